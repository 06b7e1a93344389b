"""The gate of a feed-forward layer: silu(gate) * up."""

from engine.kernels.lazy import lazy
from engine.kernels.silu_mul.naive import naive_silu_mul

__all__ = ["naive_silu_mul"]  # and the lazy ones

__getattr__ = lazy(__name__, dict.fromkeys(("silu_mul", "silu_mul_spec"), "triton"))
