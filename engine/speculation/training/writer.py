"""The target writes many texts in lockstep, and keeps what a drafter learns from on the way.

An engine does this for requests that come and go. Here all are known beforehand and begin together, so the KV cache is one dense
tensor a layer, and features need no second pass: on two cores that is several times the training text in the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.speculation.training.modules import DecoderLayer, Rotation, Target, rotated, rotation


@dataclass(frozen=True)
class Written:
    """float16 [T, E] each, for all tokens but the last, which was written and not read: ``features``, ``left`` (before the exit
    layer, divided by its root mean square)."""

    token_ids: list[int]  # T
    features: torch.Tensor
    left: torch.Tensor


class _Cache:
    """K and V of one layer, [B, K, T, D] each, of which the first ``length`` positions are filled."""

    def __init__(self, layer: DecoderLayer, batch: int, length: int) -> None:
        attention = layer.self_attn
        shape = (batch, attention.kv_heads, length, attention.head_dim)
        self.layer, self.keys, self.values, self.length = layer, torch.empty(shape), torch.empty(shape), 0

    def forward(self, x: torch.Tensor, turn: Rotation) -> torch.Tensor:
        """``x`` [B, T, E], the next T positions (T = 1 but for the first call) -> the same, the layer's contribution added."""
        attention, layer = self.layer.self_attn, self.layer
        h = layer.input_layernorm(x)
        batch, count = x.shape[:2]
        q, k, v = (
            project(h).view(batch, count, -1, attention.head_dim).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q = rotated(q, turn)
        end = self.length + count
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = rotated(k, turn), v
        self.length = end
        if count == 1:  # the query heads of a group are rows over the same keys, and see all of them
            q = q.reshape(batch, attention.kv_heads, -1, attention.head_dim)
            attended = F.scaled_dot_product_attention(q, self.keys[:, :, :end], self.values[:, :, :end])
            attended = attended.reshape(batch, attention.heads, 1, attention.head_dim)
        else:
            times = attention.heads // attention.kv_heads
            k, v = (part[:, :, :end].repeat_interleave(times, 1) for part in (self.keys, self.values))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attention.merge(attended)
        return x + layer.mlp(layer.post_attention_layernorm(x))


def write_texts(
    target: Target, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], new_tokens: int, exit_layer: int, seed: int
) -> list[Written]:
    """Continue each prompt by ``new_tokens`` tokens at its temperature (0: greedy), as if nothing ended a text.

    All prompts are read in step up to the shortest one's end; from there a longer one takes its own next token where a shorter
    one already takes the token that was drawn. ValueError for an empty prompt.
    """
    if not prompts or not all(prompts):
        raise ValueError(f"prompts must not be empty, got {len(prompts)} with lengths {sorted({len(p) for p in prompts})}")
    first = min(len(prompt) for prompt in prompts)
    total = max(len(prompt) for prompt in prompts) + new_tokens
    given = torch.full((len(prompts), total), -1)
    for row, prompt in enumerate(prompts):
        given[row, : len(prompt)] = torch.tensor(prompt)
    tokens = given.clone()
    features = torch.empty(len(prompts), total, target.config.hidden_size, dtype=torch.float16)
    left = torch.empty_like(features)
    turn = rotation(target.config, total)
    heat = torch.tensor(temperatures, dtype=torch.float32)[:, None]
    generator = torch.Generator().manual_seed(seed)
    caches = [_Cache(layer, len(prompts), total) for layer in target.layers if isinstance(layer, DecoderLayer)]
    start, end = 0, first
    with torch.inference_mode():
        while end < total:
            here = slice(start, end)
            x = target.embed_tokens(tokens[:, here])
            for i, cache in enumerate(caches):
                if i == exit_layer:
                    left[:, here] = divided(x, target.config.rms_norm_eps)
                x = cache.forward(x, (turn[0][here], turn[1][here]))
            x = target.norm(x)
            features[:, here] = x
            drawn = draw(x[:, -1] @ target.head.t(), heat, generator)
            tokens[:, end] = torch.where(given[:, end] >= 0, given[:, end], drawn)
            start, end = end, end + 1
    out = []
    for row, prompt in enumerate(prompts):
        length = len(prompt) + new_tokens
        out.append(Written(tokens[row, :length].tolist(), features[row, : length - 1], left[row, : length - 1]))
    return out


def divided(x: torch.Tensor, eps: float) -> torch.Tensor:
    """By its root mean square over the last dimension."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def draw(logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A token for each row of ``logits`` [B, V], at ``temperatures`` [B, 1]; 0: the likeliest. int64 [B]."""
    greedy = logits.argmax(-1)
    warm = (temperatures[:, 0] > 0).nonzero()[:, 0]
    if len(warm):
        probs = (logits[warm] / temperatures[warm]).softmax(-1)
        greedy[warm] = probs.multinomial(1, generator=generator)[:, 0]
    return greedy
