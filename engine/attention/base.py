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
    ``start .. start + num_tokens - 1``. ``slots``: int64 [start + num_tokens], where K and V of each of its positions lie.

    A tree of n tokens after the context (its root first) has two things more: ``ancestors``, bool [n, n]: row i sees what row j
    stored (itself included; every row sees all of the context), and ``positions``, int64 [n]: start + the row's depth, where it
    stands in its own sequence. Its K and V lie one after another all the same, at ``slots[start:]``. None: a chain.
    """

    row: int
    start: int
    num_tokens: int
    slots: "np.ndarray[Any, np.dtype[np.int64]]"
    ancestors: "np.ndarray[Any, np.dtype[np.bool_]] | None" = None
    positions: "np.ndarray[Any, np.dtype[np.int64]] | None" = None

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


def tree_rows(parents: Sequence[int]) -> "tuple[np.ndarray[Any, np.dtype[np.bool_]], np.ndarray[Any, np.dtype[np.int64]]]":
    """What a run of 1 + N rows (row 0: the root; row 1 + i: node i, after node ``parents[i]``, -1: after the root) may see, and
    how deep each row is: bool [1 + N, 1 + N] and int64 [1 + N]. ValueError unless parents come before their children."""
    n = len(parents) + 1
    seen = np.eye(n, dtype=np.bool_)
    depth = np.zeros(n, dtype=np.int64)
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError(f"the parent of node {i} must lie in [-1, {i}), got {parent}")
        seen[i + 1] |= seen[parent + 1]
        depth[i + 1] = depth[parent + 1] + 1
    return seen, depth


def hidden_keys(span: Span, window: int | None) -> "np.ndarray[Any, np.dtype[np.bool_]]":
    """[n, L]: which keys (from the first that any row sees) each row of a span does not see."""
    own = np.arange(span.start, span.end) if span.positions is None else span.positions
    context = np.arange(first_key(span.start, window), span.start)
    if span.ancestors is None:
        unseen = own > own[:, None]
    else:
        unseen = ~span.ancestors
    hidden = np.concatenate((np.zeros((len(own), len(context)), dtype=np.bool_), unseen), axis=1)
    if window is not None:
        hidden |= np.concatenate((context, own)) <= own[:, None] - window
    return hidden


def first_key(position: int, window: int | None) -> int:
    """The first position that ``position`` sees."""
    return 0 if window is None else max(0, position + 1 - window)


def contiguous(slots: "np.ndarray[Any, np.dtype[np.int64]]") -> slice | None:
    """The slots as a slice where they are neighbours in order."""
    if slots[-1] - slots[0] == len(slots) - 1 and bool((np.diff(slots) == 1).all()):
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return None


class Attention(ABC):
    """Causal attention of packed queries over the paged KV pool."""

    name: str

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.windows: tuple[int | None, ...] = tuple(dict.fromkeys(config.sliding_windows))  # the different ones

    @abstractmethod
    def plan(self, spans: Sequence[Span], kv: torch.Tensor, dtype: torch.dtype) -> Any:
        """Whatever is the same in all layers of a step (indices, masks, views). Any order of ``spans`` is right; those
        with few tokens first, equally many side by side, shortest first, is cheapest. ``kv``: the pool of all layers, ``KVCache.tensor``; ``dtype``: of the queries."""

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
