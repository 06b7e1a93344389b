"""The drafters as plain float32 torch modules: what is trained, and the oracle of the drafters that run in the engine.

Shapes: B sequences, T positions (padding only at the end, where causal attention makes it harmless), E hidden_size, H query
heads, K KV heads, D head_dim, V the draft vocabulary. Feature f_j: what the target's head reads at position j, after the final
norm. A "predicted feature" is what a drafter reads with the same head. Parameter names are the tensor names of the files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.model.config import ModelConfig, rope_frequencies

METHODS = ("eagle", "draft_model", "medusa", "layer_skip")
Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and signed sin, [T, D] each


def check_target(config: ModelConfig) -> None:
    """ValueError for a target whose layers are not plain Llama layers: the modules here have no other kind."""
    odd = [name for name in ("qkv_bias", "o_bias", "mlp_bias", "qk_norm") if getattr(config, name)]
    if any(window is not None for window in config.sliding_windows):
        odd.append("sliding_windows")
    if odd:
        raise ValueError(f"drafters are trained for targets with plain Llama layers; this one has {', '.join(odd)}")


def rotation(config: ModelConfig, length: int) -> Rotation:
    """For positions 0 .. length - 1; a rotary pair is (i, i + D / 2)."""
    angles = torch.outer(torch.arange(length).float(), rope_frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotated(x: torch.Tensor, turn: Rotation) -> torch.Tensor:
    """``x`` [B, heads, T, D], turned by its positions."""
    return x * turn[0] + x.roll(x.shape[-1] // 2, -1) * turn[1]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Causal attention with rotary positions and grouped queries."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
        hidden = config.hidden_size
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=False)

    def project(self, x: torch.Tensor, turn: Rotation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values: [B, H, T, D] each (a KV head is repeated for each of its query heads)."""

        def heads(y: torch.Tensor, count: int) -> torch.Tensor:
            return y.view(*y.shape[:2], count, self.head_dim).transpose(1, 2)

        q = rotated(heads(self.q_proj(x), self.heads), turn)
        k = rotated(heads(self.k_proj(x), self.kv_heads), turn)
        v = heads(self.v_proj(x), self.kv_heads)
        times = self.heads // self.kv_heads
        return q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)

    def merge(self, attended: torch.Tensor) -> torch.Tensor:
        """[B, H, T, D] -> [B, T, E]."""
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, turn: Rotation) -> torch.Tensor:
        q, k, v = self.project(x, turn)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One Llama layer, under Hugging Face's names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, turn: Rotation) -> torch.Tensor:
        """``x`` [B, T, E] -> the same, the layer's contribution added."""
        x = x + self.self_attn(self.input_layernorm(x), turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """The target in float32, for features: ``forward`` gives what its head reads, and the hidden state before ``exit_layer``."""

    embed_tokens: nn.Embedding
    head: torch.Tensor  # [vocab_size, E]

    def __init__(self, config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors``: of the checkpoint, by Hugging Face name. ValueError for a target that is not plain Llama."""
        check_target(config)
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config)
        own = {name: tensors[f"model.{name}"].float() for name in self.state_dict()}
        self.load_state_dict(own, assign=True)
        head = self.embed_tokens.weight if config.tie_word_embeddings else tensors["lm_head.weight"].float()
        self.register_buffer("head", head.detach(), persistent=False)
        self.requires_grad_(False)

    def forward(self, token_ids: torch.Tensor, exit_layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [B, T] -> features and the input of layer ``exit_layer`` (0-based), float32 [B, T, E] each."""
        x = self.embed_tokens(token_ids)
        turn = rotation(self.config, token_ids.shape[1])
        left = x
        for i, layer in enumerate(self.layers):
            if i == exit_layer:
                left = x
            x = layer(x, turn)
        return self.norm(x), left


class Drafter(nn.Module):
    """What is trained. ``predict`` is the whole of it; everything else is the same for all four."""

    method: str

    def predict(self, features: torch.Tensor, embeddings: torch.Tensor, left: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """Predicted features [B, T, E], of draft depth 1, 2, ..., ``depth`` (fewer where depth makes no difference).

        ``features`` [B, T, E]: the target's; ``embeddings`` [B, T, E]: of the tokens; ``left`` [B, T, E]: the hidden state before
        the exit layer, divided by its root mean square. In prediction s >= 1 of EAGLE, position j is
        the one that a draft begun at position j - s reaches, so positions below s mean nothing.
        """
        raise NotImplementedError

    def ahead(self, index: int) -> int:
        """Prediction ``index`` (from 0), at position j, is one of the feature at j + ahead."""
        return 0

    def first(self, index: int) -> int:
        """The first position at which prediction ``index`` means something."""
        return 0

    def settings(self) -> dict[str, Any]:
        """What the file's metadata says beside the common things."""
        return {}


class Eagle(Drafter):
    """EAGLE (Li et al., arXiv 2401.15077): one decoder layer over fc(f_{j-1}, embedding of t_j) predicts f_j."""

    method = "eagle"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(config)])
        self.norm = RMSNorm(config)

    def predict(self, features: torch.Tensor, embeddings: torch.Tensor, left: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """Draft step s reads its own prediction of step s - 1, and attends to the entries of the target's features up to where
        the draft began, then to its own (the training-time test of HASS, arXiv 2408.15766, and EAGLE-3, arXiv 2503.01840)."""
        turn = rotation(self.config, features.shape[1])
        layer = self.layers[0]
        assert isinstance(layer, DecoderLayer)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        out: list[torch.Tensor] = []
        for _ in range(depth):
            before = shifted(out[-1] if out else features, 1)
            x = self.fc(torch.cat((before, embeddings), -1))
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), turn)
            keys.append(k)
            values.append(v)
            x = x + layer.self_attn.merge(attend_drafted(q, keys, values))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            out.append(self.norm(x))
        return out

    def first(self, index: int) -> int:
        return index


def shifted(x: torch.Tensor, by: int, dim: int = 1) -> torch.Tensor:
    """Along ``dim``, what stood at j - by stands at j; zeros come in."""
    if by == 0:
        return x
    kept = x.narrow(dim, 0, max(x.shape[dim] - by, 0))
    zeros = torch.zeros_like(x.narrow(dim, 0, min(by, x.shape[dim])))
    return torch.cat((zeros, kept), dim)


def attend_drafted(q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention of draft step s (there are s + 1 keys): the query at j sees the entries 0 of positions <= j - s, and of every
    later step i the one entry of its own draft, at j - s + i. All [B, H, T, D]."""
    if len(keys) == 1:
        return F.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    step, length = len(keys) - 1, q.shape[2]
    q = q * q.shape[-1] ** -0.5
    seen = torch.ones(length, length, dtype=torch.bool).tril(-step)
    scores = [(q @ keys[0].transpose(2, 3)).masked_fill(~seen, float("-inf"))]
    own = [shifted(value, step - i, 2) for i, value in enumerate(values)]
    scores += [(q * shifted(keys[i], step - i, 2)).sum(-1, keepdim=True) for i in range(1, step + 1)]
    probs = torch.cat(scores, -1).softmax(-1)
    attended = probs[..., :length] @ values[0]
    for i in range(1, step + 1):
        attended = attended + probs[..., length + i - 1, None] * own[i]
    return attended


class DraftModel(Drafter):
    """A small model of the target's width, with its embedding and head (Leviathan et al., arXiv 2211.17192)."""

    method = "draft_model"

    def __init__(self, config: ModelConfig, num_layers: int = 2) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(num_layers))
        self.norm = RMSNorm(config)

    def predict(self, features: torch.Tensor, embeddings: torch.Tensor, left: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """One prediction: it reads tokens alone, so where it is in a draft makes no difference."""
        turn = rotation(self.config, embeddings.shape[1])
        x = embeddings
        for layer in self.layers:
            x = layer(x, turn)
        return [self.norm(x)]

    def settings(self) -> dict[str, Any]:
        return {"num_layers": len(self.layers)}


class Medusa(Drafter):
    """Medusa heads (Cai et al., arXiv 2401.10774, section 2.1.1): head i reads the token i + 1 after a feature's position."""

    method = "medusa"

    def __init__(self, config: ModelConfig, num_heads: int = 4) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(config.hidden_size, config.hidden_size) for _ in range(num_heads))

    def predict(self, features: torch.Tensor, embeddings: torch.Tensor, left: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """One prediction a head; the one of head i at position j is of the token j + 1 + i."""
        return [features + F.silu(head(features)) for head in self.heads[:depth]]

    def ahead(self, index: int) -> int:
        return index + 1


class Exit(Drafter):
    """Layer skipping: an exit after the target's first layers (Zhang et al., arXiv 2309.08168; Elhoushi et al., arXiv 2404.16710)."""

    method = "layer_skip"

    def __init__(self, config: ModelConfig, exit_layer: int) -> None:
        super().__init__()
        self.exit_layer = exit_layer
        self.norm = RMSNorm(config)
        self.adapter = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def predict(self, features: torch.Tensor, embeddings: torch.Tensor, left: torch.Tensor, depth: int) -> list[torch.Tensor]:
        """One prediction, from ``left`` alone; it may come divided by its root mean square, which the norm does anyway."""
        h = self.norm(left)
        return [h + self.adapter(h)]

    def settings(self) -> dict[str, Any]:
        return {"exit_layer": self.exit_layer}
