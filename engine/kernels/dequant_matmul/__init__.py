"""Activations times weights in 8 or 4 bits, which become numbers on the way from memory to the multiplication."""

from engine.kernels.dequant_matmul.naive import naive_dequant_matmul, naive_dequantize
from engine.kernels.lazy import lazy

__all__ = ["naive_dequant_matmul", "naive_dequantize"]  # and the lazy ones

__getattr__ = lazy(__name__, dict.fromkeys(("MatmulConfig", "dequant_matmul", "matmul_spec"), "triton"))
