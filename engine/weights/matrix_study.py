"""One matrix with what comes into it, whole, so that any method can be tried on it elsewhere."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from engine.weights.original import Originals, running_weight
from engine.weights.plan import STACKS, tensor_name

if TYPE_CHECKING:
    from engine.loading import Parts
    from engine.weights.studies import Study


def observe(parts: "Parts", layer: int, name: str) -> Callable[["Study"], dict[str, Any]]:
    """A study that gives the fields of a MatrixObserved."""
    running = parts.model.layers[layer]
    runs_original = parts.weights.plan.method is None

    def work(study: "Study") -> dict[str, Any]:
        with torch.inference_mode():
            originals = Originals(parts)
            stack = next(stack for stack, names in STACKS.items() if name in names)
            flow = originals.flow_at(layer)
            study.check()
            seen = flow.observe(originals.layer(layer))[stack]
            weight = originals.source.matrix(layer, name)
            now, dtype_now = b"", ""
            if not runs_original:
                whole = running_weight(getattr(running, stack), weight.shape[1], parts.model.compute_dtype)
                first = sum(originals.source.matrix(layer, n).shape[0] for n in _before(stack, name))
                now, dtype_now = _bytes(whole[first : first + weight.shape[0]])
            original, dtype = _bytes(weight)
            return {
                "layer": layer, "name": name, "rows": weight.shape[0], "columns": weight.shape[1], "dtype": dtype,
                "weight": original, "source": parts.checkpoint.types.get(tensor_name(layer, name) + ".weight", ""),
                "running_dtype": dtype_now, "running": now,
                "input_rows": seen.inputs.shape[0], "inputs": _raw(seen.inputs.half()),
                "input_abs_mean": _raw(seen.abs_mean.float()), "input_abs_max": _raw(seen.abs_max.float()),
                "hessian": _raw(seen.hessian.float()), "calibration_tokens": seen.rows,
            }  # fmt: skip

    return work


def _before(stack: str, name: str) -> tuple[str, ...]:
    return STACKS[stack][: STACKS[stack].index(name)]


def _bytes(weight: torch.Tensor) -> tuple[bytes, str]:
    """16 bits where they hold every number exactly, else 32: what a method loses is compared with these."""
    half = weight.half()
    exact = torch.equal(half.float(), weight)
    return (_raw(half), "float16") if exact else (_raw(weight.float()), "float32")


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
