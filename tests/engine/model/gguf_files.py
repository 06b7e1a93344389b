"""Writing GGUF files for tests with the gguf library, in llama.cpp's names and row order."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_NAMES[part]}.{suffix}"
    return f"{_NAMES[stem]}.{suffix}"


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order: within each head the two halves of the rows are dealt like cards."""
    heads = np.split(rows, num_heads)
    dealt = [np.stack(np.split(head, 2), axis=1).reshape(head.shape) for head in heads]
    return np.concatenate(dealt)


def write(
    path: Path,
    model: Any,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    replaced: Mapping[str, np.ndarray | None] | None = None,
    tokens: list[str] | None = None,
) -> Path:
    """``model`` (of transformers) as a GGUF file; its matrices in the type ``kind``, or as the raw blocks in ``replaced``
    (by GGUF name; None leaves the tensor out). ``metadata`` adds keys, or drops those whose value is None."""
    config = model.config
    architecture = {"mistral": "llama"}.get(config.model_type, config.model_type)
    replaced = dict(replaced or {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_metadata(config, architecture), **(metadata or {})}.items():
        if value is not None:
            _add(writer, key, value)
    writer.add_token_list(tokens or [f"<{i}>" for i in range(config.vocab_size)])
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, target = parameter.detach().to(torch.float32).numpy(), gguf_name(name)
        if architecture == "llama" and "q_proj" in name:
            values = interleave(values, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            values = interleave(values, config.num_key_value_heads)
        if target in replaced:
            blocks = replaced.pop(target)
            if blocks is not None:
                writer.add_tensor(target, blocks, raw_dtype=kind)
        elif values.ndim == 1:
            writer.add_tensor(target, values)
        else:
            writer.add_tensor(target, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for target, extra in replaced.items():
        writer.add_tensor(target, extra)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    own = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
    }
    if getattr(config, "head_dim", None):
        own |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    ends = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    return {f"{architecture}.{key}": value for key, value in own.items()} | ends


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
