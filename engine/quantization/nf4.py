"""NF4: the sixteen levels are quantiles of a normal distribution, scaled by each block's largest magnitude (QLoRA, arXiv 2305.14314).

Each level is meant for an equal share of normally distributed weights, so they lie dense about 0 and far apart at the ends. The largest
weight of a block is +-1 times its scale and comes back as that scale.

Double quantisation (section 3): a float32 scale for 64 weights costs half a bit each. The scales themselves are rounded to 8-bit floats
in blocks of 256, after their mean is taken off, which leaves 0.127 bits.
"""

import math
from dataclasses import dataclass, replace

import torch

from engine.quantization import levels, packing, rounding
from engine.quantization.base import QuantizedWeight

SCALES_PER_BLOCK = 256
_AT_ONCE = 1 << 17  # weights whose intermediate results stay in a core's cache: rounded twice as fast

# Halfway between two levels: a weight exactly there takes the lower.
_MIDPOINTS = ((levels.NF4[1:].double() + levels.NF4[:-1].double()) / 2).float()

# The interval [-1, 1] in cells of 1/32, narrower than any two midpoints are apart: a cell has at most one of them. So the nearest level
# is how many midpoints lie below the cell, and one comparison.
_CELLS = 32
_cell_starts = torch.arange(-_CELLS, _CELLS + 1) / _CELLS
_BELOW_CELL = torch.searchsorted(_MIDPOINTS, _cell_starts).to(torch.uint8)
_IN_CELL = torch.cat((_MIDPOINTS, torch.tensor([math.inf])))[_BELOW_CELL.long()]


def nearest_level(x: torch.Tensor) -> torch.Tensor:
    """The NF4 code closest to each of ``x`` (float32 in [-1, 1], any shape; beyond, the outermost): uint8. Ties: the lower level."""
    flat = x.clamp(-1, 1).reshape(-1)
    cell = (flat * _CELLS).floor_().add_(_CELLS).to(torch.int32)  # exact: the factor is a power of two
    below = _BELOW_CELL.to(x.device).index_select(0, cell)
    return below.add_(flat > _IN_CELL.to(x.device).index_select(0, cell)).view(x.shape)


@dataclass(frozen=True, slots=True)
class NestedScales:
    """The scales of blocks in 8 bits: scale = max(0, FP8(code) * block scale + mean), for 256 scales in a row of the row-major [N, G].

    A scale is a magnitude: where rounding takes one below 0 it is 0.
    """

    codes: torch.Tensor  # uint8 [N, G], the bits of float8_e4m3fn
    block_scales: torch.Tensor  # float32 [ceil((first + N * G) / 256)]
    mean: torch.Tensor  # float32 [1]
    first: int = 0  # where in its block of 256 the first code lies: not 0 for rows cut out of the middle

    def scales(self) -> torch.Tensor:
        """The scales again: float32 [N, G]."""
        level = self.codes.view(torch.float8_e4m3fn).float().view(-1)
        place = torch.arange(self.first, self.first + level.numel(), device=level.device)
        scales = level.mul_(self.block_scales[place // SCALES_PER_BLOCK]).add_(self.mean).clamp_(min=0)
        return scales.view(self.codes.shape)

    def tensors(self) -> list[torch.Tensor]:
        """What is held, for counting its bytes."""
        return [self.codes, self.block_scales, self.mean]

    def rows(self, start: int, stop: int, shape: tuple[int, int]) -> "NestedScales":
        """The scales of the rows ``start .. stop - 1`` of a weight of ``shape``: the same numbers."""
        groups = self.codes.shape[1]
        begin, end = self.first + start * groups, self.first + stop * groups
        blocks = self.block_scales[begin // SCALES_PER_BLOCK : -(-end // SCALES_PER_BLOCK)]
        return replace(self, codes=self.codes[start:stop], block_scales=blocks, first=begin % SCALES_PER_BLOCK)


def nest(scales: torch.Tensor) -> NestedScales:
    """``scales`` float32 [N, G], not negative, in 8 bits: their mean taken off, the rest in FP8 e4m3 in blocks of 256 (QLoRA, section 3)."""
    mean = scales.double().mean().float().view(1)
    flat = (scales - mean).view(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % SCALES_PER_BLOCK)).view(-1, SCALES_PER_BLOCK)
    block_scales = rounding.absolute_maximum(blocks) / levels.FP8_E4M3_MAX
    # Rounding the quotient may step over the largest value, and what FP8 cannot hold torch turns into NaN.
    within = (blocks / rounding.divisor(block_scales)[:, None]).clamp_(-levels.FP8_E4M3_MAX, levels.FP8_E4M3_MAX)
    codes = within.to(torch.float8_e4m3fn).view(torch.uint8).view(-1)[: flat.numel()]
    return NestedScales(codes.reshape(scales.shape), block_scales, mean)


def quantize_nf4(weight: torch.Tensor, block_size: int = 64, double: bool = True) -> QuantizedWeight:
    """``weight`` [N, K] (any float dtype) in NF4, blocks of ``block_size`` columns of a row; the scales in 8 bits where ``double``.

    The codes are those nearest to weight / largest magnitude in float32, as published: rounding the scales comes after. Without
    ``double`` the scales stay float32, as in the paper. The original lays blocks over the matrix read as one line: the same blocks where
    the size divides K; else here the last of each row is shorter. ValueError: a block below 1, inf, NaN, not a matrix.
    """
    weight = rounding.checked(weight)
    rows, columns = weight.shape
    size = rounding.checked_group_size(block_size, columns)
    groups = rounding.grouped(weight, size)
    scales = rounding.absolute_maximum(groups)
    codes, by = torch.empty(groups.shape, dtype=torch.uint8, device=weight.device), rounding.divisor(scales)[:, :, None]
    some = max(1, _AT_ONCE // columns)
    for part, divisor, out in zip(groups.split(some), by.split(some), codes.split(some), strict=True):
        out.copy_(nearest_level(part / divisor))
    nested = nest(scales) if double else None
    return QuantizedWeight(
        method="nf4",
        shape=(rows, columns),
        bits=4,
        levels="nf4",
        group_size=size,
        codes=packing.pack(rounding.ungrouped(codes, columns), 4),
        scales=scales if nested is None else nested.scales(),
        nested=nested,
    )
