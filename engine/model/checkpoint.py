"""A checkpoint on disk, safetensors or GGUF, behind one face: config, tensors by Hugging Face name, tokenizer.

Whatever does not fit is a ValueError that names the file and the tensor. No pickle is ever loaded.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.model import gguf_checkpoint, safetensors_file
from engine.model.config import ModelConfig, token_ids
from engine.model.gguf_file import GGUFFile
from engine.model.json_file import read_json
from engine.model.store import checked_sha256, file_sha256
from engine.model.tokenizer import Tokenizer
from engine.quantization.base import QuantizedWeight
from engine.quantization.external import open_quantized, read_layout

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


_T = TypeVar("_T")


class Lazy(Mapping[str, _T]):
    """name -> tensor or quantised weight, read from the file when it is asked for, and not kept.

    Values are on the CPU (tensors float32, float16 or bfloat16) and must not be written to. A file that turns out damaged
    when it is read is a ValueError.
    """

    def __init__(self, loaders: dict[str, Callable[[], _T]]) -> None:
        self._loaders = loaders

    def __getitem__(self, name: str) -> _T:
        return self._loaders[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loaders)

    def __len__(self) -> int:
        return len(self._loaders)


class Checkpoint:
    """What ``load_checkpoint`` found. ``tensors`` holds exactly the names of ``config.tensor_shapes()``, shapes checked.

    ``quantized``: those of the weights that the files hold in few bits; ``tensors`` has them too, dequantised to float32.
    ``quantization``: how, in plain values for a screen, None where nothing is: method, format, bits, group_size (None: one scale a row
    or matrix), symmetric, desc_act, made_by (None: not said), activations (how the maker rounds the inputs, None: not), activations_rounded
    (whether ``quantized`` asks for it here) and matrices, how many of the weights are quantised.
    """

    def __init__(
        self,
        *,
        path: Path,
        format: str,
        files: tuple[Path, ...],
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        make_tokenizer: Callable[[], Tokenizer],
        quantized: Mapping[str, QuantizedWeight] | None = None,
        quantization: dict[str, Any] | None = None,
        types: Mapping[str, str] | None = None,
    ) -> None:
        self.path = path
        self.format = format  # "safetensors" | "gguf"
        self.files = files  # the files that hold the weights
        self.config = config
        self.tensors = tensors
        self.quantized = {} if quantized is None else quantized
        self.quantization = quantization
        self.types = {} if types is None else types  # by name, of the tensors in ``tensors``: "GGUF Q4_1", "safetensors BF16"
        self._make_tokenizer = make_tokenizer

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Made on first use (a few tenths of a second). ValueError where the checkpoint has none, or of an unknown kind."""
        return self._make_tokenizer()

    @cached_property
    def checksum(self) -> str:
        """SHA-256, hexadecimal: of the file with the weights, or over names and checksums of its shards.

        Computed on first use (about 0.3 s for 100 MB); for a file that the store has checked, what it found then.
        """
        sums = [checked_sha256(file) or file_sha256(file) for file in self.files]
        if len(sums) == 1:
            return sums[0]
        return hashlib.sha256("".join(f"{file.name} {sha}\n" for file, sha in zip(self.files, sums)).encode()).hexdigest()


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Open the checkpoint at ``path``: a .gguf file, or a directory with one, or with config.json and safetensors.

    Reads headers only; tensors are read when they are used. ValueError for whatever this engine cannot run.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix == ".gguf":
            return _load_gguf(path)
        if any(path.match(pattern) for pattern in _PICKLES):
            raise ValueError(
                f"{path}: a pickle can run code when it is loaded, so it never is; convert the checkpoint to safetensors"
            )
        raise ValueError(f"{path}: expected a .gguf file or a directory with a checkpoint")
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or directory")
    if safetensors_file.present(path):
        return _load_safetensors(path)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _load_gguf(ggufs[0])
    if ggufs:
        raise ValueError(f"{path}: holds several GGUF files, name one: {', '.join(file.name for file in ggufs)}")
    pickles = sorted(file.name for pattern in _PICKLES for file in path.glob(pattern))
    if pickles:
        raise ValueError(
            f"{path}: holds only pickles ({', '.join(pickles[:3])}); a pickle can run code when it is loaded, so it never is; "
            "convert the checkpoint to safetensors"
        )
    raise ValueError(f"{path}: no checkpoint here: expected model.safetensors, model.safetensors.index.json or a .gguf file")


def _load_safetensors(path: Path) -> Checkpoint:
    config_path = path / "config.json"
    raw = read_json(config_path)
    generation = path / "generation_config.json"
    if generation.exists():  # lists every token that ends a turn, where config.json often has but one
        more = token_ids(read_json(generation).get("eos_token_id"), f"{generation}: eos_token_id")
        raw = {**raw, "eos_token_id": [*token_ids(raw.get("eos_token_id"), f"{config_path}: eos_token_id"), *more]}
    config = ModelConfig.from_hf(raw, str(config_path))
    files, found = safetensors_file.open_tensors(path)
    layout = read_layout(raw, config_path, found)
    wanted = config.tensor_shapes()
    quantized, found = open_quantized(layout, found, wanted) if layout else ({}, found)
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    loaders: dict[str, Callable[[], torch.Tensor]] = {name: partial(_dequantized, load) for name, load in quantized.items()}
    for name, entry in found.items():
        if name in wanted:
            safetensors_file.check_dtype(entry, name)
            _check_shape(entry.file, name, entry.shape, wanted[name], config_path)
            loaders[name] = entry.load
        elif name not in ignored and not name.endswith("rotary_emb.inv_freq"):
            raise ValueError(
                f"{entry.file}: tensor {name!r} has no place in a {config.architecture} model as {config_path} describes it"
            )
    _check_complete(loaders, wanted, path)
    return Checkpoint(
        path=path,
        format="safetensors",
        files=files,
        config=config,
        tensors=Lazy({name: loaders[name] for name in wanted}),
        make_tokenizer=lambda: Tokenizer.from_directory(path, config),
        quantized=Lazy(quantized),
        quantization={**layout.facts(), "matrices": len(quantized)} if layout else None,
        types={name: f"safetensors {entry.dtype}" for name, entry in found.items() if name in wanted},
    )


def _dequantized(load: Callable[[], QuantizedWeight]) -> torch.Tensor:
    return load().dequantize()


def _load_gguf(path: Path) -> Checkpoint:
    file = GGUFFile(path)
    config = gguf_checkpoint.read_config(file)
    wanted = config.tensor_shapes()
    loaders, types = {}, {}
    for name, entry in gguf_checkpoint.hf_tensors(file, config).items():
        if name not in wanted:
            raise ValueError(
                f"{path}: tensor {entry.name!r} has no place in a {config.architecture} model as its metadata describes it"
            )
        _check_shape(path, entry.name, entry.shape, wanted[name], path)
        loaders[name] = entry.load
        types[name] = f"GGUF {file.tensors[entry.name].type_name}"
    _check_complete(loaders, wanted, path)
    return Checkpoint(
        path=path,
        format="gguf",
        files=(path,),
        config=config,
        tensors=Lazy({name: loaders[name] for name in wanted}),
        make_tokenizer=lambda: Tokenizer.from_gguf(file.metadata, str(path), config),
        types=types,
    )


def _check_shape(file: Path, name: str, got: tuple[int, ...], wanted: tuple[int, ...], config_path: Path) -> None:
    if got != wanted:
        raise ValueError(f"{file}: tensor {name!r} has shape {list(got)}, but {config_path} asks for {list(wanted)}")


def _check_complete(loaders: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    missing = [name for name in wanted if name not in loaders]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{path}: tensor {missing[0]!r}{more} missing")
