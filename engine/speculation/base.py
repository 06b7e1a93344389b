"""What every drafter is: it proposes tokens, and the target's own pass over them decides (``engine.speculation.verify``).

A step is schedule, draft, run, commit. The scheduler reserves room for up to K tokens after a request's last one; the drafter
fills it, or less of it; the target computes all of them in one pass, and ``verify`` says which are kept.

A draft is a tree: node i stands for one token, ``parents[i]`` for the node it follows (-1: the request's last token). A
chain is the tree in which everyone has one child. Parents come before their children, and the children of one node in the
order in which they were proposed (for a sampled draft: drawn).

Shapes: N nodes of a draft, V vocabulary, T tokens of a step, E hidden_size.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class Draft:
    """What a drafter proposes for one request in one step.

    ``failure``: why there is none, where that is no matter of course (NaN in the draft's logits).

    ``num_window``: the last so many nodes are only computed (what Lookahead's window finds out), and stand for nothing that could
    be accepted: ``verify`` leaves them out. After the last ``num_read`` of them the target's likeliest tokens are wanted
    (``Drafter.observe_window``).

    ``q``: float64 [N, V]; row i is the distribution (after the request's own processors) that node i was drawn from: for later
    siblings the same row, what their elder siblings took is left out by whoever verifies. None: nothing was drawn at random, or it
    was drawn with the number that the target draws with ("coupled"); the target's own draw decides then.
    """

    token_ids: list[int]
    parents: list[int]
    q: torch.Tensor | None = None
    probs: list[float] = field(
        default_factory=list
    )  # the drafter's probability of each node's token, for the record; NaN: it has none
    tops: list[list[tuple[int, float]]] = field(
        default_factory=list
    )  # its likeliest (token, probability) there, for the record; may be []
    failure: str = ""
    found_at: int | None = None  # n-gram, Lookahead: position in the sequence, or number in the pool, of what was copied
    num_window: int = 0
    num_read: int = 0

    @classmethod
    def chain(cls, token_ids: Sequence[int], **more: Any) -> "Draft":
        return cls(list(token_ids), list(range(-1, len(token_ids) - 1)), **more)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_proposed(self) -> int:
        return len(self.token_ids) - self.num_window

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def depths(self) -> list[int]:
        """Of each node, from 1."""
        out: list[int] = []
        for parent in self.parents:
            out.append(1 if parent < 0 else out[parent] + 1)
        return out

    def children(self, node: int) -> list[int]:
        """Of a node (-1: of the request's last token), in the order in which they were proposed."""
        return [i for i, parent in enumerate(self.parents) if parent == node]

    def cut(self, count: int) -> "Draft":
        """The first ``count`` nodes: parents come first, so it is a draft again. A window is kept whole or not at all."""
        if count >= len(self):
            return self
        count = min(count, self.num_proposed)
        q = None if self.q is None else self.q[:count]
        return Draft(
            self.token_ids[:count], self.parents[:count], q, self.probs[:count], self.tops[:count], self.failure, self.found_at
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request that a draft is wanted for: its blocks have room for ``count`` more tokens after ``request.num_tokens``.

    Its KV is computed up to the last token but one: ``request.num_computed_tokens == request.num_tokens - 1``.
    """

    request: Any  # engine.request.Request
    count: int  # K, at least 1 (of a tree: nodes)
    window: int = 0  # room for this many nodes more, which are computed and not proposed (``Drafter.num_window``), or 0


@dataclass(frozen=True, slots=True)
class Computed:
    """What a step computed and kept of one request: the positions ``start .. start + len(rows) - 1``.

    ``rows``: where each of them lies in the features of that pass (of a draft: the last token's, then the accepted nodes').
    """

    request: Any
    start: int
    rows: list[int]


class Drafter(ABC):
    """One way to propose. One per engine; ``propose`` is called once a step with all who want a draft."""

    method: str
    num_window = 0  # nodes that it wants computed besides those that it proposes
    needs_features = False  # whether ``observe`` is to be given what the head reads, of every position that was computed

    @abstractmethod
    def propose(self, wanted: Sequence[Wanted]) -> list[Draft]:
        """A draft for each, in order, of at most ``count`` proposed nodes (and ``window`` more); an empty one where it has nothing to propose.

        Drawn with the request's own seed, so that a run can be repeated. NaN in a draft's logits gives an empty draft with
        ``failure`` set: the request goes on without.
        """

    def observe(self, computed: Sequence["Computed"], features: torch.Tensor | None) -> None:  # noqa: B027
        """The target's pass of this step is done and committed. ``features`` [T, E]: what the head reads, of the rows of that pass;
        None unless ``needs_features``. Of a draft only the accepted path is told. Requests that have finished are left out."""

    def observe_window(self, request: Any, token_ids: Sequence[int]) -> None:  # noqa: B027
        """The target's likeliest token after each of the last ``num_read`` nodes of the request's draft; before ``observe``."""

    def covers(self, block_ids: Sequence[int]) -> int:
        """How many leading blocks of a cached prefix can be taken over: the drafter's own KV must be filled there, too."""
        return len(block_ids)

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:  # noqa: B027
        """The pool copies blocks (copy-on-write): what the drafter keeps under the same ids goes with them."""

    def forget(self, request_id: str) -> None:  # noqa: B027
        """The request has left, or starts again from its tokens. Fine for one that is not known."""
