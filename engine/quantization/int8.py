"""Eight bits, symmetric: a weight is a signed integer in [-127, 127] times a scale for its output channel, or for the matrix.

Codes are held as integer + 128 (uint8; 0 is never written), the middle code of an affine grid of 8 bits. For W8A8 the layer's input is
rounded too, each token with its own scale (dynamic) or all with one found beforehand (static), and the product is of integers: exact
until the one multiplication with both scales (Dettmers et al., LLM.int8(), arXiv 2208.07339, section 2, "vector-wise"; Xiao et al.,
SmoothQuant, arXiv 2211.10438, section 3).
"""

from dataclasses import replace

import torch

from engine.quantization import rounding
from engine.quantization.base import QuantizedWeight

LARGEST = 127  # the range is kept symmetric: -128 would have no positive counterpart
MIDDLE = 128


def quantize_int8(weight: torch.Tensor, per: str = "channel") -> QuantizedWeight:
    """``weight`` [N, K] (any float dtype) in int8, one scale (largest magnitude / 127) for each output channel or for the matrix.

    ``per``: "channel" or "tensor". ValueError: another ``per``, inf, NaN, not a matrix.
    """
    if per not in ("channel", "tensor"):
        raise ValueError(f'int8 has a scale per "channel" or per "tensor", got {per!r}')
    weight = rounding.checked(weight)
    rows, columns = weight.shape
    groups = weight[:, None, :]
    largest = rounding.absolute_maximum(groups)
    if per == "tensor":
        largest = largest.amax().view(1, 1)
    scales = rounding.stored_scales(largest.double() / LARGEST)
    codes = rounding.nearest(groups, scales, None, -LARGEST, LARGEST).add_(MIDDLE)
    return QuantizedWeight(
        method="int8",
        shape=(rows, columns),
        bits=8,
        levels="affine",
        group_size=columns if per == "channel" else 0,
        codes=codes.to(torch.uint8).view(rows, columns),
        scales=scales,
    )


def quantize_int8_w8a8(
    weight: torch.Tensor, activation_scale: float | None = None, smooth: torch.Tensor | None = None
) -> QuantizedWeight:
    """``weight`` [N, K] in int8 per output channel, for inputs that are rounded to int8 as well.

    ``activation_scale``: the static scale of the inputs (largest expected magnitude / 127), None: found for each token (dynamic).
    ``smooth`` [K], positive: what each input channel is divided by; the weight's columns are multiplied by it, so that the layer's
    function is the same before rounding (SmoothQuant, equation 3). A static scale is then that of the divided inputs.
    ValueError: a scale or ``smooth`` that is not positive and finite, ``smooth`` of another length, inf, NaN, not a matrix.
    """
    if activation_scale is not None and not 0 < activation_scale < float("inf"):
        raise ValueError(f"a static activation scale is positive and finite, got {activation_scale!r}")
    weight = rounding.checked(weight)
    if smooth is not None:
        if smooth.shape != weight.shape[1:]:
            raise ValueError(f"smooth must have one value for each of {weight.shape[1]} input channels, got {list(smooth.shape)}")
        smooth = smooth.float()
        if not bool(((smooth > 0) & torch.isfinite(smooth)).all()):
            raise ValueError("smooth must be positive and finite in every channel")
        weight = weight * smooth
    return replace(
        quantize_int8(weight),
        method="int8_w8a8",
        input_scales=smooth,
        activation_scale=activation_scale,
        activation_bits=8,
    )


def quantize_activations(x: torch.Tensor, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``x`` [T, K] (any float dtype) -> int8 codes [T, K] in [-127, 127] and float32 scales [T, 1], x about codes * scales.

    ``scale`` None: each token's own, its largest magnitude / 127 (dynamic); else that one for all (static), and what lies beyond
    127 scales is cut off there. A token of zeros has scale 0 and codes 0.
    """
    x = x.float()
    if scale is None:
        scales = rounding.absolute_maximum(x)[:, None] / LARGEST
    else:
        scales = torch.full((x.shape[0], 1), scale, dtype=torch.float32, device=x.device)
    codes = (x / rounding.divisor(scales)).round_().clamp_(-LARGEST, LARGEST)
    return codes.to(torch.int8), scales


def matmul_w8a8(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """``x`` [T, K] times a W8A8 weight [N, K], transposed: float32 [T, N]. The reference: integers multiplied exactly, then scaled.

    ``x`` is divided by the weight's input scales first, where it has them. ValueError for a weight that is not W8A8.
    """
    if weight.activation_bits != 8 or weight.levels != "affine" or weight.bits != 8:
        raise ValueError(f"a W8A8 product needs a weight of method int8_w8a8, got {weight.method}")
    x = x.float()
    if weight.input_scales is not None:
        x = x / weight.input_scales
    codes, scales = quantize_activations(x, weight.activation_scale)
    # Float64 holds every sum of these products exactly (below 2**53), and multiplies matrices faster than integers are multiplied.
    sums = codes.double() @ (weight.unpacked().double() - MIDDLE).T
    return (sums * (scales.double() * weight.scales.double().T)).float()
