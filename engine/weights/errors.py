"""What rounding did to every matrix: one LayerQuantized each, in the order of the layers."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from engine.events.quantization import LayerQuantized
from engine.model.linear import Linear
from engine.quantization import catalogue
from engine.quantization.error import output_error, weight_error
from engine.weights.build import form_of
from engine.weights.original import Originals, running_weight
from engine.weights.plan import STACKS

if TYPE_CHECKING:
    from engine.loading import Parts
    from engine.weights.studies import Study

_ROWS = 64  # of calibration inputs
BINS = 64


def of_layers(parts: "Parts") -> Callable[["Study"], None]:
    """A study that compares what runs now with the checkpoint's own weights, on real inputs."""
    running, weights = parts.model, parts.weights
    layers = running.layers

    def work(study: "Study") -> None:
        # Comparing is work for one core a matrix, and half of the time: it goes on while the text moves through the next layer.
        with torch.inference_mode(), ThreadPoolExecutor(torch.get_num_threads()) as pool:
            originals = Originals(parts)
            waiting: list[Future[dict[str, Any]]] = []
            for index, layer in enumerate(layers):
                inputs = _inputs(originals, index)
                _tell(study, waiting)
                waiting = []
                for stack, names in STACKS.items():
                    linear = getattr(layer, stack)
                    runs = running_weight(linear, inputs[stack].shape[1], running.compute_dtype)
                    start = 0
                    for name in names:
                        original = originals.source.matrix(index, name)
                        part = runs[start : start + original.shape[0]]
                        start += original.shape[0]
                        facts = {"layer": index, "name": name, **_facts(weights, linear, (index, stack), runs, part)}
                        waiting.append(pool.submit(_errors, original, part, inputs[stack], facts))
            _tell(study, waiting)

    return work


def _tell(study: "Study", found: "list[Future[dict[str, Any]]]") -> None:
    study.check()
    for one in found:
        study.tell(LayerQuantized, **one.result())


def _inputs(originals: Originals, index: int) -> dict[str, torch.Tensor]:
    """Some of the rows that come into each stack."""
    flow = originals.flow_at(index)
    return {stack: seen.inputs[:_ROWS] for stack, seen in flow.observe(originals.layer(index), hessian=False).items()}


def _facts(weights: Any, linear: Linear, place: tuple[int, str], runs: torch.Tensor, part: torch.Tensor) -> dict[str, Any]:
    """``place``: layer and stack; ``runs``: the stack's weight; ``part``: the matrix's rows of it."""
    plan = weights.plan
    method = catalogue.METHOD[plan.method] if plan.method and form_of(linear) != "plain" else None
    per_weight = 8 * weights.bytes_of[place] / runs.numel()
    return {
        "method": "" if method is None else method.name,
        "rows": part.shape[0],
        "columns": part.shape[1],
        "bits": round(per_weight) if method is None else plan.options.get("bits", method.bits),
        "group_size": 0 if method is None else plan.group_size or part.shape[1],
        "form": form_of(linear),
        "nbytes": round(per_weight * part.numel() / 8),
        "bits_per_weight": per_weight,
    }


def _errors(original: torch.Tensor, part: torch.Tensor, inputs: torch.Tensor, facts: dict[str, Any]) -> dict[str, Any]:
    with torch.inference_mode():  # a thread of its own
        found = weight_error(original, part, BINS)
        off = output_error(inputs, original, part)
    return {
        **facts,
        "sqnr_db": found.sqnr_db,
        "max_error": found.max_error,
        "mean_error": found.mean_error,
        "rms_weight": float(original.square().mean().sqrt()),
        "outlier_share": found.outlier_share,
        "output_error": off,
        "weight_low": found.weights.low,
        "weight_high": found.weights.high,
        "weight_counts": found.weights.counts.tolist(),
        "error_low": found.errors.low,
        "error_high": found.errors.high,
        "error_counts": found.errors.counts.tolist(),
    }
