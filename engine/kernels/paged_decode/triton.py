"""Decode attention, split over the context: launch and kernels.

A program takes all new tokens of a request, all query heads of one KV head, and one part of the context: K and V are read once for all
of them (grouped-query attention makes one token's heads a matrix). Parts are merged by their log-sum-exps, which is exact
(Flash-Decoding, Dao, Haziza, Massa and Sizov, 2023).

Shapes: T new tokens of B requests, H query heads, K KV heads, D head size, S parts.
"""

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
from engine.kernels.device import (
    INTERPRETED,
    LN_2,
    LOG2_E,
    NEG_INF,
    dot,
    load_rows,
    narrow,
    online_softmax,
    table_slots,
    widen,
)
from engine.kernels.flash_attention.schedule import check_head_dim
from engine.kernels.flash_attention.triton import check_options
from engine.kernels.paged_decode.merge import check_splits, merge_splits
from engine.kernels.paged_decode.splits import MAX_ROWS, DecodeConfig, choose_splits
from engine.kernels.trace_device import clock, of_row, record, timer
from engine.kernels.tracing import TraceBuffer

CODES = {torch.int8: 1, torch.uint8: 2}  # QUANT: int8, e4m3 by its bits
_SCALES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _attend(
    acc, m, total, q, begin, token, own, bits, start, stop, end, context, pool_ptr, scales_ptr, tables, positions_ptr, num_blocks, scale,
    kv_head, kv_heads,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    TREE: tl.constexpr, QUANT: tl.constexpr, MASKED: tl.constexpr,
    TRACE: tl.constexpr, trace_ptr, TRACE_CAPACITY: tl.constexpr, trace_rows, trace_row,
):  # fmt: skip
    """Go over the keys start .. stop - 1 of a part. ``end``: keys of the request; ``context``: those before its new tokens."""
    for n_start in range(start, stop, BLOCK_N):
        if TRACE:
            clock_start, time_start = clock(), timer()
        n = n_start + tl.arange(0, BLOCK_N)
        valid = n < end
        slots = table_slots(tables, n, valid, num_blocks, BLOCK_SIZE)
        stride = 2 * kv_heads * HEAD_DIM
        k = load_rows(pool_ptr + kv_head * HEAD_DIM, slots, stride, valid, HEAD_DIM, BLOCK_D, MASKED)
        s = dot(q, tl.trans(widen(k, QUANT, q.dtype)), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
        if QUANT:
            s = s * tl.load(scales_ptr + slots * 2 * kv_heads + kv_head, mask=valid, other=0.0).to(tl.float32)[None, :]
        if MASKED:
            if TREE:
                new = n - context
                stored = (bits[:, None] >> tl.minimum(tl.maximum(new, 0), 63).to(tl.int64)[None, :]) & 1
                seen = valid[None, :] & ((new < 0)[None, :] | (stored == 1))
            else:
                seen = valid[None, :] & (n[None, :] <= context + token[:, None])
            if WINDOW:
                at = n
                if TREE:
                    at = tl.where(
                        n < context, n, tl.load(positions_ptr + begin + n - context, mask=valid & (n >= context), other=0)
                    )
                seen = seen & (at[None, :] > own[:, None] - WINDOW)
            s = tl.where(seen, s, NEG_INF)
        p, m, total, alpha = online_softmax(s, m, total, scale)
        v = load_rows(pool_ptr + (kv_heads + kv_head) * HEAD_DIM, slots, stride, valid, HEAD_DIM, BLOCK_D, MASKED)
        if QUANT:
            p = p * tl.load(scales_ptr + slots * 2 * kv_heads + kv_heads + kv_head, mask=valid, other=0.0).to(tl.float32)[None, :]
        acc = dot(narrow(p, q.dtype), widen(v, QUANT, q.dtype), acc * alpha[:, None])
        if TRACE:
            trace_keys = tl.minimum(BLOCK_N, end - n_start)
            trace_bytes = 2 * trace_keys * HEAD_DIM * (pool_ptr.dtype.element_ty.primitive_bitwidth // 8)
            if QUANT:
                trace_bytes += 2 * trace_keys * (scales_ptr.dtype.element_ty.primitive_bitwidth // 8)
            record(
                trace_ptr, TRACE_CAPACITY, 0, 0, trace_rows, n_start, trace_keys, of_row(m, trace_row), of_row(total, trace_row),
                trace_bytes, 0, MASKED, clock_start, time_start,
            )  # fmt: skip
    return acc, m, total


@triton.jit(do_not_specialize=["num_tokens", "num_blocks", "table_stride"])
def decode_kernel(
    q_ptr,  # [T, H, D], token stride stride_q, head stride stride_qh
    pool_ptr,  # [slots, 2 K, D], numbers or codes
    scales_ptr,  # [slots, 2 K]; None where the pool holds numbers
    out_ptr,  # S = 1: [T, H, D]; else float32 [S, T, H, D]
    lse_ptr,  # float32 [H, T] or [S, H, T]
    cu_q_ptr,  # int32 [B + 1]
    seq_lens_ptr,  # int32 [B]
    table_ptr,  # int32 [B, table_stride]
    tree_ptr,  # int64 [T]: which new tokens of its request each sees; None: chains
    positions_ptr,  # int32 [T]; None without a tree or a window
    trace_ptr,  # int64 [1 + TRACE_CAPACITY, 18]; None where not traced
    stride_q, stride_qh, num_tokens, num_blocks, table_stride,
    SPLITS: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows: new tokens times GROUP, padded
    BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    TREE: tl.constexpr,
    QUANT: tl.constexpr,  # 0: numbers, 1: int8, 2: e4m3
    TRACE: tl.constexpr, TRACE_CAPACITY: tl.constexpr, TRACE_ROW: tl.constexpr,
):  # fmt: skip
    if TRACE:
        clock_start, time_start = clock(), timer()
    split, kv_head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads = tl.num_programs(1)
    begin = tl.load(cu_q_ptr + request)
    new = tl.load(cu_q_ptr + request + 1) - begin
    if new <= 0:
        return
    length = tl.load(seq_lens_ptr + request)
    context = length - new  # negative where there are more queries than keys: the first ones see nothing
    tables = table_ptr + request.to(tl.int64) * table_stride

    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    inside = token < new
    head = kv_head * GROUP + row % GROUP
    tokens = (begin + token).to(tl.int64)
    q_at = tokens * stride_q + head * stride_qh
    q = load_rows(q_ptr, q_at, 1, inside, HEAD_DIM, BLOCK_D, True)
    own = context + token
    bits = tokens * 0
    if TREE:
        bits = tl.load(tree_ptr + tokens, mask=inside, other=0)
        if WINDOW:
            own = tl.load(positions_ptr + tokens, mask=inside, other=0)

    first = split * 0
    if WINDOW:
        first = tl.maximum(context - WINDOW + 1, 0) // BLOCK_N
    each = tl.cdiv(tl.maximum(tl.cdiv(length, BLOCK_N) - first, 0), SPLITS)
    start = tl.minimum((first + split * each) * BLOCK_N, length)
    stop = tl.minimum((first + (split + 1) * each) * BLOCK_N, length)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    scale = tl.full([], SCALE, tl.float32)
    trace_row = tl.minimum(TRACE_ROW, new * GROUP - 1)
    full_stop = start
    if not WINDOW:  # the context is seen by every row
        full_stop = tl.maximum(tl.minimum(tl.maximum(context, 0) // BLOCK_N * BLOCK_N, stop), start)
        acc, m, total = _attend(
            acc, m, total, q, begin, token, own, bits, start, full_stop, length, context, pool_ptr, scales_ptr, tables, positions_ptr,
            num_blocks, scale, kv_head, kv_heads, BLOCK_N, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW, TREE, QUANT, False,
            TRACE, trace_ptr, TRACE_CAPACITY, new, trace_row,
        )  # fmt: skip
    acc, m, total = _attend(
        acc, m, total, q, begin, token, own, bits, full_stop, stop, length, context, pool_ptr, scales_ptr, tables, positions_ptr,
        num_blocks, scale, kv_head, kv_heads, BLOCK_N, HEAD_DIM, BLOCK_D, BLOCK_SIZE, WINDOW, TREE, QUANT, True,
        TRACE, trace_ptr, TRACE_CAPACITY, new, trace_row,
    )  # fmt: skip

    out = narrow(acc / tl.where(total == 0, 1.0, total)[:, None], out_ptr.dtype.element_ty)
    lse = (m + tl.log2(tl.where(total == 0, 1.0, total))) * LN_2  # m is -inf where total is 0
    d = tl.arange(0, BLOCK_D)
    heads = kv_heads * GROUP
    part = split.to(tl.int64) * num_tokens
    at = ((part + tokens) * heads + head) * HEAD_DIM
    tl.store(out_ptr + at[:, None] + d[None, :], out, mask=inside[:, None] & (d[None, :] < HEAD_DIM))
    tl.store(lse_ptr + part * heads + head * num_tokens + tokens, lse, mask=inside)
    if TRACE:
        trace_bytes = new * GROUP * HEAD_DIM * (q_ptr.dtype.element_ty.primitive_bitwidth // 8)
        trace_stored = new * GROUP * (HEAD_DIM * (out_ptr.dtype.element_ty.primitive_bitwidth // 8) + 4)
        record(
            trace_ptr, TRACE_CAPACITY, 1, 0, new, start, tl.maximum(stop - start, 0), of_row(m, trace_row), of_row(total, trace_row),
            trace_bytes, trace_stored, 0, clock_start, time_start,
        )  # fmt: skip


def paged_decode(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    max_seqlen_q: int | None = None,
    max_seq_len: int | None = None,
    num_splits: int | None = None,
    num_sms: int | None = None,
    kv_scales: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    tree: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
    out: torch.Tensor | None = None,
    trace: TraceBuffer | None = None,
    validate: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the newest tokens of each request over its whole context, causal among them or along a tree.

    q [T, H, D], its last dimension contiguous, at most 128 / (H / K) rows of a request; kv_pool [slots, 2 K, D] in the dtype of q, or
    int8 codes, or uint8 codes of float8_e4m3fn with kv_scales [slots, 2 K] (bfloat16, float16 or float32): code * scale; block_tables
    int32 [B, max_blocks]; cu_seqlens_q int32 [B + 1]; seq_lens int32 [B]: keys, the new ones included. max_seqlen_q, max_seq_len: the
    most rows and keys of a request (None: looked up, which waits for the device); num_splits: parts of the context (None:
    ``choose_splits`` for ``num_sms`` multiprocessors, None: those of the device). tree int64 [T] (``tree_bits`` of each request): which
    new tokens each sees, all of the context besides; positions int32 [T]: where each stands in its own sequence, needed by a window over
    a tree. validate: look at the values of tables and lengths (None: on the CPU).

    Returns out [T, H, D] and the log-sum-exp float32 [H, T]: 0 and -inf for a row that sees nothing. ValueError for what does not fit.
    """
    run = _prepare(
        q, kv_pool, block_tables, cu_seqlens_q, seq_lens, block_size, max_seqlen_q, kv_scales, scale, window, tree, positions, config,
        trace, validate,
    )  # fmt: skip
    requests, kv_heads = len(seq_lens), kv_pool.shape[1] // 2
    config = (config or DecodeConfig()).check()
    if num_splits is None:
        if max_seq_len is None:
            max_seq_len = int(seq_lens.max()) if requests else 0
        if num_sms is None:
            num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        context = max_seq_len if window is None else min(max_seq_len, window + run.max_seqlen_q)
        num_splits = choose_splits(max(requests, 1), kv_heads, context, num_sms, config.block_n)
    check_splits(num_splits)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    check_tensor("out", out, q.shape, (q.dtype,), q)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    if num_splits == 1:
        run(out, lse, 1)
        return out, lse
    parts = torch.empty(num_splits, *q.shape, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(num_splits, *lse.shape, dtype=torch.float32, device=q.device)
    run(parts, part_lse, num_splits)
    return merge_splits(parts, part_lse, out, lse)


def paged_decode_partial(
    q: torch.Tensor, kv_pool: torch.Tensor, block_tables: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, *,
    block_size: int, num_splits: int, max_seqlen_q: int | None = None, kv_scales: torch.Tensor | None = None,
    scale: float | None = None, window: int | None = None, tree: torch.Tensor | None = None, positions: torch.Tensor | None = None,
    config: DecodeConfig | None = None, trace: TraceBuffer | None = None, validate: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The parts before they are merged: float32 [S, T, H, D] and their log-sum-exps [S, H, T]. Arguments of ``paged_decode``."""
    run = _prepare(
        q, kv_pool, block_tables, cu_seqlens_q, seq_lens, block_size, max_seqlen_q, kv_scales, scale, window, tree, positions, config,
        trace, validate,
    )  # fmt: skip
    check_splits(num_splits)
    parts = torch.empty(num_splits, *q.shape, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(num_splits, q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    run(parts, part_lse, num_splits)
    return parts, part_lse


class _Run:
    """A decode whose arguments are checked: called with what it writes to and the number of parts."""

    def __init__(self, tensors: tuple[Any, ...], sizes: tuple[Any, ...], constants: dict[str, Any], config: DecodeConfig) -> None:
        self.tensors, self.sizes, self.constants, self.config = tensors, sizes, constants, config
        self.max_seqlen_q = 0

    def __call__(self, out: torch.Tensor, lse: torch.Tensor, splits: int) -> None:
        q, pool, scales, *indices = self.tensors
        requests, kv_heads = indices[0].shape[0] - 1, pool.shape[1] // 2
        if not requests or not self.max_seqlen_q:
            return
        with on_device(q):
            decode_kernel[(splits, kv_heads, requests)](
                q, pool, scales, out, lse, *indices, *self.sizes, SPLITS=splits, **self.constants,
                num_warps=self.config.num_warps, num_stages=self.config.num_stages, enable_fp_fusion=True,
            )  # fmt: skip


def _prepare(
    q: torch.Tensor, kv_pool: torch.Tensor, block_tables: torch.Tensor, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor,
    block_size: int, max_seqlen_q: int | None, kv_scales: torch.Tensor | None, scale: float | None, window: int | None,
    tree: torch.Tensor | None, positions: torch.Tensor | None, config: DecodeConfig | None, trace: TraceBuffer | None,
    validate: bool | None,
) -> _Run:  # fmt: skip
    check_tensor("q", q, (None, None, None), FLOATS, dense=False)
    tokens, heads, head_dim = q.shape
    check_head_dim(head_dim)
    check_tensor("kv_pool", kv_pool, (None, None, head_dim), (q.dtype, *CODES), q)
    if kv_pool.shape[1] % 2:
        raise ValueError(f"kv_pool must hold K and V of each head, [slots, 2 K, D], got {list(kv_pool.shape)}")
    if (kv_scales is not None) != (kv_pool.dtype in CODES):
        raise ValueError(f"int8 and uint8 pools come with kv_scales, others without: got a pool of {kv_pool.dtype}")
    if kv_scales is not None:
        check_tensor("kv_scales", kv_scales, kv_pool.shape[:2], _SCALES, q)
    check_power_of_two("block_size", block_size, 1, 1024)
    requests, index = len(seq_lens), (torch.int32,)
    check_tensor("seq_lens", seq_lens, (None,), index, q)
    check_tensor("block_tables", block_tables, (requests, None), index, q)
    check_tensor("cu_seqlens_q", cu_seqlens_q, (requests + 1,), index, q)
    if tree is not None:
        check_tensor("tree", tree, (tokens,), (torch.int64,), q)
    if positions is not None:
        check_tensor("positions", positions, (tokens,), index, q)
    if window is not None and (tree is None) != (positions is None):
        raise ValueError("a window over a tree needs its positions, and positions only matter there")
    if trace is not None and trace.standard:
        raise ValueError("counting for standard attention is flash_attention's")
    if window is None:
        positions = None
    num_blocks = kv_pool.shape[0] // block_size
    if wants_values(q, validate):
        check_offsets("cu_seqlens_q", cu_seqlens_q, tokens)
        check_block_tables(block_tables, seq_lens, block_size, num_blocks)
    if requests > 65535:
        raise ValueError(f"at most 65,535 requests fit a launch, got {requests:,}")
    group = check_group(heads, kv_pool.shape[1] // 2)
    if max_seqlen_q is None:
        max_seqlen_q = int(cu_seqlens_q.diff().max()) if requests else 0
    if max_seqlen_q * group > MAX_ROWS:
        raise ValueError(
            f"a request may have at most {MAX_ROWS // group} new tokens for {group} query heads to a KV head, got {max_seqlen_q}: "
            "longer ones are flash_attention's"
        )
    check_runs_here(q, bool(INTERPRETED.value))
    config = (config or DecodeConfig()).check()
    quant = CODES.get(kv_pool.dtype, 0)
    constants = decode_constants(config, head_dim, group, max_seqlen_q, check_options(scale, head_dim, window), block_size, window, tree is not None, quant, trace)  # fmt: skip
    tensors = (
        q,
        kv_pool,
        kv_scales,
        cu_seqlens_q,
        seq_lens,
        block_tables,
        tree,
        positions,
        None if trace is None else trace.tensor,
    )
    run = _Run(tensors, (q.stride(0), q.stride(1), tokens, num_blocks, block_tables.stride(0)), constants, config)
    run.max_seqlen_q = max_seqlen_q
    return run


def decode_constants(
    config: DecodeConfig, head_dim: int, group: int, max_seqlen_q: int, scale: float, block_size: int, window: int | None, tree: bool,
    quant: int, trace: TraceBuffer | None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "SCALE": scale * LOG2_E.value,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": check_head_dim(head_dim),
        "BLOCK_M": max(16, 1 << (max(max_seqlen_q * group, 1) - 1).bit_length()),  # tl.dot takes no fewer rows
        "BLOCK_N": config.block_n,
        "BLOCK_SIZE": block_size,
        "WINDOW": window or 0,
        "TREE": tree,
        "QUANT": quant,
        "TRACE": trace is not None,
        "TRACE_CAPACITY": 0 if trace is None else trace.capacity,
        "TRACE_ROW": 0 if trace is None else trace.row,
    }
