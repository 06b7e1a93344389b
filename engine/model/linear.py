"""Linear layers: how a weight is held and multiplied on this device."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b, weight [out_features, in_features] held as it is."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + linear(x). May reuse ``residual``'s memory."""
        return residual.add_(F.linear(x, self.weight, self.bias))


class LinearBackend:
    name = "torch"

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.compute_dtype = dtype
        self.dtype = dtype

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        weight = weight.to(self.dtype)
        return Linear(
            weight.to(self.device, self.compute_dtype),
            None if bias is None else bias.to(self.dtype).to(self.device, self.compute_dtype),
        )


def create_linear_backend(device: torch.device, dtype: torch.dtype) -> LinearBackend:
    return LinearBackend(device, dtype)
