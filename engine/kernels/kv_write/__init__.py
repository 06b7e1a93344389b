"""New K and V, rotated, into their slots of the paged pool, in the pool's dtype or in 8 bits."""

from engine.kernels.kv_write.naive import naive_kv_write
from engine.kernels.lazy import lazy

__all__ = ["naive_kv_write"]  # and the lazy ones

__getattr__ = lazy(__name__, dict.fromkeys(("kv_write", "kv_write_specs"), "triton"))
