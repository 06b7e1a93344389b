"""The KV pool in 4 bits as KIVI has it (arXiv 2402.02750): K per channel in groups of tokens, V per token; a full-precision tail.

A group of tokens is a block. Its keys can be rounded only when it is complete, so until then its tokens lie in the *tail*, a
small store of whole blocks in the dtype that is read. The rule of what a token sees depends on its position alone:

    the blocks that end before its own block begins, in 4 bits; its own block, itself included, as it was computed.

So tokens do not depend on chunks, batches, prefix hits or accepted drafts, and a prompt is computed from what later steps will
see of it. (KIVI reads a prompt's own K and V unrounded, and keeps up to R of the last tokens so; here R is the place in the block.)
A block is rounded in the step that completes it, by whoever writes its last slot. When a span has tokens on both sides of a
block's end, its rows see different forms of that block: both are among its keys, and a mask chooses. The rows of a tree are the
exception: all its nodes, and the block that they begin in, are seen as computed.

Guesses: a block that holds drafted tokens keeps its tail until the next step has begun behind it, so what is rejected is written
over in the tail and rounded again. Whoever begins inside a block without a tail (nobody in a running engine; a measurement that
goes back) reads the tail back from the codes.

Where a key lies is told by one number: below ``num_slots`` it is a slot of the codes, from there on a slot of the tail.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from engine.attention.base import FEW, Pool, Span, contiguous, first_key, hidden_keys
from engine.kvcache.layout import HostBlocks, KVCache, same_number
from engine.kvcache.tail import Tail
from engine.model.config import ModelConfig
from engine.quantization import kv as codecs


@dataclass(frozen=True, slots=True)
class Writes:
    """A step's writes, the same in every layer. All index tensors are int64 on the pool's device."""

    tail_rows: torch.Tensor  # of the step's rows, those that go to the tail
    tail_slots: torch.Tensor  # and where to
    blocks: torch.Tensor  # [N]: complete with this step
    before: torch.Tensor  # tail slots of their tokens that earlier steps computed
    order: torch.Tensor  # [N * block_size]: the blocks' tokens, in (those ``before``, then the step's rows)


@dataclass(frozen=True, slots=True)
class Index:
    """Where L keys lie, as ``index_select`` takes it. Codes are read by whole blocks, each once whoever shares it: the scales of
    its keys then serve all its tokens."""

    blocks: torch.Tensor | slice | None  # [N], those of the keys that are in 4 bits; None: there are none
    tail_slots: torch.Tensor  # [T], of the others
    order: torch.Tensor | slice  # [L]: the keys in (the tokens of the blocks, then those of the tail)


class Int4Layer:
    """One layer of the pool, as a tensor [slots, 2 K, D] would be."""

    def __init__(self, cache: "Int4KVCache", index: int) -> None:
        self.cache, self.index, self.dtype = cache, index, cache.dtype
        self.codes = cache.codes[index]  # [num_blocks, block_size, 2, K, D / 2]
        self.key_affine = cache.key_affine[index]  # [num_blocks, 2, K, D]
        self.value_affine = cache.value_affine[index]  # [num_blocks, block_size, 2, K, G]

    @property
    def tail(self) -> torch.Tensor:
        """[tail slots, 2 K, D]"""
        return self.cache.tail.layers[self.index]

    def index_copy_(self, dim: int, writes: Writes, rows: torch.Tensor) -> None:
        """Put ``rows`` [T, 2 K, D] into the tail, and what they complete into 4 bits."""
        if len(writes.blocks):
            known = rows
            if len(writes.before):
                known = torch.cat((self.tail.index_select(0, writes.before), rows))
            tokens = known.index_select(0, writes.order).unflatten(0, (len(writes.blocks), -1))
            self.cache.round(tokens, writes.blocks, self.index)
        if len(writes.tail_rows):
            kept = rows if len(writes.tail_rows) == len(rows) else rows.index_select(0, writes.tail_rows)
            self.tail.index_copy_(0, writes.tail_slots, kept)

    def index_select(self, dim: int, index: Index) -> torch.Tensor:
        """[L, 2 K, D] in the dtype that is read."""
        if index.blocks is None:
            return self.tail.index_select(0, index.tail_slots)
        which = index.blocks
        held = (self.codes, self.key_affine, self.value_affine)
        codes, keys, values = (t[which] if isinstance(which, slice) else t.index_select(0, which) for t in held)
        coded = codes.shape[0] * codes.shape[1]
        rows = self.tail.new_empty(coded + len(index.tail_slots), *self.tail.shape[1:])
        k, v = rows[:coded].view(*codes.shape[:4], -1).unbind(2)
        codecs.dequantize_keys_int4(codes[:, :, 0], keys, out=k)
        codecs.dequantize_values_int4(codes[:, :, 1], values, out=v)
        torch.index_select(self.tail, 0, index.tail_slots, out=rows[coded:])
        return rows[index.order] if isinstance(index.order, slice) else rows.index_select(0, index.order)


class Int4Pool(Pool):
    """Where the keys of a span lie: in the codes up to the block it begins in, or as far as any row sees them rounded; then in the tail."""

    def __init__(self, cache: "Int4KVCache") -> None:
        self.cache, self.device, self.dtype = cache, cache.device, cache.dtype

    def slots(self, span: Span, window: int | None) -> "np.ndarray[Any, np.dtype[np.int64]]":
        first = first_key(span.start, window)
        coded_end, plain_start = self._parts(span)
        plain_start = max(first, plain_start)
        # The slots of a chunk's own tokens are not read (``holds_chunk``), and may have no place in the tail.
        plain = self.cache.tail_slots(span.slots[plain_start : span.end]) + self.cache.num_slots
        return np.concatenate((span.slots[first : max(first, coded_end)], plain))

    def hidden(self, span: Span, window: int | None) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        if span.ancestors is not None:
            return hidden_keys(span, window)  # nothing twice: the keys are in order of position
        first = first_key(span.start, window)
        coded_end, plain_start = self._parts(span)
        row = np.arange(span.start, span.end)[:, None]
        own_block = row // self.cache.block_size * self.cache.block_size
        coded, plain = np.arange(first, max(first, coded_end)), np.arange(max(first, plain_start), span.end)
        hidden = np.concatenate((coded >= own_block, (plain < own_block) | (plain > row)), axis=1)
        if window is not None:
            hidden |= np.concatenate((coded, plain)) <= row - window
        return hidden

    def _parts(self, span: Span) -> tuple[int, int]:
        """The end of the positions that are read from codes, and the start of those read as computed; between them, both."""
        size = self.cache.block_size
        plain_start = span.start // size * size
        return plain_start if span.ancestors is not None else (span.end - 1) // size * size, plain_start

    def index(self, slots: "np.ndarray[Any, np.dtype[np.int64]]") -> Index:
        size, in_tail = self.cache.block_size, slots >= self.cache.num_slots
        tail_slots = slots[in_tail] - self.cache.num_slots
        blocks, which = np.unique(slots[~in_tail] // size, return_inverse=True)
        order = np.empty_like(slots)
        order[~in_tail] = which * size + slots[~in_tail] % size
        order[in_tail] = len(blocks) * size + np.arange(len(tail_slots))
        read = self._run_or_tensor(blocks) if len(blocks) else None
        return Index(read, self._tensor(tail_slots), self._run_or_tensor(order))

    def views(self, run: slice) -> torch.Tensor | None:
        return None

    def holds_chunk(self, span: Span) -> bool:
        return False

    def _run_or_tensor(self, ids: "np.ndarray[Any, np.dtype[np.int64]]") -> torch.Tensor | slice:
        run = contiguous(ids)
        return run if run is not None else self._tensor(ids)

    def _tensor(self, ids: "np.ndarray[Any, np.dtype[np.int64]]") -> torch.Tensor:
        return torch.from_numpy(ids).to(self.device)


class Int4KVCache(KVCache):
    """Codes uint8 [num_layers, num_blocks, block_size, 2, K, D / 2], and bfloat16 scales and minima: of keys [num_layers,
    num_blocks, 2, K, D], of values [num_layers, num_blocks, block_size, 2, K, G]. The tail: ``engine.kvcache.tail``."""

    kv_dtype = "int4"
    any_offset = False  # a block's own tokens are seen as computed, and of another's complete block only the codes are left

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, device: torch.device | str, dtype: torch.dtype,
        tail_blocks: int = 1,
    ) -> None:  # fmt: skip
        """``tail_blocks``: room in the tail to begin with; it grows when more blocks are incomplete at a time. ``dtype``: of the
        tail and of what is read. ValueError for an odd head_dim."""
        if config.head_dim % 2:
            raise ValueError(f"kv_cache_dtype='int4' needs an even head_dim, got {config.head_dim}")
        self._measure(config, num_blocks, block_size, device, dtype)
        heads, dim = config.num_kv_heads, config.head_dim
        blocks = (config.num_layers, num_blocks)
        affine = codecs.SCALE_DTYPE
        self.codes = torch.zeros((*blocks, block_size, 2, heads, dim // 2), dtype=torch.uint8, device=device)
        self.key_affine = torch.zeros((*blocks, 2, heads, dim), dtype=affine, device=device)
        values = (*blocks, block_size, 2, heads, codecs.value_groups(dim))
        self.value_affine = torch.zeros(values, dtype=affine, device=device)
        self.tail = Tail(
            (config.num_layers, block_size, *self.row_shape), num_blocks, min(tail_blocks, num_blocks), self.device, dtype
        )
        self.layers = [Int4Layer(self, i) for i in range(config.num_layers)]
        self.pool = Int4Pool(self)
        self._rounded = np.zeros(num_blocks, dtype=np.bool_)  # whether a block's codes are all there

    @staticmethod
    def bytes_per_block_of(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block's codes, scales and minima, all layers; the tail is not of any block."""
        pair = 2 * codecs.SCALE_DTYPE.itemsize
        keys = block_size * config.head_dim // 2 + pair * config.head_dim
        values = block_size * (config.head_dim // 2 + pair * codecs.value_groups(config.head_dim))
        return config.num_layers * config.num_kv_heads * (keys + values)

    @property
    def bytes_per_block(self) -> int:
        return (self.nbytes - self.tail.nbytes) // self.num_blocks

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.key_affine.nbytes + self.value_affine.nbytes + self.tail.nbytes

    # -- a step ----------------------------------------------------------------------------------------------------------

    def held_by(self, ref_counts: Sequence[int]) -> None:
        self.tail.holders = ref_counts

    def writes(self, spans: Sequence[Span], release: bool = True) -> Writes:
        size = self.block_size
        tail_rows: list[Any] = []
        into: list[Any] = []
        blocks: list[int] = []
        before: list[Any] = []
        order: list[Any] = []
        row = behind = 0  # rows, and tokens before them, of the spans so far
        for span in spans:
            first = span.start // size
            table = span.slots[::size] // size  # the blocks, in order
            if release:
                self.tail.release(table[:first])
            keep_all = span.draft or span.num_tokens <= FEW
            for i in range(first, len(table)):
                start, end = max(i * size, span.start), min((i + 1) * size, span.end)
                block, complete = int(table[i]), end == (i + 1) * size
                if start > i * size:
                    self._reopen(block, start - i * size)
                if complete:
                    blocks.append(block)
                    earlier = start - i * size
                    before.append(self.tail_slots(span.slots[i * size : start]))
                    order += [("before", behind, earlier), ("rows", row + start - span.start, end - start)]
                    behind += earlier
                if complete or start == i * size:
                    self._rounded[block] = complete
                if keep_all or not complete:
                    self.tail.hold(block)
                    tail_rows.append(np.arange(row + start - span.start, row + end - span.start))
                    into.append(self.tail_slots(span.slots[start:end]))
            row += span.num_tokens
        flat = [np.arange(at, at + n) + (behind if what == "rows" else 0) for what, at, n in order]
        joined = self._joined
        return Writes(joined(tail_rows), joined(into), joined([blocks]), joined(before), joined(flat))

    def store(self, writes: Any, rows: torch.Tensor) -> None:
        for layer, own in zip(self.layers, rows, strict=False):
            layer.index_copy_(0, writes, own)

    def _joined(self, parts: list[Any]) -> torch.Tensor:
        joined = np.concatenate(parts) if parts else np.empty(0)
        return torch.from_numpy(joined.astype(np.int64)).to(self.device)

    def in_order(self, span: Span) -> bool:
        """Not where a chain goes on behind the end of a block: its rows differ in what they see of it."""
        return span.ancestors is not None or (span.end - 1) // self.block_size == span.start // self.block_size

    def tail_slots(self, slots: "np.ndarray[Any, np.dtype[np.int64]]") -> "np.ndarray[Any, np.dtype[np.int64]]":
        """Where in the tail the tokens of these slots lie; below 0 for those of a block that has no place there."""
        return self.tail.of_block[slots // self.block_size] * self.block_size + slots % self.block_size

    def round(self, tokens: torch.Tensor, blocks: torch.Tensor, layer: int) -> None:
        """Put complete ``blocks`` [N] of a layer into 4 bits: ``tokens`` [N, block_size, 2 K, D]."""
        k, v = tokens.unflatten(2, (2, -1)).unbind(2)
        k_codes, k_affine = codecs.quantize_keys_int4(k)
        v_codes, v_affine = codecs.quantize_values_int4(v)
        self.codes[layer].index_copy_(0, blocks, torch.stack((k_codes, v_codes), 2))
        self.key_affine[layer].index_copy_(0, blocks, k_affine)
        self.value_affine[layer].index_copy_(0, blocks, v_affine)

    def _reopen(self, block: int, tokens: int) -> None:
        """The first ``tokens`` of a block are about to be gone on from: they must be in the tail."""
        if self.tail.holds(block):
            return
        if not self._rounded[block]:
            raise RuntimeError(f"block {block}: {tokens} tokens should be there, but neither the tail nor the codes have them")
        index = self.pool.index(np.arange(block * self.block_size, (block + 1) * self.block_size))
        self.tail.hold(block)
        for layer in self.layers:
            self.tail.of(block, layer.index)[:] = layer.index_select(0, index)

    # -- blocks ----------------------------------------------------------------------------------------------------------

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        same_number(src, dst)
        ids = self._ids(src), self._ids(dst)
        for held in (self.codes, self.key_affine, self.value_affine):
            held[:, ids[1]] = held[:, ids[0]]
        self._rounded[list(dst)] = self._rounded[list(src)]
        self.tail.copy(src, dst)

    def _stores(self) -> tuple[torch.Tensor, ...]:
        return (self.codes, self.key_affine, self.value_affine)

    def host_bytes(self, block_ids: Sequence[int]) -> int:
        tail = self.tail.of_last(block_ids)
        return super().host_bytes(block_ids) + (0 if tail is None else tail.nbytes)

    def to_host(self, block_ids: Sequence[int]) -> HostBlocks:
        """Of the last block the tail's place too: those before it are settled."""
        kept, tail = super().to_host(block_ids), self.tail.of_last(block_ids)
        return replace(
            kept, rounded=self._rounded[list(block_ids)], tail=None if tail is None else tail.to("cpu", copy=True).contiguous()
        )

    def from_host(self, kept: HostBlocks, first: int, block_ids: Sequence[int]) -> None:
        super().from_host(kept, first, block_ids)
        self._rounded[list(block_ids)] = kept.rounded[first:]
        self.tail.release(block_ids)  # what is there is of those who had the blocks before
        if block_ids and kept.tail is not None:
            self.tail.hold(block_ids[-1])
            self.tail.tensor[:, self.tail.range_of(block_ids[-1])] = kept.tail.to(self.device)

    def move(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None:
        """As for any pool, within the tail: RuntimeError for tokens that are not in it any more (they were settled)."""
        src, dst = self._moves(src_slots, dst_slots)
        for slots in (src_slots, dst_slots):
            for block in {slot // self.block_size for slot in slots}:
                if not self.tail.holds(block):
                    raise RuntimeError(f"block {block} is settled: its tokens cannot be moved")
        where = [torch.from_numpy(self.tail_slots(slots.cpu().numpy())).to(self.device) for slots in (src, dst)]
        self.tail.tensor[:, where[1]] = self.tail.tensor[:, where[0]]
        changed = [block for block in {slot // self.block_size for slot in dst_slots} if self._rounded[block]]
        for layer in self.layers:
            for block in changed:
                self.round(self.tail.of(block, layer.index)[None], torch.tensor([block], device=self.device), layer.index)

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        """As if this value had been written, the tail's places of the blocks included."""
        ids = self._ids(block_ids)
        self.codes[:, ids] = 0
        for affine in (self.key_affine, self.value_affine):
            affine[:, ids] = value
        for block in block_ids:
            if self.tail.holds(block):
                self.tail.tensor[:, self.tail.range_of(block)] = value
