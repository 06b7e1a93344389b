"""Compile a kernel for a GPU that need not be there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.kernels.lazy import load

# Names that Triton's signatures have for torch's dtypes.
TYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """A kernel and all that its compiled code depends on.

    ``types``: argument -> Triton's type name ("*bf16", "i32", "fp32"); arguments in ``constants`` are compile-time values (None for a
    pointer that is not given). ``aligned``: arguments whose value a launch finds to be a multiple of 16; the compiler may rely on it.
    """

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    aligned: tuple[str, ...] = field(default=())


def pointer(dtype: torch.dtype) -> str:
    """Triton's name of a pointer to ``dtype``."""
    return "*" + TYPE_NAMES[dtype]


def compile_spec(spec: CompileSpec, arch: int) -> Any:
    """The compiled kernel for compute capability ``arch`` (80, 90, 100, ...): ``asm`` (ttir, ttgir, llir, ptx, cubin) and ``metadata``.

    ValueError where the spec leaves an argument out or names one that is not there; RuntimeError in a process whose kernels are
    interpreted ones, and where Triton is not installed. What does not fit the GPU is refused in the compiler's own words.
    """
    triton = load("triton")
    names = getattr(spec.kernel, "arg_names", None)
    if not isinstance(spec.kernel, triton.runtime.jit.JITFunction) or names is None:
        raise RuntimeError("kernels are interpreted in this process (TRITON_INTERPRET=1): compile them in another one")
    given = {*spec.types, *spec.constants}
    if given != set(names):
        raise ValueError(f"the arguments of {spec.kernel.__name__} are {names}; differing: {sorted(given ^ set(names))}")
    compiler, backends = load("triton.compiler"), load("triton.backends.compiler")
    signature = {name: "constexpr" if name in spec.constants else spec.types[name] for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in spec.aligned}
    source = compiler.ASTSource(spec.kernel, signature, constexprs=dict(spec.constants), attrs=attributes)
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True}
    return triton.compile(source, target=backends.GPUTarget("cuda", arch, 32), options=options)
