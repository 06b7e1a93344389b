"""Which nodes make a tree, out of what a drafter thinks likely."""

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.sampling.sampled import SampleRow
from engine.speculation.base import Draft
from engine.speculation.draw import Drawn

if TYPE_CHECKING:
    from engine.speculation.chain import Drafting

LISTED = 5  # leading entries of a distribution that are kept for the record, at most


def tree_depth(tree: Sequence[int] | None, count: int) -> int:
    """How deep a tree with room for ``count`` nodes goes, ``tree[d]`` of them at depth d + 1. None: a chain."""
    if tree is None:
        return count
    depth = 0
    while depth < len(tree) and count > 0:
        count -= tree[depth]
        depth += 1
    return depth


def best_nodes(ids: list[list[int]], probs: list[list[float]], widths: Sequence[int], count: int) -> Draft:
    """The tree of the ``count`` nodes with the largest product of probabilities from the root: a child of depth d is one of the
    ``widths[d]`` likeliest tokens of head d. ``ids``, ``probs``: [depth][tokens], in descending order.

    A node is never likelier than its parent or its elder sibling, so the best ones are found from the root on.
    """
    draft = Draft([], [])
    # Candidates: (-product, depth, rank among its siblings, parent, product of the parent).
    heap = [(-probs[0][0], 0, 0, -1, 1.0)]
    while heap and len(draft) < count:
        product, depth, rank, parent, before = heapq.heappop(heap)
        node = len(draft)
        draft.token_ids.append(ids[depth][rank])
        draft.parents.append(parent)
        draft.probs.append(probs[depth][rank])
        draft.tops.append(list(zip(ids[depth][:LISTED], probs[depth][:LISTED])))
        if rank + 1 < min(widths[depth], len(ids[depth])):
            heapq.heappush(heap, (-before * probs[depth][rank + 1], depth, rank + 1, parent, before))
        if depth + 1 < len(ids):
            heapq.heappush(heap, (product * probs[depth + 1][0], depth + 1, 0, node, -product))
    return draft


class Tree:
    """One request's tree while it grows, a depth at a time.

    Where nothing is drawn, each node of the frontier offers its likeliest children, and the best of all (by the product of
    probabilities from the root) become nodes. Where children are drawn, all of them do: to leave out the unlikely ones would
    change the law that the accept test counts on. Then only how many each node gets is decided beforehand.
    """

    def __init__(self, drafting: "Drafting", widths: Sequence[int]) -> None:
        """``widths``: nodes at each depth, at most."""
        self.drafting = drafting
        self.widths = list(widths[: tree_depth(widths, drafting.count)])
        self.drawn = drafting.row.params.temperature != 0
        self.depth = 0  # of the frontier
        self.frontier = [-1]  # nodes whose children come next; -1: the root
        self.read: list[int] = []  # nodes that the drafter has read, or reads now: the frontier last
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self.before: list[torch.Tensor] = []  # the prediction [hidden_size] that each node was chosen from
        self.failure = ""
        self._probs: list[float] = []
        self._tops: list[list[tuple[int, float]]] = []
        self._q: list[torch.Tensor] = []
        self._products: list[float] = []

    def row(self, node: int) -> SampleRow:
        """What a child of this node is chosen with."""
        path: list[int] = []
        while node >= 0:
            path.insert(0, self.token_ids[node])
            node = self.parents[node]
        return self.drafting.row.after(path) if path else self.drafting.row

    def counts(self) -> list[int]:
        """How many children each node of the frontier is to offer."""
        width = self.widths[self.depth]
        if not self.drawn:
            return [width] * len(self.frontier)
        each, more = divmod(width, len(self.frontier))
        return [each + (i < more) for i in range(len(self.frontier))]

    def grow(self, picked: Sequence[tuple[Drawn, torch.Tensor]]) -> None:
        """The children of the frontier's nodes, and the prediction that each node's were chosen from; then the next frontier."""
        offers: list[tuple[float, int, int]] = []  # (product, place in the frontier, which child)
        for place, (pick, _) in enumerate(picked):
            if pick.error is not None:
                self.failure, self.frontier = f"no draft: {pick.error}", []
                return
            product = self._products[self.frontier[place]] if self.frontier[place] >= 0 else 1.0
            offers += [(product * prob, place, child) for child, prob in enumerate(pick.probs)]
        if not self.drawn:
            offers = sorted(offers, key=lambda offer: -offer[0])[: self.widths[self.depth]]
        new = []
        for product, place, child in offers[: self.drafting.count - len(self.token_ids)]:
            pick, feature = picked[place]
            new.append(len(self.token_ids))
            self.token_ids.append(pick.token_ids[child])
            self.parents.append(self.frontier[place])
            self.before.append(feature)
            self._probs.append(pick.probs[child])
            self._tops.append(pick.tops)
            self._products.append(product)
            if pick.q is not None:
                self._q.append(pick.q)
        self.depth += 1
        self.frontier = []
        if self.depth < len(self.widths) and len(self.token_ids) < self.drafting.count:
            best = sorted(new, key=lambda node: -self._products[node])[: self.widths[self.depth]]
            self.frontier = sorted(best)
            self.read += self.frontier

    def read_mask(self) -> "tuple[np.ndarray[Any, np.dtype[np.bool_]], np.ndarray[Any, np.dtype[np.int64]]]":
        """Of the nodes in ``read``: which of them each sees, and how many are before it on its path (see ``Span``)."""
        place = {node: i for i, node in enumerate(self.read)}
        seen = np.eye(len(self.read), dtype=np.bool_)
        depths = np.zeros(len(self.read), dtype=np.int64)
        for i, node in enumerate(self.read):
            parent = self.parents[node]
            if parent >= 0:
                seen[i] |= seen[place[parent]]
                depths[i] = depths[place[parent]] + 1
        return seen, depths

    def draft(self) -> Draft:
        if self.failure:
            return Draft([], [], failure=self.failure)
        q = torch.stack(self._q) if self._q else None
        return Draft(self.token_ids, self.parents, q, self._probs, self._tops)
