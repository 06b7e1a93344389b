"""The gate of a feed-forward layer (SwiGLU, Shazeer, arXiv 2002.05202) as it is written down."""

import torch


def naive_silu_mul(x: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """x [T, 2 N], gate then up -> gate * sigmoid(gate) * up [T, N] in ``dtype``."""
    gate, up = x.to(dtype).chunk(2, -1)
    return gate * torch.sigmoid(gate) * up
