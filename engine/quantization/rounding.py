"""What rounding methods share: groups of columns, scales as they are stored, and the nearest code of an even grid.

Codes are rounded against the scale as it is stored, in 16 bits: the error of storing it then costs a little range, not accuracy.
Ties go to the even code, as IEEE 754 and ``torch.round`` have it; the quotient is one float32 division, never a product with a
reciprocal, so that every implementation of a method finds the same codes.
"""

import torch

from engine.quantization.base import check_weight

# Beyond it sums and differences of two weights could overflow float32.
LARGEST_WEIGHT = 2.0**126


def checked(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` as float32 [N, K]. ValueError as ``base.check_weight``'s, and for a magnitude over 2**126."""
    weight = check_weight(weight)
    low, high = torch.aminmax(weight)
    largest = max(-float(low), float(high))
    if largest > LARGEST_WEIGHT:
        raise ValueError(f"weights may be as large as 2**126 = {LARGEST_WEIGHT:.3g}, got {largest:.3g}")
    return weight


def checked_group_size(group_size: int, columns: int) -> int:
    """``group_size``, at most ``columns``. ValueError where it is not an integer of 1 or more."""
    if not isinstance(group_size, int) or isinstance(group_size, bool) or group_size < 1:
        raise ValueError(f"a group has 1 column or more ({columns} here: one scale for each row), got group_size={group_size!r}")
    return min(group_size, columns)


def checked_bits(bits: int) -> int:
    """``bits``. ValueError where there is no such even grid."""
    if not isinstance(bits, int) or isinstance(bits, bool) or not 2 <= bits <= 8:
        raise ValueError(f"integer weights have 2, 3, 4, 5, 6, 7 or 8 bits, got {bits!r}")
    return bits


def grouped(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """``weight`` [N, K] as groups [N, ceil(K / group_size), group_size]: a view where the group divides K.

    Else the last group is filled up with the row's last value, which moves neither its least nor its largest: it belongs to the group.
    """
    rows, columns = weight.shape
    missing = -columns % group_size
    if missing:
        weight = torch.cat((weight, weight[:, -1:].expand(-1, missing)), 1)
    return weight.reshape(rows, -1, group_size)


def ungrouped(groups: torch.Tensor, columns: int) -> torch.Tensor:
    """Groups [N, G, g] as a matrix [N, columns] again: what filled up the last group is cut off."""
    return groups.reshape(groups.shape[0], -1)[:, :columns]


def absolute_maximum(groups: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each group: [..., g] -> [...]. Two reductions: faster than a copy of all magnitudes."""
    return torch.maximum(groups.amax(-1), groups.amin(-1).neg_())


def stored_scales(scales: torch.Tensor) -> torch.Tensor:
    """``scales`` (float64, any shape) in float16, or all in float32 where float16 cannot hold one of them.

    It cannot where one overflows, or is so small (float16's subnormals, below 6.1e-5) that it would move by more than a part in 512.
    """
    return _stored(scales, scales.abs() / 512)


def stored_minima(minima: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``minima`` (float64, shaped as ``scales``) in float16, or all in float32 where float16 would move one by more than 1/8 of its step."""
    return _stored(minima, scales.abs() / 8)


def _stored(exact: torch.Tensor, tolerance: torch.Tensor) -> torch.Tensor:
    half = exact.to(torch.float16)
    holds = torch.isfinite(half) & ((half.to(torch.float64) - exact).abs() <= tolerance)
    return half if bool(holds.all()) else exact.to(torch.float32)


def divisor(scales: torch.Tensor) -> torch.Tensor:
    """``scales`` in float32 to divide by: 1 instead of 0, which is the scale of a group that is constant."""
    scales = scales.to(torch.float32)
    return torch.where(scales == 0, 1.0, scales)


def nearest(groups: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, low: int, high: int) -> torch.Tensor:
    """The integers closest to (w - minimum) / scale, in [low, high]: new float32, shaped as ``groups`` [N, G, g].

    ``scales`` and ``minima``: as stored, [N, G] or [1, 1].
    """
    by = divisor(scales)[:, :, None]
    quotient = groups / by if minima is None else (groups - minima.to(torch.float32)[:, :, None]).div_(by)
    return quotient.round_().clamp_(low, high)
