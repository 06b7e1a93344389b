"""Attention in plain torch: scaled_dot_product_attention over views or gathered rows of the paged pool.

Two forms of work, planned once a step for every different sliding window:

- a *decode group*: requests with one new token each, of similar length. Their K and V rows are gathered into one padded
  [B, L] batch, small enough to stay in the CPU's cache until it is read; where a request's table happens to be physically
  contiguous and it is alone, a view is enough and nothing is copied.
- a *chunk*: a request with several new tokens, one call of its own. Without context before it, it reads its own fresh
  K and V and no pool at all.

Padding repeats a slot of the request itself, masked out: no slot that belongs to another request, to nobody, or that has
not been written yet is ever read, so whatever they hold (NaN included) cannot show.

Shapes: T rows in the batch, B requests, L keys, H query heads, K KV heads, G = H / K query heads to a KV head, D head_dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import Attention, Span

# What one decode group gathers, at most (a single request may be longer): about two cores' second-level caches. A GPU has
# the bandwidth, and wants few large launches.
_GROUP_BYTES = 1 << 21


@dataclass(frozen=True, slots=True)
class _Decode:
    rows: slice
    slots: slice | torch.Tensor  # a contiguous run of the pool (B = 1), or int64 [B * L]
    size: int  # B
    mask: torch.Tensor | None  # [B, 1, 1, L], added to the scores; None: nothing is padded
    dtype: torch.dtype  # of the arithmetic

    def run(self, q: torch.Tensor, kv_new: torch.Tensor, pool: torch.Tensor, group: int) -> torch.Tensor:
        heads_d = q.shape[1] * q.shape[2]
        kv = _rows_of(pool, self.slots, self.dtype)  # [B * L, 2, K, D]
        kv_BL2KD = kv.view(self.size, -1, *kv.shape[1:])
        q_BKGD = q[self.rows].to(self.dtype).view(self.size, -1, group, q.shape[2])
        out = F.scaled_dot_product_attention(
            q_BKGD, kv_BL2KD[:, :, 0].transpose(1, 2), kv_BL2KD[:, :, 1].transpose(1, 2), attn_mask=self.mask
        )
        return out.reshape(self.size, heads_d).to(q.dtype)


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

    def plan(self, spans: Sequence[Span], device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> Any:
        """One list of work items for each different sliding window."""
        return {window: self._items(spans, window, device, dtype, kv_dtype) for window in self.windows}

    def run(self, plan: Any, layer: int, q: torch.Tensor, kv_new: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        items = plan[self.config.sliding_windows[layer]]
        group = self.config.num_attention_heads // self.config.num_kv_heads
        if len(items) == 1:
            return items[0].run(q, kv_new, pool, group)
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for item in items:
            out[item.rows] = item.run(q, kv_new, pool, group)
        return out

    def _items(
        self, spans: Sequence[Span], window: int | None, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[Any]:
        items: list[Any] = []
        decodes = [s for s in spans if s.num_tokens == 1]
        # A decode is bound by reading K and V: bfloat16 rows are used as they are rather than widened first.
        decode_dtype = kv_dtype if kv_dtype == torch.bfloat16 else dtype
        row_bytes = 2 * self.config.num_kv_heads * self.config.head_dim * decode_dtype.itemsize
        limit = _GROUP_BYTES // row_bytes if device.type == "cpu" else 1 << 62
        for group in _groups(decodes, window, limit):
            items.append(self._decode(group, window, device, decode_dtype))
        items += [self._chunk(s, window, device, dtype) for s in spans if s.num_tokens > 1]
        return items

    def _decode(self, spans: list[Span], window: int | None, device: torch.device, dtype: torch.dtype) -> _Decode:
        keys = [s.slots[_first_key(s.start, window) :] for s in spans]
        rows = slice(spans[0].row, spans[-1].row + 1)
        if len(keys) == 1:
            return _Decode(rows, _slots(keys[0], device), 1, None, dtype)
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
        return _Decode(rows, torch.from_numpy(padded.ravel()).to(device), len(keys), mask, dtype)

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


def _groups(spans: list[Span], window: int | None, limit: int) -> Iterator[list[Span]]:
    """Decodes in neighbouring rows whose padded batch has at most ``limit`` keys, or of which there is only one."""
    group: list[Span] = []
    longest = 0
    for span in spans:
        length = span.end if window is None else min(span.end, window)
        if group and (max(longest, length) * (len(group) + 1) > limit or span.row != group[-1].row + 1):
            yield group
            group, longest = [], 0
        group.append(span)
        longest = max(longest, length)
    if group:
        yield group


def _slots(slots: Any, device: torch.device) -> slice | torch.Tensor:
    """A slice where the slots are neighbours in order."""
    if slots[-1] - slots[0] == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(np.ascontiguousarray(slots)).to(device)
