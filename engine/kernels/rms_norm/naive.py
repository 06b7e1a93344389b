"""RMS norm (Zhang and Sennrich, arXiv 1910.07467) as it is written down."""

import torch


def naive_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, N], weight [N] -> h / sqrt(mean(h^2) + eps) * weight [T, N] in ``dtype``, and h: x, or residual + x rounded to the
    dtype of the residual."""
    h = x if residual is None else (residual.to(dtype) + x.to(dtype)).to(residual.dtype)
    wide = h.to(dtype)
    return wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.to(dtype), h
