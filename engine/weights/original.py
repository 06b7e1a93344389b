"""The checkpoint's own layers, also while others run, and what calibration text becomes on its way through them."""

from typing import TYPE_CHECKING

import torch

from engine.model.linear import Linear
from engine.model.llama import Layer, Model
from engine.model.low_bit import Int4Linear, Int8Linear, IntegerLinear, RoundedInputLinear, UnpackedAtUse
from engine.model.unpacking import create_unpacking
from engine.quantization.quality.texts import calibration_tokens
from engine.weights.build import Built, Source, build_layer
from engine.weights.calibrate import Flow
from engine.weights.plan import WeightPlan

if TYPE_CHECKING:
    from engine.loading import Parts

WINDOW, WINDOWS = 256, 4  # of calibration text that observations use
_HALF_MAX = 6e4


class Originals:
    """For one study, in its own thread. ``model``: the running model apart, for norms, head and attention's numbers."""

    def __init__(self, parts: "Parts") -> None:
        self.parts = parts
        self.model: Model = parts.model.apart()
        self.source = Source(parts.checkpoint.tensors, parts.checkpoint.quantized)
        plan = parts.weights.plan
        self._runs = plan.method is None and not parts.checkpoint.quantized
        self._latest: tuple[int, Layer] | None = None

    def layer(self, index: int) -> Layer:
        """A layer with the checkpoint's own weights in the model's dtype; for a checkpoint in few bits, dequantised."""
        if self._runs:
            return self.model.layers[index]
        if self._latest is None or self._latest[0] != index:
            self._latest = index, self._built(index)
        return self._latest[1]

    def _built(self, index: int) -> Layer:
        plain = Source(self.source.tensors)
        scratch = Built(WeightPlan(), [], create_unpacking(self.model.device))
        return build_layer(self.model, plain, WeightPlan(), index, scratch, lambda _stack: None)

    def whole(self) -> Model:
        """The model with all of its own layers."""
        other = self.model.apart()
        other.layers = [self.layer(i) for i in range(len(self.model.layers))]
        return other

    def flow_at(self, index: int) -> Flow:
        """Calibration text as it comes into layer ``index``. What is found on the way is kept for the next time."""
        kept = self.parts.flow_states
        window = min(WINDOW, self.model.config.max_position_embeddings)
        flow = Flow(self.model, calibration_tokens(self.parts.tokenizer, window * WINDOWS, window, seed=1))
        start = max((i for i in kept if i <= index), default=None)
        if start is not None:
            flow.x = kept[start].to(flow.x.dtype)
        for i in range(start or 0, index):
            flow.move_on(self.layer(i))
            small = float(flow.x.abs().max()) < _HALF_MAX
            kept[i + 1] = flow.x.half() if small else flow.x.clone()
        return flow


def running_weight(linear: Linear, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """What a linear layer multiplies with: float32 [out_features, in_features], read off its own codes where it has them, else by
    multiplying the identity in ``dtype``, the model's ``compute_dtype``."""
    if isinstance(linear, Int4Linear | Int8Linear):
        weight = linear.unpacked()
    elif isinstance(linear, IntegerLinear):
        weight = linear.weight()
    elif isinstance(linear, UnpackedAtUse):
        return linear.quantized.dequantize().cpu()
    else:
        return _by_product(linear.linear if isinstance(linear, RoundedInputLinear) else linear, columns, dtype)
    return weight if linear.inverse is None else weight * linear.inverse  # codes of W s


def _by_product(linear: Linear, columns: int, dtype: torch.dtype) -> torch.Tensor:
    zero = linear(torch.zeros(1, columns, dtype=dtype)).float()
    return (linear(torch.eye(columns, dtype=dtype)).float() - zero).t().contiguous()
