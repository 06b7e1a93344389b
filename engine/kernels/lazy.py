"""Kernels are imported when they are first asked for, so that their packages import where there is no Triton."""

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

# The submodules of an operation that need Triton are imported through here alone.
MISSING = (
    "the kernels need Triton, which is not installed here (it comes for Linux on x86_64: pip install triton); "
    "the functions named naive_* need only torch"
)


def lazy(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's ``__getattr__`` for ``names``: public name -> the submodule of ``package`` that defines it.

    The attribute raises RuntimeError where Triton is not installed, AttributeError for a name that is not there.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(load(f"{package}.{names[name]}"), name)

    return get


def load(module: str) -> Any:
    """The module ``module``, which imports Triton. RuntimeError where that is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        raise RuntimeError(f"{module}: {MISSING}") from error


def triton_version() -> str | None:
    """The installed Triton's version; None where there is none."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ModuleNotFoundError:
        return None


def run_on(device: torch.device) -> bool:
    """Whether kernels run on tensors of this device: CUDA from sm_80 on, or a CPU in a process whose kernels are interpreted ones."""
    if device.type == "cuda":
        return triton_version() is not None and torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1" and triton_version() is not None
