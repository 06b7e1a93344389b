"""Triton kernels of our own, each a trio in its folder: ``naive`` (plain torch in float64, obvious), the checked launch, the kernel.

Triton is imported when a kernel is first asked for, and not before: without it the naive functions work, and a kernel raises a
RuntimeError that says what is missing.

Where a kernel runs:

- on CUDA tensors, compiled;
- on CPU tensors under Triton's interpreter, in a process that was started with ``TRITON_INTERPRET=1`` (the interpreter is chosen
  when a kernel is decorated, so a process has one or the other);
- nowhere, but compiled for a GPU that is not there: ``engine.kernels.compiling``.
"""
