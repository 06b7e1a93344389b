"""Facts of GPUs that need not be here, from ``gpus.json``: what a chip has, and what a kernel may take of it.

Each number in the file names the document in which it is to be checked; whether it was, the file says. A number that is not there is None
here, and never a guess.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "gpus.json"


@dataclass(frozen=True, kw_only=True)
class SmLimits:
    """What one streaming multiprocessor (SM) has and how it is dealt out, by compute capability. Sizes in bytes."""

    max_warps_per_sm: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    max_threads_per_block: int
    warp_size: int
    registers_per_sm: int  # of 32 bits
    registers_per_block: int
    max_registers_per_thread: int
    shared_per_sm: int
    shared_per_block: int  # the most that a kernel can ask for
    shared_reserved_per_block: int  # what the system takes beside it
    register_unit_per_warp: int  # registers are dealt to a warp in multiples of this
    warp_granularity: int  # warps are dealt to the SM's partitions in multiples of this
    shared_unit: int  # shared memory is dealt in multiples of this


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU model. ``peak``: dtype ("tf32", "fp16", "bf16", "fp8", "int8") -> dense operations a second."""

    key: str
    title: str
    capability: str  # compute capability, "9.0"
    num_sms: int
    memory_bytes: int
    bandwidth: float  # bytes a second
    peak: Mapping[str, float]
    l2_bytes: int | None
    clock_hz: int | None  # boost clock
    limits: SmLimits
    sources: Mapping[str, str]  # number -> the document it is from, "peak.fp16" for those of ``peak``

    @property
    def arch(self) -> int:
        """The compute capability as compilers number it: 90 for "9.0"."""
        major, minor = self.capability.split(".")
        return 10 * int(major) + int(minor)

    def peak_of(self, dtype: str) -> float:
        """Dense operations a second in ``dtype`` ("bfloat16" and "float16" are known by these names, too). ValueError for one it lacks."""
        name = {"bfloat16": "bf16", "float16": "fp16", "float32": "tf32"}.get(dtype, dtype)
        if name not in self.peak:
            raise ValueError(f"{self.title} has no rate for {dtype!r}; it has {', '.join(self.peak)}")
        return self.peak[name]


@cache
def gpus() -> dict[str, Gpu]:
    """All GPUs of the file, by key, in its order."""
    raw = json.loads(FILE.read_text(encoding="utf-8"))
    return {key: _gpu(key, entry, raw) for key, entry in raw["gpus"].items()}


def gpu(key: str) -> Gpu:
    """One GPU. ValueError for a key that the file lacks."""
    known = gpus()
    if key not in known:
        raise ValueError(f"GPU must be one of {tuple(known)}, got {key!r}")
    return known[key]


@cache
def limits(capability: str) -> SmLimits:
    """What an SM of this compute capability ("9.0") has. ValueError for one that the file lacks."""
    table = json.loads(FILE.read_text(encoding="utf-8"))["capabilities"]
    if capability not in table:
        raise ValueError(f"compute capability must be one of {tuple(table)}, got {capability!r}")
    return SmLimits(**{name: int(fact["value"]) for name, fact in table[capability].items()})


def _gpu(key: str, entry: Mapping[str, Any], raw: Mapping[str, Any]) -> Gpu:
    facts = {name: fact for name, fact in entry.items() if isinstance(fact, dict) and name != "peak"}
    values = {name: fact["value"] for name, fact in facts.items()}
    named = {name: fact["source"] for name, fact in facts.items()}
    named |= {f"peak.{dtype}": fact["source"] for dtype, fact in entry["peak"].items()}
    return Gpu(
        key=key,
        title=entry["title"],
        capability=entry["capability"],
        num_sms=values["num_sms"],
        memory_bytes=values["memory_bytes"],
        bandwidth=float(values["bandwidth"]),
        peak={dtype: float(fact["value"]) for dtype, fact in entry["peak"].items()},
        l2_bytes=values.get("l2_bytes"),
        clock_hz=values.get("clock_hz"),
        limits=limits(entry["capability"]),
        sources={name: raw["sources"][source] for name, source in named.items()},
    )
