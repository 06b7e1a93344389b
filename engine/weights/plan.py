"""What is to be done to a model's weights, as plain values that can be compared, sent and hashed."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.quantization import catalogue

# The matrices of a layer by their names in a checkpoint, in the stacks that run as one linear layer.
STACKS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
MATRICES = tuple(name for names in STACKS.values() for name in names)
_PREFIX = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn") | dict.fromkeys(
    ("gate_proj", "up_proj", "down_proj"), "mlp"
)
# Options of the methods' own (see engine.quantization), and what their values are.
_OWN: dict[str, dict[str, type]] = {
    "int8": {"per": str},
    "fp8": {"per": str},
    "int8_w8a8": {"smooth": float, "static": bool},
    "int4": {"symmetric": bool},
    "int3": {"symmetric": bool},
    "int2": {"symmetric": bool},
    "nf4": {"double": bool},
    "gptq": {"damping": float, "act_order": bool, "static_groups": bool, "symmetric": bool, "bits": int},
    "awq": {"clip": bool, "symmetric": bool, "bits": int},
}
_GENERAL: dict[str, type] = {"only": list, "error_between": list, "head": bool}


@dataclass(frozen=True)
class WeightPlan:
    """``method``: one of ``engine.quantization.base.METHODS``; None: the checkpoint's own weights in the model's dtype.

    Beside the method's own, ``options`` are: "only", a list of layers ("3") or matrices ("3.down_proj"): the others stay as they are;
    "error_between", [low, high]: only weights whose rounding error lies there are rounded; "head": the head, too (it and the embedding
    stay in the model's dtype unless asked).
    """

    method: str | None = None
    group_size: int | None = None  # None: the method's own
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def needs_calibration(self) -> bool:
        if self.method is None:
            return False
        return catalogue.METHOD[self.method].needs_calibration or "smooth" in self.options or bool(self.options.get("static"))

    @property
    def own_options(self) -> dict[str, Any]:
        """What goes to the method's function. GPTQ rounds the columns that matter most first, on grids found beforehand: as good as any
        order, and its groups stay where the kernels expect them."""
        defaults = {"act_order": True, "static_groups": True} if self.method == "gptq" else {}
        return defaults | {name: value for name, value in self.options.items() if name not in _GENERAL}

    @property
    def whole(self) -> bool:
        """Whether all linear layers are rounded and nothing is left out."""
        return "only" not in self.options and "error_between" not in self.options

    def takes(self, layer: int, matrix: str) -> bool:
        """Whether this matrix is rounded at all."""
        only = self.options.get("only")
        return self.method is not None and (only is None or str(layer) in only or f"{layer}.{matrix}" in only)

    def key(self, checksum: str, version: int) -> str:
        """A hash of everything that the result depends on."""
        what = [checksum, version, self.method, self.group_size, sorted(self.options.items())]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def make_plan(
    method: str | None, group_size: int | None = None, options: Mapping[str, Any] | None = None, num_layers: int | None = None
) -> WeightPlan:
    """A plan of these. ValueError, with what is allowed, for what does not exist or does not go together."""
    options = dict(options or {})
    if method is None:
        if group_size is not None or options:
            name, got = ("quantization_options", options) if group_size is None else ("quantization_group_size", group_size)
            raise ValueError(f"{name} goes with a quantization, which is None; got {got!r}")
        return WeightPlan()
    if not isinstance(method, str):
        raise ValueError(f"quantization must be None or one of {', '.join(catalogue.METHOD)}, got {method!r}")
    _known, size = catalogue.check(method, group_size)
    allowed = _OWN[method] | _GENERAL
    for name, value in options.items():
        if name not in allowed:
            raise ValueError(f"{method} has the options {', '.join(allowed)}, got {name!r}")
        _check_type(name, value, allowed[name])
    if "bits" in options and options["bits"] not in (2, 3, 4, 8):
        raise ValueError(f"{method} takes bits 2, 3, 4 or 8, got {options['bits']!r}")
    if "only" in options:
        _check_only(options["only"], num_layers)
    if "error_between" in options:
        low_high = options["error_between"]
        if len(low_high) != 2 or not all(_real(v) for v in low_high) or low_high[0] > low_high[1]:
            raise ValueError(f"error_between must be [low, high], got {low_high!r}")
    return WeightPlan(method, size, options)


def _check_type(name: str, value: Any, kind: type) -> None:
    fits = _real(value) and math.isfinite(value) if kind is float else type(value) is kind
    if not fits:
        raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")


def _check_only(only: Iterable[Any], num_layers: int | None) -> None:
    for item in only:
        layer, _, matrix = item.partition(".") if isinstance(item, str) else ("", "", "")
        if not layer.isdigit() or (matrix and matrix not in MATRICES) or (num_layers is not None and int(layer) >= num_layers):
            where = "" if num_layers is None else f" of {num_layers}"
            raise ValueError(
                f'only must list layers{where} ("3") or matrices ("3.down_proj"; {", ".join(MATRICES)}), got {item!r}'
            )


def _real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def tensor_name(layer: int, matrix: str) -> str:
    """The matrix's name in a Hugging Face checkpoint, without ".weight"."""
    return f"model.layers.{layer}.{_PREFIX[matrix]}.{matrix}"
