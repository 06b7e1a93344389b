"""From a plan to layers, by whatever way the plan needs: rounding, calibrating, or what is kept on the disk."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.quantization.quality.texts import calibration_tokens
from engine.weights import disk
from engine.weights.build import Built, Progress, Source, build
from engine.weights.calibrate import build_calibrated
from engine.weights.plan import WeightPlan

if TYPE_CHECKING:
    from engine.loading import Parts

CALIBRATION_TOKENS = 4096
CALIBRATION_WINDOW = 256


def make_weights(
    parts: "Parts", plan: WeightPlan, progress: Progress | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Built:  # fmt: skip
    """The layers of a plan for a loaded checkpoint. Raises ``Cancelled``; ValueError for a weight that cannot be rounded, or a
    checkpoint that is no longer there."""
    model, source = parts.model, Source(parts.checkpoint.tensors, parts.checkpoint.quantized)
    if not plan.needs_calibration:
        return build(model, source, plan, progress, cancelled)
    checksum = parts.checkpoint.checksum
    kept = disk.load(plan, checksum, disk.shapes_of(model.config)) if plan.whole else None
    if kept is not None:
        built = build(model, source, plan, progress, cancelled, ready=kept[0])
        built.cached, built.calibration_tokens = True, kept[1]
        return built
    longest = model.config.max_position_embeddings
    windows = calibration_tokens(parts.tokenizer, CALIBRATION_TOKENS, min(CALIBRATION_WINDOW, longest))
    built = build_calibrated(model, source, plan, windows, progress, cancelled)
    if plan.whole:
        disk.save(plan, checksum, built.weights, built.calibration_tokens)
    return built
