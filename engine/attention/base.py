"""What every attention backend is: a plan made once a step, then one call a layer. And how it finds a request's keys in a pool."""

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
    draft: bool = False  # its rows behind the first are guesses, whose K and V may be taken back
    request_id: str = ""

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


# New tokens of a request up to which reading K and V as they are pays (measured: 1.3 to 1.6 times faster than a chunk at 5).
FEW = 16


def is_chunk(span: Span) -> bool:
    """Whether a span is worth a call of attention of its own: a prompt, or a long piece of one."""
    return span.num_tokens > FEW or (span.num_tokens > 1 and not span.start)


class Pool(ABC):
    """What attention knows of a KV pool: where the keys of a span lie, and which of its rows sees which.

    A layer of a pool is a tensor, [slots, 2 num_kv_heads, head_dim], or what answers as one: ``dtype`` (of what is read),
    ``index_copy_(0, KVCache.writes(...), rows)`` and ``index_select(0, index(...))``.
    """

    dtype: torch.dtype
    device: torch.device
    block_size: int | None = None  # tokens of a block where a slot is all that says where a token lies; None: it is not

    @abstractmethod
    def slots(self, span: Span, window: int | None) -> "np.ndarray[Any, np.dtype[np.int64]]":
        """[L]: where the keys lie that the rows of a span see, its own last of all, in order."""

    @abstractmethod
    def hidden(self, span: Span, window: int | None) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        """[n, L]: which of ``slots`` each row does not see. A single row sees them all."""

    @abstractmethod
    def index(self, slots: "np.ndarray[Any, np.dtype[np.int64]]") -> Any:
        """What ``index_select`` of a layer takes for these ``slots``."""

    @abstractmethod
    def views(self, run: slice) -> torch.Tensor | None:
        """[num_layers, L, 2, num_kv_heads, head_dim]: K and V in neighbouring slots as they lie there; None where they lie in
        another form than they are read in."""

    @abstractmethod
    def holds_chunk(self, span: Span) -> bool:
        """Whether a chunk reads its own K and V from the pool; else those at hand are put behind its context."""


class TensorPool(Pool):
    """A pool that is one tensor, [num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim], read as it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.device, self.block_size = tensor.dtype, tensor.device, tensor.shape[2]
        self._layers = tensor.flatten(1, 2)

    def slots(self, span: Span, window: int | None) -> "np.ndarray[Any, np.dtype[np.int64]]":
        return span.slots[first_key(span.start, window) :]

    def hidden(self, span: Span, window: int | None) -> "np.ndarray[Any, np.dtype[np.bool_]]":
        return hidden_keys(span, window)

    def index(self, slots: "np.ndarray[Any, np.dtype[np.int64]]") -> Any:
        return torch.from_numpy(slots.copy()).to(self.device)

    def views(self, run: slice) -> torch.Tensor | None:
        return self._layers[:, run]

    def holds_chunk(self, span: Span) -> bool:
        return span.start > 0  # a prompt's beginning has all its keys at hand


class Attention(ABC):
    """Causal attention of packed queries over the paged KV pool."""

    name: str
    takes_compiled = True  # whether the compiled layer (``Model.takes``) may do its work instead

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.windows: tuple[int | None, ...] = tuple(dict.fromkeys(config.sliding_windows))  # the different ones

    @abstractmethod
    def plan(self, spans: Sequence[Span], kv: Pool | torch.Tensor, dtype: torch.dtype) -> Any:
        """Whatever is the same in all layers of a step (indices, masks, views). Any order of ``spans`` is right; those
        with few tokens first, equally many side by side, shortest first, is cheapest. ``kv``: the pool of all layers,
        ``KVCache.pool``, or the tensor of a ``TensorPool``, after ``KVCache.writes`` of the same spans; ``dtype``: of the queries."""

    @abstractmethod
    def run(self, plan: Any, layer: int, qkv: torch.Tensor, stored: torch.Tensor, pool: Any) -> torch.Tensor:
        """[tokens, num_attention_heads * head_dim], in the dtype of ``qkv``.

        ``qkv`` [tokens, num_attention_heads + 2 num_kv_heads, head_dim]: the tokens' queries, keys and values. ``stored``: the
        same in the dtype of the pool (the same tensor where that is the same). ``pool`` [slots, 2 num_kv_heads, head_dim]: the
        layer's K and V (see ``Pool``), the tokens' own already in it.
        """

    def stores(self, qkv: torch.Tensor, pool: Any) -> bool:
        """Whether ``store`` rotates and writes a step's tokens into this layer's pool; else whoever calls does."""
        return False

    def store(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, writes: Any, pool: Any) -> None:
        """Rotate the queries of ``qkv`` (see ``run``) in place, and write the keys, rotated, and the values of its tokens into ``pool``.

        ``cos``, ``sin`` [T, 1, head_dim] as ``Rope.at`` gives them; ``writes``: ``KVCache.writes`` of the step. The keys in
        ``qkv`` itself are not rotated: ``run`` reads those of the pool.
        """
        raise NotImplementedError


BACKENDS = ("torch", "triton")


def create_attention(name: str, config: ModelConfig) -> Attention:
    """The backend of that name; "auto": torch's, which runs everywhere (``engine.hardware.device`` turns "auto" into a name).

    ValueError for another name, or a model that the kernels do not run; RuntimeError where Triton is not installed.
    """
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"attention_backend must be one of {('auto', *BACKENDS)}, got {name!r}")
    if name == "triton":
        from engine.attention.triton import TritonAttention

        return TritonAttention(config)
    from engine.attention.torch import TorchAttention

    return TorchAttention(config)
