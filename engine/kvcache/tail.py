"""The blocks of a 4-bit pool that are not complete or not settled, in full precision."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class Tail:
    """Places for whole blocks, given out by physical block; ``tensor`` [num_layers, places * block_size, 2 K, D].

    Who holds a block is the pool's affair: ``holders`` are its reference counts, and places of blocks that nobody holds any more
    are taken back when the others are used up. Where nobody tells, or all are held, the store grows, to at most a place for each block.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], num_blocks: int, places: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """``shape``: num_layers, block_size, 2 K, D."""
        self.num_layers, self.block_size, *self._row = shape
        self.of_block = np.full(num_blocks, -1, dtype=np.int64)  # a block's place; -1: none
        self.holders: Sequence[int] | None = None
        self._free: list[int] = []
        self.layers: list[torch.Tensor] = []  # each layer's [places * block_size, 2 K, D]
        self.tensor = torch.empty((self.num_layers, 0, *self._row), dtype=dtype, device=device)
        self._grow(places)

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    @property
    def num_places(self) -> int:
        return int(self.tensor.shape[1]) // self.block_size

    @property
    def num_held(self) -> int:
        return self.num_places - len(self._free)

    def holds(self, block: int) -> bool:
        return bool(self.of_block[block] >= 0)

    def range_of(self, block: int) -> slice:
        """The places of a block's tokens. RuntimeError where it has none."""
        place = int(self.of_block[block])
        if place < 0:
            raise RuntimeError(f"block {block} has no place in the tail")
        return slice(place * self.block_size, (place + 1) * self.block_size)

    def of(self, block: int, layer: int) -> torch.Tensor:
        """[block_size, 2 K, D]: a view."""
        return self.tensor[layer, self.range_of(block)]

    def of_last(self, blocks: Sequence[int]) -> torch.Tensor | None:
        """[num_layers, block_size, 2 K, D]: a view of the last of these blocks' place; None where it has none."""
        return self.tensor[:, self.range_of(blocks[-1])] if blocks and self.holds(blocks[-1]) else None

    def hold(self, block: int) -> None:
        """A place for this block, unless it has one."""
        if self.holds(block):
            return
        if not self._free and self.holders is not None:
            counts = self.holders
            self.release([b for b in np.flatnonzero(self.of_block >= 0).tolist() if not counts[b]])
        if not self._free:
            self._grow(min(2 * self.num_places, len(self.of_block)))
        self.of_block[block] = self._free.pop()

    def release(self, blocks: Any) -> None:
        """Take back the places of those of these blocks (ids, each once) that have one."""
        ids = np.asarray(blocks, dtype=np.int64)
        places = self.of_block[ids]
        self._free += [int(place) for place in places if place >= 0]
        self.of_block[ids] = -1

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """The destinations have what the sources have: a place with the same tokens, or none. All are read before any is written."""
        kept = [self.tensor[:, self.range_of(block)].clone() if self.holds(block) else None for block in src]
        for block, tokens in zip(dst, kept, strict=True):
            if tokens is None:
                self.release([block])
            else:
                self.hold(block)
                self.tensor[:, self.range_of(block)] = tokens

    def _grow(self, places: int) -> None:
        old = self.num_places
        shape = (self.num_layers, places * self.block_size, *self._row)
        with torch.inference_mode(False):  # a step may ask, but blocks are copied outside of one
            grown = torch.zeros(shape, dtype=self.tensor.dtype, device=self.tensor.device)
            grown[:, : old * self.block_size] = self.tensor
            self.tensor = grown
            self.layers = list(grown)
        self._free += range(places - 1, old - 1, -1)

    def check_integrity(self) -> None:
        """RuntimeError unless each place is free or some one block's."""
        places = [*self._free, *(int(place) for place in self.of_block if place >= 0)]
        if sorted(places) != list(range(self.num_places)):
            raise RuntimeError(f"the places of the tail are {sorted(places)}, of {self.num_places}")
