"""What rounding did to a weight: signal to noise, largest and mean error, where the error sits, and what it does to the layer's output.

The error is E = Wq - W, in the units of the weight. Sums are of float64 squares: weights may be as small or as large as float32 has them.
"""

import math
from dataclasses import dataclass

import torch

from engine.quantization.base import QuantizedWeight

# A weight further from the matrix's mean than this many standard deviations is an outlier. Of normal weights 0.27% are.
OUTLIER_DEVIATIONS = 3.0

# Values looked at together: what is made of them on the way stays in the processor's cache: twice as fast as whole matrices.
_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many values lie in each of ``len(counts)`` bins of equal width from ``low`` to ``high``, the last bin with its upper edge."""

    low: float
    high: float
    counts: torch.Tensor  # int64 [bins]

    @property
    def edges(self) -> torch.Tensor:
        """float64 [bins + 1], ascending."""
        return torch.linspace(self.low, self.high, len(self.counts) + 1, dtype=torch.float64)

    def bin_of(self, values: torch.Tensor) -> torch.Tensor:
        """The bin that each of ``values`` (float32, any shape) was counted in: int32. Beyond an edge: the outermost bin."""
        return _bins(values, self.low, self.high, len(self.counts))


@dataclass(frozen=True, slots=True)
class WeightError:
    """What rounding did to one weight [N, K]. Numbers are in the units of the weight but for the decibels and the share."""

    sqnr_db: float  # 10 log10(sum W^2 / sum E^2); +inf without any error, also for an all-zero weight; -inf for an error on zeros
    max_error: float  # largest |E|
    mean_error: float  # mean |E|
    outlier_share: float  # of the weights more than OUTLIER_DEVIATIONS standard deviations from their mean, in [0, 1]
    bits_per_weight: float | None  # truly used, scales and all counted; None where only the rounded numbers were given
    weights: Histogram  # of W, from the least to the largest
    errors: Histogram  # of E, from -max_error to max_error
    error_by_output: torch.Tensor  # float32 [N]: root mean square of each row of E
    error_by_input: torch.Tensor  # float32 [K]: of each column


def weight_error(
    weight: torch.Tensor, rounded: QuantizedWeight | torch.Tensor, bins: int = 64, bits_per_weight: float | None = None
) -> WeightError:
    """What became of ``weight`` [N, K] (any float dtype, finite) as ``rounded``: a quantised weight, or its numbers [N, K].

    ``bins``: of both histograms. ``bits_per_weight``: carried along where numbers are given (``what_if`` has it). ValueError: another
    shape, inf or NaN, fewer than 1 bin.
    """
    if isinstance(rounded, QuantizedWeight):
        bits_per_weight, rounded = rounded.bits_per_weight, rounded.dequantize()
    if weight.dim() != 2 or rounded.shape != weight.shape:
        raise ValueError(f"the rounded weight must be a matrix as the weight is, {list(weight.shape)}, got {list(rounded.shape)}")
    if bins < 1:
        raise ValueError(f"a histogram has 1 bin or more, got {bins}")
    weight = weight.float()
    error = rounded.float() - weight
    by_output, by_input, absolute, largest = [], torch.zeros(weight.shape[1], dtype=torch.float64), 0.0, 0.0
    for part in error.split(max(1, _AT_ONCE // weight.shape[1])):
        magnitude = part.abs()
        largest = max(largest, float(magnitude.max()))
        absolute += float(magnitude.sum(dtype=torch.float64))
        squares = part.double().square_()
        by_output.append(squares.sum(1))
        by_input += squares.sum(0)
    if not math.isfinite(absolute):
        raise ValueError("the weight and what it was rounded to must be finite, got inf or NaN")
    rows, columns = weight.shape
    return WeightError(
        sqnr_db=decibels(_sum_of_squares(weight), float(by_input.sum())),
        max_error=largest,
        mean_error=absolute / weight.numel(),
        outlier_share=outlier_share(weight),
        bits_per_weight=bits_per_weight,
        weights=histogram(weight, bins),
        errors=histogram(error, bins, -largest, largest),
        error_by_output=(torch.cat(by_output) / columns).sqrt_().float(),
        error_by_input=(by_input / rows).sqrt_().float(),
    )


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise) of two sums of squares: +inf without noise, -inf with noise and no signal."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def histogram(values: torch.Tensor, bins: int, low: float | None = None, high: float | None = None) -> Histogram:
    """``values`` (float32, any shape, finite) counted in ``bins`` bins from ``low`` to ``high``, their least and largest unless given.

    Where these are equal the range takes in as much again on either side (1 where they are 0), so that the bins have a width.
    """
    low = float(values.min()) if low is None else low
    high = float(values.max()) if high is None else high
    if low == high:
        low, high = low - (abs(low) or 1.0), high + (abs(high) or 1.0)
    counts = torch.zeros(bins, dtype=torch.int64)
    for part in values.reshape(-1).split(_AT_ONCE):
        counts += torch.bincount(_bins(part, low, high, bins), minlength=bins)
    return Histogram(low, high, counts)


def _bins(values: torch.Tensor, low: float, high: float, bins: int) -> torch.Tensor:
    place = (values.float() - low).div_(high - low).mul_(bins)  # divided first: bins / (high - low) could overflow
    return place.clamp_(0, bins - 1).to(torch.int32)


def outlier_share(weight: torch.Tensor, deviations: float = OUTLIER_DEVIATIONS) -> float:
    """The share of ``weight`` (float32) that lies more than ``deviations`` standard deviations from its mean, in [0, 1]."""
    mean = float(weight.mean(dtype=torch.float64))
    variance = max(0.0, _sum_of_squares(weight) / weight.numel() - mean**2)
    reach = deviations * variance**0.5
    parts = weight.reshape(-1).split(_AT_ONCE)
    return sum(int(torch.count_nonzero((part - mean).abs_() > reach)) for part in parts) / weight.numel()


def _sum_of_squares(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def output_error(x: torch.Tensor, weight: torch.Tensor, rounded: QuantizedWeight | torch.Tensor) -> float:
    """||X (W - Wq)^T|| / ||X W^T||, Frobenius norms, for inputs ``x`` [R, K] and weights [N, K]: the relative error of the layer's output.

    0 where there is none; inf where the layer's output is 0 and the rounded one's is not. Only the weights are rounded here, not ``x``.
    ValueError for shapes that do not fit.
    """
    if isinstance(rounded, QuantizedWeight):
        rounded = rounded.dequantize()
    if rounded.shape != weight.shape or x.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"shapes must be [R, K], [N, K] and [N, K], got {list(x.shape)}, {list(weight.shape)} and {list(rounded.shape)}"
        )
    x, weight = x.float(), weight.float()
    lost = float(torch.linalg.vector_norm(x @ (weight - rounded.float()).T, dtype=torch.float64))
    if lost == 0:
        return 0.0
    whole = float(torch.linalg.vector_norm(x @ weight.T, dtype=torch.float64))
    return lost / whole if whole else math.inf
