"""Checkpoints of compressed-tensors (what llm-compressor writes): int4 packed, int8 and fp8 as they are.

For a weight [N, K] in b bits:

- "pack-quantized": ``weight_packed`` int32 [N, K b / 32], codes of a row one after another, each the signed integer + 2^(b-1);
  ``weight_zero_point`` (asymmetric) int32 [N b / 32, G], likewise offset but packed along the outputs; ``weight_shape`` [N, K].
- "int-quantized" and "naive-quantized": ``weight`` int8 [N, K], ``weight_zero_point`` int8 shaped as the scales.
- "float-quantized" and "naive-quantized": ``weight`` float8_e4m3fn [N, K].

``weight_scale`` is [1] (strategy "tensor"), [N, 1] ("channel"), [N, G] ("group") or [N / rows, K / columns] ("block"). The value is
(integer - zero) * scale. ``weight_g_idx`` [K] with the activation order "group". ``input_scale`` where inputs are rounded too, statically.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.safetensors_file import Entry
from engine.quantization import packing
from engine.quantization.base import QuantizedWeight
from engine.quantization.external.fields import (
    BITS,
    FLOATS,
    Fields,
    Loader,
    Parts,
    bytes_of_words,
    words_of,
    zero_points_or_none,
)

FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "float-quantized")
_MIXED = "mixed-precision"  # each group then names its own
_KV_SCALES = re.compile(r"\.self_attn\.(([qkv]_(scale|zero_point))|([kv]_proj\.output_(scale|zero_point)))$")


@dataclass(frozen=True)
class Group:
    """One entry of ``config_groups``: which layers, and how their weights and inputs are rounded."""

    targets: tuple[str, ...]
    format: str
    bits: int
    float: bool
    symmetric: bool
    strategy: str  # tensor | channel | group | block
    group_size: int | None  # of the strategy group; of block: its columns
    block_rows: int
    act_order: bool  # columns of a group lie apart; weight_g_idx says where
    inputs: str | None  # how inputs are rounded, in words
    round_inputs: bool  # whether they are here, too: int8, symmetric, with int8 weights of one scale a row
    dynamic_inputs: bool

    def codes_dtype(self) -> str:
        return "F8_E4M3" if self.float else "I8"


class CompressedLayout:
    suffixes: tuple[str, ...] = (
        "weight_packed",
        "weight_scale",
        "weight_shape",
        "weight_zero_point",
        "weight_g_idx",
        "input_scale",
        "input_zero_point",
    )

    def __init__(self, fields: Fields) -> None:
        """ValueError for a format, strategy or width that is not supported, or a transform of the weights."""
        format = fields.choice(("format",), (*FORMATS, _MIXED))
        transforms, sparsity = fields.first("transform_config", default={}), fields.first("sparsity_config", default={})
        if transforms:
            raise fields.error("transform_config", transforms, "empty (weights in a rotated basis are not supported)")
        if sparsity and Fields(sparsity, f"{fields.where}.sparsity_config").first("format", default="dense") != "dense":
            raise fields.error("sparsity_config", sparsity, "empty or dense")
        groups = Fields(fields.first("config_groups", default={}), f"{fields.where}.config_groups")
        self.groups = [_read_group(Fields(raw, f"{groups.where}.{name}"), format) for name, raw in groups.raw.items()]
        if not self.groups:
            raise fields.error("config_groups", groups.raw, "an object with at least one group")
        self.ignore = _patterns(fields, "ignore", fields.first("ignore", default=[]))
        self.kv_cache = fields.first("kv_cache_scheme") is not None
        version = fields.first("version")
        self.made_by = f"compressed-tensors {version}" if isinstance(version, str) else None

    def facts(self) -> dict[str, Any]:
        groups = self.groups
        bits, sizes = sorted({group.bits for group in groups}), {group.group_size for group in groups}
        return {
            "method": "compressed-tensors",
            "format": ", ".join(dict.fromkeys(group.format for group in groups)),
            "bits": bits[0] if len(bits) == 1 else bits,
            "group_size": next(iter(sizes)) if len(sizes) == 1 else None,
            "symmetric": all(group.symmetric for group in groups),
            "desc_act": any(group.act_order for group in groups),
            "made_by": self.made_by,
            "activations": "; ".join(dict.fromkeys(group.inputs for group in groups if group.inputs)) or None,
            "activations_rounded": any(group.round_inputs for group in groups),
        }

    def open(self, parts: Parts) -> Loader | None:
        present = [suffix for suffix in self.suffixes if parts.has(suffix)]
        stored = parts.found.get(parts.name("weight"))
        codes = stored is not None and stored.dtype not in FLOATS
        if not present and not codes:
            return None
        group = self._group_of(parts.module)
        first = present[0] if present else "weight"
        if group is None:
            raise parts.error(first, "belongs to no group of config_groups: the layer is not targeted, or ignored")
        if group.format == "pack-quantized":
            self._check_packed(parts, group, first)
        else:
            self._check_plain(parts, group, first)
        if parts.has("weight_g_idx") or group.act_order:
            parts.check("weight_g_idx", first, ("I32", "I64"), (parts.shape[1],))
        if group.round_inputs and not group.dynamic_inputs:
            parts.check("input_scale", first, FLOATS, (), (1,))
        return lambda: _load(parts, group)

    def spare(self, name: str, found: Mapping[str, Entry]) -> bool:
        """Scales for a KV cache in fewer bits: what this engine's cache holds is the engine's own choice."""
        return self.kv_cache and _KV_SCALES.search(name) is not None

    def _group_of(self, module: str) -> Group | None:
        """The group that targets ``module``: by its name before an expression, and both before the class."""
        if any(_matches(module, pattern) for pattern in self.ignore):
            return None
        ranks = (lambda t: t == module, lambda t: t.startswith("re:") and _matches(module, t), lambda t: t == "Linear")
        return next((group for rank in ranks for group in self.groups if any(map(rank, group.targets))), None)

    def _check_packed(self, parts: Parts, group: Group, first: str) -> None:
        rows, columns = parts.shape
        parts.check(
            "weight_packed",
            first,
            ("I32",),
            (rows, words_of(columns, group.bits)),
            orders={
                (words_of(columns, group.bits), rows): "the matrix is transposed, as GPTQ has it",
                (columns, words_of(rows, group.bits)): "codes lie along the outputs, as AWQ packs them",
            },
        )
        parts.check("weight_shape", "weight_packed", ("I64", "I32"), (2,))
        groups = self._check_scales(parts, group, "weight_packed")
        if not group.symmetric or parts.has("weight_zero_point"):
            if group.strategy == "tensor":
                parts.check("weight_zero_point", "weight_packed", ("I8",), (), (1,))
            else:
                parts.check("weight_zero_point", "weight_packed", ("I32",), (words_of(rows, group.bits), groups))

    def _check_plain(self, parts: Parts, group: Group, first: str) -> None:
        parts.check("weight", first, (group.codes_dtype(),), parts.shape)
        self._check_scales(parts, group, "weight")
        if not group.symmetric or parts.has("weight_zero_point"):
            shape = parts.found[parts.name("weight_scale")].shape
            parts.check("weight_zero_point", "weight", (group.codes_dtype(),), shape)

    def _check_scales(self, parts: Parts, group: Group, beside: str) -> int:
        """The number of groups of a row."""
        rows, columns = parts.shape
        groups = -(-columns // (group.group_size or columns))
        shapes: dict[str, list[tuple[int, ...]]] = {
            "tensor": [(), (1,)],
            "channel": [(rows, 1), (rows,)],
            "group": [(rows, groups)],
            "block": [(-(-rows // group.block_rows), groups)],
        }
        parts.check("weight_scale", beside, FLOATS, *shapes[group.strategy])
        return groups


def _read_group(fields: Fields, format: str) -> Group:
    targets = _patterns(fields, "targets", fields.first("targets"))
    format = fields.choice(("format",), FORMATS, None if format == _MIXED else format)
    weights = Fields(fields.first("weights"), f"{fields.where}.weights")
    is_float = weights.choice(("type",), ("int", "float"), "int") == "float"
    if is_float != (format == "float-quantized") and format != "naive-quantized":
        raise weights.error("type", weights.first("type", default="int"), f"what {format!r} holds")
    strategies = ("tensor", "channel", "group") if format == "pack-quantized" else ("tensor", "channel", "group", "block")
    size = None if weights.first("group_size") is None else weights.group_size("group_size")
    inferred = "group" if size else "tensor" if weights.first("group_size") is None else "channel"
    strategy = weights.choice(("strategy",), strategies, inferred)
    if strategy == "group" and size is None:
        raise weights.error("group_size", weights.first("group_size"), 'a positive integer with the strategy "group"')
    block_rows, columns = _block(weights) if strategy == "block" else (1, size if strategy == "group" else None)
    if weights.first("dynamic", default=False) is not False:
        raise weights.error("dynamic", weights.raw["dynamic"], "false: weights are rounded once")
    bits = weights.choice(("num_bits",), (8,) if is_float else BITS, 8)
    symmetric = weights.boolean("symmetric", True)
    if is_float and not symmetric:
        raise weights.error("symmetric", False, "true for float8")
    if fields.first("output_activations") is not None:
        raise fields.error("output_activations", fields.raw["output_activations"], "null (not supported)")
    inputs, round_inputs, dynamic = _inputs(fields)
    return Group(
        targets=targets,
        format=format,
        bits=bits,
        float=is_float,
        symmetric=symmetric,
        strategy=strategy,
        group_size=columns,
        block_rows=block_rows,
        act_order=str(weights.first("actorder")).lower() in ("group", "dynamic", "true"),  # as the library has called it
        inputs=inputs,
        round_inputs=round_inputs and not is_float and bits == 8 and symmetric and strategy in ("tensor", "channel"),
        dynamic_inputs=dynamic,
    )


def _block(weights: Fields) -> tuple[int, int]:
    block = weights.first("block_structure")
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= 1 << 24 for n in block):
        raise weights.error("block_structure", block, "[rows, columns]")
    return block[0], block[1]


def _inputs(fields: Fields) -> tuple[str | None, bool, bool]:
    """How inputs are rounded in words, whether int8 codes about zero for a tensor or token do, and whether the scale is found anew."""
    raw = fields.first("input_activations")
    if raw is None:
        return None, False, False
    inputs = Fields(raw, f"{fields.where}.input_activations")
    kind, bits = inputs.choice(("type",), ("int", "float"), "int"), inputs.choice(("num_bits",), (4, 6, 8, 16), 8)
    symmetric, dynamic = inputs.boolean("symmetric", True), inputs.first("dynamic", default=False) is True
    strategy = str(inputs.first("strategy", default="tensor"))
    words = f"{kind}{bits}, {'symmetric' if symmetric else 'asymmetric'}, {'dynamic' if dynamic else 'static'} per {strategy}"
    # A dynamic scale is one for each token here: one for the whole batch would let requests change each other's results.
    return words, kind == "int" and bits == 8 and symmetric and strategy == ("token" if dynamic else "tensor"), dynamic


def _patterns(fields: Fields, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise fields.error(key, value, "a list of names, classes or re:expressions")
    for item in value:
        try:
            re.compile(item.removeprefix("re:") if item.startswith("re:") else "")
        except re.error as error:
            raise fields.error(key, item, f"a regular expression after re: ({error})") from error
    return tuple(value)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return pattern in (module, "Linear")


def _load(parts: Parts, group: Group) -> QuantizedWeight:
    rows, columns = parts.shape
    if group.format == "pack-quantized":
        _check_stored_shape(parts)
        codes = bytes_of_words(parts.load("weight_packed"), columns, group.bits)
    else:
        codes = _plain_codes(parts, group)
    scales = parts.scales("weight_scale")
    order = None
    if parts.has("weight_g_idx") and bool((parts.load("weight_g_idx") >= 0).all()):  # -1: was never set, columns are in order
        order = parts.group_of_column("weight_g_idx", scales.shape[-1], group.group_size or columns)
    scales = _by_rows(scales, group, rows)
    return QuantizedWeight(
        method="fp8" if group.float else "int8_w8a8" if group.round_inputs else f"int{group.bits}",
        shape=parts.shape,
        bits=group.bits,
        levels="fp8_e4m3" if group.float else "affine",
        group_size=0 if group.strategy == "tensor" else min(group.group_size or columns, columns),
        codes=codes,
        scales=scales,
        zero_points=_zero_points(parts, group) if parts.has("weight_zero_point") else None,
        group_of_column=order,
        activation_bits=8 if group.round_inputs else None,
        activation_scale=_input_scale(parts) if group.round_inputs and not group.dynamic_inputs else None,
    )


def _zero_points(parts: Parts, group: Group) -> torch.Tensor | None:
    """uint8, shaped as the scales, and None where all are the middle code: what symmetric weights must have."""
    stored = parts.load("weight_zero_point")
    zero_points = None
    if group.float:
        middle = not bool(stored.float().any())
    else:
        if stored.dtype == torch.int32:
            rows = parts.shape[0]
            offset = packing.unpack(bytes_of_words(stored.t(), rows, group.bits), group.bits, rows).t()
        else:
            offset = _offset(parts, "weight_zero_point", stored, group.bits)
        zero_points = zero_points_or_none(_by_rows(offset, group, parts.shape[0]), group.bits)
        middle = zero_points is None
    if group.symmetric and not middle:
        raise parts.error("weight_zero_point", "moves the zero, but the configuration says that the weights are symmetric")
    return zero_points


def _check_stored_shape(parts: Parts) -> None:
    stored = parts.load("weight_shape").tolist()
    if stored != list(parts.shape):
        raise parts.error("weight_shape", f"says {stored}, but the model asks for {list(parts.shape)}")


def _plain_codes(parts: Parts, group: Group) -> torch.Tensor:
    stored = parts.load("weight")
    if not group.float:
        return packing.pack(_offset(parts, "weight", stored, group.bits), group.bits)
    codes = stored.contiguous().view(torch.uint8)
    bad = int(((codes & 0x7F) == 0x7F).sum())
    if bad:
        raise parts.error("weight", f"has {bad:,} values that are NaN, of {codes.numel():,}")
    return codes


def _offset(parts: Parts, suffix: str, signed: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 in [-2^(b-1), 2^(b-1)) -> uint8 codes. ValueError for an integer that needs more bits."""
    half = 1 << (bits - 1)
    low, high = int(signed.min()), int(signed.max())
    if low < -half or high >= half:
        raise parts.error(suffix, f"holds integers from {low} to {high}, but {bits} bits hold {-half} to {half - 1}")
    return (signed.to(torch.int16) + half).to(torch.uint8)


def _by_rows(of_groups: torch.Tensor, group: Group, rows: int) -> torch.Tensor:
    """As a ``QuantizedWeight`` has scales: [1, 1] for the matrix, else [N, G]; what a block shares, for each of its rows."""
    if group.strategy == "tensor":
        return of_groups.reshape(1, 1)
    of_groups = of_groups.reshape(of_groups.shape[0], -1)
    return of_groups.repeat_interleave(group.block_rows, 0)[:rows] if group.block_rows > 1 else of_groups


def _input_scale(parts: Parts) -> float:
    scale = float(parts.load("input_scale").float())
    if not 0 < scale < float("inf"):
        raise parts.error("input_scale", f"must be positive and finite, got {scale}")
    return scale
