"""A tiny model of this folder's own: its weights change, and others' must not."""

import pytest

from engine import Engine, EngineConfig
from engine.loading import Parts, load_parts
from engine.weights import disk
from tests.engine.engines import tiny_parts


@pytest.fixture(scope="module")
def parts() -> Parts:
    """Float32, hidden_size 64, intermediate_size 96, 3 layers."""
    made = tiny_parts("llama-bias")[1]
    return load_parts(EngineConfig(model=str(made.path), dtype="float32", device="cpu"))


@pytest.fixture
def make(parts, tmp_path, monkeypatch):
    """Engines on ``parts``; what they calibrate is kept in a folder of the test."""
    monkeypatch.setattr(disk, "directory", lambda: tmp_path / "quantized")

    def engine(**config) -> Engine:
        defaults = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "num_kv_blocks": 64, "block_size": 4}
        return Engine(EngineConfig(model=str(parts.path), **{**defaults, **config}), parts=parts)

    return engine
