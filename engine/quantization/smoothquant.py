"""SmoothQuant: moves the outliers of the activations into the weights, where int8 has room for them (arXiv 2211.10438).

W x = (W diag(s)) (x / s) for any positive s. Rounded to int8 per token, an input with one channel a hundred times the others leaves
those others a few levels; divided by s it leaves them more, and the weight's rows, whose range grows, lose less than is won.
"""

import torch

from engine.quantization.base import Calibration, QuantizedWeight, check_weight
from engine.quantization.calibration import check_calibration
from engine.quantization.int8 import quantize_int8_w8a8

# A column's largest input or weight counts as at least this share of the largest of all, so that a channel that was always zero (or a
# column of zero weights) has a finite, positive scale. A dead channel gets a small one: its weights do not widen their rows' range.
FLOOR = 1e-5


def smooth_scales(weight: torch.Tensor, calibration: Calibration, alpha: float = 0.5) -> torch.Tensor:
    """s_j = max|X_j|^alpha / max|W_j|^(1 - alpha), float32 [K], for the ``weight`` [N, K] (arXiv 2211.10438, equation 4).

    ``alpha``: how much of the difficulty moves from the activations to the weights, 0 to 1. ValueError for an alpha outside, a weight with
    inf or NaN, or a calibration of another width.
    """
    weight = check_weight(weight)
    check_calibration(calibration, weight.shape[1])
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha!r}")
    return _floored(calibration.abs_max).pow(alpha).div(_floored(weight.abs().amax(0)).pow(1 - alpha)).float()


def quantize_smooth(weight: torch.Tensor, calibration: Calibration, alpha: float = 0.5, static: bool = False) -> QuantizedWeight:
    """W8A8 with the inputs divided by ``smooth_scales`` ([K], held as ``input_scales``); the codes stand for W * s.

    ``static``: the smoothed input is rounded at one scale from calibration, its largest value / 127, instead of one for each token.
    ValueError as ``smooth_scales``.
    """
    scales = smooth_scales(weight, calibration, alpha)
    activation_scale = float((calibration.abs_max / scales).max()) / 127 if static else None
    if activation_scale == 0:
        raise ValueError("every calibration input is zero: there is no static scale for the activations")
    return quantize_int8_w8a8(weight, activation_scale=activation_scale, smooth=scales)


def _floored(maxima: torch.Tensor) -> torch.Tensor:
    """Positive float64: nothing below ``FLOOR`` times the largest; ones where all are zero."""
    maxima = maxima.double()
    largest = float(maxima.max())
    return maxima.clamp_min(FLOOR * largest) if largest else torch.ones_like(maxima)
