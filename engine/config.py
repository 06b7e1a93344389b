"""The engine's configuration: one frozen object, resolved once into facts."""

import math
import os
import re
from dataclasses import asdict, dataclass, replace
from typing import Any

from engine.speculation.config import SpeculativeConfig
from engine.strict import strict
from engine.weights.plan import make_plan

BATCHING = ("continuous", "static", "dynamic")
SCHEDULING_POLICIES = ("fcfs", "priority")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# Knobs that reconfigure() may change: at the next step, or after the running requests have drained.
LIVE_KNOBS = (
    "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill", "batching", "batching_timeout_ms",
    "scheduling_policy", "watermark", "max_num_waiting", "speculative", "prefix_index", "preemption_mode", "swap_space",
)  # fmt: skip
# Knobs that change the weights: at the next step after the new ones are made, and what runs is computed again.
WEIGHT_KNOBS = ("quantization", "quantization_group_size", "quantization_options")
DRAINING_KNOBS = ("block_size", "num_kv_blocks", "kv_cache_dtype")

_CHOICES: dict[str, tuple[Any, ...]] = {
    "prefix_index": ("hash", "radix"),
    "batching": BATCHING,
    "scheduling_policy": SCHEDULING_POLICIES,
    "preemption_mode": ("recompute", "swap"),
    "kv_cache_dtype": ("auto", "int8", "int4", "fp8"),
    "attention_backend": ("auto", "torch", "triton"),
}


@strict
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What to run and how. Names are vLLM's. A value out of range is a ValueError.

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
    swap_space: float = 0  # GiB of host memory for the KV of preempted requests
    enable_prefix_caching: bool = True
    prefix_index: str = "hash"  # "radix": hits to the token, see engine.kvcache.radix
    enable_chunked_prefill: bool = True
    batching: str = "continuous"  # see engine.batching
    batching_timeout_ms: float = 50.0  # how long a dynamic batch waits to be full
    scheduling_policy: str = "fcfs"  # see engine.waiting
    watermark: float = 0.0  # share of the pool that admission leaves free while others run (vLLM's first versions: 0.01)
    max_num_waiting: int | None = None  # a request that finds so many waiting is refused; None: they are never too many
    preemption_mode: str = "recompute"  # "swap": to host memory while swap_space lasts, else as "recompute"
    kv_cache_dtype: str = "auto"  # "auto": the model's dtype
    quantization: str | None = None  # None: the checkpoint's weights as they are
    quantization_group_size: int | None = None  # None: the method's own
    quantization_options: dict[str, Any] | None = None  # see engine.weights.plan.WeightPlan
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
        if self.max_num_waiting is not None:
            _integer_in("max_num_waiting", self.max_num_waiting, 1, 1 << 24)
        if not _real(self.batching_timeout_ms) or not 0 <= self.batching_timeout_ms <= 60_000:
            raise ValueError(f"batching_timeout_ms must lie in [0, 60000], got {self.batching_timeout_ms!r}")
        if not _real(self.watermark) or not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must lie in [0, 1), got {self.watermark!r}")
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
        if not isinstance(self.quantization_options, dict | None):
            raise ValueError(f"quantization_options must be a dict or None, got {self.quantization_options!r}")
        make_plan(self.quantization, self.quantization_group_size, self.quantization_options)
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, got {getattr(self, name)!r}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")

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
