"""The tensors behind the KV pool.

One tensor holds all layers: [num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim]; index 3 is K, then V.
A token's K and V of one layer are one contiguous row, written by one copy, and physically neighbouring blocks are
neighbouring rows, so that attention can read a run of them as a view.

Slot: the place of one token, ``block_id * block_size + offset``; the same number in every layer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.model.config import ModelConfig


class KVCache:
    """K and V of all layers for ``num_blocks`` blocks of ``block_size`` tokens, in the model's dtype."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, block_size: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        for name, value in (("num_blocks", num_blocks), ("block_size", block_size)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (config.num_layers, num_blocks, block_size, 2, config.num_kv_heads, config.head_dim)
        # zeros, not empty: the pages of a large pool are then mapped only when blocks are written.
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        slots = (num_blocks * block_size, 2 * config.num_kv_heads, config.head_dim)
        # Each layer's [slots, 2 num_kv_heads, head_dim]: of a token the K of all heads, then the V of all heads.
        self.layers: list[torch.Tensor] = [layer.view(slots) for layer in self.tensor]

    @staticmethod
    def bytes_per_block_of(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block, K and V of all layers."""
        return config.num_layers * block_size * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.nbytes // self.num_blocks

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole blocks in all layers. All sources are read before any destination is written."""
        if len(src) != len(dst):
            raise ValueError(f"as many sources as destinations are needed, got {len(src)} and {len(dst)}")
        if src:
            self.tensor[:, self._ids(dst)] = self.tensor[:, self._ids(src)]

    def move(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None:
        """Copy the K and V of single tokens in all layers: the accepted path of a tree moves to the slots of its positions.

        All sources are read before any destination is written. ValueError for slots that are not there, or a destination
        that is named twice.
        """
        if len(src_slots) != len(dst_slots):
            raise ValueError(f"as many sources as destinations are needed, got {len(src_slots)} and {len(dst_slots)}")
        if len(set(dst_slots)) != len(dst_slots):
            raise ValueError(f"a destination is named twice: {list(dst_slots)}")
        if src_slots:
            slots = self.tensor.flatten(1, 2)
            src, dst = (self._within(which, self.num_slots, "slots") for which in (src_slots, dst_slots))
            slots[:, dst] = slots[:, src]

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        """Overwrite blocks in all layers; tests fill freed blocks with NaN so that a stray read shows."""
        if block_ids:
            self.tensor[:, self._ids(block_ids)] = value

    def _ids(self, block_ids: Sequence[int]) -> torch.Tensor:
        return self._within(block_ids, self.num_blocks, "block ids")

    def _within(self, ids: Sequence[int], count: int, what: str) -> torch.Tensor:
        if min(ids) < 0 or max(ids) >= count:
            raise ValueError(f"{what} must lie in [0, {count}), got {min(ids)} to {max(ids)}")
        return torch.tensor(list(ids), device=self.tensor.device)


def block_slots(block_ids: Sequence[int], block_size: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """int64 [len(block_ids) * block_size]: the slots of a block table, in order of position."""
    first = np.asarray(block_ids, dtype=np.int64)[:, None] * block_size
    return (first + np.arange(block_size, dtype=np.int64)).ravel()
