"""What a step costs in arithmetic: the counting behind "a KV cache turns t d^2 + t^2 d into d^2 + t d".

A multiply-add counts as two operations. Norms, rotary embedding, softmax and the activation are left out: they are
linear in the tokens with a small factor. Causal attention is counted as it is needed (token i meets i + 1 keys, or as
many as its layer's sliding window has). ``cost`` counts whole steps in the same way; this splits one request's by place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.hardware.cost import query_key_pairs

FACTS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_kv_heads", "head_dim", "num_layers", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """Floating-point operations of one forward pass, by where they are spent."""

    linear: float  # the layers' projections: grows with the tokens computed
    attention: float  # scores and weighted sum: grows with the tokens computed times the keys they meet
    head: float  # the vocabulary projection of the one position that is sampled

    @property
    def total(self) -> float:
        return self.linear + self.attention + self.head


def linear_parameters(model: Mapping[str, Any]) -> int:
    """Weights of one layer's projections (Q, K, V, O, gate, up, down), from ``EngineStarted.model``; ValueError if it lacks any."""
    missing = [name for name in FACTS if name not in model]
    if missing:
        raise ValueError(f"the model's facts lack {', '.join(missing)}; got {', '.join(sorted(model)) or 'nothing'}")
    hidden, ff = model["hidden_size"], model["intermediate_size"]
    q_width = model["num_attention_heads"] * model["head_dim"]
    kv_width = model["num_kv_heads"] * model["head_dim"]
    return hidden * q_width + 2 * hidden * kv_width + q_width * hidden + 3 * hidden * ff


def forward_flops(model: Mapping[str, Any], *, start: int, num_tokens: int) -> StepFlops:
    """One request's forward pass over positions ``start .. start + num_tokens - 1``, one of them sampled.

    ``start`` tokens have their K and V in the cache. With the cache a decode at context t is ``start=t-1, num_tokens=1``;
    without it, it is ``start=0, num_tokens=t``.
    """
    if start < 0 or num_tokens < 1:
        raise ValueError(f"start must be >= 0 and num_tokens >= 1, got {start} and {num_tokens}")
    linear = linear_parameters(model)
    windows = model.get("sliding_windows") or [None] * model["num_layers"]
    keys_met = sum(query_key_pairs(start, num_tokens, window) for window in windows)  # over all layers
    q_width = model["num_attention_heads"] * model["head_dim"]
    return StepFlops(
        linear=2.0 * num_tokens * linear * model["num_layers"],
        attention=4.0 * keys_met * q_width,
        head=2.0 * model["vocab_size"] * model["hidden_size"],
    )
