"""silu(gate) * up in one pass over memory: launch and kernel. T rows, N numbers of each half."""

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, check_runs_here, check_tensor, on_device
from engine.kernels.compiling import TYPE_NAMES, CompileSpec, pointer
from engine.kernels.device import INTERPRETED, narrow

_BLOCK = 1024


@triton.jit
def silu_mul_kernel(
    x_ptr,  # [T, 2 N], row stride stride_x: gate, then up
    out_ptr,  # [T, N]
    stride_x, size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    gate = tl.load(x_ptr + row * stride_x + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + size + i, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + i, narrow(out, out_ptr.dtype.element_ty), mask=inside)


def silu_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, 2 N], rows contiguous, gate then up -> silu(gate) * up [T, N] in the dtype of x, computed in float32.

    ValueError for what does not fit.
    """
    check_tensor("x", x, (None, None), FLOATS, dense=False)
    if x.shape[1] % 2 or not x.shape[1]:
        raise ValueError(f"x must be [T, 2 N], gate then up, got {list(x.shape)}")
    tokens, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device) if out is None else out
    check_tensor("out", out, (tokens, size), (x.dtype,), x)
    check_runs_here(x, bool(INTERPRETED.value))
    if tokens:
        with on_device(x):
            silu_mul_kernel[(tokens, triton.cdiv(size, _BLOCK))](
                x, out, x.stride(0), size, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=True
            )
    return out


def silu_mul_spec(dtype: torch.dtype = torch.bfloat16) -> CompileSpec:
    """What ``compile_spec`` needs."""
    types = {"x_ptr": pointer(dtype), "out_ptr": pointer(dtype)}
    types |= dict.fromkeys(("stride_x", "size"), TYPE_NAMES[torch.int32])
    return CompileSpec(silu_mul_kernel, types, {"BLOCK": _BLOCK}, 4, 2, ("x_ptr", "out_ptr", "stride_x", "size"))
