"""load_checkpoint on safetensors: the values of transformers, and an error with names for whatever does not fit."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from engine.model.checkpoint import load_checkpoint
from tests.engine.model import tiny

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=1).path


@pytest.fixture
def directory(llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may damage."""
    for name in (WEIGHTS, CONFIG, "generation_config.json"):
        (tmp_path / name).write_bytes((llama / name).read_bytes())
    return tmp_path


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """Replace tensors by dotted name (written with __ for dots); None removes."""
    tensors = load_file(directory / WEIGHTS)
    for key, value in changes.items():
        tensors.pop(key.replace("__", "."), None)
        if value is not None:
            tensors[key.replace("__", ".")] = value
    save_file(tensors, directory / WEIGHTS)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tensors_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    made = tiny.make(family, tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    state = made.model.state_dict()
    assert list(checkpoint.tensors) == list(checkpoint.config.tensor_shapes())
    assert set(state) - set(checkpoint.tensors) <= {"lm_head.weight"}
    for name, tensor in checkpoint.tensors.items():
        assert torch.equal(tensor, state[name]), name
    assert checkpoint.format == "safetensors" and checkpoint.path == tmp_path


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shards_and_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    made = tiny.make("qwen3", tmp_path, dtype=dtype, max_shard_size="60KB")
    checkpoint = load_checkpoint(tmp_path)
    assert len(checkpoint.files) > 2
    state = made.model.state_dict()
    for name, tensor in checkpoint.tensors.items():
        assert tensor.dtype == dtype and torch.equal(tensor.float(), state[name]), name


def test_checksum_follows_the_content(directory: Path, tmp_path: Path) -> None:
    first = load_checkpoint(directory).checksum
    assert first == hashlib.sha256((directory / WEIGHTS).read_bytes()).hexdigest()
    change_tensors(directory, model__norm__weight=torch.full((64,), 2.0))
    assert load_checkpoint(directory).checksum != first
    tiny.make("llama", tmp_path / "shards", num_hidden_layers=1, max_shard_size="60KB")
    sharded = load_checkpoint(tmp_path / "shards")
    shard = sharded.files[0]
    before = sharded.checksum
    tensors = load_file(shard)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, shard)
    assert load_checkpoint(tmp_path / "shards").checksum != before


def test_every_end_token_of_generation_config_counts(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert load_checkpoint(directory).config.eos_token_ids == (2, 7)


def test_harmless_extras_are_ignored(directory: Path) -> None:
    change_tensors(directory, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load_checkpoint(directory)
    change_config(directory, tie_word_embeddings=True)  # transformers then ignores the head in the file
    assert "lm_head.weight" not in load_checkpoint(directory).tensors


def test_a_bias_that_the_config_does_not_know_is_not_dropped_in_silence(directory: Path) -> None:
    change_tensors(directory, model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    with pytest.raises(ValueError, match=r"model.safetensors: tensor 'model.layers.0.self_attn.q_proj.bias' has no place"):
        load_checkpoint(directory)


def test_missing_tensor(directory: Path) -> None:
    change_tensors(directory, model__layers__0__mlp__up_proj__weight=None)
    with pytest.raises(ValueError, match=rf"{directory}: tensor 'model.layers.0.mlp.up_proj.weight' missing"):
        load_checkpoint(directory)


def test_shape_that_does_not_fit_the_config(directory: Path) -> None:
    change_config(directory, intermediate_size=97)
    message = r"model.safetensors: tensor 'model.layers.0.mlp.\w+_proj.weight' has shape \[\d+, \d+\], but .*config.json asks for \[.*97"
    with pytest.raises(ValueError, match=message):
        load_checkpoint(directory)


def test_dtype_that_is_not_a_weight(directory: Path) -> None:
    change_tensors(directory, model__norm__weight=torch.ones(64, dtype=torch.int8))
    with pytest.raises(
        ValueError, match=r"model.safetensors: tensor 'model.norm.weight' has dtype I8, supported: F32, F16, BF16"
    ):
        load_checkpoint(directory)


def test_truncated_file(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    for size in (0, 4, 8, 100, len(content) // 2, len(content) - 1):
        (directory / WEIGHTS).write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"model.safetensors: not a whole safetensors file"):
            load_checkpoint(directory)


@pytest.mark.parametrize("header_length", [(1 << 64) - 1, 1 << 40, 200_000_000])
def test_header_that_lies_about_its_length(directory: Path, header_length: int) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", header_length) + content[8:])
    with pytest.raises(ValueError, match=r"model.safetensors: not a whole safetensors file"):
        load_checkpoint(directory)


def test_header_that_lies_about_a_tensor(directory: Path) -> None:
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [1 << 61], "data_offsets": [0, 256]}}).encode()
    (directory / WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(256))
    with pytest.raises(ValueError, match=r"model.safetensors: not a whole safetensors file"):
        load_checkpoint(directory)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny.make("llama", tmp_path, num_hidden_layers=1, max_shard_size="60KB").path


def test_index_points_to_a_missing_file(sharded: Path) -> None:
    lost = sorted(sharded.glob("*.safetensors"))[0]
    lost.unlink()
    with pytest.raises(ValueError, match=rf"{lost}: missing, but .*index.json places tensor '.+' there"):
        load_checkpoint(sharded)


def test_index_places_a_tensor_where_it_is_not(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    wrong = next(name for name in files if name != index["weight_map"]["model.norm.weight"])
    index["weight_map"]["model.norm.weight"] = wrong
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{wrong}: tensor 'model.norm.weight' missing, which .*index.json places there"):
        load_checkpoint(sharded)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/model.safetensors", "pytorch_model.bin", 3, None])
def test_index_may_not_leave_its_directory_nor_name_a_pickle(sharded: Path, place: Any) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = place
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"index.json: tensor 'model.norm.weight' must lie in a .safetensors file of the same directory"
    ):
        load_checkpoint(sharded)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', "[" * 100_000, "\x00"])
def test_damaged_index(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(ValueError, match=r"index.json: "):
        load_checkpoint(sharded)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"model_type": "bert"}'])
def test_damaged_config(directory: Path, content: bytes) -> None:
    (directory / CONFIG).write_bytes(content)
    with pytest.raises(ValueError, match=r"config.json: "):
        load_checkpoint(directory)


def test_no_config(directory: Path) -> None:
    (directory / CONFIG).unlink()
    with pytest.raises(ValueError, match=r"config.json: missing"):
        load_checkpoint(directory)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.pth"])
def test_a_pickle_is_never_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / CONFIG).write_text("{}")
    (tmp_path / name).write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match=r"pickle.*never.*convert the checkpoint to safetensors"):
            load_checkpoint(path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no checkpoint here"):
        load_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="no such file or directory"):
        load_checkpoint(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match=r"expected a \.gguf file or a directory"):
        load_checkpoint(tmp_path / "notes.txt")


def test_no_tokenizer_is_an_error_only_when_it_is_asked_for(directory: Path) -> None:
    checkpoint = load_checkpoint(directory)
    with pytest.raises(ValueError, match=r"tokenizer.json: missing"):
        _ = checkpoint.tokenizer


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_is_a_value_error_or_harmless(directory: Path, llama: Path, data: st.DataObject) -> None:
    """Bytes of the header changed at random: an error that names the file, or tensors of the right shapes."""
    content = bytearray((llama / WEIGHTS).read_bytes())
    (length,) = struct.unpack_from("<Q", content)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, length + 7))] = data.draw(st.integers(0, 255))
    (directory / WEIGHTS).write_bytes(content)
    try:
        checkpoint = load_checkpoint(directory)
    except ValueError as error:
        assert str(directory) in str(error)
    else:
        for name, shape in checkpoint.config.tensor_shapes().items():
            assert tuple(checkpoint.tensors[name].shape) == shape
