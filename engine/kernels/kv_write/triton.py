"""Rotate the queries and keys of new tokens and write K and V into their slots, quantising on the way: launch and kernel.

Shapes: T tokens, H query heads, K KV heads, D head size.
"""

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, check_runs_here, check_tensor, on_device, wants_values
from engine.kernels.compiling import TYPE_NAMES, CompileSpec, pointer
from engine.kernels.device import INTERPRETED, ROUND, float_to_e4m3, narrow

_CODES = {torch.int8: 1, torch.uint8: 2}
_SCALES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _load_halves(ptr, heads, valid, stride_h, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Two float32 [heads, BLOCK]: the first and the second half of each head."""
    d = tl.arange(0, BLOCK)
    at = ptr + heads[:, None] * stride_h + d[None, :]
    mask = valid[:, None] & (d[None, :] < HALF)
    return tl.load(at, mask=mask, other=0.0).to(tl.float32), tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_halves(ptr, heads, valid, stride_h, a, b, HALF: tl.constexpr, BLOCK: tl.constexpr):
    d = tl.arange(0, BLOCK)
    at = ptr + heads[:, None] * stride_h + d[None, :]
    mask = valid[:, None] & (d[None, :] < HALF)
    tl.store(at, a, mask=mask)
    tl.store(at + HALF, b, mask=mask)


@triton.jit
def _code(x, held, QUANT: tl.constexpr):
    """float32 [heads, BLOCK] -> codes for the scales ``held`` [heads]; a scale of 0 or NaN: code 0."""
    good = (held > 0)[:, None]
    ratio = tl.where(good, tl.div_rn(x, tl.where(good, held[:, None], 1.0)), 0.0)
    if QUANT == 1:
        ratio = tl.minimum(tl.maximum(ratio, -127.0), 127.0)
        return ((ratio + ROUND) - ROUND).to(tl.int8)
    else:
        return float_to_e4m3(ratio)


@triton.jit
def _put(
    pool_ptr, scales_ptr, slot, row, a, b, heads, valid, kv_heads, HALF: tl.constexpr, BLOCK: tl.constexpr, QUANT: tl.constexpr
):
    """Store K (row 0) or V (row K) of a token, all heads."""
    to = pool_ptr + (slot * 2 * kv_heads + row) * 2 * HALF
    if QUANT:
        largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        broken = tl.sum(a * 0.0, 1) + tl.sum(b * 0.0, 1)  # NaN where something is not finite: it is to show when it is read
        if QUANT == 1:
            held = tl.div_rn(largest, tl.full([largest.shape[0]], 127.0, tl.float32))
        else:
            held = tl.minimum(tl.div_rn(largest, tl.full([largest.shape[0]], 448.0, tl.float32)), 128.0)
        held = narrow(held + broken, scales_ptr.dtype.element_ty)
        tl.store(scales_ptr + slot * 2 * kv_heads + row + heads, held, mask=valid)
        held = held.to(tl.float32)
        _store_halves(to, heads, valid, 2 * HALF, _code(a, held, QUANT), _code(b, held, QUANT), HALF, BLOCK)
    else:
        dtype: tl.constexpr = pool_ptr.dtype.element_ty
        _store_halves(to, heads, valid, 2 * HALF, narrow(a, dtype), narrow(b, dtype), HALF, BLOCK)


@triton.jit
def kv_write_kernel(
    qkv_ptr,  # [T, H + 2 K, D], token stride stride_t, head stride D; queries rotated in place
    cos_ptr,  # [T, D / 2], row stride stride_c
    sin_ptr,  # [T, D / 2], row stride stride_s
    slots_ptr,  # int64 [T]; negative: nothing is written
    pool_ptr,  # [slots, 2 K, D]
    scales_ptr,  # [slots, 2 K]; None where the pool holds numbers
    stride_t, stride_c, stride_s,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr,  # HALF, HEADS and KV_HEADS padded to powers of two
    ROTATE_QUERIES: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    cos = tl.load(cos_ptr + token * stride_c + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + token * stride_s + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
    row = qkv_ptr + token * stride_t
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    if ROTATE_QUERIES:
        heads = tl.arange(0, BLOCK_Q)
        a, b = _load_halves(row, heads, heads < HEADS, 2 * HALF, HALF, BLOCK)
        turned_a, turned_b = narrow(a * cos - b * sin, dtype), narrow(b * cos + a * sin, dtype)
        _store_halves(row, heads, heads < HEADS, 2 * HALF, turned_a, turned_b, HALF, BLOCK)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    kv = tl.arange(0, BLOCK_KV)
    valid = kv < KV_HEADS
    a, b = _load_halves(row + HEADS * 2 * HALF, kv, valid, 2 * HALF, HALF, BLOCK)
    _put(pool_ptr, scales_ptr, slot, 0, a * cos - b * sin, b * cos + a * sin, kv, valid, KV_HEADS, HALF, BLOCK, QUANT)
    a, b = _load_halves(row + (HEADS + KV_HEADS) * 2 * HALF, kv, valid, 2 * HALF, HALF, BLOCK)
    _put(pool_ptr, scales_ptr, slot, KV_HEADS, a, b, kv, valid, KV_HEADS, HALF, BLOCK, QUANT)


def kv_write(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    kv_pool: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    *,
    rotate_queries: bool = True,
    validate: bool | None = None,
) -> None:
    """Apply RoPE to the queries (in place) and keys of T new tokens, and write K and V into their slots.

    qkv [T, H + 2 K, D], heads contiguous; cos, sin [T, D / 2] of each token's position (element i is paired with i + D / 2);
    slots int64 [T], each at most once, negative for rows that only fill up a batch; kv_pool [slots, 2 K, D] in the dtype of qkv, or
    int8, or uint8 (the bits of float8_e4m3fn), then with kv_scales [slots, 2 K] (bfloat16, float16 or float32): one scale for a token's
    vector of one head, absmax / 127 or absmax / 448, and codes for that scale as it is held. A vector that is not finite gets the scale
    NaN. validate: look at the values of the slots (None: on the CPU). ValueError for what does not fit.
    """
    check_tensor("qkv", qkv, (None, None, None), FLOATS, dense=False)
    tokens, rows, head_dim = qkv.shape
    check_tensor("kv_pool", kv_pool, (None, None, head_dim), (qkv.dtype, *_CODES), qkv)
    kv_heads = kv_pool.shape[1] // 2
    heads = rows - 2 * kv_heads
    if kv_pool.shape[1] % 2 or not kv_heads or heads < 0 or head_dim % 2 or (tokens and qkv.stride(1) != head_dim):
        raise ValueError(
            f"qkv [T, H + 2 K, D] with contiguous heads and kv_pool [slots, 2 K, D] with an even D do not fit: got {list(qkv.shape)} "
            f"(strides {list(qkv.stride())}) and {list(kv_pool.shape)}"
        )
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table, (tokens, head_dim // 2), FLOATS, qkv, dense=False)
    check_tensor("slots", slots, (tokens,), (torch.int64,), qkv)
    if (kv_scales is not None) != (kv_pool.dtype in _CODES):
        raise ValueError(f"int8 and uint8 pools come with kv_scales, others without: got a pool of {kv_pool.dtype}")
    if kv_scales is not None:
        check_tensor("kv_scales", kv_scales, kv_pool.shape[:2], _SCALES, qkv)
    if tokens and wants_values(qkv, validate):
        if int(slots.max()) >= kv_pool.shape[0]:
            raise ValueError(f"slots must lie below {kv_pool.shape[0]}, the slots of the pool, got {int(slots.max())}")
        written = slots[slots >= 0]
        if len(written.unique()) != len(written):
            raise ValueError("a slot is named twice: which token it would hold is not defined")
    check_runs_here(qkv, bool(INTERPRETED.value))
    if tokens:
        with on_device(qkv):
            kv_write_kernel[(tokens,)](
                qkv, cos, sin, slots, kv_pool, kv_scales, qkv.stride(0), cos.stride(0), sin.stride(0),
                **_constants(heads, kv_heads, head_dim, rotate_queries, _CODES.get(kv_pool.dtype, 0)), num_warps=4,
                enable_fp_fusion=True,
            )  # fmt: skip


def _constants(heads: int, kv_heads: int, head_dim: int, rotate_queries: bool, quant: int) -> dict[str, int | bool]:
    return {
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HALF": head_dim // 2,
        "BLOCK": triton.next_power_of_2(head_dim // 2),
        "BLOCK_Q": triton.next_power_of_2(max(heads, 1)),
        "BLOCK_KV": triton.next_power_of_2(kv_heads),
        "ROTATE_QUERIES": rotate_queries and heads > 0,
        "QUANT": quant,
    }


def kv_write_specs(
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
) -> list[CompileSpec]:
    """What ``compile_spec`` needs; ``kv_dtype``: int8, uint8 (e4m3) or None (that of qkv)."""
    quant = 0 if kv_dtype is None else _CODES[kv_dtype]
    types = {"qkv_ptr": pointer(dtype), "cos_ptr": pointer(dtype), "sin_ptr": pointer(dtype), "slots_ptr": pointer(torch.int64)}
    types["pool_ptr"] = pointer(kv_dtype or dtype)
    constants: dict[str, object] = dict(_constants(heads, kv_heads, head_dim, True, quant))
    if quant:
        types["scales_ptr"] = pointer(torch.bfloat16)
    else:
        constants["scales_ptr"] = None
    aligned = (*types, "stride_t")
    types |= dict.fromkeys(("stride_t", "stride_c", "stride_s"), TYPE_NAMES[torch.int32])
    return [CompileSpec(kv_write_kernel, types, constants, 4, 2, aligned)]
