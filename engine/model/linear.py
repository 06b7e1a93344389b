"""Linear layers: how a weight is held and multiplied on this device. All give x W^T + b for W [out_features, in_features].

The first way that fits is taken:

- CUDA, and whatever else is not a CPU: torch's own linear in the model's dtype.
- A CPU that computes in bf16, dtype bfloat16: weights packed once for its matrix units.
- Any other CPU, 16-bit dtype: weights packed as 16-bit numbers, widened as they are read; activations and arithmetic in
  float32. Without instructions for it a 16-bit product is several times slower than that from a few rows on.
- float32: the transposed weight. So too a 16-bit weight for which the packed form is not there or not exact.

Where activations are wider than the dtype, results are at least as exact as the dtype promises.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.hardware import ops_cpu
from engine.hardware.device import has_native_bf16, widens


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


class HalfLinear(Linear):
    """Holds a float16 or bfloat16 weight packed as float16 and computes in float32; see ``ops_cpu``."""

    __slots__ = ("operator", "packed")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = ops_cpu.pack_half(weight, bias)
        self.operator = ops_cpu.half_operator()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.operator(x, self.packed)

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self.operator(x, self.packed))


class LinearBackend:
    """Makes the linear layers of a model. ``dtype``: of the weights; ``compute_dtype``: of the activations."""

    def __init__(
        self,
        name: str,
        kind: Callable[[torch.Tensor, torch.Tensor | None], Linear],
        device: torch.device,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
    ) -> None:
        self.name = name
        self.kind = kind
        self.device = device
        self.dtype = dtype
        self.compute_dtype = compute_dtype

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` rounded to ``dtype``, held in ``compute_dtype`` on the device."""
        return values.to(self.dtype).to(self.device, self.compute_dtype)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """``weight`` [out_features, in_features] and ``bias`` [out_features], in any float dtype; neither is kept."""
        weight, bias = self.tensor(weight), None if bias is None else self.tensor(bias)
        if self.kind is HalfLinear and self.dtype != torch.float16 and not ops_cpu.fits_half(weight):
            return TransposedLinear(weight, bias)
        return self.kind(weight, bias)


def create_linear_backend(device: torch.device, dtype: torch.dtype, name: str = "auto") -> LinearBackend:
    """The backend for a device and dtype. ``name``: "plain", "packed", "half" or "float32" instead of the best ("auto")."""
    if name == "auto":
        name = _best(device, dtype)
    if name == "plain":
        return LinearBackend("torch", PlainLinear, device, dtype, dtype)
    if name == "packed":
        return LinearBackend("oneDNN, packed weights", PackedLinear, device, dtype, dtype)
    if name == "half":
        return LinearBackend("FBGEMM, 16-bit weights, float32 arithmetic", HalfLinear, device, dtype, torch.float32)
    if name == "float32":
        widened = "" if dtype == torch.float32 else f", {str(dtype).removeprefix('torch.')} weights widened"
        return LinearBackend(f"torch float32{widened}", TransposedLinear, device, dtype, torch.float32)
    raise ValueError(f"linear backend must be 'auto', 'plain', 'packed', 'half' or 'float32', got {name!r}")


def _best(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cpu":
        return "plain"
    if widens(device, dtype):
        return "half"
    if dtype == torch.bfloat16 and has_native_bf16(device):
        return "packed" if ops_cpu.packing_works(dtype) else "plain"
    return "float32"
