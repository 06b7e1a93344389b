"""Tiny random checkpoints of every family, written by transformers, with its model as the oracle."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name -> (model type of transformers, what differs from BASE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500000.0}),
    "llama-linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}
BASE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Tiny:
    """A checkpoint directory and the transformers model (float32, eval, eager attention) that wrote it."""

    path: Path
    model: Any

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [len(token_ids), vocab_size]: the oracle's logits at every position."""
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([token_ids])).logits[0].float()


def model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A transformers model with random weights that are large enough for every part to show in the logits."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if family not in FAMILIES:
        raise ValueError(f"family must be one of {tuple(FAMILIES)}, got {family!r}")
    model_type, changes = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **{**BASE, **changes, **overrides})
    config._attn_implementation = "eager"
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.15)
    return made


def make(
    family: str,
    directory: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Tiny:
    """Write a checkpoint of ``family`` (see FAMILIES) into ``directory`` as safetensors; ``overrides`` change its config.

    ``dtype`` is what the file holds; the oracle has the same (rounded) weights in float32.
    ``max_shard_size="40KB"`` gives several shards and an index.
    """
    made = model(family, seed=seed, **overrides)
    copy.deepcopy(made).to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    with torch.no_grad():
        for parameter in made.parameters():  # not made.to(dtype).float(), which would round the rotary frequencies too
            parameter.copy_(parameter.to(dtype))
    return Tiny(Path(directory), made)
