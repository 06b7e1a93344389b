"""RMS norm of rows, the residual added and written back on the way: launch and kernel. T rows of N numbers."""

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, check_runs_here, check_tensor, on_device
from engine.kernels.compiling import TYPE_NAMES, CompileSpec, pointer
from engine.kernels.device import INTERPRETED, narrow

MAX_SIZE = 1 << 16


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [T, N], row stride stride_x
    residual_ptr,  # [T, N]; becomes residual + x. None: there is none
    weight_ptr,  # [N]
    out_ptr,  # [T, N]
    stride_x, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < SIZE
    x = tl.load(x_ptr + row * stride_x + i, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x += tl.load(residual_ptr + row * SIZE + i, mask=inside, other=0.0).to(tl.float32)
        held = narrow(x, residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row * SIZE + i, held, mask=inside)
        x = held.to(tl.float32)  # what the next layer adds to is what is normed
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x * x, 0) / SIZE
    tl.store(out_ptr + row * SIZE + i, narrow(x * tl.rsqrt(mean + eps) * weight, out_ptr.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """h / sqrt(mean(h^2) + eps) * weight, [T, N] in the dtype of x, computed in float32.

    x [T, N], its rows contiguous; weight [N]; h is x, or residual + x, which ``residual`` [T, N] then holds. ValueError for what does
    not fit, or rows of more than 65,536.
    """
    check_tensor("x", x, (None, None), FLOATS, dense=False)
    tokens, size = x.shape
    if not 1 <= size <= MAX_SIZE:
        raise ValueError(f"rows must have 1 to {MAX_SIZE:,} numbers, got {size:,}")
    check_tensor("weight", weight, (size,), FLOATS, x)
    if residual is not None:
        check_tensor("residual", residual, (tokens, size), FLOATS, x)
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device) if out is None else out
    check_tensor("out", out, (tokens, size), (x.dtype,), x)
    check_runs_here(x, bool(INTERPRETED.value))
    block = triton.next_power_of_2(size)
    if tokens:
        with on_device(x):
            rms_norm_kernel[(tokens,)](
                x, residual, weight, out, x.stride(0), eps, SIZE=size, BLOCK=block, num_warps=_warps(block), enable_fp_fusion=True
            )
    return out


def _warps(block: int) -> int:
    return min(max(block // 256, 1), 16)


def rms_norm_spec(size: int = 576, dtype: torch.dtype = torch.bfloat16, residual: bool = True) -> CompileSpec:
    """What ``compile_spec`` needs."""
    block = triton.next_power_of_2(size)
    constants: dict[str, object] = {"SIZE": size, "BLOCK": block}
    types = {"x_ptr": pointer(dtype), "weight_ptr": pointer(dtype), "out_ptr": pointer(dtype)}
    if residual:
        types["residual_ptr"] = pointer(dtype)
    else:
        constants["residual_ptr"] = None
    aligned = (*types, "stride_x")
    types |= {"stride_x": TYPE_NAMES[torch.int32], "eps": TYPE_NAMES[torch.float32]}
    return CompileSpec(rms_norm_kernel, types, constants, _warps(block), 2, aligned)
