"""FP8 e4m3: a weight is a floating-point number of 1 sign, 4 exponent and 3 mantissa bits, times a scale.

Its step grows with the magnitude (arXiv 2209.05433, section 3): a small weight keeps its three digits, a large one moves further than
with int8. The scale takes the largest magnitude to 448, the largest value of the format, which has no infinity.
"""

import torch

from engine.quantization import levels, rounding
from engine.quantization.base import QuantizedWeight


def quantize_fp8(weight: torch.Tensor, per: str = "channel") -> QuantizedWeight:
    """``weight`` [N, K] (any float dtype) in float8_e4m3fn, one scale (largest magnitude / 448) for each output channel or the matrix.

    Codes are the bits of the nearest value, ties to the even mantissa; beyond 448 scales a weight saturates (the stored scale may be a
    little smaller than the exact one), and no code is NaN. ``per``: "channel" or "tensor". ValueError: another ``per``, inf, NaN, not
    a matrix.
    """
    if per not in ("channel", "tensor"):
        raise ValueError(f'fp8 has a scale per "channel" or per "tensor", got {per!r}')
    weight = rounding.checked(weight)
    rows, columns = weight.shape
    largest = rounding.absolute_maximum(weight)[:, None]
    if per == "tensor":
        largest = largest.amax().view(1, 1)
    scales = rounding.stored_scales(largest.double() / levels.FP8_E4M3_MAX)
    # The clamp comes first: torch's conversion turns what is too large into NaN.
    within = (weight / rounding.divisor(scales)).clamp_(-levels.FP8_E4M3_MAX, levels.FP8_E4M3_MAX)
    return QuantizedWeight(
        method="fp8",
        shape=(rows, columns),
        bits=8,
        levels="fp8_e4m3",
        group_size=columns if per == "channel" else 0,
        codes=within.to(torch.float8_e4m3fn).view(torch.uint8),
        scales=scales,
    )
