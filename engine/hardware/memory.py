"""What a KV cache weighs: arithmetic on a model's shape, with no tensor in sight.

Every function takes plain numbers and returns plain numbers, so that a saved run can be reckoned without an engine.
Bytes are bytes, never thousands; a "slot" is the room for the K and V of one token in all layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.hardware.cost import DTYPE_BYTES, KV_DTYPES, kv_bytes


@dataclass(frozen=True, kw_only=True)
class KvShape:
    """What decides what one token costs in the KV cache: five numbers, and for a cache in few bits what it is held in."""

    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_element: int  # of the model's dtype
    kv_dtype: str = "auto"  # as EngineConfig.kv_cache_dtype; "auto": the model's
    block_size: int = 16  # tokens that share the keys' scales, for "int4"

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_attention_heads", "num_kv_heads", "head_dim", "bytes_per_element", "block_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {value!r}")
        if self.kv_dtype not in ("auto", *KV_DTYPES):
            raise ValueError(f"kv_dtype must be one of {('auto', *KV_DTYPES)}, got {self.kv_dtype!r}")
        if self.num_attention_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_attention_heads={self.num_attention_heads}, got {self.num_kv_heads}")

    @classmethod
    def from_facts(cls, model: Mapping[str, Any], dtype: str, kv_dtype: str = "auto", block_size: int = 16) -> "KvShape":
        """From ``EngineStarted.model``, the dtype's name as in ``EngineStarted.device["dtype"]``, and ``kv_cache_dtype`` and
        ``block_size`` of the configuration."""
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {tuple(DTYPE_BYTES)}, got {dtype!r}")
        names = ("num_layers", "num_attention_heads", "num_kv_heads", "head_dim")
        missing = [name for name in names if name not in model]
        if missing:
            raise ValueError(f"the model's facts lack {', '.join(missing)}; got {', '.join(sorted(model)) or 'nothing'}")
        facts = {name: int(model[name]) for name in names}
        return cls(**facts, bytes_per_element=DTYPE_BYTES[dtype], kv_dtype=kv_dtype, block_size=block_size)

    @property
    def bytes_per_token(self) -> int:
        """2 (K and V) x layers x KV heads x head size x bytes of a number; in few bits those of codes, scales and minima, rounded up."""
        return -(-self.bytes_per_block(self.block_size) // self.block_size)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes that a block of so many tokens adds to the pool."""
        vectors = self.num_layers * self.num_kv_heads
        if self.kv_dtype == "auto":
            return 2 * vectors * self.head_dim * self.bytes_per_element * block_size
        return vectors * round(block_size * kv_bytes(self.kv_dtype, self.head_dim, block_size))

    @property
    def mha(self) -> "KvShape":
        """The same model if every query head had its own K and V (multi-head attention)."""
        return replace(self, num_kv_heads=self.num_attention_heads)

    @property
    def mqa(self) -> "KvShape":
        """The same model if all query heads shared one K and V (multi-query attention)."""
        return replace(self, num_kv_heads=1)

    @property
    def attention_name(self) -> str:
        """ "MHA", "GQA" or "MQA", whichever this model has."""
        if self.num_kv_heads == self.num_attention_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens`` tokens: the ceiling of their quotient."""
    if num_tokens < 0 or block_size < 1:
        raise ValueError(f"num_tokens must be >= 0 and block_size >= 1, got {num_tokens} and {block_size}")
    return -(-num_tokens // block_size)


def pool_bytes(shape: KvShape, num_blocks: int, block_size: int) -> int:
    """Bytes of a pool of ``num_blocks`` blocks of ``block_size`` slots; without the tail of an int4 pool."""
    if num_blocks < 0 or block_size < 1:
        raise ValueError(f"num_blocks must be >= 0 and block_size >= 1, got {num_blocks} and {block_size}")
    return num_blocks * shape.bytes_per_block(block_size)


def contiguous_slots(num_requests: int, max_model_len: int) -> int:
    """Slots that an engine without paging sets aside: the longest possible sequence, for each request, at once."""
    if num_requests < 0 or max_model_len < 1:
        raise ValueError(f"num_requests must be >= 0 and max_model_len >= 1, got {num_requests} and {max_model_len}")
    return num_requests * max_model_len


def utilisation(num_tokens: float, num_slots: float) -> float | None:
    """Share of the slots held that hold a token; None when no slot is held. Above 1 when requests share blocks."""
    return num_tokens / num_slots if num_slots else None


def human_bytes(num_bytes: float) -> str:
    """``36864`` -> ``"36 KiB"``: powers of 1024, three significant digits."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    digits = 0 if value == int(value) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {unit}"
