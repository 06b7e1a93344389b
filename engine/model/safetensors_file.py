"""Reading safetensors, one file or shards with an index, through the safetensors library (which checks the header)."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Entry:
    """A tensor of a safetensors file: its dtype and shape from the header, its values on ``load()``."""

    file: Path
    dtype: str  # as the header names it: "F32", "I32", ...
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


def present(directory: Path) -> bool:
    return (directory / SINGLE).exists() or (directory / INDEX).exists()


def open_tensors(directory: Path) -> tuple[tuple[Path, ...], dict[str, Entry]]:
    """The files with the weights, and every tensor in them. ValueError, naming file and tensor, for a damaged one.

    Tensors of any dtype: whoever takes one for an ordinary weight calls ``check_dtype``.
    """
    if (directory / SINGLE).exists():
        file = directory / SINGLE
        return (file,), _open_file(file)
    index = directory / INDEX
    weight_map = _read_weight_map(index)
    names = sorted(set(weight_map.values()))
    shards = {}
    for name in names:
        if not (directory / name).is_file():
            lost = next(tensor for tensor, shard in weight_map.items() if shard == name)
            raise ValueError(f"{directory / name}: missing, but {index} places tensor {lost!r} there")
        shards[name] = _open_file(directory / name)
    found = {}
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise ValueError(f"{directory / name}: tensor {tensor!r} missing, which {index} places there")
        found[tensor] = shards[name][tensor]
    return tuple(directory / name for name in names), found


def check_dtype(entry: Entry, name: str) -> None:
    """ValueError for a tensor without the dtype of an ordinary weight."""
    if entry.dtype not in _DTYPES:
        raise ValueError(f"{entry.file}: tensor {name!r} has dtype {entry.dtype}, supported: {', '.join(_DTYPES)}")


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{index}: no weight_map in it: {error!r}") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: weight_map must be an object from tensors to files")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index}: tensor {tensor!r} must lie in a .safetensors file of the same directory, got {name!r}")
    return weight_map


def _open_file(file: Path) -> dict[str, Entry]:
    try:
        handle = safe_open(file, framework="pt")
        names = list(handle.keys())
        slices = {name: handle.get_slice(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file: {error}") from error
    entries = {}
    for name, part in slices.items():
        entries[name] = Entry(file, part.get_dtype(), tuple(part.get_shape()), partial(_load, handle, file, name))
    return entries


def _load(handle: Any, file: Path, name: str) -> torch.Tensor:
    try:
        return handle.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{file}: tensor {name!r} cannot be read: {error}") from error
