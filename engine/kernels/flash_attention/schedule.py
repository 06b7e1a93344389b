"""Tile sizes, and which K and V tiles a program goes over: the same arithmetic as the kernel's, for those who draw it or test it."""

from dataclasses import dataclass

import torch

from engine.kernels.checks import check_power_of_two

HEAD_DIMS = (64, 80, 96, 128)


@dataclass(frozen=True, slots=True)
class FlashConfig:
    """``block_m`` query rows and ``block_n`` keys a tile, warps of a program, stages of the software pipeline over K and V tiles."""

    block_m: int = 128
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 2

    def check(self) -> "FlashConfig":
        """Itself. ValueError for tile sizes that are not powers of two in [16, 256], warps or stages out of range."""
        check_power_of_two("block_m", self.block_m, 16, 256)
        check_power_of_two("block_n", self.block_n, 16, 256)
        check_power_of_two("num_warps", self.num_warps, 1, 16)
        if not isinstance(self.num_stages, int) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be an integer in [1, 8], got {self.num_stages!r}")
        return self


def default_config(head_dim: int, dtype: torch.dtype, max_seqlen_q: int | None = None) -> FlashConfig:
    """Tile sizes that fit the shared memory of sm_80 and later. ValueError for a head size that is not supported."""
    check_head_dim(head_dim)
    if dtype in (torch.float32, torch.float64):  # twice the bytes, and no tensor cores in full precision
        config = FlashConfig(64, 32, 4, 1)
    elif head_dim <= 64:
        config = FlashConfig(128, 64, 4, 3)
    else:
        config = FlashConfig(128, 64, 8, 2)
    if max_seqlen_q is not None and max_seqlen_q <= 16:
        return FlashConfig(16, config.block_n, 4, config.num_stages)
    return config


def check_head_dim(head_dim: int) -> int:
    """The power of two that a head is padded to. ValueError for a size that is not supported."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"the head size must be one of {HEAD_DIMS}, got {head_dim}")
    return 1 << (head_dim - 1).bit_length()


@dataclass(frozen=True, slots=True)
class TileRange:
    """What one program goes over. Query rows ``q_start .. q_start + q_rows - 1`` of a request, keys ``start .. stop - 1`` in tiles of
    block_n; those in ``full_start .. full_stop - 1`` are seen by all its rows and not masked (``left`` and ``right`` of them, they are).

    Tiles before ``start`` are skipped since they lie before the window, those from ``stop`` on since they lie after the last row.
    """

    q_start: int
    q_rows: int
    start: int
    full_start: int
    full_stop: int
    stop: int
    skipped_window: int  # tiles
    skipped_causal: int

    def tiles(self, block_n: int) -> list[int]:
        """First keys of the tiles that are done, in order."""
        return list(range(self.start, self.stop, block_n))


def tile_schedule(
    q_len: int, kv_len: int, config: FlashConfig, causal: bool = True, window: int | None = None
) -> list[TileRange]:
    """The ranges of one request and head, query tile after query tile."""
    bm, bn = config.block_m, config.block_n
    out = []
    for q_start in range(0, q_len, bm):
        rows = min(bm, q_len - q_start)
        first = q_start + kv_len - q_len  # position of the first row; may be negative: it sees nothing
        last = first + rows - 1
        stop = max(min(kv_len, last + 1), 0) if causal else kv_len
        start = full_start = 0
        if window is not None:
            start = min(max(first_seen(first, window), 0) // bn * bn, stop)
            full_start = min(-(-max(first_seen(last, window), 0) // bn) * bn, stop)
        full_stop = max((min(first + 1, kv_len) if causal else kv_len), 0) // bn * bn
        full_stop = max(full_stop, full_start)
        out.append(
            TileRange(q_start, rows, start, full_start, full_stop, stop, start // bn, max(-(-kv_len // bn) - -(-stop // bn), 0))
        )
    return out


def first_seen(position: int, window: int) -> int:
    """The first key that ``position`` sees through the window."""
    return position - window + 1
