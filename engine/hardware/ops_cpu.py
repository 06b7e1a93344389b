"""The private torch operators that this engine uses, all in this file: products on weights packed beforehand.

- oneDNN's, in the weight's dtype: what ``torch.compile`` emits for a CPU with frozen weights.
- FBGEMM's for 16-bit floats: weights held as float16, widened in registers, float32 in and out. On a CPU without bf16
  arithmetic they read half the memory of float32 weights and are the fastest up to some hundred rows.
- Weights of 8 and 4 bits times bf16, for a few rows; and oneDNN's product of 8-bit integers, for more.

Being private they may change or go, so nothing may depend on them: ``packing_works``, ``half_packing_works``, ``int8_works``,
``int4_works`` and ``integer_product_works`` try them against ``F.linear`` and say False where they are missing or wrong.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# The number of rows that packing is told to expect. Measured: from 8 to 256 the packed order serves all row counts alike,
# while for 1 oneDNN picks one that is several times slower with many rows.
_ROWS_HINT = 32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [out, in], bfloat16 or float32, in the matrix units' order. An opaque tensor that only ``linear`` reads."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)


def linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[T, in] -> [T, out]."""
    return torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")


def linear_add(residual: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """residual + linear(x), added by the product itself."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")


def pack_half(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """``weight`` [out, in] float32, every value a float16 (``fits_half``). An opaque object that only ``half_operator()`` reads."""
    return torch.ops.quantized.linear_prepack_fp16(weight, bias)


def half_operator() -> Callable[[torch.Tensor, Any], torch.Tensor]:
    """(float32 [T, in], packed) -> float32 [T, out].

    The operator without torch's Python wrapper, which looks through the arguments for stand-ins of packed objects at every
    call: that takes as long as multiplying a single row by a small weight.
    """
    return torch.ops.quantized.linear_dynamic_fp16.default._op


def fits_half(weight: torch.Tensor) -> bool:
    """Whether float16 holds bfloat16 values: all of them in range. Those under 2**-17 lose bits, at most 2**-25 each."""
    low, high = torch.aminmax(weight)
    return bool(torch.maximum(-low, high) <= torch.finfo(torch.float16).max)


def int8_linear(x: torch.Tensor, codes: torch.Tensor, ones: torch.Tensor) -> torch.Tensor:
    """bfloat16 [T, in] times int8 ``codes`` [out, in] -> bfloat16 [T, out]. ``ones`` bfloat16 [out]: the operator has scales only in
    16 bits, which would be a systematic error for each channel; they are left to the caller."""
    return torch._weight_int8pack_mm(x, codes, ones)


def pack_int4(codes: torch.Tensor) -> torch.Tensor:
    """``codes`` integers [out, in] in [0, 16). An opaque tensor that only ``int4_linear`` reads."""
    return torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)


def int4_linear(x: torch.Tensor, packed: torch.Tensor, group_size: int, scales_and_zeros: torch.Tensor) -> torch.Tensor:
    """bfloat16 [T, in] -> bfloat16 [T, out]; a weight is (code - 8) * scale + zero. ``scales_and_zeros``: bfloat16 [G, out, 2]."""
    return torch._weight_int4pack_mm_for_cpu(x, packed, group_size, scales_and_zeros)


INT4_GROUPS = (32, 64, 128, 256)  # group sizes that ``int4_linear`` knows
INT4_ROWS = 16  # the out_features must be a multiple of


def pack_integers(codes: torch.Tensor) -> torch.Tensor:
    """``codes`` int8 [out, in]. An opaque tensor that only ``integer_product`` reads."""
    return torch.ops.onednn.qlinear_prepack(codes, None)


def integer_product(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """uint8 [T, in] times int8 weights, summed as integers, times ``scales`` float32 [out], plus ``bias`` float32 [out] -> float32 [T, out].

    ``zeros``: int32 [out], all 0. Signed activations would fall back to a reference that is a thousand times slower.
    """
    product = torch.ops.onednn.qlinear_pointwise.default
    return product(x, 1.0, 0, packed, scales, zeros, bias, 1.0, 0, torch.float32, "none", [], "")


@functools.cache
def int8_works() -> bool:
    """Whether torch's int8 weights exist here and agree with ``F.linear``."""

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        scales = weight.abs().amax(1) / 127
        codes = (weight / scales[:, None]).round().to(torch.int8)
        return int8_linear(x.bfloat16(), codes, torch.ones_like(scales, dtype=torch.bfloat16)).float() * scales + bias

    return _agrees(product, torch.float32, 0.2)


@functools.cache
def int4_works() -> bool:
    """Whether torch's int4 weights exist here and agree with ``F.linear`` (of what 4 bits leave of the weight)."""

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        scale = float(weight.abs().max()) / 7
        codes = (weight / scale).round() + 8
        table = torch.tensor([scale, 0.0], dtype=torch.bfloat16).expand(1, weight.shape[0], 2).contiguous()
        rounding = F.linear(x, weight - (codes - 8) * scale)
        return int4_linear(x.bfloat16(), pack_int4(codes), 32, table).float() + bias + rounding

    return _agrees(product, torch.float32, 0.3)


@functools.cache
def integer_product_works() -> bool:
    """Whether oneDNN's product of integers exists here and agrees with ``F.linear``."""

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        scales, step = weight.abs().amax(1) / 127, float(x.abs().max()) / 127
        codes = (weight / scales[:, None]).round().to(torch.int8)
        shifted = ((x / step).round() + 128).to(torch.uint8)
        out = integer_product(shifted, pack_integers(codes), scales, torch.zeros(len(scales), dtype=torch.int32))
        return (out - 128 * scales * codes.sum(1)) * step + bias

    return _agrees(product, torch.float32, 0.3)


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN's operators exist here and agree with ``F.linear``."""

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        packed = pack(weight)
        added = linear_add(torch.ones(x.shape[0], weight.shape[0], dtype=dtype), x, packed, bias)
        return torch.stack((linear(x, packed, bias), added - 1))

    return _agrees(product, dtype, 1e-3 if dtype == torch.float32 else 0.2)


@functools.cache
def half_packing_works() -> bool:
    """Whether FBGEMM's operators exist here and agree with ``F.linear``."""
    return _agrees(lambda x, weight, bias: half_operator()(x, pack_half(weight.half().float(), bias)), torch.float32, 0.02)


def _agrees(product: Callable[..., torch.Tensor], dtype: torch.dtype, tolerance: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    try:
        with torch.inference_mode():
            for rows in (1, 3, 70):
                x = torch.randn(rows, 32, generator=generator).to(dtype)
                expected = F.linear(x.float(), weight.float(), bias.float())
                if not torch.allclose(
                    product(x, weight, bias).float(), expected.expand(1, -1, -1), atol=tolerance, rtol=tolerance
                ):
                    return False
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return False  # gone, renamed, or not for this CPU or dtype: the caller uses the public way
    return True
