"""Bytes to and from device memory, of flash attention and of attention that writes the score matrix. Pure.

Q, K, V, output and log-sum-exp are counted as programs ask for them; what a cache saves is not, as in the kernel's own trace.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from engine.kernels.flash_attention.schedule import FlashConfig, tile_schedule
from explorer.attention.shape import DTYPE_BYTES, Shape

LENGTHS = tuple(128 << i for i in range(9))  # 128 .. 32768 tokens
SRAM = tuple(16 * 1024 * 2 ** (i / 8) for i in range(49))  # 16 KiB .. 1 MiB
LONG = 8192  # tokens, at the least, of the picture by SRAM: a short text fits whole


@lru_cache(4096)
def flash_bytes(n: int, shape: Shape) -> int:
    """Loaded and stored for ``n`` tokens with the shape's tiles: the kernel's own ranges (``tile_schedule``)."""
    ranges = tile_schedule(n, n, FlashConfig(shape.block_m, shape.block_n), shape.causal, shape.window or None)
    row = shape.head_dim * DTYPE_BYTES
    one = sum(found.q_rows * (2 * row + 4) + 2 * max(0, found.stop - found.start) * row for found in ranges)
    return shape.group * one


def standard_bytes(n: int, shape: Shape) -> int:
    """Three kernels: S = Q K^T is written, read for the softmax, P written, read for P V. Nothing is skipped: 4 N^2 + 4 N D numbers a
    head (FlashAttention, arXiv 2205.14135, algorithm 0)."""
    return shape.group * DTYPE_BYTES * (4 * n * n + 4 * n * shape.head_dim)


def extra_bytes(n: int, shape: Shape) -> tuple[int, int]:
    """What is kept in device memory besides inputs and output: of flash attention (log-sum-exps, float32), of standard (S and P)."""
    return shape.group * 4 * n, shape.group * 2 * n * n * DTYPE_BYTES


def rows_in(sram: float, shape: Shape) -> float:
    """Query rows that fit beside the stages of K and V tiles: M = (B_r + 2 stages B_n) D bytes-per-number; 0 where these do not fit."""
    return max(0.0, sram / (shape.padded * DTYPE_BYTES) - 2 * shape.num_stages * shape.block_n)


def sram_bytes(sram: float, shape: Shape) -> float:
    """Traffic for as many query rows a tile as ``sram`` bytes hold: each tile goes once over the K and V that it sees. Modelled. NaN
    where no row fits."""
    n, row = max(LONG, shape.seq_len), shape.head_dim * DTYPE_BYTES
    rows = min(float(n), rows_in(sram, shape))
    if rows < 1:
        return float("nan")
    seen = float(n)
    if shape.window:
        seen = min(n, shape.window + rows)
    elif shape.causal:
        seen = (n + rows) / 2
    return shape.group * (n * (2 * row + 4) + (n / rows) * 2 * seen * row)


@dataclass(frozen=True)
class Counted:
    """Bytes that a kernel's own records add up to."""

    tokens: int
    nbytes: int


def counted(known: Iterable[tuple[Shape, Mapping[str, Any]]], shape: Shape, total: Any) -> list[Counted]:
    """The runs with the shape's tiles among ``known``; ``total``: an answer -> its bytes."""
    here = replace(shape.run, seq_len=512)
    found = {
        s.seq_len: Counted(s.seq_len, total(a)) for s, a in known if "error" not in a and replace(s.run, seq_len=512) == here
    }
    return [found[n] for n in sorted(found)]
