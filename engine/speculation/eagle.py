"""EAGLE: one decoder layer continues the target's features (Li et al., arXiv 2401.15077, and EAGLE-2, arXiv 2406.16858).

The layer's entry of position j is made of the target's feature f_{j-1} (what its head reads at j - 1; f_{-1} = 0) and the
embedding of token j; out comes a prediction of f_j, which the target's head reads for token j + 1. Drafting on, the prediction
takes the feature's place. After the target's pass the true features are there, and the entries are made of them.

Features are kept by slot, like KV, and entries are made of them when a draft wants them, or early for a long prompt. So siblings
that share blocks share them, and nothing is lost with a preemption that the target's own KV survives. A request that ran before
the drafter was there has features from some position on: the layer then sees only the entries from there.

Shapes: T rows of a pass, B requests, E hidden_size.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.model.llama import Norm
from engine.speculation.base import Computed, Draft, Wanted
from engine.speculation.chain import ChainDrafter, Drafting
from engine.speculation.config import SpeculativeConfig
from engine.speculation.draft_kv import DraftLayers, DraftRun, Filled, request_slots
from engine.speculation.files import read_drafter, shipped_drafter
from engine.speculation.head import DraftHead, Target
from engine.speculation.tree import Tree

_EARLY = 32  # entries of a request that may wait for its next draft


class EagleDrafter(ChainDrafter):
    needs_features = True

    def __init__(self, config: SpeculativeConfig, target: Target) -> None:
        """ValueError for a layer of another target."""
        path = Path(config.model) if config.model is not None else shipped_drafter("eagle")
        model, pool = target.model, target.pool
        file = read_drafter(path, "eagle", model.config, target.sha256)
        super().__init__(config, target, DraftHead.of(target, file.vocab))
        self.tree = config.tree
        backend = target.backend()
        self.fc = backend.pack(file.tensors["fc.weight"], None)
        self.layers = DraftLayers(file.tensors, 1, model, backend, pool)
        self.norm = Norm(backend.tensor(file.tensors["norm.weight"]), model.config.rms_norm_eps)
        shape = (self.layers.kv.num_slots, model.config.hidden_size)
        self.features = torch.zeros(shape, dtype=model.compute_dtype, device=model.device)
        self.known = Filled(pool)  # features
        self.filled = Filled(pool)  # entries that have seen the whole context
        self.partial = Filled(pool)  # entries whose context begins where the drafter came

    # -- what the target tells ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def observe(self, computed: Sequence[Computed], features: torch.Tensor | None) -> None:
        if features is None:
            raise RuntimeError("EAGLE drafts from the target's features, and got none")
        if not computed:
            return
        size = self.target.pool.block_size
        slots = [request_slots(one.request, size) for one in computed]
        into = np.concatenate([own[one.start : one.start + len(one.rows)] for one, own in zip(computed, slots)])
        rows = [row for one in computed for row in one.rows]
        device = self.features.device
        told = features if rows == list(range(len(features))) else features.index_select(0, torch.tensor(rows, device=device))
        self.features.index_copy_(0, torch.from_numpy(into).to(device), told)
        early = []
        for one, own in zip(computed, slots):
            end = one.start + len(one.rows)
            self.known.mark(one.request.block_ids, one.start, end)
            run = self._run(one.request, own, end)
            if run is not None and run.count > _EARLY:
                early.append((one.request, run))
        if early:
            self._enter([request for request, _ in early], [run for _, run in early])

    def covers(self, block_ids: Sequence[int]) -> int:
        size = self.target.pool.block_size
        count = self.filled.leading(block_ids) // size
        while count and self.known.trailing(block_ids, count * size) == count * size:
            count -= 1  # the feature that the next entry is made of
        return count

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self.layers.kv.copy_blocks(src, dst)
        blocks = self.features.view(-1, self.target.pool.block_size, self.features.shape[1])
        blocks[list(dst)] = blocks[list(src)]
        for filled in (self.known, self.filled, self.partial):
            filled.copy(src, dst)

    # -- entries -----------------------------------------------------------------------------------------------------------

    def _run(self, request: Any, slots: "np.ndarray[Any, np.dtype[np.int64]]", end: int) -> DraftRun | None:
        """The entries up to ``end - 1`` that are not made yet, and what they see; at least the last one is made (again).
        None: the feature before it is not known."""
        known = self.known.trailing(request.block_ids, end - 1)
        if known == end - 1 and end > 1:
            return None
        start = min(self.filled.leading(request.block_ids), end - 1)
        if known == 0 or start > known:
            return DraftRun(slots, start, end - start)
        start = self.partial.last(request.block_ids, known + 1, end - 1)
        return DraftRun(slots, start, end - start, self.partial.trailing(request.block_ids, start))

    def _enter(self, requests: Sequence[Any], runs: Sequence[DraftRun]) -> torch.Tensor:
        """Make these entries out of the target's features; the prediction at each run's last position, [B, E]."""
        tokens: list[int] = []
        before: list[np.ndarray[Any, np.dtype[np.int64]]] = []
        zeros: list[int] = []  # rows of a first token: nothing is before it
        for request, run in zip(requests, runs, strict=True):
            end = run.start + run.count
            if run.start == 0:
                zeros.append(len(tokens))
                before.append(run.slots[:1])
            before.append(run.slots[max(run.start - 1, 0) : end - 1])
            tokens += request.token_ids[run.start : end]
        features = self.features.index_select(0, torch.from_numpy(np.concatenate(before)).to(self.features.device))
        if zeros:
            features[zeros] = 0.0
        predicted = self._predict(features, tokens, runs)
        for request, run in zip(requests, runs, strict=True):
            (self.partial if run.first else self.filled).mark(request.block_ids, run.start, run.start + run.count)
        return predicted

    def _predict(
        self, features: torch.Tensor, token_ids: Sequence[int], runs: Sequence[DraftRun], last_rows: bool = True
    ) -> torch.Tensor:
        """``features`` [T, E] before each token -> predicted features at the last row of each run [B, E], or at all."""
        batch = self.layers.batch(token_ids, runs, last_rows)
        x = self.fc(torch.cat((features, self.target.embed(batch.token_ids)), -1))
        return self.norm(self.layers.forward(x, batch))

    # -- chains ------------------------------------------------------------------------------------------------------------

    def _ready(self, wanted: Wanted) -> bool:
        request = wanted.request
        end = request.num_tokens - 1
        return end == 0 or self.known.trailing(request.block_ids, end) < end

    def _first(self, drafting: Sequence[Drafting]) -> torch.Tensor:
        runs = []
        for one in drafting:
            run = self._run(one.request, one.slots, one.request.num_tokens)
            if run is None:
                raise RuntimeError(f"{one.request.request_id}: no feature of its last computed token")
            one.first = run.first
            runs.append(run)
        return self._enter([one.request for one in drafting], runs)

    def _next(self, drafting: Sequence[Drafting], features: torch.Tensor) -> torch.Tensor:
        runs = [DraftRun(one.slots, one.last, 1, one.first) for one in drafting]
        return self._predict(features, [one.token_ids[-1] for one in drafting], runs)

    # -- trees -------------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        if self.tree is None:
            return super().propose(wanted)
        trees = {i: Tree(self._drafting(one), self.tree) for i, one in enumerate(wanted) if self._ready(one)}
        live = list(trees.values())
        features = self._first([one.drafting for one in live]) if live else None
        while features is not None:
            nodes = [(tree, node) for tree in live for node in tree.frontier]
            picked = self.picker.pick(
                self.head(features), [tree.row(node) for tree, node in nodes], [n for tree in live for n in tree.counts()]
            )
            by_node = dict(zip([(id(tree), node) for tree, node in nodes], zip(picked, features), strict=True))
            for tree in live:
                tree.grow([by_node[id(tree), node] for node in tree.frontier])
            live = [tree for tree in live if tree.frontier]
            features = self._widen(live) if live else None
        return [trees[i].draft() if i in trees else Draft([], []) for i in range(len(wanted))]

    def _drafting(self, wanted: Wanted) -> Drafting:
        return Drafting.of(wanted, self.target.pool.block_size)

    def _widen(self, trees: Sequence[Tree]) -> torch.Tensor:
        """Predictions at the nodes of the trees' frontiers, in order. What was read of a tree before is read again with them: an
        entry lies in the slot of its place in the tree, so the whole tree is one run, with its own mask."""
        runs = []
        tokens: list[int] = []
        features: list[torch.Tensor] = []
        wanted: list[int] = []  # rows
        for tree in trees:
            seen, depths = tree.read_mask()
            runs.append(DraftRun(tree.drafting.slots, tree.drafting.last + 1, len(tree.read), tree.drafting.first, seen, depths))
            first = len(tokens)
            tokens += [tree.token_ids[node] for node in tree.read]
            features += [tree.before[node] for node in tree.read]
            wanted += range(first + len(tree.read) - len(tree.frontier), first + len(tree.read))
        predicted = self._predict(torch.stack(features), tokens, runs, last_rows=False)
        return predicted.index_select(0, torch.tensor(wanted, device=predicted.device))
