"""The decode kernels as a launch would compile them."""

import torch

from engine.kernels.compiling import TYPE_NAMES, CompileSpec, pointer
from engine.kernels.flash_attention.schedule import check_head_dim
from engine.kernels.flash_attention.triton import check_options
from engine.kernels.paged_decode.merge import merge_kernel
from engine.kernels.paged_decode.splits import DecodeConfig
from engine.kernels.paged_decode.triton import CODES, decode_constants, decode_kernel
from engine.kernels.tracing import TraceBuffer


def decode_specs(
    head_dim: int = 64, dtype: torch.dtype = torch.bfloat16, *, kv_dtype: torch.dtype | None = None, group: int = 4,
    max_seqlen_q: int = 1, num_splits: int = 8, block_size: int = 16, window: int | None = None, tree: bool = False,
    config: DecodeConfig | None = None, trace: TraceBuffer | None = None,
) -> list[CompileSpec]:  # fmt: skip
    """What ``compile_spec`` needs for the decode kernel and the merge. ``kv_dtype``: int8, uint8 (e4m3) or None (that of q)."""
    config = (config or DecodeConfig()).check()
    quant = 0 if kv_dtype is None else CODES[kv_dtype]
    constants = decode_constants(config, head_dim, group, max_seqlen_q, check_options(None, head_dim, window), block_size, window, tree, quant, trace)  # fmt: skip
    constants["SPLITS"] = num_splits
    f32, i32 = pointer(torch.float32), pointer(torch.int32)
    types = {
        "q_ptr": pointer(dtype),
        "pool_ptr": pointer(kv_dtype or dtype),
        "lse_ptr": f32,
        "cu_q_ptr": i32,
        "seq_lens_ptr": i32,
    }
    types |= {"table_ptr": i32, "out_ptr": f32 if num_splits > 1 else pointer(dtype)}
    optional = {
        "scales_ptr": pointer(torch.bfloat16) if quant else None,
        "tree_ptr": pointer(torch.int64) if tree else None,
        "positions_ptr": i32 if tree and window else None,
        "trace_ptr": pointer(torch.int64) if trace is not None else None,
    }
    types |= {name: kind for name, kind in optional.items() if kind}
    constants |= {name: None for name, kind in optional.items() if not kind}
    aligned = (*types, "stride_q", "stride_qh")
    types |= dict.fromkeys(("stride_q", "stride_qh", "num_tokens", "num_blocks", "table_stride"), TYPE_NAMES[torch.int32])
    decode = CompileSpec(decode_kernel, types, constants, config.num_warps, config.num_stages, aligned)
    merge_types = {"parts_ptr": f32, "part_lse_ptr": f32, "out_ptr": pointer(dtype), "lse_ptr": f32}
    merge_constants = {
        "SPLITS": num_splits,
        "HEAD_DIM": head_dim,
        "BLOCK_D": check_head_dim(head_dim),
        "BLOCK_S": max(1 << (num_splits - 1).bit_length(), 2),
    }
    aligned = tuple(merge_types)
    merge = CompileSpec(merge_kernel, {**merge_types, "num_tokens": TYPE_NAMES[torch.int32]}, merge_constants, 4, 2, aligned)
    return [decode, merge]
