"""Drafter files: what is written is read, and whatever is not a drafter for this target is refused by name."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from engine.model.store import DEFAULT, KNOWN
from engine.speculation.files import METHODS, read_drafter, shipped_drafter, tensor_shapes, write_drafter
from tests.engine.engines import tiny_parts

SHA = "ab" * 32
SETTINGS = {"draft_model": {"num_layers": 2}, "layer_skip": {"exit_layer": 1}, "medusa": {}, "eagle": {}}


def config() -> Any:
    return tiny_parts()[0].model_config


def values(method: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = tensor_shapes(method, config(), num_layers=2, num_heads=3)
    return {name: torch.randn(shape).half().float() for name, shape in shapes.items()}


def write(path: Path, method: str, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> Path:
    known = {"config": config(), "target": "tiny", "target_sha256": SHA, "settings": SETTINGS[method], "card": "made by a test"}
    write_drafter(path, method, tensors or values(method), torch.tensor([1, 2, 5, 300]), **{**known, **changes})
    return path


def spoil(path: Path, tensors: dict[str, torch.Tensor] | None = None, **metadata: str | None) -> None:
    """Write the file anew with other tensors and metadata (None: left out)."""
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    changed = {name: value for name, value in {**header["__metadata__"], **metadata}.items() if value is not None}
    save_file({**load_file(path), **(tensors or {})}, path, changed)


@pytest.mark.parametrize("method", METHODS)
def test_round_trip(method: str, tmp_path: Path) -> None:
    file = read_drafter(write(tmp_path / "a.safetensors", method), method, config(), SHA)
    assert file.vocab.tolist() == [1, 2, 5, 300] and file.vocab.dtype == torch.int64
    want = values(method)
    assert set(file.tensors) == set(want)
    for name, tensor in file.tensors.items():
        assert tensor.dtype == torch.float16 and torch.equal(tensor.float(), want[name])
    assert (file.method, file.target, file.card) == (method, "tiny", "made by a test")
    assert file.num_layers == (2 if method == "draft_model" else None)
    assert file.exit_layer == (1 if method == "layer_skip" else None)
    assert file.num_heads == (3 if method == "medusa" else None)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]  # nothing half-written stays


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"format": None}, "not a drafter file"),
        ({"format": "pt"}, "not a drafter file"),
        ({"version": "2"}, "version '2'"),
        ({"method": "medusa"}, "method 'medusa', 'draft_model' was asked for"),
        ({"target_sha256": "cd" * 32}, "another target: 'tiny'"),
        ({"hidden_size": "576"}, "hidden_size of '576'"),
        ({"num_layers": None}, "num_layers must be an integer"),
        ({"num_layers": "-1"}, "num_layers must be an integer"),
        ({"num_layers": "1000000000"}, "num_layers must be an integer"),
        ({"num_layers": "٣"}, "num_layers must be an integer"),
        ({"num_layers": "3"}, "'layers.2.input_layernorm.weight' missing"),
        ({"num_layers": "1"}, "'layers.1.input_layernorm.weight' has no place"),
    ],
)
def test_metadata_of_another_kind(metadata: dict[str, str | None], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", "draft_model")
    spoil(path, **metadata)
    with pytest.raises(ValueError, match=message) as error:
        read_drafter(path, "draft_model", config(), SHA)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"norm.weight": torch.zeros(63).half()}, r"'norm.weight' has shape \[63\], this target asks for \[64\]"),
        ({"norm.weight": torch.zeros(64)}, "dtype torch.float32"),
        ({"more": torch.zeros(1).half()}, "'more' has no place"),
        ({"vocab": torch.tensor([2, 1], dtype=torch.int32)}, "ascending"),
        ({"vocab": torch.tensor([1, 1], dtype=torch.int32)}, "ascending"),
        ({"vocab": torch.tensor([-1, 1], dtype=torch.int32)}, "ascending"),
        ({"vocab": torch.tensor([1, 320], dtype=torch.int32)}, r"\[0, 320\)"),
        ({"vocab": torch.tensor([1, 2])}, "int32"),
        ({"vocab": torch.zeros(0, dtype=torch.int32)}, "not empty"),
    ],
)
def test_tensors_of_another_kind(tensors: dict[str, torch.Tensor], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", "eagle")
    spoil(path, tensors)
    with pytest.raises(ValueError, match=message):
        read_drafter(path, "eagle", config(), SHA)


@pytest.mark.parametrize("name", ["vocab", "fc.weight", "norm.weight"])
def test_a_tensor_is_missing(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", "eagle")
    tensors = load_file(path)
    del tensors[name]
    save_file(
        tensors, path, {"format": "cutaway-drafter", "version": "1", "method": "eagle", "target_sha256": SHA, "hidden_size": "64"}
    )
    with pytest.raises(ValueError, match=f"'{name}' missing"):
        read_drafter(path, "eagle", config(), SHA)


def test_exit_beyond_the_target(tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", "layer_skip")
    spoil(path, exit_layer="3")  # the target has three layers: all of them are no exit
    with pytest.raises(ValueError, match=r"exit_layer must be an integer in \[1, 2\]"):
        read_drafter(path, "layer_skip", config(), SHA)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_damaged_file(keep: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", "medusa")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        read_drafter(path, "medusa", config(), SHA)


def test_no_file_and_no_method(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such drafter file"):
        read_drafter(tmp_path / "none.safetensors", "eagle", config(), SHA)
    for call in (
        lambda: read_drafter(write(tmp_path / "a.safetensors", "eagle"), "ngram", config(), SHA),
        lambda: shipped_drafter("ngram"),
    ):
        with pytest.raises(ValueError, match="got 'ngram'"):
            call()


def test_writing_what_is_no_drafter(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = values("eagle")
    with pytest.raises(ValueError, match=r"'fc.weight' has shape"):
        write(path, "eagle", {**tensors, "fc.weight": torch.zeros(64, 64)})
    with pytest.raises(ValueError, match="cannot hold"):
        write(path, "eagle", {**tensors, "norm.weight": torch.full((64,), 1e6)})
    assert not path.exists()


def test_what_is_shipped() -> None:
    """A drafter of each kind, for the default model, small enough to ship, its card saying what it reaches."""
    sizes = {method: shipped_drafter(method).stat().st_size for method in METHODS}
    assert max(sizes.values()) <= 20_000_000 and sum(sizes.values()) <= 40_000_000
    vocabularies = []
    for method in METHODS:
        with safe_open(shipped_drafter(method), framework="pt") as file:
            metadata = file.metadata()
            vocabularies.append(file.get_tensor("vocab").tolist())
        assert metadata["method"] == method and metadata["target_sha256"] == KNOWN[DEFAULT].sha256
        assert (
            "mean accepted" in metadata["card"] and metadata["card"] in (shipped_drafter(method).parent / "CARD.md").read_text()
        )
    assert all(vocabulary == vocabularies[0] for vocabulary in vocabularies)
