"""Integer weights of 2 to 8 bits, round to nearest: one even grid for each group of columns of a row.

Asymmetric: w = code * scale + minimum, the grid from the group's least to its largest value, as GGUF's Q4_1 and torch's int4 kernel.
Symmetric: w = (code - 2**(bits - 1)) * scale. There are as many codes as values, an even number, so one side reaches a step further:
the scale takes the sign that gives this side to the group's largest magnitude (as GGUF's Q4_0 does). Keeping to the shorter range on
both sides would leave a code unused, one of four at 2 bits: 3.6 dB of signal to noise instead of 8.8 on normal weights in groups of 32.

A group that is constant has scale 0 and comes back exactly; so does an all-zero one.
"""

from dataclasses import dataclass

import torch

from engine.quantization import packing, rounding
from engine.quantization.base import QuantizedWeight


@dataclass(frozen=True, slots=True)
class Grid:
    """The even grid of each group: scales and minima [N, G], as stored (float16, or float32 where that cannot hold them)."""

    bits: int
    scales: torch.Tensor
    minima: torch.Tensor | None  # None: symmetric

    def codes(self, groups: torch.Tensor) -> torch.Tensor:
        """The nearest codes of ``groups`` [N, G, g]: float32 integers in [0, 2**bits), for symmetric grids the middle not yet added."""
        middle = 0 if self.minima is not None else 1 << (self.bits - 1)
        return rounding.nearest(groups, self.scales, self.minima, -middle, (1 << self.bits) - 1 - middle)


def grid(groups: torch.Tensor, bits: int, symmetric: bool = False) -> Grid:
    """The grid for ``groups`` float32 [N, G, g]: from least to largest, or about 0 where ``symmetric``."""
    low, high = groups.amin(-1).double(), groups.amax(-1).double()
    if symmetric:
        # The largest magnitude takes the outermost code, -2**(bits - 1): a positive one by a negative scale.
        scales = torch.where(-low >= high, low, high) / -(1 << (bits - 1))
        return Grid(bits, rounding.stored_scales(scales), None)
    scales = (high - low) / ((1 << bits) - 1)
    return Grid(bits, rounding.stored_scales(scales), rounding.stored_minima(low, scales))


def quantize_int(
    weight: torch.Tensor, bits: int, group_size: int, symmetric: bool = False, method: str | None = None
) -> QuantizedWeight:
    """``weight`` [N, K] (any float dtype) rounded to ``bits`` bits, each group of ``group_size`` columns on a grid of its own.

    Where the group does not divide K the last group of a row is shorter; one of K or more columns is the whole row. ``method``: the
    name that the result carries, "int<bits>" unless given. ValueError: bits not 2 to 8, a group below 1, inf, NaN, not a matrix.
    """
    rounding.checked_bits(bits)
    weight = rounding.checked(weight)
    rows, columns = weight.shape
    size = rounding.checked_group_size(group_size, columns)
    groups = rounding.grouped(weight, size)
    of_groups = grid(groups, bits, symmetric)
    codes = of_groups.codes(groups)
    if symmetric:
        codes += 1 << (bits - 1)
    return QuantizedWeight(
        method=method or f"int{bits}",
        shape=(rows, columns),
        bits=bits,
        levels="affine",
        group_size=size,
        codes=packing.pack(rounding.ungrouped(codes.to(torch.uint8), columns), bits),
        scales=of_groups.scales,
        minima=of_groups.minima,
    )


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a weight would become on another even grid: not packed, so quick enough to follow a slider."""

    bits: int
    group_size: int
    symmetric: bool
    dequantized: torch.Tensor  # float32 [N, K]: exactly what quantize_int's would be
    scales: torch.Tensor  # as QuantizedWeight has them
    minima: torch.Tensor | None
    bits_per_weight: float  # as if it were packed, scales and minima counted


def what_if(weight: torch.Tensor, bits: int, group_size: int, symmetric: bool = False) -> WhatIf:
    """What ``quantize_int`` would make of ``weight``, without packing it. Takes and raises the same."""
    rounding.checked_bits(bits)
    weight = rounding.checked(weight)
    rows, columns = weight.shape
    size = rounding.checked_group_size(group_size, columns)
    groups = rounding.grouped(weight, size)
    of_groups = grid(groups, bits, symmetric)
    values = of_groups.codes(groups).mul_(of_groups.scales.float()[:, :, None])
    if of_groups.minima is not None:
        values.add_(of_groups.minima.float()[:, :, None])
    held = [of_groups.scales] if of_groups.minima is None else [of_groups.scales, of_groups.minima]
    nbytes = rows * packing.packed_width(columns, bits) + sum(t.numel() * t.element_size() for t in held)
    return WhatIf(
        bits=bits,
        group_size=size,
        symmetric=symmetric,
        dequantized=rounding.ungrouped(values, columns).contiguous(),
        scales=of_groups.scales,
        minima=of_groups.minima,
        bits_per_weight=8 * nbytes / (rows * columns),
    )
