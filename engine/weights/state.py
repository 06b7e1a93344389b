"""Which weights a loaded model runs at the moment, and what they weigh."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.model.low_bit import LowBitLinear
from engine.weights.build import Built
from engine.weights.disk import shapes_of
from engine.weights.plan import STACKS, WeightPlan

if TYPE_CHECKING:
    from engine.loading import Parts


@dataclass
class RunningWeights:
    """``linear_bytes``: what a product of few rows reads of all linear layers; ``bytes_of``: what the method itself takes for each stack of
    a layer (a method that runs dequantised is smaller there); ``other_bytes``: embedding, head and norms."""

    plan: WeightPlan
    forms: dict[str, int]
    linear_bytes: int
    bytes_of: dict[tuple[int, str], int]
    other_bytes: int
    num_weights: int
    cached: bool = False
    calibration_tokens: int = 0
    stored: dict[str, Any] = field(default_factory=dict)  # what the checkpoint says of its own quantisation

    plain_bytes: int = 0  # of the linear layers in the model's dtype

    @property
    def bits_per_weight(self) -> float:
        return 8 * sum(self.bytes_of.values()) / self.num_weights

    def facts(self) -> dict[str, Any]:
        """The fields of ``WeightsChanged`` that say what runs."""
        return {
            "method": self.plan.method or "",
            "group_size": self.plan.group_size or 0,
            "options": dict(self.plan.options) or dict(self.stored),
            "cached": self.cached,
            "calibration_tokens": self.calibration_tokens,
            "forms": dict(self.forms),
            "linear_bytes": self.linear_bytes,
            "other_bytes": self.other_bytes,
            "bits_per_weight": self.bits_per_weight,
        }


def of_model(parts: "Parts", built: Built | None = None) -> RunningWeights:
    """``built``: what the model was just given; None: it runs as it was loaded."""
    model = parts.model
    size = model.dtype.itemsize
    shapes = shapes_of(model.config)
    num_weights = sum(rows * columns for rows, columns in shapes.values())
    linear = 0
    for (layer, stack), (rows, columns) in shapes.items():
        found = getattr(model.layers[layer], stack)
        linear += found.nbytes if isinstance(found, LowBitLinear) else rows * columns * size
    parameters = parts.model_facts["num_parameters"]
    table = model.config.vocab_size * model.config.hidden_size
    head = model.head.nbytes if isinstance(model.head, LowBitLinear) else table * size
    # A tied head is the embedding; once it is in few bits it is held beside it.
    stored_heads = 0 if model.config.tie_word_embeddings else 1
    rest = parameters - num_weights - stored_heads * table
    other = rest * size + (head if stored_heads or isinstance(model.head, LowBitLinear) else 0)
    if built is None:
        forms = {"plain": len(STACKS) * len(model.layers)}
        plain = {key: rows * columns * size for key, (rows, columns) in shapes.items()}
        return RunningWeights(WeightPlan(), forms, linear, plain, other, num_weights, plain_bytes=num_weights * size)
    return RunningWeights(
        built.plan, built.forms(), linear, built.bytes_of, other, num_weights, built.cached, built.calibration_tokens,
        parts.checkpoint.quantization or {}, num_weights * size,
    )  # fmt: skip
