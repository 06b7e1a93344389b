"""The token that a draw falls on, after temperature, min_p, top_k and top_p, without sorting the vocabulary."""

from engine.kernels.lazy import lazy
from engine.kernels.sample.naive import naive_sample

__all__ = ["naive_sample"]  # and the lazy ones

__getattr__ = lazy(__name__, dict.fromkeys(("sample", "sample_spec"), "triton"))
