"""What the drafters with a model have in common: what they see of the target, the head that they read with, and the choosing.

A drafter's head is the target's own, often only the rows of a reduced draft vocabulary (FR-Spec, arXiv 2502.14856): the head is
the largest matrix of a small model, and the tokens that it leaves out are rarely drafted. They keep q = 0, and the target draws
them when it wants to.

Shapes: B requests, E hidden_size, V the target's vocabulary, Vd the draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch

from engine.kvcache.layout import KVCache
from engine.kvcache.pool import BlockPool
from engine.model.linear import Linear, LinearBackend, create_linear_backend
from engine.model.llama import Model


@dataclass(frozen=True)
class Target:
    """The model that is drafted for, and where its KV lies."""

    model: Model
    kv: KVCache
    pool: BlockPool
    tokenizer: Any  # engine.model.tokenizer.Tokenizer
    sha256: str

    @classmethod
    def of(cls, engine: Any) -> "Target":
        """Of an ``engine.Engine``."""
        parts = engine.parts
        return cls(parts.model, engine.kv, engine.pool, parts.tokenizer, parts.model_facts["sha256"])

    @property
    def vocab_size(self) -> int:
        return self.model.config.vocab_size

    def backend(self) -> LinearBackend:
        return create_linear_backend(self.model.device, self.model.dtype)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, E] in the dtype that the model computes in."""
        return self.model.embedding.index_select(0, token_ids).to(self.model.compute_dtype)


class DraftHead:
    """What a drafter reads its logits with. ``ids`` int64 [Vd], ascending: the token that each row stands for."""

    def __init__(self, linear: Linear, ids: torch.Tensor, vocab_size: int) -> None:
        self.linear = linear
        self.ids = ids
        self.vocab_size = vocab_size  # V
        self.whole = len(ids) == vocab_size

    @classmethod
    def of(cls, target: Target, ids: torch.Tensor) -> "DraftHead":
        """The target's rows of these tokens."""
        ids = ids.to(target.model.device)
        if len(ids) == target.vocab_size:
            return cls(target.model.head, ids, target.vocab_size)
        return cls(target.backend().pack(_head_rows(target.model, ids), None), ids, target.vocab_size)

    def __call__(self, features: torch.Tensor) -> torch.Tensor:
        """[T, E] -> logits [T, Vd]."""
        logits = self.linear(features)
        return logits if logits.shape[1] == len(self.ids) else logits[:, : len(self.ids)]  # a table that is padded


def _head_rows(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """[Vd, E]. A head of its own is kept only in the order that its products want: the unit vectors read it out."""
    if model.config.tie_word_embeddings:
        return model.embedding.index_select(0, ids)
    size, step = model.config.hidden_size, 64
    columns = []
    for first in range(0, size, step):
        unit = torch.eye(size, dtype=model.compute_dtype, device=model.device)[first : first + step]
        columns.append(model.head(unit).index_select(1, ids))
    return torch.cat(columns).t().contiguous()
