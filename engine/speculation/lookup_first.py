"""The request's own text first, another drafter where it has nothing to offer.

Prompt lookup costs nothing and is nearly always right where text repeats itself, which is what small drafters are bad at; a model
or a datastore knows what may come where nothing repeats. Each draft is made by one of the two, so nothing changes for whoever
verifies it. What was looked up is a chain, as deep as the other's tree where that drafts one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.speculation.base import Computed, Draft, Drafter, Wanted
from engine.speculation.config import SpeculativeConfig
from engine.speculation.ngram import NgramDrafter
from engine.speculation.tree import tree_depth


class LookupFirst(Drafter):
    def __init__(self, config: SpeculativeConfig, other: Drafter) -> None:
        self.method, self.other = other.method, other
        self.needs_features, self.num_window = other.needs_features, other.num_window
        self.lookup, self.tree = NgramDrafter(config), config.tree

    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        drafts = self.lookup.propose([replace(one, count=tree_depth(self.tree, one.count)) for one in wanted])
        rest = [i for i, draft in enumerate(drafts) if not len(draft)]
        if rest:
            for i, draft in zip(rest, self.other.propose([wanted[i] for i in rest]), strict=True):
                drafts[i] = draft
        return drafts

    def observe(self, computed: Sequence[Computed], features: torch.Tensor | None) -> None:
        self.other.observe(computed, features)

    def observe_window(self, request: Any, token_ids: Sequence[int]) -> None:
        self.other.observe_window(request, token_ids)

    def covers(self, block_ids: Sequence[int]) -> int:
        return self.other.covers(block_ids)

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self.other.copy_blocks(src, dst)

    def forget(self, request_id: str) -> None:
        self.lookup.forget(request_id)
        self.other.forget(request_id)
