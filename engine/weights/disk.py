"""Rounded weights that took minutes, kept in the cache by what they were made of: the same question is answered from the disk.

One safetensors file for each plan and checkpoint. A file that is damaged, or of another version, is not used and is made again.
"""

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.model.store import cache_directory
from engine.quantization.base import QuantizedWeight
from engine.weights.plan import STACKS, WeightPlan

VERSION = 1  # of the methods' code and of the format: raised when either changes what comes out
_KEEP = 8  # files, the latest used
_TENSORS = ("codes", "scales", "zero_points", "minima", "group_of_column", "input_scales")
_FIELDS = ("method", "shape", "bits", "levels", "group_size", "activation_scale", "activation_bits")
_log = logging.getLogger(__name__)

Weights = dict[tuple[int, str], QuantizedWeight]


def directory() -> Path:
    return cache_directory() / "quantized"


def path_of(plan: WeightPlan, checksum: str) -> Path:
    return directory() / f"{plan.method}-{plan.key(checksum, VERSION)}.safetensors"


def load(plan: WeightPlan, checksum: str, shapes: Mapping[tuple[int, str], tuple[int, int]]) -> tuple[Weights, int] | None:
    """The weights, and how many tokens calibrated them. ``shapes``: what must be there. None: not kept, or not to be trusted."""
    path = path_of(plan, checksum)
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["cutaway"])
            weights = {}
            for (layer, stack), shape in shapes.items():
                weight = _read(file, facts["weights"][f"{layer}.{stack}"], f"{layer}.{stack}")
                if weight.shape != shape or weight.unpacked().shape != shape:
                    raise ValueError(f"{layer}.{stack} has shape {list(weight.shape)}, {list(shape)} expected")
                weights[layer, stack] = weight
            os.utime(path)
            return weights, int(facts["calibration_tokens"])
    except (SafetensorError, ValueError, KeyError, TypeError, OSError) as error:
        _log.warning("%s is not used, and made again: %s", path, error)
        return None


def save(plan: WeightPlan, checksum: str, weights: Weights, calibration_tokens: int) -> None:
    """Keep them. A cache that cannot be written is said in the log, and nothing else happens."""
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {"calibration_tokens": calibration_tokens, "weights": {}}
    for (layer, stack), weight in weights.items():
        if weight.nested is not None:
            raise RuntimeError(f"{weight.method} has scales of scales, which are not kept on disk")
        name = f"{layer}.{stack}"
        facts["weights"][name] = {field: getattr(weight, field) for field in _FIELDS}
        held = {part: getattr(weight, part) for part in _TENSORS}
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in held.items() if tensor is not None}
    path = path_of(plan, checksum)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            made = Path(work) / path.name
            save_file(tensors, made, {"cutaway": json.dumps(facts)})
            os.replace(made, path)
        _forget_oldest(path.parent)
    except OSError as error:
        _log.warning("the rounded weights could not be kept in %s: %s", path.parent, error)


def _read(file: Any, facts: Mapping[str, Any], name: str) -> QuantizedWeight:
    found = set(file.keys())
    tensors = {part: file.get_tensor(f"{name}.{part}") if f"{name}.{part}" in found else None for part in _TENSORS}
    fields: dict[str, Any] = {**{field: facts[field] for field in _FIELDS}, "shape": tuple(facts["shape"]), **tensors}
    return QuantizedWeight(**fields)


def _forget_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[_KEEP:]:
        with contextlib.suppress(OSError):
            file.unlink()


def shapes_of(config: Any) -> dict[tuple[int, str], tuple[int, int]]:
    """Shape [out_features, in_features] of each stack of each layer. ``config``: a ModelConfig."""
    hidden, q = config.hidden_size, config.num_attention_heads * config.head_dim
    of_stack = {
        "qkv": (q + 2 * config.num_kv_heads * config.head_dim, hidden),
        "o": (hidden, q),
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
    }
    return {(layer, stack): of_stack[stack] for layer in range(config.num_layers) for stack in STACKS}
