"""Where the model runs and in which number format: turns "auto" into facts, and says why."""

import importlib.util
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.hardware.ops_cpu import half_packing_works

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BACKENDS = ("torch", "triton")  # attention backends that this version has
# Flags of /proc/cpuinfo (and their names on ARM) that mean: the CPU multiplies bf16 without widening it first.
_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What was taken. ``why`` tells a reader how each "auto" was decided."""

    device: str  # "cpu", "cuda:0"
    dtype: str  # of weights and KV cache; activations may be wider
    attention_backend: str
    name: str  # of the processor
    threads: int  # that torch uses on the CPU
    native_bf16: bool  # whether this device has bf16 arithmetic
    why: str

    @property
    def type(self) -> str:
        return self.torch_device.type

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    def as_dict(self) -> dict[str, Any]:
        names = ("device", "dtype", "attention_backend", "name", "threads", "native_bf16", "why")
        return {name: getattr(self, name) for name in names}


def resolve_device(device: str = "auto", dtype: str = "auto", attention_backend: str = "auto") -> DeviceFacts:
    """Decide device, number format and attention backend. ValueError for one that this machine does not have."""
    chosen, why_device = _choose_device(device)
    native = has_native_bf16(chosen)
    chosen_dtype, why_dtype = _choose_dtype(dtype, chosen, native)
    backend, why_backend = _choose_backend(attention_backend, chosen)
    return DeviceFacts(
        device=str(chosen),
        dtype=chosen_dtype,
        attention_backend=backend,
        name=torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else cpu_name(),
        threads=torch.get_num_threads(),
        native_bf16=native,
        why=f"{why_device}; {why_dtype}; {why_backend}",
    )


def has_native_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16 itself: CUDA from sm_80 on, a CPU with AMX or AVX512-BF16 (or ARM's bf16)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    flags = cpu_flags()
    return any(flag in flags for flag in _BF16_FLAGS)


def widens(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of this dtype are held as they are and multiplied in float32: 16 bits on a CPU without arithmetic for them."""
    if device.type != "cpu" or dtype.itemsize != 2 or (dtype == torch.bfloat16 and has_native_bf16(device)):
        return False
    return half_packing_works()


def cpu_flags() -> frozenset[str]:
    """Feature flags of the first CPU as Linux names them; empty where there is no /proc/cpuinfo."""
    for key in ("flags", "Features"):
        found = _cpuinfo(key)
        if found:
            return frozenset(found.split())
    return frozenset()


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""  # not Linux: what is not known counts as not there
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _choose_device(wanted: str) -> tuple[torch.device, str]:
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device()), "a CUDA device is there"
        return torch.device("cpu"), "no CUDA device"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {wanted!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {wanted!r}")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = device.index if device.index is not None else 0
        if index >= count:
            raise ValueError(f"device {wanted!r} is not there: this machine has {count} CUDA device(s)")
        device = torch.device("cuda", index)
    else:
        device = torch.device("cpu")
    return device, f"device {wanted!r} was asked for"


def _choose_dtype(wanted: str, device: torch.device, native_bf16: bool) -> tuple[str, str]:
    if wanted != "auto":
        if wanted not in TORCH_DTYPES:
            raise ValueError(f"dtype must be one of {('auto', *TORCH_DTYPES)}, got {wanted!r}")
        return wanted, f"dtype {wanted!r} was asked for"
    if native_bf16:
        return "bfloat16", "bfloat16, because the device has bf16 arithmetic"
    if device.type == "cuda":
        return "float16", "float16, because the GPU has no bf16 arithmetic"
    if half_packing_works():
        return "bfloat16", "bfloat16, half to read, computed in float32, because the CPU has neither AMX nor AVX512-BF16"
    return "float32", "float32, because the CPU has neither AMX nor AVX512-BF16, nor has torch products of 16-bit weights for it"


def _choose_backend(wanted: str, device: torch.device) -> tuple[str, str]:
    """Of attention. "triton", our kernels: where there is CUDA, or, for tests, a CPU in a process whose kernels are interpreted ones."""
    if wanted not in ("auto", *BACKENDS):
        raise ValueError(f"attention_backend must be one of {('auto', *BACKENDS)}, got {wanted!r}")
    has_triton = importlib.util.find_spec("triton") is not None
    if wanted == "auto":
        if device.type != "cuda":
            return "torch", "attention by torch, because there is no GPU for the kernels"
        if not has_triton:
            return "torch", "attention by torch, because Triton is not installed"
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "torch", "attention by torch, because the kernels are for GPUs from sm_80 on"
        return "triton", "attention by our kernels"
    if wanted == "triton":
        if not has_triton:
            raise ValueError(
                "attention_backend='triton' needs Triton, which is not installed here (it comes for Linux on x86_64)"
            )
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                "attention_backend='triton' needs CUDA; on a CPU the kernels run only under Triton's interpreter, for tests: "
                "start the process with TRITON_INTERPRET=1 in its environment"
            )
    return wanted, f"attention backend {wanted!r} was asked for"
