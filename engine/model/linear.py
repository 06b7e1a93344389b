"""Linear layers: how a weight is held and multiplied on this device. All give x W^T + b for W [out_features, in_features].

Three ways, the first that fits is taken:

- CUDA, and whatever else is not a CPU: torch's own linear in the model's dtype.
- A CPU that computes in bf16, dtype bfloat16: weights packed once for its matrix units (``ops_cpu``).
- Any other CPU: float32 arithmetic on the transposed weight. A 16-bit weight is rounded to its dtype and then held
  widened: without the instructions for it a 16-bit product is several times slower from a few rows on, and no faster
  than float32 for a single row. Activations are float32 then, so results are at least as exact as the dtype promises.
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from engine.hardware.device import has_native_bf16
from engine.model import ops_cpu


class Linear(ABC):
    """One weight, ready to multiply."""

    @abstractmethod
    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] -> [T, out_features]."""

    @abstractmethod
    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + linear(x); ``residual`` [T, out_features] may be overwritten."""


class PlainLinear(Linear):
    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(F.linear(x, self.weight, self.bias))


class TransposedLinear(Linear):
    """Holds W^T contiguous, which CPU libraries multiply faster for a few rows; the residual is added by the product itself."""

    __slots__ = ("bias", "weight_t")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight_t = weight.t().contiguous()  # [in_features, out_features]
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight_t) if self.bias is None else torch.addmm(self.bias, x, self.weight_t)

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        added = residual.addmm_(x, self.weight_t)
        return added if self.bias is None else added.add_(self.bias)


class PackedLinear(Linear):
    """Holds the weight in the order of the CPU's matrix units; see ``ops_cpu``."""

    __slots__ = ("bias", "packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = ops_cpu.pack(weight)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return ops_cpu.linear(x, self.packed, self.bias)

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return ops_cpu.linear_add(residual, x, self.packed, self.bias)


class LinearBackend:
    """Makes the linear layers of a model. ``dtype``: of the weights; ``compute_dtype``: of the activations."""

    def __init__(self, name: str, kind: type[Linear], device: torch.device, dtype: torch.dtype, compute_dtype: torch.dtype) -> None:
        self.name = name
        self.kind = kind
        self.device = device
        self.dtype = dtype
        self.compute_dtype = compute_dtype

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` rounded to ``dtype``, held in ``compute_dtype`` on the device."""
        return values.to(self.dtype).to(self.device, self.compute_dtype)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self.kind(self.tensor(weight), None if bias is None else self.tensor(bias))


def create_linear_backend(device: torch.device, dtype: torch.dtype, name: str = "auto") -> LinearBackend:
    """The backend for a device and dtype. ``name``: "plain", "packed" or "float32" instead of the best ("auto")."""
    if name == "auto":
        if device.type != "cpu":
            name = "plain"
        elif dtype == torch.bfloat16 and has_native_bf16(device):
            name = "packed" if ops_cpu.packing_works(dtype) else "plain"
        else:
            name = "float32"
    if name == "plain":
        return LinearBackend("torch", PlainLinear, device, dtype, dtype)
    if name == "packed":
        return LinearBackend("oneDNN, packed weights", PackedLinear, device, dtype, dtype)
    if name == "float32":
        wide = "" if dtype == torch.float32 else f", {str(dtype).removeprefix('torch.')} weights widened"
        return LinearBackend(f"torch float32{wide}", TransposedLinear, device, dtype, torch.float32)
    raise ValueError(f"linear backend must be 'auto', 'plain', 'packed' or 'float32', got {name!r}")
