"""Whole checkpoints that the field's libraries wrote: their weights to the last bit, the logits of the model, and the facts."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.base import Span, create_attention
from engine.kvcache.layout import KVCache, block_slots
from engine.model.checkpoint import Checkpoint, load_checkpoint
from engine.model.llama import Batch, Model
from tests.engine.quantization.external.layouts import DATA, NAME

# name -> what the screen is told, and what a weight becomes: method, bits, group size of [32, 64], activation_bits
CHECKPOINTS: dict[str, tuple[dict[str, Any], tuple[str, int, int, int | None]]] = {
    "gptq_v1": ({"method": "gptq", "format": "gptq", "bits": 4, "group_size": 32, "made_by": None}, ("gptq", 4, 32, None)),
    "gptq_v2_act_order": (
        {"method": "gptq", "format": "gptq_v2", "bits": 4, "group_size": 32, "desc_act": True, "made_by": "gptqmodel:7.7.0"},
        ("gptq", 4, 32, None),
    ),
    "awq": ({"method": "awq", "format": "gemm", "bits": 4, "group_size": 32, "made_by": None}, ("awq", 4, 32, None)),
    "compressed_int4": (
        {"method": "compressed-tensors", "format": "pack-quantized", "bits": 4, "group_size": 32, "activations": None},
        ("int4", 4, 32, None),
    ),
    "compressed_int8": (
        {"format": "int-quantized", "bits": 8, "group_size": None, "symmetric": True, "activations_rounded": True},
        ("int8_w8a8", 8, 64, 8),
    ),
    "compressed_fp8": (
        {"format": "float-quantized", "activations": "float8, symmetric, dynamic per token", "activations_rounded": False},
        ("fp8", 8, 64, None),
    ),
}
COMMON = {"desc_act": False, "symmetric": False, "matrices": 14}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of the AutoGPTQ checkpoint that a test may change."""
    return Path(shutil.copytree(DATA / "gptq_v1", tmp_path / "copy"))


def change(directory: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor) -> None:
    """Change ``quantization_config``, and tensors of NAME by suffix."""
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    raw["quantization_config"].update(config or {})
    path.write_text(json.dumps(raw))
    held = load_file(directory / "model.safetensors")
    save_file({**held, **{f"{NAME}.{suffix}": t for suffix, t in tensors.items()}}, directory / "model.safetensors")


def logits(checkpoint: Checkpoint, tokens: list[int]) -> torch.Tensor:
    """Of the engine's model in float32, at every position."""
    model = Model(checkpoint.config, checkpoint.tensors, "cpu", torch.float32)
    kv = KVCache(checkpoint.config, 8, 4, "cpu", torch.float32)
    kv.fill_blocks(range(8), float("nan"))
    attention = create_attention("torch", checkpoint.config)
    slots = block_slots(random.Random(0).sample(range(8), 8), 4)[: len(tokens)]
    positions = torch.arange(len(tokens))
    plan = attention.plan([Span(0, 0, len(tokens), slots)], kv.tensor, torch.float32)
    batch = Batch(torch.tensor(tokens), positions, torch.from_numpy(np.array(slots)), None, len(tokens), attention, plan)
    return model.forward(batch, kv)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_weights_are_those_of_the_library_and_so_are_the_logits(name: str) -> None:
    checkpoint = load_checkpoint(DATA / name)
    expected = load_file(DATA / name / "expected.safetensors")
    tokens = expected.pop("token_ids").tolist()
    wanted = expected.pop("logits")
    assert len(expected) == 2
    for weight, values in expected.items():
        assert checkpoint.tensors[weight].dtype == torch.float32
        assert torch.equal(checkpoint.tensors[weight], values), weight
        assert torch.equal(checkpoint.quantized[weight].dequantize(), values), weight
    assert (logits(checkpoint, tokens) - wanted).abs().max() < 1e-4
    assert wanted.std() > 0.5  # the tolerance is far below what a wrong weight would do


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_all_linear_layers_are_quantized_and_the_facts_say_how(name: str) -> None:
    checkpoint = load_checkpoint(DATA / name)
    facts, (method, bits, group_size, activation_bits) = CHECKPOINTS[name]
    assert checkpoint.quantization is not None
    assert checkpoint.quantization == {
        **checkpoint.quantization,
        **COMMON,
        **({"symmetric": True} if "fp8" in name else {}),
        **facts,
    }
    linear = {key for key in checkpoint.config.tensor_shapes() if key.endswith("_proj.weight")}
    assert set(checkpoint.quantized) == linear and len(linear) == 14
    assert list(checkpoint.tensors) == list(checkpoint.config.tensor_shapes())
    weight = checkpoint.quantized["model.layers.0.self_attn.k_proj.weight"]
    assert (weight.method, weight.bits, weight.group_size, weight.activation_bits) == (method, bits, group_size, activation_bits)
    assert weight.shape == (32, 64) and weight.bits_per_weight < bits + 2
    assert (weight.group_of_column is not None) == ("act_order" in name)


def test_the_same_weights_dequantized_are_an_ordinary_checkpoint(directory: Path) -> None:
    """Which has nothing quantised, whatever other tools' files lie beside it."""
    made = load_checkpoint(directory)
    ordinary = directory.parent / "ordinary"
    ordinary.mkdir()
    raw = json.loads((directory / "config.json").read_text())
    (ordinary / "quant_config.json").write_text(json.dumps({"tool": "another"}))
    (ordinary / "config.json").write_text(json.dumps({**raw, "quantization_config": None}))
    save_file(dict(made.tensors), ordinary / "model.safetensors")
    checkpoint = load_checkpoint(ordinary)
    assert len(checkpoint.quantized) == 0 and checkpoint.quantization is None
    assert all(torch.equal(made.tensors[name], tensor) for name, tensor in checkpoint.tensors.items())


def test_values_are_read_when_they_are_asked_for(directory: Path) -> None:
    scales = load_file(directory / "model.safetensors")[f"{NAME}.scales"]
    scales[1, 3], scales[0, 5] = float("nan"), float("inf")
    change(directory, scales=scales)
    checkpoint = load_checkpoint(directory)
    checkpoint.tensors["model.layers.0.self_attn.k_proj.weight"]
    for held in (checkpoint.quantized, checkpoint.tensors):
        with pytest.raises(
            ValueError, match=rf"model.safetensors: tensor '{NAME}.scales' has 2 scales that are inf or NaN, of 128"
        ):
            held[f"{NAME}.weight"]


def test_a_layer_that_was_left_as_it_was_stays_so(directory: Path) -> None:
    held = load_file(directory / "model.safetensors")
    for suffix in ("qweight", "qzeros", "scales", "g_idx"):
        del held[f"{NAME}.{suffix}"]
    held[f"{NAME}.weight"] = torch.full((64, 64), 0.5, dtype=torch.float16)
    save_file(held, directory / "model.safetensors")
    checkpoint = load_checkpoint(directory)
    assert f"{NAME}.weight" not in checkpoint.quantized and len(checkpoint.quantized) == 13
    assert checkpoint.tensors[f"{NAME}.weight"].dtype == torch.float16
    assert checkpoint.quantization is not None and checkpoint.quantization["matrices"] == 13


def test_early_autogptq_has_a_file_of_its_own(directory: Path) -> None:
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    config = raw.pop("quantization_config")
    path.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="has no place in a llama model"):
        load_checkpoint(directory)
    del config["quant_method"]
    (directory / "quantize_config.json").write_text(json.dumps(config))
    assert len(load_checkpoint(directory).quantized) == 14
    (directory / "quantize_config.json").write_text(json.dumps({**config, "bits": 7}))
    with pytest.raises(ValueError, match=r"quantize_config.json: quantization.bits must be one of 2, 3, 4, 8, got 7"):
        load_checkpoint(directory)


def test_biases_of_zeros_that_autogptq_added(directory: Path) -> None:
    change(directory, bias=torch.zeros(64, dtype=torch.float16))
    assert f"{NAME}.bias" not in load_checkpoint(directory).tensors
    change(directory, bias=torch.ones(64, dtype=torch.float16))
    with pytest.raises(ValueError, match=rf"tensor '{NAME}.bias' has no place"):
        load_checkpoint(directory)


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
def test_a_missing_tensor(directory: Path, suffix: str) -> None:
    held = load_file(directory / "model.safetensors")
    del held[f"{NAME}.{suffix}"]
    save_file(held, directory / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model.safetensors: tensor '{NAME}.{suffix}' missing beside '{NAME}.q"):
        load_checkpoint(directory)


def test_integers_where_ordinary_values_belong(directory: Path) -> None:
    held = load_file(directory / "model.safetensors")
    save_file({**held, "model.norm.weight": torch.ones(64, dtype=torch.int8)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensor 'model.norm.weight' has dtype I8, supported: F32, F16, BF16"):
        load_checkpoint(directory)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method must be one of 'gptq', 'awq', 'compressed-tensors', got 'bitsandbytes'"),
        ({"quant_method": "hqq"}, "quant_method must be one of .*, got 'hqq'"),
        ({"quant_method": None}, "quant_method must be one of .*, got None"),
        ({"bits": 5}, "bits must be one of 2, 3, 4, 8, got 5"),
        ({"bits": None}, "bits must be one of 2, 3, 4, 8, got None"),
        ({"bits": True}, "bits must be one of 2, 3, 4, 8, got True"),
        ({"group_size": 0}, "group_size must be a positive integer, or -1 for one group a row, got 0"),
        ({"group_size": "32"}, "group_size must be a positive integer"),
        ({"sym": "yes"}, "sym must be true or false, got 'yes'"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format must be one of 'gptq', 'gptq_v2', got 'marlin'"),
        ({"checkpoint_format": "gptq_p"}, "checkpoint_format must be one of 'gptq', 'gptq_v2', got 'gptq_p'"),
        ({"pack_dtype": "int64"}, "pack_dtype must be one of 'int32', got 'int64'"),
        ({"is_marlin_format": True}, "is_marlin_format must be absent"),
        ({"quant_method": "awq", "version": "gemv"}, "version must be one of 'gemm', got 'gemv'"),
        ({"quant_method": "awq", "bits": 3}, "bits must be one of 4, got 3"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point must be true"),
    ],
)  # fmt: skip
def test_a_configuration_that_is_not_supported_names_file_and_key(directory: Path, config: dict[str, Any], message: str) -> None:
    change(directory, config)
    with pytest.raises(ValueError, match=rf"copy/config.json: quantization_config.{message}"):
        load_checkpoint(directory)


def test_a_configuration_that_is_no_object(directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": [4]}))
    with pytest.raises(ValueError, match=r"config.json: quantization_config must be a JSON object, got \[4\]"):
        load_checkpoint(directory)
