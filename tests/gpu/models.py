"""Models with random weights, made in memory: the default model's shape and a small one. No file, no network, no tokenizer library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.hardware.device import resolve_device
from engine.loading import Parts
from engine.model.checkpoint import Checkpoint, load_checkpoint
from engine.model.config import ModelConfig
from engine.model.llama import Model
from tests.gpu.stand_ins import checkpoint_folder

SHAPES: dict[str, dict[str, Any]] = {
    # SmolLM2-135M-Instruct
    "default": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    },
    "tiny": {
        "model_type": "llama", "vocab_size": 300, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2,
    },
}  # fmt: skip
# The same with everything else that a layer may have: sliding windows, biases, norms of queries and keys.
SHAPES["tiny-window"] = {**SHAPES["tiny"], "model_type": "mistral", "sliding_window": 9}
SHAPES["tiny-qk-norm"] = {**SHAPES["tiny"], "model_type": "qwen3", "attention_bias": True}


class Letters:
    """In place of a tokenizer: a token is written as its number."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id = None
    chat_template = None
    max_token_chars = 8

    def encode(self, text: str) -> list[int]:
        return [3 + ord(c) % 250 for c in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(f" {i}" for i in token_ids)

    def token_text(self, token_id: int) -> str:
        return f" {token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return f" {token_id}".encode()

    def is_special(self, token_id: int) -> bool:
        return False


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    """float32, of a size under which every part shows in the logits, and the likeliest token is well ahead."""
    made = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        if name.endswith("norm.weight"):
            tensors[name] = torch.rand(shape, generator=made) + 0.5
        elif name.endswith(".bias"):
            tensors[name] = torch.randn(shape, generator=made) * 0.5
        else:
            tensors[name] = torch.randn(shape, generator=made) * (1.5 / shape[-1] ** 0.5)
    return tensors


def random_parts(shape: str = "tiny", device: str = "cpu", dtype: str = "float32", backend: str = "auto", seed: int = 0) -> Parts:
    """What ``Engine`` takes as ``parts``, with random weights of ``SHAPES[shape]``."""
    config = ModelConfig.from_hf(SHAPES[shape], shape)
    return parts_of(config, random_tensors(config, seed), device, dtype, backend)


def parts_of(config: ModelConfig, tensors: Any, device: str, dtype: str, backend: str) -> Parts:
    checkpoint = Checkpoint(
        path=Path("random"), format="safetensors", files=(), config=config, tensors=tensors, make_tokenizer=Letters  # type: ignore[arg-type]
    )  # fmt: skip
    facts = resolve_device(device, dtype, backend)
    model = Model(config, tensors, facts.torch_device, facts.torch_dtype)
    described = {**config.facts(), "name": "random", "file": "random", "format": "safetensors", "sha256": ""}
    return Parts(Path("random"), config, checkpoint.tokenizer, model, facts, described, {}, checkpoint, "random weights")


def engine_config(**options: Any) -> EngineConfig:
    defaults: dict[str, Any] = {"model": "random", "max_model_len": 256, "num_kv_blocks": 64, "block_size": 4}
    return EngineConfig(**{**defaults, **options})


def best_parts(device: str, dtype: str, backend: str = "auto") -> Parts:
    """The checkpoint that CUTAWAY_CHECKPOINT names, or random weights of the default model's shape."""
    folder = checkpoint_folder()
    if folder is None:
        return random_parts("default", device, dtype, backend)
    found = load_checkpoint(folder)
    return parts_of(found.config, found.tensors, device, dtype, backend)
