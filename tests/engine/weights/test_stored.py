"""Checkpoints that others made in few bits: they run so, can be rounded another way, and come back as they were."""

from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig
from engine.loading import load_parts, make_kv_cache, make_runner
from engine.model.checkpoint import load_checkpoint
from engine.model.llama import Model
from engine.quantization.quality.forward import ModelLogits
from engine.runner import Runner
from engine.weights.plan import STACKS
from tests.engine.engines import write_byte_tokenizer

FOLDER = Path(__file__).parents[2] / "data" / "quantized"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
IDS = [5, 9, 3, 40, 17, 2, 63, 21, 8, 33, 12]


@pytest.fixture(params=NAMES)
def engine(request, tmp_path):
    for file in (FOLDER / request.param).iterdir():
        (tmp_path / file.name).symlink_to(file)
    if not (tmp_path / "tokenizer.json").exists():
        write_byte_tokenizer(tmp_path)
    config = EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", max_model_len=64, num_kv_blocks=16, block_size=4)
    return Engine(config, parts=load_parts(config))


def logits(engine: Engine, model: Model | None = None) -> torch.Tensor:
    config = engine.config.changed(num_kv_blocks=8)
    runner = make_runner(engine.parts, make_kv_cache(engine.parts, config), config)
    return ModelLogits(Runner(model or engine.parts.model, runner.kv, runner.attention))(IDS).double()


def test_a_checkpoint_in_few_bits_runs_in_them(engine):
    """Against the same numbers in float32; eleven rows, so no path rounds to bf16, but W8A8 rounds its inputs."""
    checkpoint = load_checkpoint(engine.parts.path)
    assert checkpoint.quantized and engine.parts.weights.plan.method is None
    forms = engine.parts.weights.forms
    assert sum(forms.values()) == len(STACKS) * engine.model_config.num_layers
    plain = Model(checkpoint.config, checkpoint.tensors, "cpu", torch.float32)
    expected, got = logits(engine, plain), logits(engine)
    tolerance = 0.05 if hasattr(engine.parts.model.layers[0].qkv, "activation_scale") else 1e-4
    assert float((got - expected).abs().max()) < tolerance * float(expected.abs().max())


def test_another_method_and_back(engine):
    before, stored = logits(engine), engine.parts.weights.facts()
    engine.reconfigure(quantization="int8")
    assert engine.parts.weights.forms == {"int8_kernel": stored["forms"] and sum(stored["forms"].values())}
    engine.reconfigure(quantization=None)
    assert torch.equal(logits(engine), before) and engine.parts.weights.facts() == stored
