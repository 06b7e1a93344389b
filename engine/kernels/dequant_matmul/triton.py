"""Activations times weights of 8 or 4 bits: launch and kernels.

Codes come from memory as they are and become numbers in registers, so that a weight costs its bits and no more; that is all the speed
there is where the product is bound by memory (few rows). Of one row, products are added up without the tensor cores.

Shapes: x [T, K], weight [N, K] with a scale for each group of columns of a row, G groups.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, check_power_of_two, check_runs_here, check_tensor, on_device
from engine.kernels.compiling import TYPE_NAMES, CompileSpec, pointer
from engine.kernels.device import INTERPRETED, dot, narrow

_SCALES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class MatmulConfig:
    """A tile of ``block_m`` rows by ``block_n`` outputs, ``block_k`` columns at a time (block_m 1: matrix-vector)."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3

    def check(self) -> "MatmulConfig":
        """Itself. ValueError for sizes that are not powers of two, or out of range."""
        if self.block_m != 1:
            check_power_of_two("block_m", self.block_m, 16, 256)
        check_power_of_two("block_n", self.block_n, 16, 256)
        check_power_of_two("block_k", self.block_k, 32, 1024)
        check_power_of_two("num_warps", self.num_warps, 1, 16)
        if not isinstance(self.num_stages, int) or not 1 <= self.num_stages <= 8:
            raise ValueError(f"num_stages must be an integer in [1, 8], got {self.num_stages!r}")
        return self


def default_config(rows: int) -> MatmulConfig:
    """Tiles for a product with ``rows`` rows of activations."""
    if rows == 1:
        return MatmulConfig(1, 16, 512, 4, 2)
    return MatmulConfig(min(max(16, 1 << (rows - 1).bit_length()), 64), 64, 64, 4, 3)


@triton.jit
def _weights(
    codes_ptr, scales_ptr, zeros_ptr, minima_ptr, levels_ptr, n, k_start, rows, columns, width, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK_N, BLOCK_K]: the weights of rows ``n`` and columns k_start .. k_start + BLOCK_K - 1; finite beyond the last."""
    inside = (n < rows)[:, None]
    row = n.to(tl.int64)[:, None]
    if BITS == 8:
        byte = k_start + tl.arange(0, BLOCK_K)
        code = tl.load(codes_ptr + row * width + byte[None, :], mask=inside & (byte < columns)[None, :], other=0)
    else:  # the even column is in the low half of a byte
        byte = k_start // 2 + tl.arange(0, BLOCK_K // 2)
        pair = tl.load(codes_ptr + row * width + byte[None, :], mask=inside & (byte < width)[None, :], other=0)
        code = tl.reshape(tl.join(pair & 15, pair >> 4), [BLOCK_N, BLOCK_K])
    if levels_ptr is not None:
        level = tl.load(levels_ptr + code.to(tl.int32))
    else:
        level = code.to(tl.float32)
    # The groups that these columns lie in: one scale is loaded for each, not for each column.
    PARTS: tl.constexpr = BLOCK_K // GROUP if GROUP and GROUP < BLOCK_K else 1
    if GROUP:
        group = k_start // GROUP + tl.arange(0, PARTS)
    else:
        group = tl.arange(0, PARTS)
    at = row * groups + group[None, :]
    valid = inside & (group < groups)[None, :]
    level = tl.reshape(level, [BLOCK_N, PARTS, BLOCK_K // PARTS])
    if zeros_ptr is not None:
        level -= tl.load(zeros_ptr + at, mask=valid, other=0).to(tl.float32)[:, :, None]
    elif levels_ptr is None and minima_ptr is None:
        level -= 1 << (BITS - 1)
    weight = level * tl.load(scales_ptr + at, mask=valid, other=0.0).to(tl.float32)[:, :, None]
    if minima_ptr is not None:
        weight += tl.load(minima_ptr + at, mask=valid, other=0.0).to(tl.float32)[:, :, None]
    return tl.reshape(weight, [BLOCK_N, BLOCK_K])


@triton.jit(do_not_specialize=["tokens"])
def matmul_kernel(
    x_ptr,  # [T, K], row stride stride_x
    codes_ptr,  # uint8 [N, width]: K codes a row, two in a byte where they have 4 bits
    scales_ptr,  # [N, G]
    zeros_ptr,  # uint8 [N, G], or None
    minima_ptr,  # [N, G], or None
    levels_ptr,  # float32 [2**BITS]: what each code stands for; None: itself less its zero point
    bias_ptr,  # [N], or None
    out_ptr,  # [T, N]
    stride_x, tokens, rows, columns, width, groups,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,  # columns that share a scale; 0: the whole row
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k_start in range(0, columns, BLOCK_K):
        k = k_start + tl.arange(0, BLOCK_K)
        x_at = x_ptr + m[:, None] * stride_x + k[None, :]
        x = tl.load(x_at, mask=(m < tokens)[:, None] & (k < columns)[None, :], other=0.0)
        w = _weights(
            codes_ptr, scales_ptr, zeros_ptr, minima_ptr, levels_ptr, n, k_start, rows, columns, width, groups,
            BITS, GROUP, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc = dot(x, tl.trans(narrow(w, x.dtype)), acc)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < rows, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + m[:, None] * rows + n[None, :]
    tl.store(at, narrow(acc, out_ptr.dtype.element_ty), mask=(m < tokens)[:, None] & (n < rows)[None, :])


@triton.jit
def matvec_kernel(
    x_ptr,  # [K]
    codes_ptr, scales_ptr, zeros_ptr, minima_ptr, levels_ptr, bias_ptr,  # as above
    out_ptr,  # [N]
    rows, columns, width, groups,
    BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for k_start in range(0, columns, BLOCK_K):
        k = k_start + tl.arange(0, BLOCK_K)
        x = tl.load(x_ptr + k, mask=k < columns, other=0.0).to(tl.float32)
        w = _weights(
            codes_ptr, scales_ptr, zeros_ptr, minima_ptr, levels_ptr, n, k_start, rows, columns, width, groups,
            BITS, GROUP, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        acc += tl.sum(w * x[None, :], 1)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n < rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, narrow(acc, out_ptr.dtype.element_ty), mask=n < rows)


def dequant_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    *,
    bits: int,
    group_size: int,
    zero_points: torch.Tensor | None = None,
    minima: torch.Tensor | None = None,
    levels: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    config: MatmulConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + bias, [T, N] in the dtype of x, accumulated in float32.

    x [T, K], rows contiguous. W [N, K]: codes uint8 [N, ceil(K * bits / 8)] of 8 or 4 bits (of two in a byte, the even column in the low
    half); scales [N, G] (float16, bfloat16 or float32), G = ceil(K / group_size), group_size a power of two >= 16, or K for one scale a
    row. A weight is level(code) * scale + minimum: the level is ``levels[code]`` (float32 [2**bits]: NF4's table), or the code less
    its zero point (uint8 [N, G]; without them 2**(bits - 1), and 0 where ``minima`` [N, G] are given). In the tensor cores' shape it is
    rounded to the dtype of x first; of one row it is not. bias [N]. ValueError for what does not fit.
    """
    check_tensor("x", x, (None, None), FLOATS, dense=False)
    tokens, columns = x.shape
    if bits not in (4, 8):
        raise ValueError(f"codes have 4 or 8 bits here, got {bits!r}")
    width = -(-columns * bits // 8)
    check_tensor("codes", codes, (None, width), (torch.uint8,), x)
    rows = codes.shape[0]
    if not columns or not rows:
        raise ValueError(f"a weight must not be empty, got [{rows}, {columns}]")
    if group_size != columns:
        check_power_of_two("group_size", group_size, 16, 1 << 16)
    groups = -(-columns // group_size)
    check_tensor("scales", scales, (rows, groups), _SCALES, x)
    if zero_points is not None and (minima is not None or levels is not None):
        raise ValueError("zero_points go neither with minima nor with levels")
    for name, tensor, shape, dtypes in (
        ("zero_points", zero_points, (rows, groups), (torch.uint8,)),
        ("minima", minima, (rows, groups), _SCALES),
        ("levels", levels, (1 << bits,), (torch.float32,)),
        ("bias", bias, (rows,), _SCALES),
    ):
        if tensor is not None:
            check_tensor(name, tensor, shape, dtypes, x)
    config = (config or default_config(tokens)).check()
    if config.block_m == 1 and tokens > 1:
        raise ValueError(f"a block_m of 1 is for one row, got {tokens}")
    out = torch.empty(tokens, rows, dtype=x.dtype, device=x.device) if out is None else out
    check_tensor("out", out, (tokens, rows), (x.dtype,), x)
    check_runs_here(x, bool(INTERPRETED.value))
    if not tokens:
        return out
    weight = (codes, scales, zero_points, minima, levels, bias)
    sizes = (rows, columns, width, groups)
    blocks: dict[str, Any] = _constants(config, bits, 0 if group_size == columns else group_size)
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    with on_device(x):
        if config.block_m == 1:
            matvec_kernel[(triton.cdiv(rows, config.block_n),)](x, *weight, out, *sizes, **blocks, **options)
        else:
            grid = (triton.cdiv(rows, config.block_n), triton.cdiv(tokens, config.block_m))
            matmul_kernel[grid](x, *weight, out, x.stride(0), tokens, *sizes, **blocks, **options)
    return out


def _constants(config: MatmulConfig, bits: int, group: int) -> dict[str, int]:
    constants = {"BITS": bits, "GROUP": group, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    return constants if config.block_m == 1 else {**constants, "BLOCK_M": config.block_m}


def matmul_spec(
    kind: str = "int4",
    dtype: torch.dtype = torch.bfloat16,
    rows: int = 1,
    group_size: int = 32,
    config: MatmulConfig | None = None,
) -> CompileSpec:
    """What ``compile_spec`` needs; ``kind``: "int8" (one scale a row), "int4" (scale and minimum a group) or "nf4"."""
    if kind not in ("int8", "int4", "nf4"):
        raise ValueError(f"kind must be int8, int4 or nf4, got {kind!r}")
    config = (config or default_config(rows)).check()
    kernel = matvec_kernel if config.block_m == 1 else matmul_kernel
    constants: dict[str, Any] = _constants(config, 8 if kind == "int8" else 4, 0 if kind == "int8" else group_size)
    types = {
        "x_ptr": pointer(dtype),
        "codes_ptr": pointer(torch.uint8),
        "scales_ptr": pointer(torch.float16),
        "out_ptr": pointer(dtype),
    }
    if kind == "int4":
        types["minima_ptr"] = pointer(torch.float16)
    if kind == "nf4":
        types["levels_ptr"] = pointer(torch.float32)
    constants |= {name: None for name in kernel.arg_names if name.endswith("_ptr") and name not in types}
    whole = [name for name in ("stride_x", "tokens", "rows", "columns", "width", "groups") if name in kernel.arg_names]
    aligned = (*types, *(name for name in whole if name != "tokens"))
    types |= dict.fromkeys(whole, TYPE_NAMES[torch.int32])
    return CompileSpec(kernel, types, constants, config.num_warps, config.num_stages, aligned)
