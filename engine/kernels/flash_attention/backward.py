"""FlashAttention-2, backward (Dao, arXiv 2307.08691, algorithm 2): launch and kernels.

The probabilities are not kept from the forward pass but computed again, tile by tile, from its log-sum-exp: P = exp(S - lse). One kernel
goes over the query tiles for a tile of keys (dK, dV; the query heads of a KV head one after another, so that nothing is added up by
atomics and a result repeats bit for bit), one over the key tiles for a tile of queries (dQ).

Shapes as in the forward pass; K and V lie one request after another.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from engine.kernels.checks import check_group, check_power_of_two, check_runs_here, check_tensor, on_device
from engine.kernels.compiling import TYPE_NAMES, CompileSpec, pointer
from engine.kernels.device import INTERPRETED, LOG2_E, dot, load_rows, narrow
from engine.kernels.flash_attention.schedule import FlashConfig, check_head_dim
from engine.kernels.flash_attention.triton import DTYPES, check_options, flash_attention_varlen


@triton.jit(do_not_specialize=["num_tokens"])
def delta_kernel(
    out_ptr,  # [T, H, D]
    dout_ptr,  # [T, H, D]
    delta_ptr,  # ACC [H, T]: sum of out * dout over D
    num_tokens,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    rows = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    inside = rows < num_tokens
    stride = tl.num_programs(1) * HEAD_DIM
    out = load_rows(out_ptr + head * HEAD_DIM, rows, stride, inside, HEAD_DIM, BLOCK_D, True).to(ACC)
    dout = load_rows(dout_ptr + head * HEAD_DIM, rows, stride, inside, HEAD_DIM, BLOCK_D, True).to(ACC)
    tl.store(delta_ptr + head.to(tl.int64) * num_tokens + rows, tl.sum(out * dout, 1), mask=inside)


@triton.jit
def _probabilities(q, k, lse, scale, position, n, end, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """[M, N]: P of a tile, 0 where a key is hidden. ``lse`` in base 2."""
    s = dot(q, tl.trans(k), tl.zeros([q.shape[0], k.shape[0]], lse.dtype))
    seen = (n[None, :] < end) & (lse[:, None] != float("-inf"))
    if CAUSAL:
        seen = seen & (n[None, :] <= position[:, None])
    if WINDOW:
        seen = seen & (n[None, :] > position[:, None] - WINDOW)
    origin = tl.where(lse == float("-inf"), 0.0, lse)
    return tl.where(seen, tl.exp2(tl.fma(s, tl.zeros_like(s) + scale, tl.zeros_like(s) - origin[:, None])), 0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def key_gradient_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [S, K, D]
    v_ptr,  # [S, K, D]
    dout_ptr,  # [T, H, D]
    lse_ptr,  # ACC [H, T]
    delta_ptr,  # ACC [H, T]
    dk_ptr,  # [S, K, D]
    dv_ptr,  # [S, K, D]
    cu_q_ptr,  # int32 [B + 1]
    cu_k_ptr,  # int32 [B + 1]
    num_tokens,
    SCALE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    kv_head, kv_heads, request = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    q_begin, k_begin = tl.load(cu_q_ptr + request), tl.load(cu_k_ptr + request)
    q_len = tl.load(cu_q_ptr + request + 1) - q_begin
    kv_len = tl.load(cu_k_ptr + request + 1) - k_begin
    n_start = tl.program_id(0) * BLOCK_N
    if n_start >= kv_len:
        return
    offset = kv_len - q_len  # position of the first row
    n = n_start + tl.arange(0, BLOCK_N)
    at = (k_begin + n).to(tl.int64)
    stride = kv_heads * HEAD_DIM
    k = load_rows(k_ptr + kv_head * HEAD_DIM, at, stride, n < kv_len, HEAD_DIM, BLOCK_D, True)
    v = load_rows(v_ptr + kv_head * HEAD_DIM, at, stride, n < kv_len, HEAD_DIM, BLOCK_D, True)
    dk, dv = tl.zeros([BLOCK_N, BLOCK_D], ACC), tl.zeros([BLOCK_N, BLOCK_D], ACC)
    scale = tl.full([], SCALE * LOG2_E, ACC)
    start, stop = n_start * 0, q_len  # the rows that see some of these keys
    if CAUSAL:
        start = tl.maximum(n_start - offset, 0) // BLOCK_M * BLOCK_M
    if WINDOW:
        stop = tl.minimum(q_len, tl.minimum(n_start + BLOCK_N, kv_len) - 1 + WINDOW - offset)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        for q_start in range(start, stop, BLOCK_M):
            rows = q_start + tl.arange(0, BLOCK_M)
            tokens = (q_begin + rows).to(tl.int64)
            inside = rows < q_len
            q = load_rows(q_ptr + head * HEAD_DIM, tokens, stride * GROUP, inside, HEAD_DIM, BLOCK_D, True)
            dout = load_rows(dout_ptr + head * HEAD_DIM, tokens, stride * GROUP, inside, HEAD_DIM, BLOCK_D, True)
            of_rows = head.to(tl.int64) * num_tokens + tokens
            lse = tl.load(lse_ptr + of_rows, mask=inside, other=float("-inf")) * LOG2_E
            delta = tl.load(delta_ptr + of_rows, mask=inside, other=0.0)
            p = _probabilities(q, k, lse, scale, rows + offset, n, kv_len, CAUSAL, WINDOW)
            dv = dot(tl.trans(narrow(p, dout.dtype)), dout, dv)
            dp = dot(dout, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], ACC))
            ds = p * (dp - delta[:, None])
            dk = dot(tl.trans(narrow(ds, q.dtype)), q, dk)
    d = tl.arange(0, BLOCK_D)
    to = at[:, None] * stride + kv_head * HEAD_DIM + d[None, :]
    mask = (n < kv_len)[:, None] & (d[None, :] < HEAD_DIM)
    tl.store(dk_ptr + to, narrow(dk * tl.full([], SCALE, ACC), dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + to, narrow(dv, dv_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def query_gradient_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [S, K, D]
    v_ptr,  # [S, K, D]
    dout_ptr,  # [T, H, D]
    lse_ptr,  # ACC [H, T]
    delta_ptr,  # ACC [H, T]
    dq_ptr,  # [T, H, D]
    cu_q_ptr,  # int32 [B + 1]
    cu_k_ptr,  # int32 [B + 1]
    num_tokens,
    SCALE: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    head, heads, request = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    q_begin, k_begin = tl.load(cu_q_ptr + request), tl.load(cu_k_ptr + request)
    q_len = tl.load(cu_q_ptr + request + 1) - q_begin
    kv_len = tl.load(cu_k_ptr + request + 1) - k_begin
    q_start = tl.program_id(0) * BLOCK_M
    if q_start >= q_len:
        return
    rows = q_start + tl.arange(0, BLOCK_M)
    tokens = (q_begin + rows).to(tl.int64)
    inside = rows < q_len
    offset = kv_len - q_len
    q = load_rows(q_ptr + head * HEAD_DIM, tokens, heads * HEAD_DIM, inside, HEAD_DIM, BLOCK_D, True)
    dout = load_rows(dout_ptr + head * HEAD_DIM, tokens, heads * HEAD_DIM, inside, HEAD_DIM, BLOCK_D, True)
    of_rows = head.to(tl.int64) * num_tokens + tokens
    lse = tl.load(lse_ptr + of_rows, mask=inside, other=float("-inf")) * LOG2_E
    delta = tl.load(delta_ptr + of_rows, mask=inside, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    scale = tl.full([], SCALE * LOG2_E, ACC)
    start, stop = q_start * 0, kv_len
    if CAUSAL:
        stop = tl.minimum(kv_len, tl.minimum(q_start + BLOCK_M, q_len) + offset)
    if WINDOW:
        start = tl.maximum(q_start + offset - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    kv_stride = heads // GROUP * HEAD_DIM
    for n_start in range(start, stop, BLOCK_N):
        n = n_start + tl.arange(0, BLOCK_N)
        at = (k_begin + n).to(tl.int64)
        k = load_rows(k_ptr + head // GROUP * HEAD_DIM, at, kv_stride, n < kv_len, HEAD_DIM, BLOCK_D, True)
        v = load_rows(v_ptr + head // GROUP * HEAD_DIM, at, kv_stride, n < kv_len, HEAD_DIM, BLOCK_D, True)
        p = _probabilities(q, k, lse, scale, rows + offset, n, kv_len, CAUSAL, WINDOW)
        dp = dot(dout, tl.trans(v), tl.zeros([BLOCK_M, BLOCK_N], ACC))
        ds = p * (dp - delta[:, None])
        dq = dot(narrow(ds, k.dtype), k, dq)
    d = tl.arange(0, BLOCK_D)
    to = dq_ptr + tokens[:, None] * heads * HEAD_DIM + head * HEAD_DIM + d[None, :]
    dq = narrow(dq * tl.full([], SCALE, ACC), dq_ptr.dtype.element_ty)
    tl.store(to, dq, mask=inside[:, None] & (d[None, :] < HEAD_DIM))


def flash_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    config: FlashConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dQ [T, H, D], dK and dV [S, K, D] of ``flash_attention_varlen``, given its output, log-sum-exp and inputs, all contiguous.

    max_seqlen_q, max_seqlen_k: most rows of a request (None: looked up, which waits for the device). The log-sum-exp has no gradient of
    its own. ValueError for what does not fit.
    """
    check_tensor("q", q, (None, None, None), DTYPES)
    tokens, heads, head_dim = q.shape
    block_d = check_head_dim(head_dim)
    for name, tensor, shape in (("k", k, (None, None, head_dim)), ("out", out, q.shape), ("dout", dout, q.shape)):
        check_tensor(name, tensor, shape, (q.dtype,), q)
    check_tensor("v", v, k.shape, (q.dtype,), q)
    acc = torch.float64 if q.dtype == torch.float64 else torch.float32
    check_tensor("lse", lse, (heads, tokens), (acc,), q)
    check_tensor("cu_seqlens_q", cu_seqlens_q, (None,), (torch.int32,), q)
    check_tensor("cu_seqlens_k", cu_seqlens_k, cu_seqlens_q.shape, (torch.int32,), q)
    kv_heads = k.shape[1]
    group = check_group(heads, kv_heads)
    scale = check_options(scale, head_dim, window)
    check_runs_here(q, bool(INTERPRETED.value))
    config = (config or FlashConfig(64, 32 if acc == torch.float64 else 64, 4, 2)).check()
    requests = len(cu_seqlens_q) - 1
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if not requests:
        return dq, dk, dv
    if max_seqlen_q is None:
        max_seqlen_q = int(cu_seqlens_q.diff().max())
    if max_seqlen_k is None:
        max_seqlen_k = int(cu_seqlens_k.diff().max())
    delta = torch.empty_like(lse)
    constants = _constants(config, head_dim, block_d, group, scale, causal, window, acc)
    of_delta = {name: constants[name] for name in ("HEAD_DIM", "BLOCK_D", "BLOCK_M", "ACC")}
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    tail = (cu_seqlens_q, cu_seqlens_k, tokens)
    with on_device(q):
        if tokens:
            delta_kernel[(-(-tokens // config.block_m), heads)](out, dout, delta, tokens, **of_delta, **options)
        if k.shape[0]:
            grid = (-(-max_seqlen_k // config.block_n), kv_heads, requests)
            key_gradient_kernel[grid](q, k, v, dout, lse, delta, dk, dv, *tail, **constants, **options)
        if tokens:
            grid = (-(-max_seqlen_q // config.block_m), heads, requests)
            query_gradient_kernel[grid](q, k, v, dout, lse, delta, dq, *tail, **constants, **options)
    return dq, dk, dv


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, options: dict[str, Any]) -> Any:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, **options)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, dout: Any) -> Any:  # type: ignore[override]
        q, k, v, out, lse, cu_q, cu_k = ctx.saved_tensors
        return *flash_attention_backward(dout.contiguous(), q, k, v, out, lse, cu_q, cu_k, **ctx.options), None, None, None


def attention_with_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, *,
    scale: float | None = None, causal: bool = True, window: int | None = None, config: FlashConfig | None = None,
) -> torch.Tensor:  # fmt: skip
    """The output of ``flash_attention_varlen``, through which gradients flow to q, k and v by ``flash_attention_backward``."""
    options = {"scale": scale, "causal": causal, "window": window, "config": config}
    return _Attention.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, options)  # type: ignore[no-any-return, no-untyped-call]


def _constants(
    config: FlashConfig, head_dim: int, block_d: int, group: int, scale: float, causal: bool, window: int | None, acc: torch.dtype
) -> dict[str, Any]:
    check_power_of_two("block_d", block_d, 16, 256)
    return {
        "SCALE": scale,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CAUSAL": bool(causal),
        "WINDOW": window or 0,
        "ACC": tl.float64 if acc == torch.float64 else tl.float32,
    }


def backward_specs(
    head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, *, group: int = 1, causal: bool = True, window: int | None = None,
    config: FlashConfig | None = None,
) -> list[CompileSpec]:  # fmt: skip
    """What ``compile_spec`` needs for the three kernels of the backward pass."""
    config = (config or FlashConfig(64, 64, 4, 2)).check()
    scale = check_options(None, head_dim, window)
    constants = _constants(config, head_dim, check_head_dim(head_dim), group, scale, causal, window, torch.float32)
    specs = []
    for kernel in (delta_kernel, key_gradient_kernel, query_gradient_kernel):
        names = kernel.arg_names
        types = {name: pointer(dtype) for name in names if name.endswith("_ptr")}
        types |= {name: pointer(torch.float32) for name in names if name in ("lse_ptr", "delta_ptr")}
        types |= {name: pointer(torch.int32) for name in names if name.startswith("cu_")}
        aligned = tuple(types)
        types["num_tokens"] = TYPE_NAMES[torch.int32]
        chosen = {name: value for name, value in constants.items() if name in names}
        specs.append(CompileSpec(kernel, types, chosen, config.num_warps, config.num_stages, aligned))
    return specs
