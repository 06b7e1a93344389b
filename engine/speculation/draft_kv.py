"""What a drafter keeps of each position under the target's block ids, and which of it is there.

A drafter with layers of its own has KV of its own: the same block tables, a tensor of its own. But a block that is found by its
prefix may hold no entries of the drafter (it was off, or not asked), and one that was given out again holds somebody else's. So
it is kept for each physical block how many leading entries are good, and for which giving-out (``BlockPool.generations``).
It stays in the model's dtype whatever ``kv_cache_dtype`` is: it has a layer or a few, and a draft that goes wrong costs a step.

Only entries of tokens that are settled are marked. What was written for drafted tokens is good once they are accepted; until
then it lies behind the mark, where nobody looks for it.

Shapes: T rows of a pass, E hidden_size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from engine.attention.base import Attention, Span, create_attention
from engine.kvcache.layout import KVCache, block_slots
from engine.kvcache.pool import BlockPool
from engine.model.config import ModelConfig
from engine.model.few_rows import FewRows
from engine.model.linear import LinearBackend
from engine.model.llama import Batch, Layer, Model


class Filled:
    """Of every physical block: the offsets ``low .. high - 1`` of the entries that are good."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._low = [0] * pool.num_blocks
        self._high = [0] * pool.num_blocks
        self._generation = [-1] * pool.num_blocks

    def _range(self, block: int) -> tuple[int, int]:
        if self._generation[block] != self.pool.generations[block]:
            return 0, 0
        return self._low[block], self._high[block]

    def mark(self, block_ids: Sequence[int], start: int, end: int) -> None:
        """Positions ``start .. end - 1`` of this table are good now. What was good beside them stays so; with a gap between, it is
        forgotten."""
        size = self.pool.block_size
        for index in range(start // size, -(-end // size)):
            block, first = block_ids[index], index * size
            low, high = max(start - first, 0), min(end - first, size)
            old_low, old_high = self._range(block)
            if old_low < old_high and old_low <= high and low <= old_high:
                low, high = min(low, old_low), max(high, old_high)
            self._low[block], self._high[block], self._generation[block] = low, high, self.pool.generations[block]

    def leading(self, block_ids: Sequence[int]) -> int:
        """How many positions are good from the first one on."""
        size = self.pool.block_size
        for index, block in enumerate(block_ids):
            low, high = self._range(block)
            if low or high < size:
                return index * size + (0 if low else high)
        return len(block_ids) * size

    def trailing(self, block_ids: Sequence[int], end: int) -> int:
        """The first position of the good ones that reach up to ``end - 1`` without a gap; ``end`` where there are none."""
        size = self.pool.block_size
        while end > 0:
            index, offset = divmod(end - 1, size)
            low, high = self._range(block_ids[index])
            if not low <= offset < high:
                return end
            end = index * size + low
            if low:
                return end
        return end

    def last(self, block_ids: Sequence[int], start: int, end: int) -> int:
        """One more than the last good position of ``start .. end - 1``; ``start`` where there is none."""
        size = self.pool.block_size
        for index in range((end - 1) // size, start // size - 1, -1):
            low, high = self._range(block_ids[index])
            high = min(index * size + high, end)
            if high > max(index * size + low, start):
                return high
        return start

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        ranges = [self._range(block) for block in src]
        for block, (low, high) in zip(dst, ranges, strict=True):
            self._low[block], self._high[block], self._generation[block] = low, high, self.pool.generations[block]


@dataclass(frozen=True, slots=True)
class DraftRun:
    """Rows of one request in a drafter's pass: positions ``start .. start + count - 1``, which see those from ``first`` on.

    ``slots``: of the request's positions from 0 on. A tree has ``ancestors`` and ``depths`` (of its rows, from 0) beside, see
    ``Span``; its rows lie in the slots from ``start`` on, and stand at the positions ``start + depths``.
    """

    slots: "np.ndarray[Any, np.dtype[np.int64]]"
    start: int
    count: int
    first: int = 0
    ancestors: "np.ndarray[Any, np.dtype[np.bool_]] | None" = None
    depths: "np.ndarray[Any, np.dtype[np.int64]] | None" = None


def request_slots(request: Any, block_size: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    return block_slots(request.block_ids, block_size)


def draft_batch(
    token_ids: Sequence[int], runs: Sequence[DraftRun], kv: KVCache, attention: Attention, dtype: torch.dtype,
    last_rows: bool = True, takes: Callable[[Sequence[Span]], bool] = lambda _: False,
) -> Batch:  # fmt: skip
    """The tensors of a drafter's pass. ``dtype``: of its activations; ``last_rows``: only the last row of each run is wanted;
    ``takes``: see ``Model.takes``."""
    spans: list[Span] = []
    positions: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    row = 0
    for run in runs:
        end = run.start + run.count
        at = np.arange(run.start, end, dtype=np.int64) if run.depths is None else run.start + run.depths
        # The window that the attention sees begins at ``first``; only the rotary embedding knows where that is.
        relative = None if run.ancestors is None else at - run.first
        own = run.slots[run.first : end]
        spans.append(Span(row, run.start - run.first, run.count, own, run.ancestors, relative, draft=True))
        positions.append(at)
        row += run.count
    device = kv.device
    where = np.concatenate(positions) if len(runs) > 1 else positions[0]
    into = kv.writes(spans, release=False)  # in the target's own pool a draft goes on from guesses
    sample_rows = None
    if last_rows and row > len(runs):
        sample_rows = torch.tensor([span.row + span.num_tokens - 1 for span in spans], device=device)
    compiled = takes(spans) and kv.in_order(spans[0])
    return Batch(
        torch.tensor(token_ids, dtype=torch.int64, device=device),
        torch.from_numpy(where).to(device),
        into,
        sample_rows,
        int(where.max()) + 1,
        attention,
        None if compiled else attention.plan(spans, kv.pool, dtype),
        spans[0] if compiled else None,
    )


class DraftLayers:
    """Decoder layers of a drafter, shaped like the target's (plain Llama layers), with their KV under the target's block ids."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], num_layers: int, model: Model, backend: LinearBackend, pool: BlockPool
    ) -> None:
        """``tensors``: ``layers.{i}.*`` by Hugging Face name."""
        self.model = model
        self.config = layers_config(model.config, num_layers)
        named = {f"model.{name}": tensor for name, tensor in tensors.items()}
        # What is compiled for the target's layers does for these where they differ in nothing but weights.
        same = replace(self.config, num_layers=model.config.num_layers, sliding_windows=model.config.sliding_windows)
        compiled = model.compiled is not None and same == model.config
        self.layers = [Layer(self.config, named, i, backend, compiled) for i in range(num_layers)]
        self.few_rows: FewRows | None = None
        if compiled:
            self.few_rows = FewRows(self.config.sliding_windows, [layer.compiled_inputs() for layer in self.layers])
        self.attention = create_attention("torch", self.config)
        self.kv = KVCache(self.config, pool.num_blocks, pool.block_size, model.device, model.dtype)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """``x`` [T, E] -> what comes out of the last layer at ``batch.sample_rows`` (None: at all)."""
        cos, sin = self.model.rope.at(batch.positions, batch.end)
        if batch.span is not None and self.few_rows is not None:
            x = self.model.run_compiled(self.few_rows, batch.span, x, cos, sin, self.kv)
            return x if batch.sample_rows is None else x.index_select(0, batch.sample_rows)
        last = len(self.layers) - 1
        for i, (layer, pool) in enumerate(zip(self.layers, self.kv.layers)):
            x = layer.forward(x, batch, cos, sin, pool, batch.sample_rows if i == last else None)
        return x

    def batch(self, token_ids: Sequence[int], runs: Sequence[DraftRun], last_rows: bool = True) -> Batch:
        dtype = self.model.compute_dtype
        return draft_batch(token_ids, runs, self.kv, self.attention, dtype, last_rows, self._takes)

    def _takes(self, spans: Sequence[Span]) -> bool:
        return self.few_rows is not None and self.model.takes(spans, self.few_rows)


def layers_config(config: ModelConfig, num_layers: int) -> ModelConfig:
    """Plain Llama layers of the target's sizes."""
    return replace(
        config, num_layers=num_layers, qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False,
        sliding_windows=(None,) * num_layers,
    )  # fmt: skip
