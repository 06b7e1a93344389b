"""Split-K decode: how many parts fill a chip, and what merging them gives. Pure."""

from dataclasses import dataclass

import numpy as np

from engine.kernels.paged_decode.splits import MAX_SPLITS, choose_splits, split_ranges

SEED = 11


@dataclass(frozen=True)
class Plan:
    """A decode of ``lengths`` keys a request over ``slots`` places that work side by side. ``splits``: those that were chosen."""

    lengths: tuple[int, ...]
    kv_heads: int
    block_n: int
    num_sms: int
    programs_per_sm: int
    splits: int

    @property
    def slots(self) -> int:
        return self.num_sms * self.programs_per_sm

    @property
    def tiles(self) -> int:
        """Of the longest request."""
        return max(-(-max(self.lengths) // self.block_n), 1)

    def programs(self, splits: int) -> int:
        return len(self.lengths) * self.kv_heads * splits

    def waves(self, splits: int) -> int:
        return -(-self.programs(splits) // self.slots)

    def time(self, splits: int) -> int:
        """In units of a tile's time, as ``choose_splits`` counts it."""
        merge = 0 if splits == 1 else 1 + -(-splits // 16)
        return self.waves(splits) * (-(-self.tiles // splits) + 1) + merge

    def busy(self, splits: int) -> float:
        """Places that have a program, over all places of all waves."""
        return self.programs(splits) / (self.waves(splits) * self.slots)

    def curve(self) -> list[tuple[int, int, int, float]]:
        """(parts, time, waves, busy share), for each number of parts that is looked at."""
        return [(s, self.time(s), self.waves(s), self.busy(s)) for s in range(1, min(self.tiles, MAX_SPLITS) + 1)]

    def ranges(self, request: int) -> list[tuple[int, int]]:
        """[first key, end) of the parts of a request."""
        return split_ranges(self.lengths[request], 1, self.splits, self.block_n)


def plan(lengths: list[int], kv_heads: int, block_n: int, num_sms: int, programs_per_sm: int, splits: int = 0) -> Plan:
    """``splits`` 0: as the kernel's launch chooses. ValueError without a request."""
    if not lengths:
        raise ValueError("a decode needs at least one request, got none")
    chosen = splits or choose_splits(len(lengths), kv_heads, max(lengths), num_sms, block_n, programs_per_sm)
    return Plan(tuple(lengths), kv_heads, block_n, num_sms, programs_per_sm, chosen)


@dataclass(frozen=True)
class Merge:
    """One head's parts and what they become. ``weights``: exp(lse_i - lse), 0 for an empty part."""

    ranges: list[tuple[int, int]]
    lse: np.ndarray  # [S]
    weights: np.ndarray  # [S]
    whole: float  # log-sum-exp of all
    merged: np.ndarray  # float32 [D]
    right: np.ndarray  # float64 [D], unsplit
    difference: float  # largest


def merge(ranges: list[tuple[int, int]], head_dim: int = 64) -> Merge:
    """Attention of one query over made-up keys, in parts, in float32, against the whole in float64."""
    rng = np.random.default_rng(SEED)
    n = max(end for _start, end in ranges)
    q, k, v = rng.standard_normal(head_dim), rng.standard_normal((n, head_dim)), rng.standard_normal((n, head_dim))
    scores = k @ q / np.sqrt(head_dim)
    lse = np.full(len(ranges), -np.inf, np.float32)
    parts = np.zeros((len(ranges), head_dim), np.float32)
    for i, (start, end) in enumerate(ranges):
        if end > start:
            s = scores[start:end].astype(np.float32)
            p = np.exp(s - s.max())
            lse[i] = s.max() + np.log(p.sum())
            parts[i] = (p / p.sum()) @ v[start:end].astype(np.float32)
    whole = float(lse.max() + np.log(np.exp(lse - lse.max()).sum()))
    weights = np.exp(lse - whole)
    merged = (parts * weights[:, None]).sum(0)
    p = np.exp(scores - scores.max())
    right = p @ v / p.sum()
    return Merge(ranges, lse, weights, whole, merged, right, float(np.abs(merged - right).max()))
