"""The private torch operators that this engine uses, all in this file: products on weights packed beforehand.

- oneDNN's, in the weight's dtype: what ``torch.compile`` emits for a CPU with frozen weights.
- FBGEMM's for 16-bit floats: weights held as float16, widened in registers, float32 in and out. On a CPU without bf16
  arithmetic they read half the memory of float32 weights and are the fastest up to some hundred rows.

Being private they may change or go, so nothing may depend on them: ``packing_works`` and ``half_packing_works`` try them
against ``F.linear`` and say False where they are missing or wrong.
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
