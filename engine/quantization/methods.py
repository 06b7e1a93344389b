"""One call for all weight methods; see ``engine.quantization.catalogue`` for what each is."""

from typing import Any

import torch

from engine.quantization.base import Calibration, QuantizedWeight
from engine.quantization.catalogue import METHOD, Method, check
from engine.quantization.fp8 import quantize_fp8
from engine.quantization.int8 import LARGEST, quantize_int8, quantize_int8_w8a8
from engine.quantization.intn import WhatIf, quantize_int, what_if
from engine.quantization.nf4 import quantize_nf4

__all__ = ["METHOD", "Method", "WhatIf", "check", "quantize", "what_if"]


def quantize(
    weight: torch.Tensor,
    method: str,
    group_size: int | None = None,
    calibration: Calibration | None = None,
    **options: Any,
) -> QuantizedWeight:
    """``weight`` [N, K] by ``method``, one of ``base.METHODS``; ``options`` go to the method's own function.

    ``group_size``: columns that share a scale, None for the method's own. ``calibration``: what was seen of the layer's inputs; GPTQ and
    AWQ need it, W8A8 takes it for ``smooth=alpha`` (SmoothQuant) and ``static=True``, the others leave it unused. ValueError: as
    ``check``'s; no calibration where it is needed; inf, NaN, not a matrix. TypeError: an option that the method does not have.
    """
    known, size = check(method, group_size)
    if size is None:
        if method == "int8_w8a8":
            return _w8a8(weight, calibration, **options)
        return (quantize_int8 if method == "int8" else quantize_fp8)(weight, **options)
    if method == "nf4":
        return quantize_nf4(weight, size, **options)
    if not known.needs_calibration:
        return quantize_int(weight, known.bits, size, **options)
    if calibration is None:
        raise ValueError(f"{method} needs the calibration of this layer's inputs, got none")
    # These are only loaded where they are used.
    if method == "gptq":
        from engine.quantization.gptq import quantize_gptq

        return quantize_gptq(weight, calibration, group_size=size, **options)
    from engine.quantization.awq import quantize_awq

    return quantize_awq(weight, calibration, group_size=size, **options)


def _w8a8(
    weight: torch.Tensor, calibration: Calibration | None, smooth: float | None = None, static: bool = False, **options: Any
) -> QuantizedWeight:
    """W8A8 with what calibration can add: ``smooth`` (SmoothQuant's exponent alpha) and a ``static`` scale of the inputs."""
    if smooth is None and not static:
        return quantize_int8_w8a8(weight, **options)
    if calibration is None:
        raise ValueError("int8_w8a8 needs the calibration of this layer's inputs to smooth them or for a static scale, got none")
    if smooth is None:
        scale = float(calibration.abs_max.max()) / LARGEST
        return quantize_int8_w8a8(weight, activation_scale=scale, **options)
    from engine.quantization.smoothquant import quantize_smooth

    return quantize_smooth(weight, calibration, smooth, static, **options)
