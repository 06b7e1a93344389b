"""The private torch operators that this engine uses, all in this file: oneDNN products on weights packed beforehand.

They are what ``torch.compile`` emits for a CPU with frozen weights. Being private they may change or go, so nothing may
depend on them: ``packing_works`` tries them against ``F.linear`` and says False where they are missing or wrong.
"""

import functools

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
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def linear_add(residual: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """residual + linear(x), added by the product itself."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, packed, bias, "add")


@functools.cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether the operators exist here and agree with ``F.linear``."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 32, generator=generator).to(dtype)
    bias = torch.randn(48, generator=generator).to(dtype)
    tolerance = 1e-3 if dtype == torch.float32 else 0.15
    try:
        with torch.inference_mode():
            packed = pack(weight)
            for rows in (1, 3, 70):
                x = torch.randn(rows, 32, generator=generator).to(dtype)
                residual = torch.randn(rows, 48, generator=generator).to(dtype)
                expected = F.linear(x.float(), weight.float(), bias.float())
                got = linear(x, packed, bias).float()
                added = linear_add(residual, x, packed, bias).float()
                if not torch.allclose(got, expected, atol=tolerance, rtol=tolerance):
                    return False
                if not torch.allclose(added, expected + residual.float(), atol=tolerance, rtol=tolerance):
                    return False
    except (RuntimeError, AttributeError, NotImplementedError, TypeError):
        return False  # gone, renamed, or not for this CPU or dtype: the caller uses the public way
    return True
