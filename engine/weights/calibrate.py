"""Layer by layer: run calibration text through the layers, see what comes into each linear layer, round it, and go on with what the
rounded layer gives, so that a layer is fitted to the inputs it will really get (as GPTQ does, arXiv 2210.17323, section 4)."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from engine.model.linear import Linear
from engine.model.llama import Layer, Model
from engine.model.unpacking import create_unpacking
from engine.quantization.base import Calibration, QuantizedWeight
from engine.quantization.calibration import Collector
from engine.weights.build import Built, Cancelled, Progress, Source, build_head, build_layer
from engine.weights.plan import STACKS, WeightPlan

_KEPT_ROWS = 128


class _Seen(Linear):
    """A linear layer that shows what comes into it."""

    def __init__(self, linear: Linear, collector: Collector) -> None:
        self.linear, self.collector = linear, collector

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.collector.add(x)
        return self.linear(x)

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.collector.add(x)
        return self.linear.added_to(residual, x)


class Flow:
    """Calibration windows on their way through the layers; all windows have the same length. Attention sees its own window only."""

    def __init__(self, model: Model, windows: Sequence[Sequence[int]]) -> None:
        """ValueError: no windows, or of different lengths."""
        lengths = {len(window) for window in windows}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(f"calibration windows must be of one length, got {sorted(lengths)}")
        self.model = model
        self.length = lengths.pop()
        self.num_tokens = self.length * len(windows)
        self.x = model.embedding[torch.tensor(windows).flatten().to(model.device)].to(model.compute_dtype)
        positions = torch.arange(self.length, device=model.device).repeat(len(windows))
        self.cos, self.sin = model.rope.at(positions, self.length)

    def through(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """What comes out of a layer for ``x`` [tokens, hidden_size], which stays as it is."""
        qkv = layer.project(x, self.cos[: len(x)], self.sin[: len(x)])
        window = self.model.config.sliding_windows[layer.index]
        return layer.feed_forward(x.clone(), _attend(qkv.unflatten(0, (-1, self.length)), layer, window))

    def observe(self, layer: Layer, hessian: bool = True) -> dict[str, Calibration]:
        """What comes into the linear layers of a layer, by stack. ``hessian`` False: from the first window only, which is quicker."""
        hidden, q = self.model.config.hidden_size, layer.heads * layer.head_dim
        widths = {"qkv": hidden, "o": q, "gate_up": hidden, "down": self.model.config.intermediate_size}
        seen = {stack: Collector(widths[stack], _KEPT_ROWS, seed=layer.index) for stack in STACKS}
        x = self.x if hessian else self.x[: self.length]
        self.through(layer.with_linears({s: _Seen(getattr(layer, s), seen[s]) for s in STACKS}, {}), x)
        return {stack: collector.finish() for stack, collector in seen.items()}

    def move_on(self, layer: Layer) -> None:
        self.x = self.through(layer, self.x)


def _attend(qkv: torch.Tensor, layer: Layer, window: int | None) -> torch.Tensor:
    """``qkv`` [windows, n, H + 2 K, D] -> [windows * n, H * D]: causal attention inside each window."""
    q, k, v = qkv.transpose(1, 2).split((layer.heads, layer.kv_heads, layer.kv_heads), 1)
    mask = None
    if window is not None and window < q.shape[2]:
        steps = torch.arange(q.shape[2], device=q.device)
        behind = steps[:, None] - steps
        mask = (behind >= 0) & (behind < window)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2).reshape(-1, layer.heads * layer.head_dim)


def build_calibrated(
    model: Model, source: Source, plan: WeightPlan, windows: Sequence[Sequence[int]], progress: Progress | None = None,
    cancelled: Callable[[], bool] = lambda: False, keep: Callable[[int, str, QuantizedWeight], None] | None = None,
) -> Built:  # fmt: skip
    """The layers of a plan that needs to see inputs. ``keep`` gets each rounded weight. Raises ``Cancelled``; ValueError as ``build``.

    Inputs are taken through the checkpoint's own weights of a layer, on top of the layers that are already rounded.
    """
    with torch.inference_mode():
        flow = Flow(model.apart(), windows)  # the engine runs on meanwhile
        built = Built(plan, [], create_unpacking(model.device), calibration_tokens=flow.num_tokens)
        original = WeightPlan()
        for index in range(len(model.layers)):
            if cancelled():
                raise Cancelled
            scratch = Built(original, [], create_unpacking(model.device))
            before = build_layer(model, source, original, index, scratch, lambda _stack: None)
            layer = build_layer(model, source, plan, index, built, lambda _stack: None, flow.observe(before))
            built.layers.append(layer)
            flow.move_on(layer)
            if keep is not None:
                for stack in STACKS:
                    if (index, stack) in built.weights:
                        keep(index, stack, built.weights[index, stack])
            if progress is not None:
                progress(index + 1, len(model.layers), "calibrating and rounding")
        if plan.options.get("head"):
            built.head = build_head(model, source, plan, built)
    return built
