"""Attention in plain torch: scaled_dot_product_attention over views or gathered rows of the paged pool.

Two forms of work, planned once a step for every different sliding window:

- a *decode group*: requests with one new token each. Their K and V rows are gathered into one padded [B, L] batch; where
  a request's table happens to be physically contiguous and it is alone, a view is enough and nothing is copied.
- a *chunk*: a request with several new tokens, one call of its own. Without context before it, it reads its own fresh
  K and V and no pool at all.

Padding repeats a slot of the request itself, masked out: no slot that belongs to another request, to nobody, or that has
not been written yet is ever read, so whatever they hold (NaN included) cannot show.

Shapes: T rows in the batch, B requests, L keys, H query heads, K KV heads, G = H / K query heads to a KV head, D head_dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import Attention, Span

Rows = slice | torch.Tensor  # of the packed batch


@dataclass(frozen=True, slots=True)
class _Decode:
    rows: Rows
    slots: slice | torch.Tensor  # a contiguous run of the pool (B = 1), or int64 [B * L]
    size: int  # B
    mask: torch.Tensor | None  # [B, 1, G, L], added to the scores; None: nothing is padded

    def run(self, q: torch.Tensor, kv_new: torch.Tensor, pool: torch.Tensor, group: int) -> torch.Tensor:
        heads_d = q.shape[1] * q.shape[2]
        kv = _rows_of(pool, self.slots, q.dtype)  # [B * L, 2, K, D]
        kv_BL2KD = kv.view(self.size, -1, *kv.shape[1:])
        q_BKGD = q[self.rows].view(self.size, -1, group, q.shape[2])
        out = F.scaled_dot_product_attention(
            q_BKGD, kv_BL2KD[:, :, 0].transpose(1, 2), kv_BL2KD[:, :, 1].transpose(1, 2), attn_mask=self.mask
        )
        return out.reshape(self.size, heads_d)


@dataclass(frozen=True, slots=True)
class _Chunk:
    rows: slice
    slots: slice | torch.Tensor | None  # of all keys; None: the keys are the chunk itself
    mask: torch.Tensor | None  # [n, L], added to the scores; None: plain causal, n = L

    def run(self, q: torch.Tensor, kv_new: torch.Tensor, pool: torch.Tensor, group: int) -> torch.Tensor:
        heads_d = q.shape[1] * q.shape[2]
        kv = kv_new[self.rows] if self.slots is None else _rows_of(pool, self.slots, q.dtype)
        q_nHD = q[self.rows]
        n = q_nHD.shape[0]
        # The G query heads of a KV head become the outer dimension, over which K and V repeat without being copied.
        q_GKnD = q_nHD.view(n, -1, group, q.shape[2]).permute(2, 1, 0, 3)
        k_GKLD = kv[:, 0].transpose(0, 1).expand(group, -1, -1, -1)
        v_GKLD = kv[:, 1].transpose(0, 1).expand(group, -1, -1, -1)
        out = F.scaled_dot_product_attention(q_GKnD, k_GKLD, v_GKLD, attn_mask=self.mask, is_causal=self.mask is None)
        return out.permute(2, 1, 0, 3).reshape(n, heads_d)


def _rows_of(pool: torch.Tensor, slots: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[rows, 2, K, D] in ``dtype``: a view where it can be one."""
    rows = pool[slots] if isinstance(slots, slice) else pool.index_select(0, slots)
    return rows.to(dtype)


class TorchAttention(Attention):
    name = "torch"

    def plan(self, spans: Sequence[Span], device: torch.device, dtype: torch.dtype) -> Any:
        """One list of work items for each different sliding window."""
        return {window: self._items(spans, window, device, dtype) for window in self.windows}

    def run(self, plan: Any, layer: int, q: torch.Tensor, kv_new: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        items = plan[self.config.sliding_windows[layer]]
        group = self.config.num_attention_heads // self.config.num_kv_heads
        if len(items) == 1:
            return items[0].run(q, kv_new, pool, group)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for item in items:
            out[item.rows] = item.run(q, kv_new, pool, group)
        return out

    def _items(self, spans: Sequence[Span], window: int | None, device: torch.device, dtype: torch.dtype) -> list[Any]:
        items: list[Any] = []
        decodes = [s for s in spans if s.num_tokens == 1]
        if decodes:
            items.append(self._decode(decodes, window, device, dtype))
        items += [self._chunk(s, window, device, dtype) for s in spans if s.num_tokens > 1]
        return items

    def _decode(self, spans: list[Span], window: int | None, device: torch.device, dtype: torch.dtype) -> _Decode:
        keys = [s.slots[_first_key(s.start, window) :] for s in spans]
        rows = _rows([s.row for s in spans], device)
        if len(keys) == 1:
            return _Decode(rows, _slots(keys[0], device), 1, None)
        longest = max(len(k) for k in keys)
        padded = np.empty((len(keys), longest), dtype=np.int64)
        for row, k in zip(padded, keys):
            row[: len(k)] = k
            row[len(k) :] = k[0]
        mask = None
        if any(len(k) != longest for k in keys):
            lengths = np.array([len(k) for k in keys])
            hidden = np.arange(longest) >= lengths[:, None]
            bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
            mask = bias.to(device)[:, None, None, :]
        return _Decode(rows, torch.from_numpy(padded.ravel()).to(device), len(keys), mask)

    def _chunk(self, span: Span, window: int | None, device: torch.device, dtype: torch.dtype) -> _Chunk:
        rows = slice(span.row, span.row + span.num_tokens)
        if span.start == 0 and (window is None or window >= span.end):
            return _Chunk(rows, None, None)
        first = _first_key(span.start, window)
        positions = torch.arange(span.start, span.end, device=device)[:, None]
        keys = torch.arange(first, span.end, device=device)[None, :]
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        slots = _slots(span.slots[first:], device) if span.start else None
        return _Chunk(rows, slots, mask)


def _first_key(position: int, window: int | None) -> int:
    """The first position that ``position`` sees."""
    return 0 if window is None else max(0, position + 1 - window)


def _rows(rows: list[int], device: torch.device) -> Rows:
    if rows[-1] - rows[0] == len(rows) - 1:  # rows ascend
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, device=device)


def _slots(slots: Any, device: torch.device) -> slice | torch.Tensor:
    """A slice where the slots are neighbours in order."""
    if slots[-1] - slots[0] == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(np.ascontiguousarray(slots)).to(device)
