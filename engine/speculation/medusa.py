"""Medusa: heads on the target's last feature propose the next tokens all at once (Cai et al., arXiv 2401.10774, section 2.1.1).

Head i reads the token i + 1 after the feature's position. A draft is made when the last token is known but not computed, so it
begins from the feature before it, and head i proposes the token i behind the last one. The heads do not know what each other has
chosen; a tree therefore tries several tokens of each, the paths that are likeliest if the heads were right independently (section
2.1.2, with the tree made anew for each draft out of the probabilities at hand).

Nothing is drawn: the target's own draw decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from engine.speculation.base import Computed, Draft, Drafter, Wanted
from engine.speculation.config import SpeculativeConfig
from engine.speculation.files import read_drafter, shipped_drafter
from engine.speculation.head import DraftHead, Target
from engine.speculation.tree import LISTED, best_nodes, tree_depth


@dataclass(slots=True)
class _Last:
    """The feature of the last position that was computed of a request."""

    position: int
    feature: torch.Tensor  # [hidden_size]


class MedusaDrafter(Drafter):
    method = "medusa"
    needs_features = True

    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        """ValueError for heads of another target, or fewer of them than the tree is deep."""
        path = Path(config.model) if config.model is not None else shipped_drafter("medusa")
        file = read_drafter(path, "medusa", target.model.config, target.sha256)
        assert file.num_heads is not None
        self.num_heads = file.num_heads
        self.tree = config.tree
        if self.tree is not None and len(self.tree) > self.num_heads:
            raise ValueError(f"tree must be at most {self.num_heads} deep, the heads in {path}, got {self.tree}")
        self.target = target
        self.head = DraftHead.of(target, file.vocab)
        weights = [file.tensors[f"heads.{i}.weight"] for i in range(self.num_heads)]
        biases = [file.tensors[f"heads.{i}.bias"] for i in range(self.num_heads)]
        self.heads = target.backend().pack(torch.cat(weights), torch.cat(biases))
        self._ids = self.head.ids.cpu().numpy()
        self._last: dict[str, _Last] = {}

    def observe(self, computed: Sequence[Computed], features: torch.Tensor | None) -> None:
        if features is None:
            raise RuntimeError("Medusa drafts from the target's features, and got none")
        for one in computed:
            # A copy: a view would keep the features of the whole pass.
            self._last[one.request.request_id] = _Last(one.start + len(one.rows) - 1, features[one.rows[-1]].clone())

    def forget(self, request_id: str) -> None:
        self._last.pop(request_id, None)

    @torch.inference_mode()
    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        found = [self._feature(one) for one in wanted]
        have = [i for i, feature in enumerate(found) if feature is not None]
        drafts = [Draft([], []) for _ in wanted]
        if not have:
            return drafts
        features = torch.stack([feature for feature in found if feature is not None])
        depth = min(self.num_heads, max(self._depth(wanted[i]) for i in have))
        ids, probs = self._tops(features, depth)
        for i, own_ids, own_probs in zip(have, ids, probs, strict=True):
            if any(row[0] != row[0] for row in own_probs):
                drafts[i] = Draft([], [], failure="no draft: the logits contain NaN")
            else:
                deep = self._depth(wanted[i])
                drafts[i] = best_nodes(own_ids[:deep], own_probs[:deep], self._widths(deep), wanted[i].count)
        return drafts

    def _feature(self, wanted: Wanted) -> torch.Tensor | None:
        """None: there is none (yet), as for a request that ran before the drafter was there."""
        request = wanted.request
        last = self._last.get(request.request_id)
        if last is None and request.num_tokens == request.num_prompt_tokens + 1:
            last = self._last.get(request.group_id)  # a sibling that has just left shares the prompt's feature
        return last.feature if last is not None and last.position == request.num_tokens - 2 else None

    def _depth(self, wanted: Wanted) -> int:
        return min(self.num_heads, tree_depth(self.tree, wanted.count))

    def _widths(self, depth: int) -> list[int]:
        return [1] * depth if self.tree is None else list(self.tree[:depth])

    def _tops(self, features: torch.Tensor, depth: int) -> tuple[list[list[list[int]]], list[list[list[float]]]]:
        """The likeliest tokens of each head, and their probabilities: [B][depth][tokens]."""
        size = features.shape[1]
        steps = F.silu(self.heads(features)).view(-1, self.num_heads, size)[:, :depth]
        logits = self.head((features[:, None] + steps).reshape(-1, size)).float()
        recorder = self.target.pool.recorder
        listed = min(recorder.tokens_top or 0, LISTED) if recorder.on else 0
        most = min(max(listed, *self._widths(depth)), logits.shape[1])
        values, at = logits.softmax(-1).topk(most, -1)
        host = torch.stack((values.double(), at.double())).cpu().numpy()
        shape = (-1, depth, most)
        ids = self._ids[host[1].astype("int64")].reshape(shape)
        return ids.tolist(), host[0].reshape(shape).tolist()
