"""The KV pool in 8 bits: codes and scales of each token's vectors, a slot as it is in the plain pool.

A token's K or V of one head has a scale of its own (``engine.quantization.kv``), so tokens are written, moved and shared one by
one, and a block found by its prefix is the same bytes. Everything is read back from the pool, a step's own tokens too: what
a token sees does not depend on how its prompt was cut into chunks or who else was in the step. The one exception is the
compiled layer for few rows of one request, which has the rows' own K and V at hand and sees those (and only those) unrounded.

4 bits need more than a slot: ``engine.kvcache.int4``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from engine.attention.base import Pool, Span, contiguous, first_key, hidden_keys
from engine.kvcache.layout import KVCache, same_number
from engine.model.config import ModelConfig
from engine.quantization import kv as codecs

Codec = tuple[
    torch.dtype,
    Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor],
]
CODECS: dict[str, Codec] = {  # dtype of the codes, there, back
    "int8": (torch.int8, codecs.quantize_int8, codecs.dequantize_int8),
    "fp8": (torch.uint8, codecs.quantize_fp8, codecs.dequantize_fp8),
}


class QuantizedLayer:
    """One layer of the pool, as a tensor [slots, 2 K, D] of ``dtype`` would be."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor, codec: Codec, dtype: torch.dtype) -> None:
        """``codes`` [slots, 2 K, D], ``scales`` [slots, 2 K, 1]: parts of the pool's."""
        self.codes, self.scales, self.dtype = codes, scales, dtype
        _, self._quantize, self._dequantize = codec

    def index_copy_(self, dim: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Write ``rows`` [T, 2 K, D], rounded."""
        codes, scales = self._quantize(rows)
        self.codes.index_copy_(dim, slots, codes)
        self.scales.index_copy_(dim, slots, scales)

    def index_select(self, dim: int, slots: torch.Tensor | slice) -> torch.Tensor:
        """[L, 2 K, D], dequantised."""
        if isinstance(slots, slice):
            return self._dequantize(self.codes[slots], self.scales[slots], self.dtype)
        return self._dequantize(self.codes.index_select(dim, slots), self.scales.index_select(dim, slots), self.dtype)


class SlotPool(Pool):
    """A pool whose tokens lie slot by slot, but not as they are read."""

    def __init__(self, device: torch.device, dtype: torch.dtype, block_size: int | None = None) -> None:
        self.device, self.dtype, self.block_size = device, dtype, block_size

    def slots(self, span: Span, window: int | None) -> "np.ndarray[Any, np.dtype[np.int64]]":
        return span.slots[first_key(span.start, window) :]

    def hidden(self, span: Span, window: int | None) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        return hidden_keys(span, window)

    def index(self, slots: "np.ndarray[Any, np.dtype[np.int64]]") -> Any:
        run = contiguous(slots)
        return run if run is not None else torch.from_numpy(slots.copy()).to(self.device)

    def views(self, run: slice) -> torch.Tensor | None:
        return None

    def holds_chunk(self, span: Span) -> bool:
        return True


class QuantizedKVCache(KVCache):
    """int8 or fp8: codes [num_layers, num_blocks, block_size, 2, K, D] of one byte, and scales, bfloat16, [..., 1]."""

    def __init__(
        self, kv_dtype: str, config: ModelConfig, num_blocks: int, block_size: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        """``dtype``: of what is read, the model's. ValueError for another ``kv_dtype`` than those of ``CODECS``."""
        if kv_dtype not in CODECS:
            raise ValueError(f"kv_dtype must be one of {tuple(CODECS)}, got {kv_dtype!r}")
        self._measure(config, num_blocks, block_size, device, dtype)
        self.kv_dtype = kv_dtype
        codec = self._codec = CODECS[kv_dtype]
        shape = (config.num_layers, num_blocks, block_size, 2, config.num_kv_heads)
        self.codes = torch.zeros((*shape, config.head_dim), dtype=codec[0], device=device)
        self.scales = torch.zeros((*shape, 1), dtype=codecs.SCALE_DTYPE, device=device)
        layers = zip(self.codes.flatten(1, 2).flatten(2, 3), self.scales.flatten(1, 2).flatten(2, 3), strict=True)
        self.layers = [QuantizedLayer(codes, scales, codec, dtype) for codes, scales in layers]
        self.pool = SlotPool(self.device, dtype, block_size)

    @staticmethod
    def bytes_per_block_of(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block, codes and scales of all layers, whatever the ``dtype`` they are read in."""
        vectors = config.num_layers * block_size * 2 * config.num_kv_heads
        return vectors * (config.head_dim + codecs.SCALE_DTYPE.itemsize)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def _stores(self) -> tuple[torch.Tensor, ...]:
        return (self.codes, self.scales)

    def store(self, writes: Any, rows: torch.Tensor) -> None:
        for held, new in zip((self.codes, self.scales), self._codec[1](rows), strict=True):
            held[: len(rows)].flatten(1, 2).flatten(2, 3).index_copy_(1, writes, new)

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        same_number(src, dst)
        ids = self._ids(src), self._ids(dst)
        for held in (self.codes, self.scales):
            held[:, ids[1]] = held[:, ids[0]]

    def move(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None:
        src, dst = self._moves(src_slots, dst_slots)
        for held in (self.codes.flatten(1, 2), self.scales.flatten(1, 2)):
            held[:, dst] = held[:, src]

    def fill_blocks(self, block_ids: Sequence[int], value: float) -> None:
        """As if this value had been written, but for rounding: what is read is ``value`` in bfloat16."""
        ids = self._ids(block_ids)
        self.codes[:, ids] = int(codecs.to_fp8(torch.ones(1))) if self.kv_dtype == "fp8" else 1
        self.scales[:, ids] = value
