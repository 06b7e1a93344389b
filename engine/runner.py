"""Builds the tensors of a step out of "n tokens of this request, from position start" and runs the model on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.attention.base import Attention, Span, create_attention
from engine.kvcache.layout import KVCache, block_slots
from engine.model.llama import Batch, Model


class RequestLike(Protocol):
    """What the runner reads of a request."""

    request_id: str
    token_ids: list[int]  # prompt and output
    block_ids: list[int]  # the block table


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Positions ``start .. start + num_tokens - 1`` of a request; ``sample``: the logits after the last one are wanted."""

    request: Any  # RequestLike
    start: int
    num_tokens: int
    sample: bool


class _Table:
    """A block table as slots, kept between steps and brought up to date by what changed."""

    __slots__ = ("block_ids", "block_size", "slots")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_ids: list[int] = []
        self.slots: np.ndarray[Any, np.dtype[np.int64]] = np.empty(0, dtype=np.int64)

    def update(self, block_ids: list[int]) -> None:
        if block_ids == self.block_ids:
            return
        kept = len(self.block_ids)
        if block_ids[:kept] != self.block_ids:  # preempted and back, or a block copied on write: from scratch
            kept = 0
        self.slots = np.concatenate((self.slots[: kept * self.block_size], block_slots(block_ids[kept:], self.block_size)))
        self.block_ids = list(block_ids)


class Runner:
    """One model on one KV cache."""

    def __init__(self, model: Model, kv: KVCache, attention: Attention | None = None) -> None:
        self.model = model
        self.kv = kv
        self.attention = attention if attention is not None else create_attention("auto", model.config)
        self._tables: dict[str, _Table] = {}

    def run(self, scheduled: Sequence[Scheduled]) -> torch.Tensor:
        """Logits [number of items with ``sample``, vocab_size], in order, in the dtype the model computes in.

        ValueError: nothing scheduled, or tokens or blocks that the request does not have.
        """
        with torch.inference_mode():
            return self.model.forward(self._batch(scheduled), self.kv)

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request. Fine for one that was never run."""
        self._tables.pop(request_id, None)

    def _batch(self, scheduled: Sequence[Scheduled]) -> Batch:
        if not scheduled:
            raise ValueError("nothing is scheduled")
        # Decodes first, by length, so that attention finds requests of similar length side by side.
        order = sorted(range(len(scheduled)), key=lambda i: (scheduled[i].num_tokens > 1, scheduled[i].start))
        tokens: list[int] = []
        spans: list[Span] = []
        last_row = [0] * len(scheduled)
        for i in order:
            item = scheduled[i]
            span = self._span(item, len(tokens))
            spans.append(span)
            tokens += item.request.token_ids[item.start : span.end]
            last_row[i] = len(tokens) - 1
        sampled = [row for row, item in zip(last_row, scheduled) if item.sample]
        everything = sampled == list(range(len(tokens)))
        positions = np.concatenate([np.arange(s.start, s.end, dtype=np.int64) for s in spans])
        slots = np.concatenate([s.slots[s.start :] for s in spans])
        device = self.model.device
        return Batch(
            token_ids=torch.tensor(tokens, device=device),
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(slots).to(device),
            sample_rows=None if everything else torch.tensor(sampled, dtype=torch.int64, device=device),
            end=max(s.end for s in spans),
            attention=self.attention,
            plan=self.attention.plan(spans, self.kv.tensor, self.model.compute_dtype),
        )

    def _span(self, item: Scheduled, row: int) -> Span:
        request, end = item.request, item.start + item.num_tokens
        if item.start < 0 or item.num_tokens < 1 or end > len(request.token_ids):
            raise ValueError(
                f"{request.request_id}: positions {item.start} to {end - 1} are scheduled, it has {len(request.token_ids)} tokens"
            )
        table = self._tables.get(request.request_id)
        if table is None:
            table = self._tables[request.request_id] = _Table(self.kv.block_size)
        table.update(request.block_ids)
        if end > len(table.slots):
            raise ValueError(f"{request.request_id}: {end} tokens need more than its {len(request.block_ids)} blocks")
        return Span(row, item.start, item.num_tokens, table.slots[:end])
