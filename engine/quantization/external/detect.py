"""Which tool made a checkpoint of safetensors, and what reads its quantised layers."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from engine.model.json_file import read_json
from engine.model.safetensors_file import Entry
from engine.quantization.external.awq_layout import AWQLayout
from engine.quantization.external.compressed_layout import CompressedLayout
from engine.quantization.external.fields import Fields, Layout, Loader, Parts
from engine.quantization.external.gptq_layout import GPTQLayout

METHODS = ("gptq", "awq", "compressed-tensors")
# Files beside config.json in which early AutoGPTQ and AutoAWQ wrote what later went into it.
_SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def read_layout(config: Mapping[str, Any], config_path: Path, names: Iterable[str]) -> Layout | None:
    """How the tensors ``names`` beside ``config_path`` are quantised; None where they are not.

    ValueError, naming file and key, for a method, layout or option that is not supported.
    """
    for key in ("quantization_config", "compression_config"):  # the latter: compressed-tensors before 0.6
        if config.get(key) is not None:
            fields = Fields(config[key], f"{config_path}: {key}")
            return _layout(fields, None if key == "quantization_config" else "compressed-tensors")
    for name, method in _SIDE_FILES.items() if any(name.endswith(".qweight") for name in names) else ():
        side = config_path.parent / name
        if side.is_file():
            return _layout(Fields(read_json(side), f"{side}: quantization"), method)
    return None


def _layout(fields: Fields, method: str | None) -> Layout:
    method = fields.choice(("quant_method", "method"), METHODS, method)
    if method == "gptq":
        return GPTQLayout(fields)
    return AWQLayout(fields) if method == "awq" else CompressedLayout(fields)


def open_quantized(
    layout: Layout, found: Mapping[str, Entry], wanted: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, Loader], dict[str, Entry]]:
    """The quantised weights by Hugging Face name, and the tensors that are left: those of everything that is not quantised.

    ``wanted``: every tensor of the model, with its shape. Only linear layers are looked at. Names, dtypes and shapes are checked
    here, against the headers; values when a weight is loaded. ValueError names file and tensor.
    """
    weights: dict[str, Loader] = {}
    left = dict(found)
    for name, shape in wanted.items():
        module, _, suffix = name.rpartition(".")
        if suffix != "weight" or len(shape) != 2 or not module.endswith(("_proj", "lm_head")):
            continue
        loader = layout.open(Parts(module, (shape[0], shape[1]), found))
        if loader is None:
            continue
        weights[name] = loader
        for suffix in (*layout.suffixes, "weight"):
            left.pop(f"{module}.{suffix}", None)
    for name in [name for name in left if name not in wanted and layout.spare(name, found)]:
        del left[name]
    return weights, left
