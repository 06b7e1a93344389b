"""Keyframes of a log, and how large events are."""

from collections.abc import Callable
from typing import Any

import numpy as np

from engine.events.attention import AttentionTraced
from engine.events.batching import PrefixTree
from engine.events.quantization import KvObserved, LayerQuantized, MatrixObserved, QuantizationProbed
from engine.events.state import State
from engine.events.types import (
    BeamsFinished,
    BeamsSelected,
    EngineStarted,
    Event,
    LogitsRecorded,
    RequestAdded,
    RequestBranched,
    RequestState,
    Snapshot,
    StepDone,
    TokenSampled,
)


class Keyframe:
    """A state in a compact form. Requests are shared with the states around it; the pool's parts are arrays."""

    __slots__ = ("_cached", "_lru", "_state", "nbytes")

    def __init__(self, state: State) -> None:
        copy = state.copy()
        count = len(copy.cached)
        blocks = np.fromiter(copy.cached, np.int32, count)
        try:
            hashes = np.fromiter(copy.cached.values(), np.uint64, count)
        except OverflowError:  # a hash beyond 64 bits or a negative one: kept as it is
            hashes = np.array(list(copy.cached.values()), object)
        self._cached = (blocks, hashes)
        self._lru = np.fromiter(copy.lru, np.int32, len(copy.lru))
        copy.cached, copy.lru = {}, {}
        self._state = copy
        views = sum(200 + 8 * (len(v.output_token_ids) + len(v.output_texts) + len(v.block_ids)) for v in copy.live)
        self.nbytes = copy.ref_counts.nbytes + blocks.nbytes + hashes.nbytes + self._lru.nbytes + 100 * len(copy.requests) + views

    @property
    def engine(self) -> EngineStarted | None:
        return self._state.engine

    def state(self) -> State:
        state = self._state.copy()
        blocks, hashes = self._cached
        state.cached = dict(zip(blocks.tolist(), hashes.tolist()))
        state.lru = dict.fromkeys(self._lru.tolist())
        return state


_WEIGHTS: dict[type, Callable[[Any], int]] = {
    TokenSampled: lambda e: 300 + 180 * len(e.top),
    StepDone: lambda e: 700 + 120 * len(e.runs),
    RequestAdded: lambda e: 1000 + 10 * len(e.prompt_token_ids) + len(e.prompt_text),
    Snapshot: lambda e: 1000 + 8 * len(e.ref_counts) + 100 * len(e.cached) + sum(map(_state_weight, e.requests)),
    LogitsRecorded: lambda e: 300 + len(e.logits),
    BeamsSelected: lambda e: 300 + 250 * len(e.candidates),
    BeamsFinished: lambda e: 300 + sum(200 + 100 * len(s.token_ids) for s in e.sequences),
    RequestBranched: lambda e: 400 + 100 * len(e.output_token_ids),
    LayerQuantized: lambda e: 700 + 32 * (len(e.weight_counts) + len(e.error_counts)),
    MatrixObserved: lambda e: 700 + len(e.weight) + len(e.running) + len(e.inputs) + len(e.hessian) + 8 * e.columns,
    QuantizationProbed: lambda e: (
        2000 + 100 * (len(e.kl) + len(e.token_texts)) + 300 * (len(e.entered) + len(e.left) + len(e.top))
    ),
    KvObserved: lambda e: 1000 + 128 * len(e.key_abs_max),
    PrefixTree: lambda e: 600 + sum(600 + 8 * (len(n.token_ids) + len(n.block_ids)) + 60 * len(n.holders) for n in e.nodes),
    AttentionTraced: lambda e: (
        3000 + len(e.records) + len(e.row_scores) + sum(300 + 8 * len(r.block_ids) + 8 * len(r.row_bits) for r in e.requests)
    ),
}


def _state_weight(r: RequestState) -> int:
    return (
        1500
        + 10 * (len(r.prompt_token_ids) + len(r.output_token_ids) + len(r.block_ids))
        + len(r.prompt_text)
        + len(r.output_text)
    )


def weight(event: Event) -> int:
    """About the bytes that an event takes as objects: rough, but never far below for the kinds that can be large."""
    measure = _WEIGHTS.get(type(event))
    return 300 if measure is None else measure(event)
