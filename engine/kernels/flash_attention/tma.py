"""FlashAttention-2's forward pass with tensor descriptors: K and V tiles come by the tensor memory accelerator (TMA) of sm_90 and later.

The same tiles and the same arithmetic as ``triton.py``; what differs is who copies. There each thread computes addresses and issues
cp.async for a few bytes of a tile; here one thread names a tile (descriptor and corner), and the accelerator copies all of it into
shared memory, in the layout that the tensor cores want, and fills with zeros what lies beyond the edge: no masks, no address
registers. A descriptor describes a rectangle, so this is for K and V that lie one request after another; through a block table each
block would be a copy of its own, for which blocks of 16 tokens are small.

This is one of three things that FlashAttention-3 (Shah et al., arXiv 2407.08608) adds for this generation. The second, warps that only
copy and warps that only compute, handing tiles over through barriers (section 3.1), and two groups of warps in turn, so that one's
softmax runs while the other's products do: Triton's compiler overlaps the copies with the products by its software pipeline instead,
and on sm_90 leaves softmax and products of a warp in order. The third, 8-bit products with scales a block (section 3.3), is not here.

Shapes: T rows in the batch, B requests, H query heads, K KV heads, D head size, S rows of keys.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, check_group, check_offsets, check_runs_here, check_tensor, on_device, wants_values
from engine.kernels.compiling import TYPE_NAMES, CompileSpec, pointer
from engine.kernels.device import INTERPRETED, LN_2, LOG2_E, NEG_INF, dot, load_rows, narrow, online_softmax
from engine.kernels.flash_attention.schedule import FlashConfig, check_head_dim, default_config
from engine.kernels.flash_attention.triton import check_options

_TMA_BYTES = 16  # a row of a descriptor begins at a multiple of this


@triton.jit
def _attend(
    acc, m, total, q, position, start, stop, end, k_tiles, v_tiles, scale,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Go over the keys start .. stop - 1; rows from ``end`` on are zeros to the descriptors of a request's last tile, and masked."""
    for n_start in tl.range(start, stop, BLOCK_N):
        k = k_tiles.load([n_start, 0])
        s = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], acc.dtype))
        if MASKED:
            n = n_start + tl.arange(0, BLOCK_N)
            seen = n[None, :] < end
            if CAUSAL:
                seen = seen & (n[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            s = tl.where(seen, s, NEG_INF)
        p, m, total, alpha = online_softmax(s, m, total, scale)
        v = v_tiles.load([n_start, 0])
        acc = dot(narrow(p, v.dtype), v, acc * alpha[:, None])
    return acc, m, total


@triton.jit(do_not_specialize=["num_tokens"])
def flash_attention_tma_kernel(
    q_ptr,  # [T, H, D], token stride stride_q, head stride stride_qh
    k_ptr,  # [S, K, D], contiguous
    v_ptr,  # likewise
    out_ptr,  # [T, H, D]
    lse_ptr,  # float32 [H, T]: natural log-sum-exp of the scaled logits
    cu_q_ptr,  # int32 [B + 1]
    cu_k_ptr,  # int32 [B + 1]
    stride_q, stride_qh, stride_kv, num_tokens,
    SCALE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    tile, head, request = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_begin = tl.load(cu_q_ptr + request)
    q_len = tl.load(cu_q_ptr + request + 1) - q_begin
    q_start = tile * BLOCK_M
    if q_start >= q_len:
        return
    base = tl.load(cu_k_ptr + request)
    kv_len = tl.load(cu_k_ptr + request + 1) - base
    at = base.to(tl.int64) * stride_kv + (head // GROUP) * HEAD_DIM
    k_tiles = tl.make_tensor_descriptor(k_ptr + at, [kv_len, HEAD_DIM], [stride_kv, 1], [BLOCK_N, BLOCK_D])
    v_tiles = tl.make_tensor_descriptor(v_ptr + at, [kv_len, HEAD_DIM], [stride_kv, 1], [BLOCK_N, BLOCK_D])

    rows = q_start + tl.arange(0, BLOCK_M)
    inside = rows < q_len
    tokens = (q_begin + rows).to(tl.int64)
    q = load_rows(q_ptr + head * stride_qh, tokens, stride_q, inside, HEAD_DIM, BLOCK_D, True)
    position = rows + (kv_len - q_len)
    first = q_start + kv_len - q_len
    last = tl.minimum(q_start + BLOCK_M, q_len) - 1 + kv_len - q_len
    stop, full_stop = kv_len, kv_len
    if CAUSAL:
        stop = tl.maximum(tl.minimum(kv_len, last + 1), 0)
        full_stop = tl.maximum(tl.minimum(kv_len, first + 1), 0)
    start, full_start = q_start * 0, q_start * 0
    if WINDOW:
        start = tl.minimum(tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N, stop)
        full_start = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N, stop)
    full_stop = tl.maximum(full_stop // BLOCK_N * BLOCK_N, full_start)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale = tl.full([], SCALE, tl.float32)
    if WINDOW:
        acc, m, total = _attend(
            acc, m, total, q, position, start, full_start, stop, k_tiles, v_tiles, scale, BLOCK_N, CAUSAL, WINDOW, True
        )
    acc, m, total = _attend(
        acc, m, total, q, position, full_start, full_stop, stop, k_tiles, v_tiles, scale, BLOCK_N, CAUSAL, WINDOW, False
    )
    acc, m, total = _attend(
        acc, m, total, q, position, full_stop, stop, stop, k_tiles, v_tiles, scale, BLOCK_N, CAUSAL, WINDOW, True
    )
    out = narrow(acc / tl.where(total == 0, 1.0, total)[:, None], out_ptr.dtype.element_ty)
    lse = (m + tl.log2(tl.where(total == 0, 1.0, total))) * LN_2
    d = tl.arange(0, BLOCK_D)
    to = out_ptr + (tokens[:, None] * tl.num_programs(1) + head) * HEAD_DIM + d[None, :]
    tl.store(to, out, mask=inside[:, None] & (d[None, :] < HEAD_DIM))
    tl.store(lse_ptr + head.to(tl.int64) * num_tokens + tokens, lse, mask=inside)


def flash_attention_tma(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    config: FlashConfig | None = None,
    validate: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flash_attention_varlen`` by tensor descriptors: q [T, H, D], k and v [S, K, D], contiguous; cu_seqlens int32 [B + 1].

    Returns the output [T, H, D] and the log-sum-exp float32 [H, T]. ValueError for what does not fit, or a GPU before sm_90.
    """
    check_tensor("q", q, (None, None, None), FLOATS, dense=False)
    check_tensor("k", k, (None, None, q.shape[2]), (q.dtype,), q)
    check_tensor("v", v, k.shape, (q.dtype,), q)
    check_tensor("cu_seqlens_q", cu_seqlens_q, (None,), (torch.int32,), q)
    check_tensor("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, (torch.int32,), q)
    tokens, heads, head_dim = q.shape
    block_d, group = check_head_dim(head_dim), check_group(heads, k.shape[1])
    scale = check_options(scale, head_dim, window)
    if k.data_ptr() % _TMA_BYTES or v.data_ptr() % _TMA_BYTES:
        raise ValueError(f"k and v must begin at a multiple of {_TMA_BYTES} bytes, as descriptors want it")
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < (9, 0):
        raise ValueError("tensor descriptors need a GPU from sm_90 on: flash_attention_varlen runs on this one")
    if wants_values(q, validate):
        check_offsets("cu_seqlens_q", cu_seqlens_q, tokens)
        check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    check_runs_here(q, bool(INTERPRETED.value))
    requests = len(cu_seqlens_q) - 1
    if max_seqlen_q is None:
        max_seqlen_q = int(cu_seqlens_q.diff().max()) if requests else 0
    config = (config or default_config(head_dim, q.dtype, max_seqlen_q)).check()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=q.device)
    grid = (-(-max_seqlen_q // config.block_m), heads, requests)
    if 0 in grid:
        return out, lse
    if q.is_cuda:  # descriptors are written by the kernel into memory that is asked for at the launch
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=q.device))
    with on_device(q):
        flash_attention_tma_kernel[grid](
            q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, q.stride(0), q.stride(1), k.stride(0), tokens,
            **_constants(config, head_dim, block_d, group, scale, causal, window), num_warps=config.num_warps,
            num_stages=config.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out, lse


def _constants(
    config: FlashConfig, head_dim: int, block_d: int, group: int, scale: float, causal: bool, window: int | None
) -> dict[str, Any]:
    return {
        "SCALE": scale * LOG2_E.value,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CAUSAL": bool(causal),
        "WINDOW": window or 0,
    }


def tma_spec(
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: int = 1,
    causal: bool = True,
    window: int | None = None,
    config: FlashConfig | None = None,
) -> CompileSpec:
    """What ``compile_spec`` needs; beside it, ``forward_spec(block_size=0)`` is the kernel that does without descriptors."""
    block_d = check_head_dim(head_dim)
    config = (config or default_config(head_dim, dtype)).check()
    constants = _constants(config, head_dim, block_d, group, check_options(None, head_dim, window), causal, window)
    data, index = pointer(dtype), pointer(torch.int32)
    types = {"q_ptr": data, "k_ptr": data, "v_ptr": data, "out_ptr": data, "lse_ptr": pointer(torch.float32)}
    types |= {"cu_q_ptr": index, "cu_k_ptr": index}
    aligned = (*types, "stride_q", "stride_qh", "stride_kv")
    types |= dict.fromkeys(("stride_q", "stride_qh", "stride_kv", "num_tokens"), TYPE_NAMES[torch.int32])
    return CompileSpec(flash_attention_tma_kernel, types, constants, config.num_warps, config.num_stages, aligned)
