"""The parts of a decoder layer that are bound by memory, in fewer passes over it by kernels of our own: the sum of a residual with its
norm, and the gated activation. The linear layers between them stay what they are."""

import torch

from engine.kernels.lazy import load


def add_and_norm_(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of residual + x, [T, N]; ``residual`` [T, N], contiguous, holds the sum afterwards."""
    out: torch.Tensor = load("engine.kernels.rms_norm.triton").rms_norm(x, weight, eps, residual=residual)
    return out


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 N], gate and up side by side -> silu(gate) * up, [T, N]."""
    out: torch.Tensor = load("engine.kernels.silu_mul.triton").silu_mul(gate_up)
    return out
