"""The engine's configuration: one frozen object, resolved once into facts."""

import math
import os
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.speculation.config import SpeculativeConfig
from engine.strict import strict

DTYPES = ("auto", "float32", "bfloat16", "float16")
# Knobs that reconfigure() may change: at the next step, or after the running requests have drained.
LIVE_KNOBS = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill", "speculative")
DRAINING_KNOBS = ("block_size", "num_kv_blocks")

_BUILT: dict[str, tuple[Any, ...]] = {  # name -> the values that this version can run
    "prefix_index": ("hash",),
    "batching": ("continuous",),
    "scheduling_policy": ("fcfs",),
    "preemption_mode": ("recompute",),
    "kv_cache_dtype": ("auto",),
    "quantization": (None,),
    "quantization_group_size": (None,),
    "attention_backend": ("auto", "torch"),
    "swap_space": (0,),
}
_KNOWN: dict[str, tuple[Any, ...]] = {  # name -> every value the design gives it
    "prefix_index": ("hash", "radix"),
    "batching": ("continuous", "static", "dynamic"),
    "scheduling_policy": ("fcfs", "priority"),
    "preemption_mode": ("recompute", "swap"),
    "kv_cache_dtype": ("auto", "int8", "int4", "fp8"),
    "quantization": (None, "int8", "int8_w8a8", "int4", "int3", "int2", "nf4", "fp8", "gptq", "awq"),
    "attention_backend": ("auto", "torch", "triton"),
}


@strict
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to run and how. Names are vLLM's. A value out of range, or of a feature that is not built yet, is a ValueError.

    ``max_model_len``, ``num_kv_blocks``: None lets ``Engine`` choose from the checkpoint and the memory at hand.
    """

    model: str = "smollm2-135m"  # a known name, a local directory, a .gguf file, or a Hugging Face id
    device: str = "auto"
    dtype: str = "auto"
    max_num_seqs: int = 8  # requests in one step ("batch size")
    max_num_batched_tokens: int = 512  # tokens in one step (the budget that prefill chunks share with decodes)
    max_model_len: int | None = None
    block_size: int = 16  # tokens a KV block holds
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    swap_space: float = 0  # GiB
    enable_prefix_caching: bool = True
    prefix_index: str = "hash"
    enable_chunked_prefill: bool = True
    batching: str = "continuous"
    scheduling_policy: str = "fcfs"
    preemption_mode: str = "recompute"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    quantization_group_size: int | None = None
    speculative: SpeculativeConfig | None = None  # or a dict of its fields
    attention_backend: str = "auto"
    enforce_eager: bool = False  # never compile: every operator is called one by one
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("max_num_seqs", 1, 4096), ("max_num_batched_tokens", 1, 1 << 20), ("block_size", 1, 1024)):
            _integer_in(name, getattr(self, name), low, high)
        for name, high in (("max_model_len", 1 << 24), ("num_kv_blocks", 1 << 24)):
            if getattr(self, name) is not None:
                _integer_in(name, getattr(self, name), 1, high)
        _integer_in("seed", self.seed, 0, 2**64 - 1)
        object.__setattr__(self, "speculative", _speculative(self.speculative))
        if isinstance(self.model, os.PathLike):
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model must be a name, a path or a Hugging Face id, got {self.model!r}")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {self.device!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {self.dtype!r}")
        if not _real(self.gpu_memory_utilization) or not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must lie in (0, 1], got {self.gpu_memory_utilization!r}")
        if not _real(self.swap_space) or not 0 <= self.swap_space < math.inf:
            raise ValueError(f"swap_space must be a number of GiB >= 0, got {self.swap_space!r}")
        if self.quantization_group_size is not None:
            _integer_in("quantization_group_size", self.quantization_group_size, 1, 1 << 16)
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, got {getattr(self, name)!r}")
        for name, built in _BUILT.items():
            value = getattr(self, name)
            if name in _KNOWN and value not in _KNOWN[name]:
                raise ValueError(f"{name} must be one of {_KNOWN[name]}, got {value!r}")
            if value not in built:
                raise ValueError(f"{name}={value!r} is not built yet; available: {built}")

    def changed(self, **changes: Any) -> "EngineConfig":
        """A copy with these fields changed; ValueError for a name that is not a field."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _speculative(value: Any) -> SpeculativeConfig | None:
    """A dict is what comes from a file or another process."""
    if value is None or isinstance(value, SpeculativeConfig):
        return value
    if not isinstance(value, dict) or "method" not in value:
        raise ValueError(f"speculative must be None, a SpeculativeConfig or a dict with its method, got {value!r}")
    return SpeculativeConfig(**value)


def _real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _integer_in(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {value!r}")
