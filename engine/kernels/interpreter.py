"""Triton's interpreter: whether this process has it, and a way to run it in half the time."""

import os
import types
from typing import Any

from engine.kernels.lazy import load


def is_interpreted() -> bool:
    """Whether kernels of this process run under the interpreter."""
    return bool(load("engine.kernels.device").INTERPRETED.value)


def environment() -> dict[str, str]:
    """The environment for a child process whose kernels are to be interpreted ones."""
    return {**os.environ, "TRITON_INTERPRET": "1"}


def patch_once() -> bool:
    """Replace the functions of ``triton.language`` for good instead of at each call of a jitted function, which is half of the
    interpreter's time. For processes that do nothing but interpret. False where this Triton's interpreter is built otherwise.
    """
    if not is_interpreted():
        raise RuntimeError(
            "kernels of this process are not interpreted ones: start it with TRITON_INTERPRET=1 in its environment"
        )
    interpreter = load("triton.runtime.interpreter")
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None or not hasattr(interpreter, "_LangPatchScope"):
        return False
    if patch is _patched:
        return True
    language = load("triton.language")

    def any_kernel() -> None:
        pass

    # Jitted functions know the language as triton.language, the standard library of Triton as triton.language.core.
    sees_both: Any = types.FunctionType(any_kernel.__code__, {"tl": language, "core": language.core})
    patch(sees_both)
    interpreter._patch_lang = _patched
    return True


class _Nothing:
    def restore(self) -> None:
        pass


def _patched(function: Any) -> _Nothing:
    return _Nothing()
