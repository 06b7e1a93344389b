"""Decode attention over the paged pool, one request, token and head at a time."""

import math

import torch


def dequantize_pool(kv_pool: torch.Tensor, kv_scales: torch.Tensor | None, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """The pool [slots, 2 K, D] as numbers: int8 codes, or uint8 codes of float8_e4m3fn, times their scales [slots, 2 K]."""
    if kv_scales is None:
        return kv_pool.to(dtype)
    codes = kv_pool.view(torch.float8_e4m3fn).to(dtype) if kv_pool.dtype == torch.uint8 else kv_pool.to(dtype)
    return codes * kv_scales.to(dtype)[:, :, None]


def naive_paged_decode(
    q: torch.Tensor,
    kv_pool: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    block_size: int,
    kv_scales: torch.Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    ancestors: list[torch.Tensor | None] | None = None,
    positions: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``paged_decode``, in ``dtype``: out [T, H, D] and log-sum-exp [H, T].

    ancestors: of each request None (a chain) or bool [n, n], which of the n new tokens each of them sees; positions [T]: where each
    stands in its own sequence (None: one after another), for the window alone.
    """
    tokens, heads, dim = q.shape
    kv_heads = kv_pool.shape[1] // 2
    scale = 1 / math.sqrt(dim) if scale is None else scale
    out = torch.zeros(tokens, heads, dim, dtype=dtype)
    lse = torch.full((heads, tokens), -math.inf, dtype=dtype)
    for b in range(len(seq_lens)):
        begin, end, length = int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]), int(seq_lens[b])
        start = length - (end - begin)  # tokens before the new ones
        slots = [int(block_tables[b, n // block_size]) * block_size + n % block_size for n in range(length)]
        where = torch.tensor(slots, dtype=torch.int64)
        kv = dequantize_pool(kv_pool[where], None if kv_scales is None else kv_scales[where], dtype)
        key_position = torch.arange(length)
        if positions is not None and length:
            key_position = torch.cat([key_position[: max(start, 0)], positions[begin:end].long()[max(-start, 0) :]])
        for i in range(end - begin):
            own = start + i if positions is None else int(positions[begin + i])
            tree = None if ancestors is None else ancestors[b]
            if tree is None:
                seen = torch.arange(length) <= start + i
            else:
                seen = torch.cat([torch.ones(start, dtype=torch.bool), tree[i]])
            if window is not None:
                seen = seen & (key_position > own - window)
            if not seen.any():
                continue
            for h in range(heads):
                j = h // (heads // kv_heads)
                logits = kv[seen, j] @ q[begin + i, h].to(dtype) * scale
                out[begin + i, h] = torch.softmax(logits, 0) @ kv[seen, kv_heads + j]
                lse[h, begin + i] = torch.logsumexp(logits, 0)
    return out, lse


def naive_merge(parts: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over parts of the keys, as one: parts [S, ..., D] and their log-sum-exps [S, ...] -> [..., D], [...].

    sum_s exp(lse_s) o_s / sum_s exp(lse_s): exact, in any order. 0 and -inf where no part saw anything.
    """
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(torch.isinf(lse), 0.0, lse))
    return (weights[..., None] * parts).sum(0), lse
