"""The tensors behind the KV pool.

One tensor holds all layers: [num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim]; index 3 is K, then V.
A token's K and V of one layer are one contiguous row, written by one copy, and physically neighbouring blocks are
neighbouring rows, so that attention can read a run of them as a view.

Slot: the place of one token, ``block_id * block_size + offset``; the same number in every layer.

K and V in few bits lie elsewhere: ``engine.kvcache.quantized``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.base import Pool, Span, TensorPool
from engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class HostBlocks:
    """The content of N blocks in host memory: a copy of each of the pool's tensors for these blocks, [num_layers, N, ...]. Of 4 bits
    also which blocks were complete (bool [N]), and what the tail held of the last: [num_layers, block_size, 2 K, D] or None."""

    tensors: tuple[torch.Tensor, ...]
    rounded: Any = None
    tail: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        return int(self.tensors[0].shape[1])

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors) + (0 if self.tail is None else self.tail.nbytes)


class KVCache:
    """K and V of all layers for ``num_blocks`` blocks of ``block_size`` tokens, in the model's dtype.

    A layer of ``layers`` is a tensor, or what answers as one (see ``Pool``); ``pool`` is what attention plans with.
    """

    kv_dtype = "auto"  # as EngineConfig.kv_cache_dtype
    any_offset = True  # whether a request may go on from any token of another's block, once that is copied
    tensor: torch.Tensor  # of this class alone
    layers: list[Any]
    pool: Pool

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self._measure(config, num_blocks, block_size, device, dtype)
        shape = (config.num_layers, num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)
        # zeros, not empty: the pages of a large pool are then mapped only when blocks are written.
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        slots = (num_blocks * block_size, 2 * config.num_kv_heads, config.head_dim)
        # Each layer's [slots, 2 num_kv_heads, head_dim]: of a token the K of all heads, then the V of all heads.
        self.layers = [layer.view(slots) for layer in self.tensor]
        self.pool = TensorPool(self.tensor)

    def _measure(
        self, config: ModelConfig, num_blocks: int, block_size: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.row_shape = (2 * config.num_kv_heads, config.head_dim)  # K and V of a token in a layer
        self.device = torch.device(device)
        self.dtype = dtype  # of what is read

    @staticmethod
    def bytes_per_block_of(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block, K and V of all layers."""
        return config.num_layers * block_size * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes that a block adds to the pool, in all layers."""
        return self.nbytes // self.num_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    def held_by(self, ref_counts: Sequence[int]) -> None:
        """How many hold each block, as the pool of blocks counts it from now on: what is kept beside unheld ones may go."""

    def writes(self, spans: Sequence[Span], release: bool = True) -> Any:
        """Where the K and V of these spans' tokens go, as ``index_copy_`` of a layer takes it: rows in order of the spans.

        Asked once a step, before attention plans it. ``release``: all before each span's start is settled, so that what was kept
        to take guesses back may go.
        """
        slots = [span.slots[span.start :] for span in spans]
        return torch.from_numpy(np.concatenate(slots)).to(self.device)

    def store(self, writes: Any, rows: torch.Tensor) -> None:
        """Write the K and V of tokens in the first layers at once: ``rows`` [layers, T, 2 K, D] in ``dtype``, ``writes`` of their spans."""
        self.tensor[: len(rows)].flatten(1, 2).flatten(2, 3).index_copy_(1, writes, rows)

    def in_order(self, span: Span) -> bool:
        """Whether the keys that a span sees are those of its request's positions, each once: what the compiled layer wants."""
        return True

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole blocks in all layers. All sources are read before any destination is written."""
        same_number(src, dst)
        if src:
            self.tensor[:, self._ids(dst)] = self.tensor[:, self._ids(src)]

    def move(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None:
        """Copy the K and V of single tokens in all layers: the accepted path of a tree moves to the slots of its positions.

        All sources are read before any destination is written. ValueError for slots that are not there, or a destination
        that is named twice.
        """
        src, dst = self._moves(src_slots, dst_slots)
        if len(src):
            slots = self.tensor.flatten(1, 2)
            slots[:, dst] = slots[:, src]

    def _stores(self) -> tuple[torch.Tensor, ...]:
        """What the blocks lie in, each [num_layers, num_blocks, ...]."""
        return (self.tensor,)

    def host_bytes(self, block_ids: Sequence[int]) -> int:
        """Bytes that ``to_host`` takes for these."""
        return len(block_ids) * sum(held[:, 0].nbytes for held in self._stores())

    def to_host(self, block_ids: Sequence[int]) -> HostBlocks:
        """A copy of these blocks in host memory."""
        ids = self._ids(block_ids)
        return HostBlocks(tuple(held.index_select(1, ids).cpu() for held in self._stores()))

    def from_host(self, kept: HostBlocks, first: int, block_ids: Sequence[int]) -> None:
        """Write the blocks ``first``.. of ``kept`` to these. ValueError unless they are as many."""
        self._same_number(kept, first, block_ids)
        ids = self._ids(block_ids)
        for held, copied in zip(self._stores(), kept.tensors, strict=True):
            held[:, ids] = copied[:, first:].to(self.device)

    def _same_number(self, kept: HostBlocks, first: int, block_ids: Sequence[int]) -> None:
        if first < 0 or first + len(block_ids) != kept.num_blocks:
            raise ValueError(f"{kept.num_blocks} blocks were kept: from {first} on they do not fit {len(block_ids)}")

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        """Overwrite blocks in all layers; tests fill freed blocks with NaN so that a stray read shows."""
        if block_ids:
            self.tensor[:, self._ids(block_ids)] = value

    def _moves(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        same_number(src_slots, dst_slots)
        if len(set(dst_slots)) != len(dst_slots):
            raise ValueError(f"a destination is named twice: {list(dst_slots)}")
        return self._within(src_slots, self.num_slots, "slots"), self._within(dst_slots, self.num_slots, "slots")

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        return self._within(block_ids, self.num_blocks, "block ids")

    def _within(self, ids: Sequence[int], count: int, what: str) -> torch.Tensor:
        if len(ids) and (min(ids) < 0 or max(ids) >= count):
            raise ValueError(f"{what} must lie in [0, {count}), got {min(ids)} to {max(ids)}")
        return torch.tensor(list(ids), dtype=torch.int64, device=self.device)


def same_number(src: Sequence[int], dst: Sequence[int]) -> None:
    if len(src) != len(dst):
        raise ValueError(f"as many sources as destinations are needed, got {len(src)} and {len(dst)}")


def block_slots(block_ids: Sequence[int], block_size: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """int64 [len(block_ids) * block_size]: the slots of a block table, in order of position."""
    first = np.asarray(block_ids, dtype=np.int64)[:, None] * block_size
    return (first + np.arange(block_size, dtype=np.int64)).ravel()
