"""Builds the tensors of a step out of "n tokens of this request, from position start" and runs the model on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.attention.base import Attention, Span, create_attention, tree_rows
from engine.cuda_graphs import DecodeGraphs
from engine.kvcache.layout import KVCache, block_slots
from engine.model.llama import Batch, Model
from engine.speculation.base import Draft


class RequestLike(Protocol):
    """What the runner reads of a request."""

    request_id: str
    token_ids: list[int]  # prompt and output
    block_ids: list[int]  # the block table


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Positions ``start .. start + num_tokens - 1`` of a request; ``sample``: the logits after the last one are wanted.

    With a draft they are the request's last token and the draft's nodes behind it, and the logits after each are wanted.
    """

    request: Any  # RequestLike
    start: int
    num_tokens: int
    sample: bool
    num_drafts: int = 0  # places reserved for a draft; how many it fills is the drafter's affair
    draft: Draft | None = None
    accepted: tuple[int, ...] = ()  # nodes of the draft that were kept, once it is verified

    is_padding: bool = False  # computed for nobody: what is kept for the request stays as it is

    @property
    def num_logits(self) -> int:
        return self.num_tokens if self.draft is not None else int(self.sample)


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

    def __init__(self, model: Model, kv: KVCache, attention: Attention | None = None, graphs: DecodeGraphs | None = None) -> None:
        """``graphs``: made for this model, KV cache and attention; None: every kernel is launched by itself."""
        self.model = model
        self.kv = kv
        self.attention = attention if attention is not None else create_attention("auto", model.config)
        self.graphs = graphs
        self._tables: dict[str, _Table] = {}

    def run(self, scheduled: Sequence[Scheduled]) -> torch.Tensor:
        """Logits [sum of ``num_logits``, vocab_size], in order, in the dtype the model computes in.

        ValueError: nothing scheduled, or tokens or blocks that the request does not have.
        """
        with torch.inference_mode():
            batch, _ = self._batch(scheduled)
            done = self._by_graph(batch)
            return self.model.forward(batch, self.kv) if done is None else done[0]

    def run_with_features(self, scheduled: Sequence[Scheduled]) -> tuple[torch.Tensor, torch.Tensor]:
        """``run``, and what the head reads at every token, in order: [sum of ``num_tokens``, hidden_size]."""
        with torch.inference_mode():
            batch, first_rows = self._batch(scheduled)
            logits, features = self._by_graph(batch) or self.model.forward_with_features(batch, self.kv)
            rows = [first + i for first, item in zip(first_rows, scheduled, strict=True) for i in range(item.num_tokens)]
            in_order = rows == list(range(len(rows)))
            return logits, features if in_order else features[torch.tensor(rows, device=features.device)]

    def _by_graph(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.graphs.run(batch) if self.graphs is not None and self.graphs.takes(batch) else None

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request. Fine for one that was never run."""
        self._tables.pop(request_id, None)

    def _batch(self, scheduled: Sequence[Scheduled]) -> tuple[Batch, list[int]]:
        """The step's tensors, and the first row of each item in them."""
        if not scheduled:
            raise ValueError("nothing is scheduled")
        # Decodes first, then equally many tokens side by side, by length: so attention finds similar requests next to each other.
        order = sorted(range(len(scheduled)), key=lambda i: (scheduled[i].num_tokens, scheduled[i].start))
        tokens: list[int] = []
        spans: list[Span] = []
        first_rows = [0] * len(scheduled)
        for i in order:
            item = scheduled[i]
            span = self._span(item, len(tokens))
            spans.append(span)
            first_rows[i] = len(tokens)
            tokens += item.request.token_ids[item.start : span.end]
            if item.draft is not None:
                tokens += item.draft.token_ids
        sampled = [
            row
            for first, item in zip(first_rows, scheduled)
            for row in range(first + item.num_tokens - item.num_logits, first + item.num_tokens)
        ]
        everything = sampled == list(range(len(tokens)))
        positions = np.concatenate(
            [np.arange(s.start, s.end, dtype=np.int64) if s.positions is None else s.positions for s in spans]
        )
        device = self.model.device
        slots = self.kv.writes(spans)
        compiled = self.attention.takes_compiled and self.model.takes(spans) and self.kv.in_order(spans[0])
        batch = Batch(
            token_ids=torch.tensor(tokens, device=device),
            positions=torch.from_numpy(positions).to(device),
            slots=slots,
            sample_rows=None if everything else torch.tensor(sampled, dtype=torch.int64, device=device),
            end=max(s.end for s in spans),
            attention=self.attention,
            plan=None if compiled else self.attention.plan(spans, self.kv.pool, self.model.compute_dtype),
            span=spans[0] if compiled else None,
        )
        return batch, first_rows

    def compact(self, item: Scheduled, path: Sequence[int]) -> None:
        """Move the K and V of a tree's accepted path to the slots of its positions."""
        slots = self._tables[item.request.request_id].slots
        moves = [(int(slots[item.start + 1 + node]), int(slots[item.start + 1 + i])) for i, node in enumerate(path) if node != i]
        if moves:
            self.kv.move([src for src, _ in moves], [dst for _, dst in moves])

    def _span(self, item: Scheduled, row: int) -> Span:
        request, end = item.request, item.start + item.num_tokens
        drafts = 0 if item.draft is None else len(item.draft)
        if item.start < 0 or item.num_tokens < 1 or end > len(request.token_ids) + drafts:
            raise ValueError(
                f"{request.request_id}: positions {item.start} to {end - 1} are scheduled, it has {len(request.token_ids)} tokens"
            )
        table = _Table(self.kv.block_size) if item.is_padding else self._tables.get(request.request_id)
        if table is None:
            table = self._tables[request.request_id] = _Table(self.kv.block_size)
        table.update(request.block_ids)
        if end > len(table.slots):
            raise ValueError(f"{request.request_id}: {end} tokens need more than its {len(request.block_ids)} blocks")
        slots, draft = table.slots[:end], item.draft
        if draft is None or draft.is_chain:
            return Span(row, item.start, item.num_tokens, slots, draft=draft is not None, request_id=request.request_id)
        ancestors, depths = tree_rows(draft.parents)
        return Span(
            row, item.start, item.num_tokens, slots, ancestors, item.start + depths, draft=True, request_id=request.request_id
        )
