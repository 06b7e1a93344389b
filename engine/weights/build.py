"""Makes the layers of a plan out of a checkpoint, beside the layers that run: nothing of the model is touched.

A layer's linear layers are four stacks (qkv, o, gate_up, down). A stack of which all is rounded alike runs in few bits; one of which
only some is (``WeightPlan.takes``, "error_between") runs in the model's dtype, with the rounded numbers in it.
"""

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from engine.model.linear import Linear
from engine.model.llama import Layer, Model
from engine.model.low_bit import LowBitLinear, pack_quantized
from engine.model.unpacking import Unpacking, create_unpacking
from engine.quantization import methods
from engine.quantization.base import Calibration, QuantizedWeight
from engine.quantization.stacking import concatenate
from engine.weights.plan import STACKS, WeightPlan, tensor_name

Progress = Callable[[int, int, str], None]  # layers done, of how many, what is done


class Cancelled(Exception):
    """Whoever asked has changed their mind."""


@dataclass
class Built:
    """Layers that a model can take, and what is known of them."""

    plan: WeightPlan
    layers: list[Layer]
    unpacking: Unpacking | None
    head: Linear | None = None  # None: the model's own
    weights: dict[tuple[int, str], QuantizedWeight] = field(default_factory=dict)  # (layer, stack)
    bytes_of: dict[tuple[int, str], int] = field(default_factory=dict)  # of each stack, as the method defines them
    cached: bool = False
    calibration_tokens: int = 0

    def forms(self) -> dict[str, int]:
        """How the linear layers run -> how many."""
        found: dict[str, int] = {}
        for layer in self.layers:
            for stack in STACKS:
                form = form_of(getattr(layer, stack))
                found[form] = found.get(form, 0) + 1
        return found


def form_of(linear: Linear) -> str:
    return linear.form if isinstance(linear, LowBitLinear) else "plain"


class Source:
    """The original matrices of a checkpoint."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], quantized: Mapping[str, QuantizedWeight] | None = None) -> None:
        self.tensors = tensors
        self.quantized = quantized or {}

    def matrix(self, layer: int, name: str) -> torch.Tensor:
        """Float32 [out_features, in_features]."""
        return self.tensors[tensor_name(layer, name) + ".weight"].float()

    def stack(self, layer: int, stack: str) -> torch.Tensor:
        parts = [self.matrix(layer, name) for name in STACKS[stack]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def bias(self, layer: int, stack: str) -> torch.Tensor | None:
        names = [tensor_name(layer, name) + ".bias" for name in STACKS[stack]]
        biases = [self.tensors[name] for name in names if name in self.tensors]
        return torch.cat(biases) if biases else None

    def stored(self, layer: int, stack: str) -> QuantizedWeight | None:
        """What the checkpoint itself has in few bits; None: it has not, or not in a form that can be stacked."""
        found = [self.quantized.get(tensor_name(layer, name) + ".weight") for name in STACKS[stack]]
        parts = [weight for weight in found if weight is not None]
        if len(parts) != len(found):
            return None
        return parts[0] if len(parts) == 1 else concatenate(parts)


def build(
    model: Model, source: Source, plan: WeightPlan, progress: Progress | None = None, cancelled: Callable[[], bool] = lambda: False,
    ready: Mapping[tuple[int, str], QuantizedWeight] | None = None,
) -> Built:  # fmt: skip
    """The layers of a plan that needs no calibration, or whose rounded weights are ``ready``. Raises ``Cancelled``; ValueError that
    names the matrix for one that cannot be rounded."""
    built = Built(plan, [], None if plan.method is None and not source.quantized else create_unpacking(model.device))
    count = len(model.layers)
    done = 0

    def one(index: int) -> Layer:
        nonlocal done
        if cancelled():
            raise Cancelled
        layer = build_layer(model, source, plan, index, built, lambda stack: None if ready is None else ready[index, stack])
        done += 1
        if progress is not None:
            progress(done, count, "rounding" if plan.method else "reading")
        return layer

    # Reading, rounding and packing is work for one core a tensor: several at a time.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        built.layers = list(pool.map(one, range(count)))
    if plan.options.get("head"):
        built.head = build_head(model, source, plan, built)
    return built


def build_layer(
    model: Model, source: Source, plan: WeightPlan, index: int, built: Built,
    rounded: Callable[[str], QuantizedWeight | None], calibrations: Mapping[str, Calibration] | None = None,
) -> Layer:  # fmt: skip
    """One layer of the plan. ``rounded(stack)``: a weight that is there already, or None."""
    linears: dict[str, Linear] = {}
    plain: dict[str, torch.Tensor] = {}
    for stack, names in STACKS.items():
        bias = source.bias(index, stack)
        calibration = None if calibrations is None else calibrations[stack]
        found = _weight(source, plan, index, stack, rounded(stack), calibration)
        if isinstance(found, QuantizedWeight):
            built.weights[index, stack] = found
            built.bytes_of[index, stack] = found.nbytes
            assert built.unpacking is not None
            # What runs as plain numbers may run compiled.
            also = None if model.compiled is None else functools.partial(plain.__setitem__, names[0])
            linear: Linear = pack_quantized(found, bias, model.backend, built.unpacking, also)
        else:
            built.bytes_of[index, stack] = found.numel() * model.dtype.itemsize
            linear = model.backend.pack(found, bias)
            if model.compiled is not None:
                plain[names[0]] = found.to(model.dtype).contiguous()
        linears[stack] = linear
        if model.compiled is not None:
            plain[f"{names[0]}.bias"] = torch.zeros(0) if bias is None else model.backend.tensor(bias).float()
    return model.layers[index].with_linears(linears, plain)


def build_head(model: Model, source: Source, plan: WeightPlan, built: Built) -> Linear:
    """The head, by the plan's method where it needs no calibration, else in int8."""
    name = "model.embed_tokens.weight" if model.config.tie_word_embeddings else "lm_head.weight"
    assert built.unpacking is not None and plan.method is not None
    method, size = ("int8", None) if plan.needs_calibration else (plan.method, plan.group_size)
    return pack_quantized(methods.quantize(source.tensors[name], method, size), None, model.backend, built.unpacking)


def _weight(
    source: Source, plan: WeightPlan, index: int, stack: str, rounded: QuantizedWeight | None, calibration: Calibration | None
) -> QuantizedWeight | torch.Tensor:
    names = STACKS[stack]
    if plan.method is None:
        stored = source.stored(index, stack)
        return source.stack(index, stack) if stored is None else stored
    taken = [plan.takes(index, name) for name in names]
    if not any(taken):
        return source.stack(index, stack)
    original = source.stack(index, stack)
    if rounded is None:
        rounded = quantize(original, plan, calibration, f"layer {index}, {stack}")
    if all(taken) and plan.whole:
        return rounded
    return mixed(original, rounded, plan, [source.matrix(index, name).shape[0] for name in names], taken)


def quantize(weight: torch.Tensor, plan: WeightPlan, calibration: Calibration | None, what: str) -> QuantizedWeight:
    """ValueError that names the matrix for one that the method cannot round."""
    assert plan.method is not None
    try:
        return methods.quantize(weight, plan.method, plan.group_size, calibration, **plan.own_options)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def mixed(original: torch.Tensor, rounded: QuantizedWeight, plan: WeightPlan, rows: list[int], taken: list[bool]) -> torch.Tensor:
    """``original`` float32 [N, K] with the rounded numbers where the plan wants them. ``rows``: of the stacked matrices."""
    after = rounded.dequantize()
    wanted = torch.cat([torch.full((count, 1), flag) for count, flag in zip(rows, taken, strict=True)])
    between: Any = plan.options.get("error_between")
    if between is not None:
        error = after - original
        wanted = wanted & (error >= between[0]) & (error <= between[1])
    return torch.where(wanted, after, original)
