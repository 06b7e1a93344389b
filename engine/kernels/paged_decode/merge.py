"""Parts of a decode become one by their log-sum-exps: launch and kernel. S parts, T tokens, H heads, D head size."""

import torch
import triton
import triton.language as tl

from engine.kernels.checks import FLOATS, check_runs_here, check_tensor, on_device
from engine.kernels.device import INTERPRETED, LN_2, LOG2_E, narrow
from engine.kernels.flash_attention.schedule import check_head_dim
from engine.kernels.paged_decode.splits import MAX_SPLITS


@triton.jit(do_not_specialize=["num_tokens"])
def merge_kernel(
    parts_ptr,  # float32 [S, T, H, D]
    part_lse_ptr,  # float32 [S, H, T]
    out_ptr,  # [T, H, D]
    lse_ptr,  # float32 [H, T]
    num_tokens,
    SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    token, head, heads = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    step = num_tokens.to(tl.int64) * heads
    lse = tl.load(part_lse_ptr + s * step + head * num_tokens + token, mask=s < SPLITS, other=float("-inf"))
    largest = tl.max(lse, 0)
    origin = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2((lse - origin) * LOG2_E)
    total = tl.sum(weights, 0)
    at = parts_ptr + (s[:, None] * step + token * heads + head) * HEAD_DIM + d[None, :]
    parts = tl.load(at, mask=(s[:, None] < SPLITS) & (d[None, :] < HEAD_DIM), other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + (token * heads + head) * HEAD_DIM + d, narrow(out, out_ptr.dtype.element_ty), mask=d < HEAD_DIM)
    tl.store(lse_ptr + head * num_tokens + token, largest + tl.log2(tl.where(total == 0, 1.0, total)) * LN_2)


def merge_splits(
    parts: torch.Tensor, part_lse: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge float32 parts [S, T, H, D] by their log-sum-exps [S, H, T] into ``out`` [T, H, D]; returns it and lse [H, T]."""
    splits, tokens, heads, head_dim = parts.shape
    check_splits(splits)
    lse = torch.empty(heads, tokens, dtype=torch.float32, device=out.device) if lse is None else lse
    check_tensor("parts", parts, (splits, tokens, heads, head_dim), (torch.float32,), out)
    check_tensor("part_lse", part_lse, (splits, heads, tokens), (torch.float32,), out)
    check_tensor("out", out, (tokens, heads, head_dim), FLOATS)
    check_runs_here(out, bool(INTERPRETED.value))
    block_s = max(1 << (splits - 1).bit_length(), 2)
    if tokens:
        with on_device(out):
            merge_kernel[(tokens, heads)](
                parts, part_lse, out, lse, tokens, SPLITS=splits, HEAD_DIM=head_dim, BLOCK_D=check_head_dim(head_dim),
                BLOCK_S=block_s, num_warps=4, enable_fp_fusion=True,
            )  # fmt: skip
    return out, lse


def check_splits(num_splits: int) -> None:
    if not isinstance(num_splits, int) or not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be an integer in [1, {MAX_SPLITS}], got {num_splits!r}")
