"""Attention as the textbook writes it, one request and one head at a time, the whole score matrix in memory."""

import math

import torch


def visible(q_len: int, kv_len: int, causal: bool, window: int | None) -> torch.Tensor:
    """bool [q_len, kv_len]: which keys each query sees. The last query is aligned with the last key (bottom right)."""
    position = torch.arange(q_len)[:, None] + kv_len - q_len
    key = torch.arange(kv_len)[None, :]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if causal:
        seen &= key <= position
    if window is not None:
        seen &= key > position - window
    return seen


def naive_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(Q K^T scale) V of packed requests, computed in ``dtype``; differentiable.

    q [T, H, D]; k, v [S, K, D], H a multiple of K; cu_seqlens_q, cu_seqlens_k: int [B + 1], where each request begins; window: a
    query sees its own position and the ``window - 1`` before it. Returns the output [T, H, D] and the natural log-sum-exp of the
    scaled logits [H, T], both in ``dtype``: 0 and -inf for a row that sees nothing.
    """
    heads, kv_heads, dim = q.shape[1], k.shape[1], q.shape[2]
    scale = 1 / math.sqrt(dim) if scale is None else scale
    outputs, sums = [], []
    for b in range(len(cu_seqlens_q) - 1):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        keys = slice(int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1]))
        q_HND = q[rows].to(dtype).transpose(0, 1)
        k_HND = k[keys].to(dtype).transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
        v_HND = v[keys].to(dtype).transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
        seen = visible(q_HND.shape[1], k_HND.shape[1], causal, window).to(q.device)
        logits = (q_HND @ k_HND.transpose(1, 2) * scale).masked_fill(~seen, -math.inf)
        none = ~seen.any(1)
        weights = torch.softmax(logits.masked_fill(none[:, None], 0), -1).masked_fill(~seen, 0)
        outputs.append((weights @ v_HND).transpose(0, 1))
        safe = (
            torch.logsumexp(logits.masked_fill(none[:, None], 0), -1) if logits.shape[2] else logits.new_zeros(logits.shape[:2])
        )
        sums.append(safe.masked_fill(none, -math.inf))
    return torch.cat(outputs), torch.cat(sums, 1)


def gather_paged(
    kv_pool: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The K and V that block tables point at, one request after another: k, v [S, K, D] and cu_seqlens_k [B + 1].

    kv_pool [slots, 2 K, D]: of a token the K of all heads, then the V; slot = block * block_size + offset.
    """
    slots = [
        int(row[n // block_size]) * block_size + n % block_size
        for row, length in zip(block_tables, seq_lens.tolist(), strict=True)
        for n in range(length)
    ]
    kv = kv_pool[torch.tensor(slots, dtype=torch.int64, device=kv_pool.device)]
    kv_heads = kv_pool.shape[1] // 2
    ends = torch.cumsum(seq_lens.to(torch.int32), 0, dtype=torch.int32)
    return kv[:, :kv_heads], kv[:, kv_heads:], torch.cat([ends.new_zeros(1), ends])
