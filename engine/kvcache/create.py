"""The KV cache for each ``kv_cache_dtype``."""

import torch

from engine.kvcache.int4 import Int4KVCache
from engine.kvcache.layout import KVCache
from engine.kvcache.quantized import CODECS, QuantizedKVCache
from engine.model.config import ModelConfig


def create_kv_cache(
    kv_dtype: str, config: ModelConfig, num_blocks: int, block_size: int, device: torch.device | str, dtype: torch.dtype,
    tail_blocks: int = 1,
) -> KVCache:  # fmt: skip
    """``kv_dtype``: "auto" (K and V in ``dtype``), "int8", "fp8" or "int4". ``tail_blocks``: blocks that are expected to be
    incomplete at a time, which 4 bits keep in ``dtype``. ValueError for anything else."""
    if kv_dtype == "auto":
        return KVCache(config, num_blocks, block_size, device, dtype)
    if kv_dtype == "int4":
        return Int4KVCache(config, num_blocks, block_size, device, dtype, tail_blocks)
    _check(kv_dtype)
    return QuantizedKVCache(kv_dtype, config, num_blocks, block_size, device, dtype)


def block_bytes(kv_dtype: str, config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block adds to such a cache: all layers, scales and minima included."""
    if kv_dtype == "auto":
        return KVCache.bytes_per_block_of(config, block_size, dtype)
    if kv_dtype == "int4":
        return Int4KVCache.bytes_per_block_of(config, block_size, dtype)
    _check(kv_dtype)
    return QuantizedKVCache.bytes_per_block_of(config, block_size, dtype)


def _check(kv_dtype: str) -> None:
    if kv_dtype not in CODECS:
        raise ValueError(f"kv_cache_dtype must be one of {('auto', *CODECS, 'int4')}, got {kv_dtype!r}")
