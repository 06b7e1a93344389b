"""What every attention backend is: a plan made once a step, then one call a layer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens of one request in a step: rows ``row .. row + num_tokens - 1`` of the packed batch are its positions
    ``start .. start + num_tokens - 1``. ``slots``: int64 [start + num_tokens], where K and V of each of its positions lie."""

    row: int
    start: int
    num_tokens: int
    slots: "np.ndarray[Any, np.dtype[np.int64]]"

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Attention(ABC):
    """Causal attention of packed queries over the paged KV pool."""

    name: str

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.windows: tuple[int | None, ...] = tuple(dict.fromkeys(config.sliding_windows))  # the different ones

    @abstractmethod
    def plan(self, spans: Sequence[Span], kv: torch.Tensor, dtype: torch.dtype) -> Any:
        """Whatever is the same in all layers of a step (indices, masks, views). Any order of ``spans`` is right; decodes first,
        shortest first, is cheapest. ``kv``: the pool of all layers, ``KVCache.tensor``; ``dtype``: of the queries."""

    @abstractmethod
    def run(self, plan: Any, layer: int, qkv: torch.Tensor, stored: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        """[tokens, num_attention_heads * head_dim], in the dtype of ``qkv``.

        ``qkv`` [tokens, num_attention_heads + 2 num_kv_heads, head_dim]: the tokens' queries, keys and values. ``stored``: the
        same in the dtype of the pool (the same tensor where that is the same). ``pool`` [slots, 2 num_kv_heads, head_dim]: the
        layer's K and V, the tokens' own already in it.
        """


def create_attention(name: str, config: ModelConfig) -> Attention:
    """The backend of that name ("auto": the only one there is so far)."""
    if name not in ("auto", "torch"):
        raise ValueError(f"attention_backend must be one of ('auto', 'torch'), got {name!r}")
    from engine.attention.torch import TorchAttention

    return TorchAttention(config)
