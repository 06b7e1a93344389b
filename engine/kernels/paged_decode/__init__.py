"""Attention of one or a few query tokens over a long context, split over it (Flash-Decoding) and merged by log-sum-exp."""

from engine.kernels.lazy import lazy
from engine.kernels.paged_decode.naive import dequantize_pool, naive_merge, naive_paged_decode
from engine.kernels.paged_decode.splits import DecodeConfig, choose_splits, split_ranges, tree_bits

__all__ = [
    "DecodeConfig",
    "choose_splits",
    "dequantize_pool",
    "naive_merge",
    "naive_paged_decode",
    "split_ranges",
    "tree_bits",
]  # and the lazy ones

__getattr__ = lazy(
    __name__,
    {
        "paged_decode": "triton",
        "paged_decode_partial": "triton",
        "merge_splits": "merge",
        "decode_specs": "spec",
    },
)
