"""FlashAttention-2, forward (Dao, arXiv 2307.08691, algorithm 1): launch and kernel.

A program takes one tile of query rows of one head of one request and goes over the tiles of K and V that it may see, keeping for
each row the running maximum m and sum total of the softmax and the accumulator. Tiles that causality or the window hides wholly are
never loaded; only those that are hidden in part are masked.

Shapes: T rows in the batch, B requests, H query heads, K KV heads, D head size, S rows of keys.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.checks import (
    FLOATS,
    check_block_tables,
    check_group,
    check_offsets,
    check_power_of_two,
    check_runs_here,
    check_tensor,
    on_device,
    wants_values,
)
from engine.kernels.compiling import TYPE_NAMES, CompileSpec, pointer
from engine.kernels.device import INTERPRETED, LN_2, LOG2_E, NEG_INF, dot, load_rows, narrow, online_softmax, table_slots
from engine.kernels.flash_attention.schedule import FlashConfig, check_head_dim, default_config
from engine.kernels.trace_device import clock, of_row, record, timer
from engine.kernels.tracing import TraceBuffer

# float64 is for tests of the gradient: under the interpreter, or slowly.
DTYPES = (*FLOATS, torch.float64)


@triton.jit
def _attend(
    acc, m, total, q, position, start, stop, end, k_ptr, v_ptr, table_ptr, base, stride_kv, num_blocks, scale,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
    TRACE: tl.constexpr, trace_ptr, TRACE_CAPACITY: tl.constexpr, TRACE_STANDARD: tl.constexpr, trace_q, trace_rows, trace_row,
):  # fmt: skip
    """Go over the keys start .. stop - 1. ``end``: the first key that no row of the tile sees; it and those after it are not read."""
    for n_start in range(start, stop, BLOCK_N):
        if TRACE:
            clock_start, time_start = clock(), timer()
        n = n_start + tl.arange(0, BLOCK_N)
        if BLOCK_SIZE:
            slots = table_slots(table_ptr, n, n < end, num_blocks, BLOCK_SIZE)
        else:
            slots = base + n
        k = load_rows(k_ptr, slots, stride_kv, n < end, HEAD_DIM, BLOCK_D, MASKED)
        s = dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], acc.dtype))
        if MASKED:
            seen = n[None, :] < end
            if CAUSAL:
                seen = seen & (n[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (n[None, :] > position[:, None] - WINDOW)
            s = tl.where(seen, s, NEG_INF)
        p, m, total, alpha = online_softmax(s, m, total, scale)
        v = load_rows(v_ptr, slots, stride_kv, n < end, HEAD_DIM, BLOCK_D, MASKED)
        acc = dot(narrow(p, v.dtype), v, acc * alpha[:, None])
        if TRACE:
            trace_keys = tl.minimum(BLOCK_N, end - n_start)
            trace_bytes = 2 * trace_keys * HEAD_DIM * (k_ptr.dtype.element_ty.primitive_bitwidth // 8)
            trace_stored = trace_keys * 0
            if TRACE_STANDARD:  # S is written and read, P is written and read
                trace_stored = 2 * trace_rows * trace_keys * (q.dtype.primitive_bitwidth // 8)
                trace_bytes += trace_stored
            record(
                trace_ptr, TRACE_CAPACITY, 0, trace_q, trace_rows, n_start, trace_keys, of_row(m, trace_row), of_row(total, trace_row),
                trace_bytes, trace_stored, MASKED, clock_start, time_start,
            )  # fmt: skip
    return acc, m, total


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "table_stride"])
def flash_attention_kernel(
    q_ptr,  # [T, H, D], token stride stride_q, head stride stride_qh
    k_ptr,  # [S, K, D], row stride stride_kv, head stride D. Paged: the pool [slots, 2 K, D]
    v_ptr,  # likewise. Paged: the pool from its first V on
    out_ptr,  # [T, H, D]
    lse_ptr,  # float32 (float64) [H, T]: natural log-sum-exp of the scaled logits
    cu_q_ptr,  # int32 [B + 1]: first row of each request in q
    cu_k_ptr,  # int32 [B + 1]: first row of each request in k and v; None where paged
    seq_lens_ptr,  # int32 [B]: keys of each request; None where not paged
    table_ptr,  # int32 [B, table_stride]: block tables; None where not paged
    trace_ptr,  # int64 [1 + TRACE_CAPACITY, 18]; None where not traced
    stride_q, stride_qh, stride_kv, num_tokens, num_blocks, table_stride,
    SCALE: tl.constexpr,  # of the logits, times log2(e)
    GROUP: tl.constexpr,  # H / K
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM padded to a power of two
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # tokens of a block; 0: not paged
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,  # keys that a query sees, itself included; 0: all
    ACC: tl.constexpr,  # dtype of the arithmetic
    TRACE: tl.constexpr,
    TRACE_CAPACITY: tl.constexpr,
    TRACE_STANDARD: tl.constexpr,  # no tile is skipped, and what attention that writes its scores would move is counted
    TRACE_ROW: tl.constexpr,  # of each query tile, whose running maximum and sum are recorded
):  # fmt: skip
    if TRACE:
        clock_start, time_start = clock(), timer()
    # The last tiles of a causal sequence are the longest: they go first, so that none is left running alone at the end.
    tile, head, request = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_begin = tl.load(cu_q_ptr + request)
    q_len = tl.load(cu_q_ptr + request + 1) - q_begin
    q_start = tile * BLOCK_M
    if q_start >= q_len:
        return
    if BLOCK_SIZE:
        base = q_begin * 0
        kv_len = tl.load(seq_lens_ptr + request)
        tables = table_ptr + request.to(tl.int64) * table_stride
    else:
        base = tl.load(cu_k_ptr + request)
        kv_len = tl.load(cu_k_ptr + request + 1) - base
        tables = table_ptr

    rows = q_start + tl.arange(0, BLOCK_M)
    inside = rows < q_len
    tokens = (q_begin + rows).to(tl.int64)
    q = load_rows(q_ptr + head * stride_qh, tokens, stride_q, inside, HEAD_DIM, BLOCK_D, True)
    position = rows + (kv_len - q_len)
    first = q_start + kv_len - q_len
    last = tl.minimum(q_start + BLOCK_M, q_len) - 1 + kv_len - q_len

    # Keys start .. stop - 1 are seen by some row; of these, full_start .. full_stop - 1 by every row, in whole tiles.
    stop, full_stop = kv_len, kv_len
    if CAUSAL:
        stop = tl.maximum(tl.minimum(kv_len, last + 1), 0)
        full_stop = tl.maximum(tl.minimum(kv_len, first + 1), 0)
    start, full_start = q_start * 0, q_start * 0
    if WINDOW:
        start = tl.minimum(tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N, stop)
        full_start = tl.minimum(tl.cdiv(tl.maximum(last - WINDOW + 1, 0), BLOCK_N) * BLOCK_N, stop)
    full_stop = tl.maximum(full_stop // BLOCK_N * BLOCK_N, full_start)
    if TRACE:  # noqa: SIM102
        if TRACE_STANDARD:
            start, full_start, full_stop, stop = q_start * 0, q_start * 0, q_start * 0, kv_len

    m = tl.full([BLOCK_M], float("-inf"), ACC)
    total = tl.zeros([BLOCK_M], ACC)
    acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    scale = tl.full([], SCALE, ACC)
    kv_head = (head // GROUP) * HEAD_DIM
    trace_rows = tl.minimum(BLOCK_M, q_len - q_start)
    trace_row = tl.minimum(TRACE_ROW, trace_rows - 1)
    if WINDOW:
        acc, m, total = _attend(
            acc, m, total, q, position, start, full_start, stop, k_ptr + kv_head, v_ptr + kv_head, tables, base.to(tl.int64), stride_kv,
            num_blocks, scale, BLOCK_N, HEAD_DIM, BLOCK_D, BLOCK_SIZE, CAUSAL, WINDOW, True,
            TRACE, trace_ptr, TRACE_CAPACITY, TRACE_STANDARD, q_start, trace_rows, trace_row,
        )  # fmt: skip
    acc, m, total = _attend(
        acc, m, total, q, position, full_start, full_stop, stop, k_ptr + kv_head, v_ptr + kv_head, tables, base.to(tl.int64), stride_kv,
        num_blocks, scale, BLOCK_N, HEAD_DIM, BLOCK_D, BLOCK_SIZE, CAUSAL, WINDOW, False,
        TRACE, trace_ptr, TRACE_CAPACITY, TRACE_STANDARD, q_start, trace_rows, trace_row,
    )  # fmt: skip
    acc, m, total = _attend(
        acc, m, total, q, position, full_stop, stop, stop, k_ptr + kv_head, v_ptr + kv_head, tables, base.to(tl.int64), stride_kv,
        num_blocks, scale, BLOCK_N, HEAD_DIM, BLOCK_D, BLOCK_SIZE, CAUSAL, WINDOW, True,
        TRACE, trace_ptr, TRACE_CAPACITY, TRACE_STANDARD, q_start, trace_rows, trace_row,
    )  # fmt: skip

    out = narrow(acc / tl.where(total == 0, 1.0, total)[:, None], out_ptr.dtype.element_ty)  # a row that sees nothing: 0
    lse = (m + tl.log2(tl.where(total == 0, 1.0, total))) * LN_2  # m is -inf where total is 0
    d = tl.arange(0, BLOCK_D)
    at = out_ptr + (tokens[:, None] * tl.num_programs(1) + head) * HEAD_DIM + d[None, :]
    tl.store(at, out, mask=inside[:, None] & (d[None, :] < HEAD_DIM))
    tl.store(lse_ptr + head.to(tl.int64) * num_tokens + tokens, lse, mask=inside)
    if TRACE:
        trace_bytes = trace_rows * HEAD_DIM * (q_ptr.dtype.element_ty.primitive_bitwidth // 8)
        trace_stored = trace_rows * (
            HEAD_DIM * (out_ptr.dtype.element_ty.primitive_bitwidth // 8) + lse_ptr.dtype.element_ty.primitive_bitwidth // 8
        )
        record(
            trace_ptr, TRACE_CAPACITY, 1, q_start, trace_rows, start, tl.maximum(stop - start, 0), of_row(m, trace_row),
            of_row(total, trace_row), trace_bytes, trace_stored, 0, clock_start, time_start,
        )  # fmt: skip


def flash_attention(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    max_seqlen_q: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    config: FlashConfig | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    trace: TraceBuffer | None = None,
    validate: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed queries over the paged pool; the last query of a request is aligned with its last key.

    q [T, H, D], its last dimension contiguous; kv_pool [slots, 2 K, D] in the dtype of q: of a token the K of all heads, then the V,
    at slot = block * block_size + offset; block_tables int32 [B, max_blocks]; cu_seqlens_q int32 [B + 1]; seq_lens int32 [B]: keys of
    each request, its new ones included. max_seqlen_q: most rows of a request (None: looked up, which waits for the device); window: a
    query sees its position and the ``window - 1`` before it; trace: filled with the tile schedule; validate: look at the values of the
    tables and lengths (None: on the CPU).

    Returns out [T, H, D] and the log-sum-exp float32 [H, T] of the scaled logits: 0 and -inf for a row that sees nothing. ValueError
    for what does not fit, RuntimeError for CPU tensors without the interpreter.
    """
    check_tensor("q", q, (None, None, None), FLOATS, dense=False)
    check_tensor("kv_pool", kv_pool, (None, None, q.shape[2]), (q.dtype,), q)
    if kv_pool.shape[1] % 2:
        raise ValueError(f"kv_pool must hold K and V of each head, [slots, 2 K, D], got {list(kv_pool.shape)}")
    check_power_of_two("block_size", block_size, 1, 1024)
    requests = len(seq_lens)
    check_tensor("seq_lens", seq_lens, (None,), (torch.int32,), q)
    check_tensor("block_tables", block_tables, (requests, None), (torch.int32,), q)
    check_tensor("cu_seqlens_q", cu_seqlens_q, (requests + 1,), (torch.int32,), q)
    num_blocks = kv_pool.shape[0] // block_size
    if wants_values(q, validate):
        check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0])
        check_block_tables(block_tables, seq_lens, block_size, num_blocks)
    kv_heads = kv_pool.shape[1] // 2
    pools = (kv_pool, kv_pool[:, kv_heads:])
    paged = (None, seq_lens, block_tables, block_size, num_blocks, block_tables.stride(0))
    return _launch(q, *pools, kv_heads, cu_seqlens_q, paged, max_seqlen_q, scale, causal, window, config, out, lse, trace)


def flash_attention_varlen(
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
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    trace: TraceBuffer | None = None,
    validate: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flash_attention`` over K and V that lie one request after another: k, v [S, K, D], cu_seqlens_k int32 [B + 1]. float64 too."""
    check_tensor("q", q, (None, None, None), DTYPES, dense=False)
    check_tensor("k", k, (None, None, q.shape[2]), (q.dtype,), q)
    check_tensor("v", v, k.shape, (q.dtype,), q)
    check_tensor("cu_seqlens_q", cu_seqlens_q, (None,), (torch.int32,), q)
    check_tensor("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, (torch.int32,), q)
    if wants_values(q, validate):
        check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0])
        check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0])
    varlen = (cu_seqlens_k, None, None, 0, 0, 0)
    return _launch(q, k, v, k.shape[1], cu_seqlens_q, varlen, max_seqlen_q, scale, causal, window, config, out, lse, trace)


def check_options(scale: float | None, head_dim: int, window: int | None) -> float:
    """The scale of the logits. ValueError for a scale that is not positive, a window that sees nothing."""
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    if not 0 < scale < math.inf:  # the running maximum is taken before scaling
        raise ValueError(f"scale must be a positive number, got {scale!r}")
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be None or an integer >= 1, got {window!r}")
    return scale


def _launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_heads: int, cu_seqlens_q: torch.Tensor, keys: tuple[Any, ...],
    max_seqlen_q: int | None, scale: float | None, causal: bool, window: int | None, config: FlashConfig | None,
    out: torch.Tensor | None, lse: torch.Tensor | None, trace: TraceBuffer | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """``keys``: cu_seqlens_k, seq_lens, block_tables, block_size, num_blocks, stride of the tables."""
    tokens, heads, head_dim = q.shape
    block_d = check_head_dim(head_dim)
    group = check_group(heads, kv_heads)
    scale = check_options(scale, head_dim, window)
    check_runs_here(q, bool(INTERPRETED.value))
    requests = len(cu_seqlens_q) - 1
    if max_seqlen_q is None:
        max_seqlen_q = int(cu_seqlens_q.diff().max()) if requests else 0
    config = (config or default_config(head_dim, q.dtype, max_seqlen_q)).check()
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse = torch.empty(heads, tokens, dtype=acc, device=q.device) if lse is None else lse
    check_tensor("out", out, (tokens, heads, head_dim), (q.dtype,), q)
    check_tensor("lse", lse, (heads, tokens), (acc,), q)
    cu_seqlens_k, seq_lens, block_tables, block_size, num_blocks, table_stride = keys
    grid = (-(-max_seqlen_q // config.block_m), heads, requests)
    if 0 in grid:
        return out, lse
    if requests > 65535:
        raise ValueError(f"at most 65,535 requests fit a launch, got {requests:,}")
    constants = _constants(config, head_dim, block_d, group, scale, q.dtype, block_size, causal, window, trace)
    with on_device(q):
        flash_attention_kernel[grid](
            q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seq_lens, block_tables, None if trace is None else trace.tensor,
            q.stride(0), q.stride(1), k.stride(0), tokens, num_blocks, table_stride,
            **constants, num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out, lse


def _constants(
    config: FlashConfig, head_dim: int, block_d: int, group: int, scale: float, dtype: torch.dtype, block_size: int, causal: bool,
    window: int | None, trace: TraceBuffer | None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "SCALE": scale * LOG2_E.value,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_SIZE": block_size,
        "CAUSAL": bool(causal),
        "WINDOW": window or 0,
        "ACC": tl.float64 if dtype == torch.float64 else tl.float32,
        "TRACE": trace is not None,
        "TRACE_CAPACITY": 0 if trace is None else trace.capacity,
        "TRACE_STANDARD": trace is not None and trace.standard,
        "TRACE_ROW": 0 if trace is None else trace.row,
    }


def forward_spec(
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    *,
    group: int = 1,
    block_size: int = 16,
    causal: bool = True,
    window: int | None = None,
    config: FlashConfig | None = None,
    trace: TraceBuffer | None = None,
    kernel: Any = None,
) -> CompileSpec:
    """What ``compile_spec`` needs for the forward kernel as a launch would compile it; ``block_size`` 0: not paged."""
    block_d = check_head_dim(head_dim)
    config = (config or default_config(head_dim, dtype)).check()
    constants = _constants(config, head_dim, block_d, group, check_options(None, head_dim, window), dtype, block_size, causal, window, trace)  # fmt: skip
    data = pointer(dtype)
    index = pointer(torch.int32)
    types = {"q_ptr": data, "k_ptr": data, "v_ptr": data, "out_ptr": data, "lse_ptr": pointer(torch.float32), "cu_q_ptr": index}
    absent = ["cu_k_ptr"] if block_size else ["seq_lens_ptr", "table_ptr"]
    types |= {"seq_lens_ptr": index, "table_ptr": index} if block_size else {"cu_k_ptr": index}
    if trace is None:
        absent.append("trace_ptr")
    else:
        types["trace_ptr"] = pointer(torch.int64)
    aligned = (*(name for name in types), "stride_q", "stride_qh", "stride_kv")
    types |= dict.fromkeys(
        ("stride_q", "stride_qh", "stride_kv", "num_tokens", "num_blocks", "table_stride"), TYPE_NAMES[torch.int32]
    )
    constants |= dict.fromkeys(absent)
    return CompileSpec(kernel or flash_attention_kernel, types, constants, config.num_warps, config.num_stages, aligned)
