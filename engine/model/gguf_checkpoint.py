"""From GGUF's words to Hugging Face's: config from the metadata, tensor names, the order of rotary rows."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.model.config import ModelConfig
from engine.model.gguf_file import GGUFFile

_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's GGUF files say "llama"
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # divisors of the rotary frequencies: Llama-3's scaling, written out


@dataclass(frozen=True)
class Entry:
    """A tensor under its GGUF ``name``: its shape from the header, its values on ``load()``."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's config from the metadata. ValueError, naming the file, for another architecture or a missing key."""
    metadata, source = file.metadata, str(file.path)
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ValueError(f"{source}: general.architecture must be one of {_ARCHITECTURES}, got {architecture!r}")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{architecture}.{key}", default)

    if get("expert_count", 0):
        raise ValueError(f"{source}: {architecture}.expert_count is {get('expert_count')}: mixtures of experts are not supported")
    window = get("attention.sliding_window", 0)
    if window and architecture != "llama":
        raise ValueError(f"{source}: {architecture}.attention.sliding_window={window} is not supported in GGUF files")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{source}: tensor 'token_embd.weight' missing")
    raw = {
        "model_type": "mistral" if window else architecture,
        "vocab_size": embedding.shape[0],
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv", get("attention.head_count")),
        "head_dim": get("attention.key_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(get),
        "max_position_embeddings": get("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "sliding_window": window or None,
        "eos_token_id": [
            metadata[key] for key in ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id") if key in metadata
        ],
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
    }
    raw = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in raw.items()}
    config = ModelConfig.from_hf(raw, source)
    for key in ("rope.dimension_count", "attention.value_length"):
        if get(key, config.head_dim) != config.head_dim:
            raise ValueError(f"{source}: {architecture}.{key} must be the head size {config.head_dim}, got {get(key)}")
    return _with_rope_factors(file, config)


def _rope_scaling(get: Callable[..., Any]) -> dict[str, Any] | None:
    kind = get("rope.scaling.type", "none")
    return None if kind == "none" else {"rope_type": kind, "factor": get("rope.scaling.factor")}


def _with_rope_factors(file: GGUFFile, config: ModelConfig) -> ModelConfig:
    info = file.tensors.get(ROPE_FACTORS)
    if info is None:
        return config
    if info.shape != (config.head_dim // 2,):
        raise ValueError(f"{file.path}: tensor {ROPE_FACTORS!r} has shape {list(info.shape)}, expected [{config.head_dim // 2}]")
    factors = tuple(file.tensor(ROPE_FACTORS).float().tolist())
    if not all(0 < factor < float("inf") for factor in factors):
        raise ValueError(f"{file.path}: tensor {ROPE_FACTORS!r} must hold finite numbers above 0, got {factors}")
    return replace(config, rope_scaling={"rope_type": "factors", "factors": factors})


def hf_tensors(file: GGUFFile, config: ModelConfig) -> dict[str, Entry]:
    """Every weight of the file under its Hugging Face name. ValueError for a tensor without one."""
    permuted = file.metadata["general.architecture"] == "llama"
    entries = {}
    for name, info in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        hf_name = _hf_name(name)
        if hf_name is None:
            raise ValueError(f"{file.path}: tensor {name!r} is not known in a {config.architecture} model")
        load = partial(file.tensor, name)
        if permuted and ".attn_q." in name:
            load = partial(_split_halves, load, config.num_attention_heads)
        elif permuted and ".attn_k." in name:
            load = partial(_split_halves, load, config.num_kv_heads)
        entries[hf_name] = Entry(name, info.shape, load)
    return entries


def _hf_name(name: str) -> str | None:
    top = re.fullmatch(r"(\w+)\.(weight)", name)
    if top and top[1] in _TOP:
        return f"{_TOP[top[1]]}.{top[2]}"
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in _LAYER:
        return f"model.layers.{int(layer[1])}.{_LAYER[layer[2]]}.{layer[3]}"
    return None


def _split_halves(load: Callable[[], torch.Tensor], num_heads: int) -> torch.Tensor:
    """Undo the row order of llama.cpp, which puts the two numbers of each rotary pair side by side.

    Hugging Face's layout has, in each head, the first numbers of all pairs and then the second ones.
    """
    tensor = load()
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)
