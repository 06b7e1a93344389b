"""Throughput and latency over the number of requests that run, as measured; what the pool and the device allow; what static batches pad. Pure.

A step of B decoding requests reads the weights once, whatever B is, and each request's KV; its operations grow with B. So the time of a step
is at least max((W + k B) / bandwidth, f B / peak): flat at first, and from the knee on a line through the origin (the roofline of Williams,
Waterman and Patterson, CACM 2009, drawn over B).
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from engine.events.hardware import RoofsMeasured
from engine.events.types import EngineStarted, Event, KnobChanged, PoolResized, Snapshot, StepDone, WeightsChanged
from engine.load.collector import PADDING
from engine.load.ideal import ideal_ratio, static_padding_share
from explorer.batching.whatif_rows import History, Load

KEPT = 300  # steps of each batch size, the newest
FEWEST = 3  # steps, before a batch size is told
KINDS = ("equal", "uniform", "exponential")
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_ANEW = (
    "quantization",
    "quantization_group_size",
    "kv_cache_dtype",
    "speculative",
    "block_size",
)  # knobs after which a step costs something else


@dataclass(frozen=True)
class Point:
    """Steps in which ``batch`` requests decoded and nothing else ran. ``tokens_per_s`` is of all of them together, from the median step."""

    batch: int
    tokens_per_s: float
    itl_ms: float  # median step
    itl_p99_ms: float
    num_steps: int
    flops: float  # of a step, counted
    weight_bytes: float  # read in a step
    kv_bytes: float  # read and written in a step, of all requests
    context: float  # mean tokens of a request


@dataclass(frozen=True)
class Roof:
    """Of the device: bytes and operations a second."""

    name: str
    bandwidth: float
    peak: float
    dtype: str


@dataclass
class _Bucket:
    ms: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    tokens: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    last: StepDone | None = None


class SweepRows:
    """Takes the events of a run in order."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.buckets: dict[int, _Bucket] = {}
        self.roofs: RoofsMeasured | None = None
        self.dtype = ""
        self.block_size = 16
        self.num_blocks = 0
        self.max_num_seqs = 0

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, StepDone):
                self._step(event)
            elif isinstance(event, EngineStarted):
                self.clear()
                self.dtype = str(event.device.get("dtype", ""))
                self.max_num_seqs = int(event.config.get("max_num_seqs") or 0)
            elif isinstance(event, Snapshot | PoolResized):
                self.num_blocks, self.block_size = event.num_blocks, event.block_size
            elif isinstance(event, WeightsChanged):
                self.buckets = {}
            elif isinstance(event, KnobChanged) and event.request_id is None and not event.draining:
                if event.name in _ANEW and event.old != event.new:
                    self.buckets = {}
                elif event.name == "max_num_seqs":
                    self.max_num_seqs = int(event.new)
            elif isinstance(event, RoofsMeasured):
                self.roofs = event

    def _step(self, event: StepDone) -> None:
        self.max_num_seqs = event.max_num_seqs
        if not event.runs or any(run.phase != "decode" for run in event.runs):
            return
        bucket = self.buckets.setdefault(len(event.runs), _Bucket())
        bucket.ms.append(event.step_ms)
        bucket.tokens.append(sum(1 + run.num_accepted for run in event.runs if run.sampled))
        bucket.last = event

    @property
    def points(self) -> list[Point]:
        """By batch size."""
        return [_point(batch, b) for batch, b in sorted(self.buckets.items()) if len(b.ms) >= FEWEST]

    @property
    def roof(self) -> Roof | None:
        """None before it was measured, or where nothing is known of the engine's dtype."""
        r = self.roofs
        if r is None or not r.peak:
            return None
        dtype = self.dtype if self.dtype in r.peak else max(r.peak, key=lambda name: r.peak[name])
        return Roof(r.name, max(r.copy_bandwidth, r.read_bandwidth), r.peak[dtype], dtype)


def _point(batch: int, bucket: _Bucket) -> Point:
    last = bucket.last
    assert last is not None
    ms = median(bucket.ms)
    return Point(
        batch, 1e3 * sum(bucket.tokens) / len(bucket.tokens) / ms, ms, float(np.percentile(bucket.ms, 99)), len(bucket.ms), last.flops,
        last.weight_bytes, last.kv_read_bytes + last.kv_write_bytes, sum(run.start + 1 for run in last.runs) / batch,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- what is allowed


def kv_limit(num_blocks: int, block_size: int, tokens: int) -> int:
    """The most requests of ``tokens`` tokens, none shared, that the pool has room for at their ends. ValueError for sizes below 1."""
    if block_size < 1 or tokens < 1 or num_blocks < 0:
        raise ValueError(f"block_size and tokens must be >= 1 and num_blocks >= 0, got {block_size}, {tokens} and {num_blocks}")
    return num_blocks // -(-tokens // block_size)


@dataclass(frozen=True)
class Bounds:
    """A step's least time over the batch size, from what one request adds: operations and KV bytes."""

    weight_bytes: float
    flops: float  # a request and step
    kv_bytes: float  # a request and step
    roof: Roof

    @property
    def knee(self) -> float:
        """The batch size from which on arithmetic takes longer than memory; infinity where it never does."""
        rest = self.flops / self.roof.peak - self.kv_bytes / self.roof.bandwidth
        return self.weight_bytes / self.roof.bandwidth / rest if rest > 0 else math.inf

    def seconds(self, batch: float) -> float:
        memory = (self.weight_bytes + batch * self.kv_bytes) / self.roof.bandwidth
        return max(memory, batch * self.flops / self.roof.peak)

    def tokens_per_s(self, batch: float) -> float:
        return batch / self.seconds(batch)


def bounds_of(points: Sequence[Point], roof: Roof | None) -> Bounds | None:
    """From the largest batch that was measured: what is counted there for each request."""
    if roof is None or not points:
        return None
    p = points[-1]
    if p.flops <= 0 or p.weight_bytes <= 0:
        return None
    return Bounds(p.weight_bytes, p.flops / p.batch, p.kv_bytes / p.batch, roof)


def best_batch(points: Sequence[Point], share: float = 0.9) -> Point | None:
    """The smallest batch that has ``share`` of the highest throughput that was measured."""
    most = max((p.tokens_per_s for p in points), default=0.0)
    return next((p for p in points if p.tokens_per_s >= share * most), None)


# ------------------------------------------------------------------------------------------------------------------ padding


def ideal_padding(kind: str, batch: int) -> float:
    """Of the tokens that a static batch decodes, the share for requests that are done, as their number grows: 1 - E[length] / E[longest]."""
    return 1 - 1 / ideal_ratio(kind, batch)


@dataclass(frozen=True)
class Padded:
    """A load that ran in static batches. Shares are of the decoded tokens; prompts' padding does not count here."""

    number: int
    batch: int
    measured: float
    derived: float  # what its lengths say, in their order
    spread: float  # of its lengths: standard deviation over mean
    num_requests: int


def padded(history: History, load: Load) -> Padded | None:
    """None for a load that ran otherwise, or has not ended."""
    if load.setting.batching not in ("static", "dynamic") or load.mixed or not history.complete(load):
        return None
    decoded = padding = 0
    for step in load.steps:
        if any(run.phase == "prefill" for run in step.runs):
            continue
        for run in step.runs:
            decoded += run.num_tokens
            padding += run.num_tokens if run.phase == PADDING else 0
    records = sorted(history.records(load), key=lambda r: r.arrival_s)
    # The prefill gives the first token: what is left to decode is one less.
    lengths = [r.num_output_tokens - 1 for r in records if r.num_output_tokens > 1]
    if not decoded or not lengths:
        return None
    batch = load.setting.max_num_seqs
    spread = float(np.std(lengths) / np.mean(lengths))
    return Padded(load.number, batch, padding / decoded, static_padding_share(lengths, batch), spread, len(records))


def padding_curves() -> dict[str, list[tuple[int, float]]]:
    """By kind of length distribution: (batch size, ideal share)."""
    return {kind: [(b, ideal_padding(kind, b)) for b in WIDTHS] for kind in KINDS}


def mean_tokens(history: History) -> int:
    """Of the requests of the newest load, prompt and output, rounded up; 0 before there is one."""
    for load in reversed(history.usable()):
        records = history.records(load)
        return math.ceil(sum(r.num_prompt_tokens + r.num_output_tokens for r in records) / len(records))
    return 0


def columns(points: Sequence[Point]) -> dict[str, list[Any]]:
    """As the figures take them."""
    return {
        "batch": [p.batch for p in points], "tokens": [p.tokens_per_s for p in points], "itl": [p.itl_ms for p in points],
        "p99": [p.itl_p99_ms for p in points], "each": [p.tokens_per_s / p.batch for p in points], "steps": [p.num_steps for p in points],
        "context": [p.context for p in points],
    }  # fmt: skip
