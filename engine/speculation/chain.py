"""Drafting token after token: a pass for all requests that want a draft, then one more for each further token.

What differs between drafters is the pass; which token is taken of its logits is the same for all (``Picker``): the likeliest at
temperature 0, else one drawn (``engine.speculation.draw``) from the drafter's own processed distribution.

Shapes: B requests that are still drafting, E hidden_size, V vocabulary, Vd draft vocabulary.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.sampling.sampled import SampleRow
from engine.speculation.base import Draft, Drafter, Wanted
from engine.speculation.config import SpeculativeConfig
from engine.speculation.draft_kv import request_slots
from engine.speculation.draw import DraftSampler, Drawn
from engine.speculation.head import DraftHead, Target
from engine.speculation.tree import LISTED


class Picker:
    """Chooses what is proposed out of a drafter's logits."""

    def __init__(self, head: DraftHead, target: Target, config: SpeculativeConfig) -> None:
        self.recorder = target.pool.recorder
        self.acceptance = config.acceptance
        self._sampler = DraftSampler(target.vocab_size, None if head.whole else head.ids)
        self._ids: np.ndarray[Any, np.dtype[np.int64]] = head.ids.cpu().numpy()

    def pick(self, logits: torch.Tensor, rows: Sequence[SampleRow], counts: Sequence[int] | None = None) -> list[Drawn]:
        """Of each row of ``logits`` [B, Vd] one token, or up to ``counts[i]`` different ones, the first to be tried first.

        ``rows``: what the target will sample with at that place. A row with NaN gets ``error`` and no tokens; the others are not
        affected.
        """
        counts = [1] * len(rows) if counts is None else counts
        listed = min(self.recorder.tokens_top or 0, LISTED) if self.recorder.on else 0
        groups: dict[int, list[int]] = {}  # rows by how they are chosen; 0: the likeliest as they stand
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            plain = row.params.temperature == 0 and not row.params.penalised
            groups.setdefault(0 if plain else count, []).append(i)
        out: list[Drawn] = [Drawn() for _ in rows]
        for count, at in groups.items():
            part = logits if len(at) == len(rows) else logits.index_select(0, torch.tensor(at, device=logits.device))
            if count:
                found = self._sampler.draw(part, [rows[i] for i in at], count, self.acceptance, listed)
            else:
                found = self._likeliest(part, [counts[i] for i in at], listed)
            for i, one in zip(at, found, strict=True):
                out[i] = one
        return out

    def _likeliest(self, logits: torch.Tensor, counts: Sequence[int], listed: int) -> list[Drawn]:
        probs = logits.float().softmax(-1)
        most = min(max(1, listed, *counts), probs.shape[1])
        values, at = probs.max(-1, keepdim=True) if most == 1 else probs.topk(most, -1)
        host = torch.stack((values.double(), at.double())).cpu().numpy()
        tokens = self._ids[host[1].astype(np.int64)].tolist()
        return [
            _likeliest(ids, values, count, listed) for ids, values, count in zip(tokens, host[0].tolist(), counts, strict=True)
        ]


def _likeliest(ids: Sequence[int], probs: Sequence[float], count: int, listed: int) -> Drawn:
    if probs[0] != probs[0]:
        return Drawn(error="the logits contain NaN")
    kept = [(token, prob) for token, prob in zip(ids, probs) if prob > 0]
    return Drawn([token for token, _ in kept[:count]], [prob for _, prob in kept[:count]], kept[:listed])


@dataclass(slots=True)
class Drafting:
    """One request while it is drafted for."""

    request: Any
    count: int  # tokens wanted
    slots: "np.ndarray[Any, np.dtype[np.int64]]"  # of its positions, the reserved ones too
    row: SampleRow  # for the next token
    confidence: float = 0.0  # of the draft: below, it ends
    first: int = 0  # the first position whose entries the drafter sees
    token_ids: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    q: list[torch.Tensor] = field(default_factory=list)
    failure: str = ""

    @classmethod
    def of(cls, wanted: Wanted, block_size: int, confidence: float = 0.0) -> "Drafting":
        slots = request_slots(wanted.request, block_size)
        return cls(wanted.request, wanted.count, slots, SampleRow.next_of(wanted.request), confidence)

    @property
    def last(self) -> int:
        """The position of the last token, drafted ones included."""
        return self.request.num_tokens - 1 + len(self.token_ids)

    def take(self, picked: Drawn) -> bool:
        """The token that was chosen; whether another one is wanted."""
        if picked.error is not None:
            self.failure = f"no draft: {picked.error}"
            return False
        self.token_ids += picked.token_ids
        self.probs += picked.probs
        self.tops.append(picked.tops)
        if picked.q is not None:
            self.q.append(picked.q)
        if len(self.token_ids) >= self.count or math.prod(self.probs) < self.confidence:
            return False
        self.row = self.row.after(picked.token_ids)
        return True

    def draft(self) -> Draft:
        if self.failure:
            return Draft([], [], failure=self.failure)
        q = torch.stack(self.q) if self.q else None
        return Draft.chain(self.token_ids, q=q, probs=self.probs, tops=self.tops)


class ChainDrafter(Drafter):
    """A drafter with a model, whose passes give what its head reads."""

    def __init__(self, config: SpeculativeConfig, target: Target, head: DraftHead) -> None:
        self.method = config.method
        self.target = target
        self.head = head
        self.picker = Picker(head, target, config)
        self.confidence = config.draft_confidence or 0.0

    @abstractmethod
    def _first(self, drafting: Sequence[Drafting]) -> torch.Tensor:
        """What the head reads after the last token of each, [B, E]."""

    @abstractmethod
    def _next(self, drafting: Sequence[Drafting], features: torch.Tensor) -> torch.Tensor:
        """The same after the token just drafted; ``features`` [B, E]: what was read where it was drafted."""

    def _ready(self, wanted: Wanted) -> bool:
        """Whether there is what a draft needs."""
        return True

    @torch.inference_mode()
    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        size = self.target.pool.block_size
        all_ = {i: Drafting.of(one, size, self.confidence) for i, one in enumerate(wanted) if self._ready(one)}
        live = list(all_.values())
        features = self._first(live) if live else None
        while features is not None:
            picked = self.picker.pick(self.head(features), [one.row for one in live])
            going = [i for i, (one, pick) in enumerate(zip(live, picked, strict=True)) if one.take(pick)]
            if not going:
                break
            if len(going) < len(live):
                live = [live[i] for i in going]
                features = features.index_select(0, torch.tensor(going, device=features.device))
            features = self._next(live, features)
        self._drafted(list(all_.values()))
        return [all_[i].draft() if i in all_ else Draft([], []) for i in range(len(wanted))]

    def _drafted(self, drafting: Sequence[Drafting]) -> None:
        """The drafts are made: what to remember of them until the target has decided."""
