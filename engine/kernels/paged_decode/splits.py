"""How a decode is cut over its context, and how a tree of drafts is told to the kernel: pure functions."""

from dataclasses import dataclass

import torch

from engine.kernels.checks import check_power_of_two

MAX_SPLITS = 128
MAX_TREE = 64  # new tokens of a request whose ancestors fit a 64-bit word
MAX_ROWS = 128  # query rows of a KV head: tokens times heads of its group


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """``block_n`` keys a tile, warps of a program, stages of the software pipeline over tiles."""

    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3

    def check(self) -> "DecodeConfig":
        """Itself. ValueError for a tile that is not a power of two in [16, 256], warps or stages out of range."""
        check_power_of_two("block_n", self.block_n, 16, 256)
        check_power_of_two("num_warps", self.num_warps, 1, 16)
        if not isinstance(self.num_stages, int) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be an integer in [1, 8], got {self.num_stages!r}")
        return self


def choose_splits(
    requests: int, kv_heads: int, max_context: int, num_sms: int, block_n: int = 64, programs_per_sm: int = 2
) -> int:
    """The number of parts that fills the chip: the one of least modelled time, the smaller of equals.

    In units of one tile's time: ``waves * (tiles of a part + 1)``, the 1 for starting a program, where waves = ceil(requests * kv_heads *
    splits / (num_sms * programs_per_sm)); and merging costs 1 more, and another for every 16 parts. With the chip already full by
    requests and heads that is 1. ``num_sms``: multiprocessors of the GPU; ``programs_per_sm``: programs that one holds at a time.
    ValueError for numbers below 1 (max_context: below 0).
    """
    for name, value, least in (
        ("requests", requests, 1),
        ("kv_heads", kv_heads, 1),
        ("max_context", max_context, 0),
        ("num_sms", num_sms, 1),
        ("block_n", block_n, 1),
        ("programs_per_sm", programs_per_sm, 1),
    ):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    tiles = max(-(-max_context // block_n), 1)
    slots = num_sms * programs_per_sm

    def time(splits: int) -> int:
        waves = -(-requests * kv_heads * splits // slots)
        merge = 0 if splits == 1 else 1 + -(-splits // 16)
        return waves * (-(-tiles // splits) + 1) + merge

    return min(range(1, min(tiles, MAX_SPLITS) + 1), key=lambda splits: (time(splits), splits))


def split_ranges(
    seq_len: int, num_tokens: int, num_splits: int, block_n: int, window: int | None = None
) -> list[tuple[int, int]]:
    """[first key, end) of each part of a request, as the kernel cuts it: whole tiles, the last parts may be empty."""
    first = 0 if window is None else max(seq_len - num_tokens - window + 1, 0) // block_n
    tiles = max(-(-seq_len // block_n) - first, 0)
    each = -(-tiles // num_splits)
    ranges = []
    for split in range(num_splits):
        start = min((first + split * each) * block_n, seq_len)
        ranges.append((start, min((first + (split + 1) * each) * block_n, seq_len)))
    return ranges


def tree_bits(ancestors: torch.Tensor) -> torch.Tensor:
    """bool [n, n] (row i sees what row j stored) -> int64 [n], bit j of word i. ValueError beyond 64 rows."""
    if ancestors.dim() != 2 or ancestors.shape[0] != ancestors.shape[1] or ancestors.shape[0] > MAX_TREE:
        raise ValueError(f"ancestors must be [n, n] with n <= {MAX_TREE}, got {list(ancestors.shape)}")
    words = [sum(1 << j for j, seen in enumerate(row) if seen) for row in ancestors.tolist()]
    return torch.tensor([w - (1 << 64) if w >> 63 else w for w in words], dtype=torch.int64)
