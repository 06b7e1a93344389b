"""Attention in plain torch: scaled_dot_product_attention over views or gathered rows of the paged pool.

Four forms of work, planned once a step for every different sliding window:

- a *view*: one request with one new token whose table is physically contiguous. Nothing is copied.
- a *gather*: requests with one new token each, of similar length. Their K and V rows are gathered into one padded [B, L]
  batch, small enough to stay in the CPU's cache until it is read.
- a *few*: requests with the same small number of new tokens after a context (a draft to verify, chain or tree): viewed or
  gathered like decodes, the new tokens beside the heads of a group, so that K and V are read once for all of them.
- a *chunk*: a request with many new tokens, one call of its own. Without context before it, it reads its own fresh
  K and V and no pool at all.

A pool that holds K and V in few bits has no views: its rows are gathered, and dequantised as they are. It also says where a
row's keys lie and whether a chunk reads back what it stored, or its own at hand (``Pool``, ``engine.kvcache.quantized``).

Padding repeats a slot of the request itself, masked out: no slot that belongs to another request, to nobody, or that has
not been written yet is ever read, so whatever they hold (NaN included) cannot show.

The first three run for every token and are bound by reading K and V and by the number of operations, not by arithmetic. So
bfloat16 rows are used as they are rather than widened first, and there are few calls.

Shapes: T rows in the batch, B requests, n new tokens of each, L keys, H query heads, K KV heads, G = H / K query heads to a KV head, D head_dim.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import Attention, Pool, Span, TensorPool, contiguous, first_key, is_chunk
from engine.model.config import ModelConfig

# What one gather copies, at most (a single request may be longer): about two cores' second-level caches. A GPU has the
# bandwidth, and wants few large launches.
_GATHER_BYTES = 1 << 21


@dataclass(frozen=True, slots=True)
class _Heads:
    """The numbers of a layer, as the work items need them."""

    query: int  # H
    kv: int  # K
    group: int  # G
    dim: int  # D
    dtype: torch.dtype  # of a decode's arithmetic


@dataclass(frozen=True, slots=True)
class _View:
    rows: slice
    keys: tuple[torch.Tensor, ...]  # each layer's [1, K, L, D], views of the pool
    values: tuple[torch.Tensor, ...]
    heads: _Heads

    def run(self, layer: int, qkv: torch.Tensor, stored: torch.Tensor, pool: Any) -> torch.Tensor:
        h = self.heads
        k, v = _as(self.keys[layer], h.dtype), _as(self.values[layer], h.dtype)
        q = _queries(self.rows, qkv, stored, h).view(1, h.kv, h.group, h.dim)
        out = F.scaled_dot_product_attention(q, k, v).view(1, -1)
        return _as(out, qkv.dtype)


@dataclass(frozen=True, slots=True)
class _Gather:
    rows: slice
    slots: Any  # [B * L], as the pool's layers take them
    mask: torch.Tensor | None  # [B, 1, 1, L], added to the scores; None: nothing is padded
    heads: _Heads

    def run(self, layer: int, qkv: torch.Tensor, stored: torch.Tensor, pool: Any) -> torch.Tensor:
        h, size = self.heads, self.rows.stop - self.rows.start
        kv = _as(pool.index_select(0, self.slots), h.dtype)  # [B * L, 2 K, D]
        k, v = kv.view(size, -1, 2, h.kv, h.dim).permute(2, 0, 3, 1, 4).unbind()  # [B, K, L, D]
        q = _queries(self.rows, qkv, stored, h).view(size, h.kv, h.group, h.dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).reshape(size, -1)
        return _as(out, qkv.dtype)


@dataclass(frozen=True, slots=True)
class _Few:
    rows: slice
    size: int  # B
    keys: Any  # views of each layer, a tuple of [1, L, 2, K, D]; or the slots [B * L], as the pool's layers take them
    mask: torch.Tensor  # [B or 1, 1, n * G, L], added to the scores
    heads: _Heads

    def run(self, layer: int, qkv: torch.Tensor, stored: torch.Tensor, pool: Any) -> torch.Tensor:
        h, size = self.heads, self.size
        if isinstance(self.keys, tuple):
            kv = _as(self.keys[layer], h.dtype)
        else:
            kv = _as(pool.index_select(0, self.keys), h.dtype).view(size, -1, 2, h.kv, h.dim)
        k, v = kv.permute(2, 0, 3, 1, 4).unbind()  # [B, K, L, D]
        q = _queries(self.rows, qkv, stored, h)
        n = q.shape[0] // size
        q = q.view(size, n, h.kv, h.group, h.dim).transpose(1, 2).reshape(size, h.kv, n * h.group, h.dim)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        out = out.view(size, h.kv, n, h.group, h.dim).transpose(1, 2).reshape(size * n, -1)
        return _as(out, qkv.dtype)


@dataclass(frozen=True, slots=True)
class _Chunk:
    rows: slice
    keys: Any  # as a few's, the views [L, 2 K, D]; None: the keys are the chunk itself
    mask: torch.Tensor | None  # [n, L], added to the scores; None: plain causal, n = L
    heads: _Heads
    own: bool = False  # the chunk's own keys come behind those of the pool, as at hand

    def run(self, layer: int, qkv: torch.Tensor, stored: torch.Tensor, pool: Any) -> torch.Tensor:
        h, new = self.heads, qkv[self.rows]
        if self.keys is None:
            kv = new[:, h.query :]
        else:
            kv = _as(self.keys[layer] if isinstance(self.keys, tuple) else pool.index_select(0, self.keys), qkv.dtype)
        if self.own:  # rounded as what is stored of the chunk will be when it is context
            kv = torch.cat((kv, _as(stored[self.rows][:, h.query :], qkv.dtype)))
        # The G query heads of a KV head become the outer dimension, over which K and V repeat without being copied.
        q = new[:, : h.query].view(-1, h.kv, h.group, h.dim).permute(2, 1, 0, 3)  # [G, K, n, D]
        k = kv[:, : h.kv].transpose(0, 1).expand(h.group, -1, -1, -1)  # [G, K, L, D]
        v = kv[:, h.kv :].transpose(0, 1).expand(h.group, -1, -1, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, is_causal=self.mask is None)
        return out.permute(2, 1, 0, 3).reshape(new.shape[0], -1)


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _queries(rows: slice, qkv: torch.Tensor, stored: torch.Tensor, heads: _Heads) -> torch.Tensor:
    """The queries of some rows in the dtype of a decode's arithmetic."""
    source = stored if stored.dtype == heads.dtype else qkv
    q = source.narrow(1, 0, heads.query)
    return q if q.shape[0] == rows.stop - rows.start else q[rows]


class TorchAttention(Attention):
    name = "torch"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.group = config.num_attention_heads // config.num_kv_heads

    def plan(self, spans: Sequence[Span], kv: Pool | torch.Tensor, dtype: torch.dtype) -> Any:
        """One list of work items for each different sliding window."""
        pool = kv if isinstance(kv, Pool) else TensorPool(kv)
        decode_dtype = pool.dtype if pool.dtype == torch.bfloat16 else dtype
        config = self.config
        heads = _Heads(config.num_attention_heads, config.num_kv_heads, self.group, config.head_dim, decode_dtype)
        return {window: self._items(spans, window, pool, dtype, heads) for window in self.windows}

    def run(self, plan: Any, layer: int, qkv: torch.Tensor, stored: torch.Tensor, pool: Any) -> torch.Tensor:
        items = plan[self.config.sliding_windows[layer]]
        if len(items) == 1:
            return items[0].run(layer, qkv, stored, pool)
        out = qkv.new_empty(qkv.shape[0], self.config.num_attention_heads * self.config.head_dim)
        for item in items:
            out[item.rows] = item.run(layer, qkv, stored, pool)
        return out

    def _items(self, spans: Sequence[Span], window: int | None, pool: Pool, dtype: torch.dtype, heads: _Heads) -> list[Any]:
        row_bytes = 2 * heads.kv * heads.dim * heads.dtype.itemsize
        limit = _GATHER_BYTES // row_bytes if pool.device.type == "cpu" else 1 << 62
        decodes: list[Span] = []
        few: list[Span] = []
        many: list[Span] = []
        for s in spans:
            (many if is_chunk(s) else decodes if s.num_tokens == 1 else few).append(s)
        items: list[Any] = [_decode(group, window, pool, heads) for group in _groups(decodes, window, limit)]
        items += [_few(group, window, pool, heads) for group in _groups(few, window, limit)]
        return items + [_chunk(s, window, pool, dtype, heads) for s in many]


def _groups(spans: list[Span], window: int | None, limit: int) -> Iterator[list[Span]]:
    """Spans of as many tokens in neighbouring rows whose padded batch has at most ``limit`` keys, or of which there is only one."""
    group: list[Span] = []
    longest = 0
    for span in spans:
        length = span.end - first_key(span.start, window)
        if group:
            last = group[-1]
            neighbour = last.num_tokens == span.num_tokens and span.row == last.row + last.num_tokens
            if not neighbour or max(longest, length) * (len(group) + 1) > limit:
                yield group
                group, longest = [], 0
        group.append(span)
        longest = max(longest, length)
    if group:
        yield group


def _decode(spans: list[Span], window: int | None, pool: Pool, heads: _Heads) -> _View | _Gather:
    keys = [pool.slots(s, window) for s in spans]
    rows = slice(spans[0].row, spans[-1].row + 1)
    views = _views(keys, pool)
    if views is not None:
        k, v = views.permute(2, 0, 3, 1, 4).unsqueeze(2)  # [num_layers, 1, K, L, D]
        return _View(rows, k.unbind(), v.unbind(), heads)
    slots, longest = _padded(keys)
    mask = None
    if any(len(k) != longest for k in keys):
        hidden = np.arange(longest) >= np.array([len(k) for k in keys])[:, None]
        mask = _bias(hidden, heads.dtype, pool.device)[:, None, None, :]
    return _Gather(rows, pool.index(slots), mask, heads)


def _few(spans: list[Span], window: int | None, pool: Pool, heads: _Heads) -> _Few:
    keys = [pool.slots(s, window) for s in spans]
    rows = slice(spans[0].row, spans[-1].row + spans[-1].num_tokens)
    slots, longest = _padded(keys)
    hidden = np.ones((len(spans), spans[0].num_tokens, longest), dtype=np.bool_)
    for into, span in zip(hidden, spans):
        own = pool.hidden(span, window)
        into[:, : own.shape[1]] = own
    mask = _bias(hidden.repeat(heads.group, axis=1), heads.dtype, pool.device)[:, None]
    views = _views(keys, pool)
    if views is not None:
        return _Few(rows, 1, views[:, None].unbind(), mask, heads)
    return _Few(rows, len(spans), pool.index(slots), mask, heads)


def _chunk(span: Span, window: int | None, pool: Pool, dtype: torch.dtype, heads: _Heads) -> _Chunk:
    n = span.num_tokens
    rows = slice(span.row, span.row + n)
    slots = pool.slots(span, window)
    causal = len(slots) == n and span.ancestors is None and (window is None or window >= n)
    mask = None if causal else _bias(pool.hidden(span, window), dtype, pool.device)
    held = pool.holds_chunk(span)
    if not held:
        slots = slots[: len(slots) - n]
        if not len(slots):
            return _Chunk(rows, None, mask, heads)
    views = _views([slots], pool)
    return _Chunk(rows, pool.index(slots) if views is None else views.flatten(2, 3).unbind(), mask, heads, own=not held)


def _views(keys: "list[np.ndarray[Any, np.dtype[np.int64]]]", pool: Pool) -> torch.Tensor | None:
    """[num_layers, L, 2, K, D] of the only request, where its keys are neighbours in order and can be read in place."""
    run = contiguous(keys[0]) if len(keys) == 1 else None
    return None if run is None else pool.views(run)


def _bias(hidden: "np.ndarray[Any, np.dtype[np.bool_]]", dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to the scores: 0, or -inf where hidden."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(torch.from_numpy(hidden), float("-inf")).to(device)


def _padded(keys: "list[np.ndarray[Any, np.dtype[np.int64]]]") -> "tuple[np.ndarray[Any, np.dtype[np.int64]], int]":
    """[B * L] slots and L: each row filled up with its first slot."""
    longest = max(len(k) for k in keys)
    padded = np.empty((len(keys), longest), dtype=np.int64)
    for row, k in zip(padded, keys):
        row[: len(k)] = k
        row[len(k) :] = k[0]
    return padded.ravel(), longest
