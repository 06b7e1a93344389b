"""Attention by tiles that never writes the score matrix: FlashAttention-2 (Dao, arXiv 2307.08691), forward and backward."""

from engine.kernels.flash_attention.naive import gather_paged, naive_flash_attention
from engine.kernels.flash_attention.schedule import FlashConfig, default_config, tile_schedule
from engine.kernels.lazy import lazy

__all__ = ["FlashConfig", "default_config", "gather_paged", "naive_flash_attention", "tile_schedule"]  # and the lazy ones

__getattr__ = lazy(
    __name__,
    {
        "flash_attention": "triton",
        "flash_attention_varlen": "triton",
        "forward_spec": "triton",
        "flash_attention_tma": "tma",
        "tma_spec": "tma",
        "attention_with_gradient": "backward",
        "flash_attention_backward": "backward",
        "backward_specs": "backward",
    },
)
