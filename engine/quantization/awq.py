"""AWQ: scales up the input channels that matter before rounding, guided by the activations (arXiv 2306.00978, section 3.2).

W x = (W diag(s)) (x / s). A channel with s > 1 is rounded more finely, as long as it does not widen its group's range; the channels with
large activations gain most. s = (mean |x|)^alpha (equation 5), with alpha in [0, 1] searched on a grid for the least output error on the
calibration inputs (equation 4). Here s is not folded into the layer before: the running layer divides its input by ``input_scales``.
"""

from dataclasses import dataclass, replace
from math import isfinite

import torch

from engine.quantization.base import Calibration, QuantizedWeight, check_weight
from engine.quantization.calibration import check_calibration, output_error
from engine.quantization.intn import quantize_int, what_if

# A channel's mean magnitude counts as at least this share of the mean over channels, so that a channel that was always zero has a
# finite, positive scale (a small one: its weights do not matter and give way to the rest of their group).
FLOOR = 1e-4
# What of a group's range may be cut off: the outermost weights saturate, all the others are rounded more finely.
CLIP_RATIOS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)


@dataclass(frozen=True, slots=True)
class AwqCurve:
    """The search: for each exponent tried (float64 [grid + 1], 0 to 1) the mean over calibration rows of ||(W - Q) x||^2 (float64)."""

    alpha: torch.Tensor
    error: torch.Tensor

    @property
    def best(self) -> int:
        """The index of the least error, the smallest exponent where several have it."""
        return int((self.error == self.error.min()).nonzero()[0])


def awq_scales(calibration: Calibration, alpha: float) -> torch.Tensor:
    """s = (mean |x|)^alpha divided by its geometric mean: float32 [K], positive; all ones at ``alpha`` 0. ValueError for alpha outside [0, 1].

    A common factor of s changes nothing but the scales' size (they are proportional to it), so s is normalised to keep them where float16
    has its full precision.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha!r}")
    mean = calibration.abs_mean.double()
    if not float(mean.max()):
        return torch.ones_like(calibration.abs_mean, dtype=torch.float32)
    log = mean.clamp_min(FLOOR * float(mean.mean())).log()
    return (alpha * (log - log.mean())).exp().float()


def awq_curve(
    weight: torch.Tensor, calibration: Calibration, bits: int = 4, group_size: int = 64, symmetric: bool = False, grid: int = 20
) -> AwqCurve:
    """The output error at the exponents 0, 1/grid, ... 1: exact over all calibration rows, through the Hessian. ValueError as ``quantize_awq``."""
    weight = _checked(weight, calibration, grid)
    alphas = [i / grid for i in range(grid + 1)]
    errors = []
    for alpha in alphas:
        scales = _scales(calibration, alpha)
        errors.append(output_error(_error(weight, _scaled(weight, scales), scales, bits, group_size, symmetric), calibration))
    if not all(map(isfinite, errors)):
        raise ValueError("the output error overflows float32: the weight or the calibration inputs are too large")
    return AwqCurve(torch.tensor(alphas, dtype=torch.float64), torch.tensor(errors, dtype=torch.float64))


def quantize_awq(
    weight: torch.Tensor,
    calibration: Calibration,
    bits: int = 4,
    group_size: int = 64,
    symmetric: bool = False,
    grid: int = 20,
    clip: bool = False,
) -> QuantizedWeight:
    """``weight`` [N, K] rounded to nearest after scaling its columns by the best of ``grid`` + 1 exponents.

    Where exponent 0 is best that is plain rounding, and no ``input_scales`` are held. ``clip``: then each row and group searches how much
    of its range to give up (``CLIP_RATIOS``); what is found is kept only if the layer's output error falls. So that error is never larger than
    plain rounding's. ValueError for a weight with inf or NaN, a calibration of another width, a grid below 1, and as ``quantize_int``.
    """
    weight = _checked(weight, calibration, grid)
    curve = awq_curve(weight, calibration, bits, group_size, symmetric, grid)
    scales = _scales(calibration, float(curve.alpha[curve.best]))
    best = _rounded(_scaled(weight, scales), scales, bits, group_size, symmetric)
    if not clip:
        return best
    clipped = _clipped(weight, scales, calibration, bits, group_size, symmetric)
    return clipped if output_error(weight - clipped.dequantize(), calibration) < float(curve.error[curve.best]) else best


def _checked(weight: torch.Tensor, calibration: Calibration, grid: int) -> torch.Tensor:
    weight = check_weight(weight)
    check_calibration(calibration, weight.shape[1])
    if grid < 1:
        raise ValueError(f"the grid of exponents has at least 1 step, got {grid!r}")
    return weight


def _scales(calibration: Calibration, alpha: float) -> torch.Tensor | None:
    return awq_scales(calibration, alpha) if alpha else None


def _scaled(weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return weight if scales is None else weight * scales


def _rounded(scaled: torch.Tensor, scales: torch.Tensor | None, bits: int, group_size: int, symmetric: bool) -> QuantizedWeight:
    return replace(quantize_int(scaled, bits, group_size, symmetric, method="awq"), input_scales=scales)


def _error(
    weight: torch.Tensor, scaled: torch.Tensor, scales: torch.Tensor | None, bits: int, group_size: int, symmetric: bool
) -> torch.Tensor:
    """``weight`` minus what ``_rounded`` would dequantise to, float32 [N, K]; nothing is packed."""
    rounded = what_if(scaled, bits, group_size, symmetric).dequantized
    return weight - (rounded if scales is None else rounded / scales)


def _clipped(
    weight: torch.Tensor, scales: torch.Tensor | None, calibration: Calibration, bits: int, group_size: int, symmetric: bool
) -> QuantizedWeight:
    """The rounding with, in each row and group, the range whose own output error (the group's block of the Hessian) is least."""
    scaled = _scaled(weight, scales)
    best = scaled.clone()
    least: list[torch.Tensor] = []
    for ratio in (1.0, *CLIP_RATIOS):
        narrow = torch.cat([_narrowed(group, ratio) for group in scaled.split(group_size, 1)], 1)
        error = _error(weight, narrow, scales, bits, group_size, symmetric)
        for i, (e, candidate, kept) in enumerate(zip(*(t.split(group_size, 1) for t in (error, narrow, best)), strict=True)):
            columns = slice(i * group_size, i * group_size + e.shape[1])
            own = ((e @ calibration.hessian[columns, columns].to(e.dtype)) * e).sum(1)
            if ratio == 1:
                least.append(own)
                continue
            better = own < least[i]
            least[i] = torch.where(better, own, least[i])
            kept[better] = candidate[better]  # a view of ``best``
    return _rounded(best, scales, bits, group_size, symmetric)


def _narrowed(block: torch.Tensor, ratio: float) -> torch.Tensor:
    low, high = block.amin(1, keepdim=True), block.amax(1, keepdim=True)
    return block.clamp(low * ratio, high * ratio) if ratio < 1 else block
