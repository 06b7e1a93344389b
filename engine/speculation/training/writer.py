"""The target writes many texts in lockstep, and keeps what a drafter learns from on the way.

An engine does this for requests that come and go. Here all are known beforehand and begin together, so the KV cache is one dense
tensor a layer, and features need no second pass: on two cores that is several times the training text in the same time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.hardware.ops_cpu import half_packing_works
from engine.model.linear import Linear, create_linear_backend
from engine.speculation.training.modules import DecoderLayer, Rotation, Target, rotated, rotation


@dataclass(frozen=True)
class Written:
    """float16 [T, E] each, for all tokens but the last, which was written and not read: ``features``, ``left`` (before the exit
    layer, divided by its root mean square)."""

    token_ids: list[int]  # T
    features: torch.Tensor
    left: torch.Tensor


class _Layer:
    """One layer of the target with packed weights, and its K and V, [B, K, T, D] each, of which ``length`` positions are filled."""

    def __init__(self, layer: DecoderLayer, batch: int, length: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.heads, self.kv_heads, self.head_dim = attention.heads, attention.kv_heads, attention.head_dim
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = _packed(attention.q_proj, attention.k_proj, attention.v_proj)
        self.o, self.gate_up, self.down = _packed(attention.o_proj), _packed(mlp.gate_proj, mlp.up_proj), _packed(mlp.down_proj)
        shape = (batch, self.kv_heads, length, self.head_dim)
        self.keys, self.values, self.length = torch.empty(shape), torch.empty(shape), 0

    def forward(self, x: torch.Tensor, turn: Rotation) -> torch.Tensor:
        """``x`` [B, T, E], the next T positions (T = 1 but for the first call) -> the same, the layer's contribution added."""
        x = x + self.o(self._attended(self.input_layernorm(x), turn).flatten(0, 1)).view_as(x)
        gate, up = self.gate_up(self.post_attention_layernorm(x).flatten(0, 1)).chunk(2, -1)
        return x + self.down(F.silu(gate).mul_(up)).view_as(x)

    def _attended(self, h: torch.Tensor, turn: Rotation) -> torch.Tensor:
        """[B, T, E] -> [B, T, H * D]."""
        batch, count = h.shape[:2]
        parts = self.qkv(h.flatten(0, 1)).view(batch, count, -1, self.head_dim).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.kv_heads, self.kv_heads), 1)
        q = rotated(q, turn)
        end = self.length + count
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = rotated(k, turn), v
        self.length = end
        if count == 1:  # the query heads of a group are rows over the same keys, and see all of them
            q = q.reshape(batch, self.kv_heads, -1, self.head_dim)
            attended = F.scaled_dot_product_attention(q, self.keys[:, :, :end], self.values[:, :, :end])
            return attended.reshape(batch, 1, -1)
        times = self.heads // self.kv_heads
        k, v = (part[:, :, :end].repeat_interleave(times, 1) for part in (self.keys, self.values))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return attended.transpose(1, 2).flatten(2)


def _packed(*parts: torch.nn.Linear) -> Linear:
    """One product for all parts. In 16 bits where that loses nothing: half of what a step reads."""
    weight = torch.cat([part.weight.detach() for part in parts])
    exact = half_packing_works() and bool((weight.bfloat16() == weight).all())
    dtype, name = (torch.bfloat16, "half") if exact else (torch.float32, "float32")
    return create_linear_backend(weight.device, dtype, name).pack(weight, None)


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
    layers = [_Layer(layer, len(prompts), total) for layer in target.layers if isinstance(layer, DecoderLayer)]
    start, end = 0, first
    with torch.inference_mode():
        while end < total:
            here = slice(start, end)
            x = target.embed_tokens(tokens[:, here])
            for i, layer in enumerate(layers):
                if i == exit_layer:
                    left[:, here] = divided(x, target.config.rms_norm_eps)
                x = layer.forward(x, (turn[0][here], turn[1][here]))
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
        summed = (logits[warm] / temperatures[warm]).softmax(-1).cumsum(-1)
        u = torch.rand(len(warm), 1, generator=generator) * summed[:, -1:]
        greedy[warm] = torch.searchsorted(summed, u, right=True)[:, 0].clamp(max=logits.shape[1] - 1)
    return greedy
