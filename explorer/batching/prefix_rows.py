"""The prefix cache: its tree laid out, what its look-ups found, and what that saved against the formula. Pure.

A request whose prompt takes P seconds to compute and whose answer takes D seconds is done in P + D. With a share h of the prompt found in the
cache it is (1 - h) P + D: the gain is (P + D) / ((1 - h) P + D), and no more than 1 + P / D however much is found.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.events.batching import PrefixTree, PrefixTreeNode
from engine.events.types import EngineStarted, Event, PrefixLookup
from engine.measures import RequestRecord
from explorer.batching.whatif_rows import History
from explorer.i18n import _

KEPT_LOOKUPS = 5000
REASONS = {
    "": _("all that could be hit was hit"), "no such prefix": _("no such prefix"), "shorter than a block": _("shorter than a block"),
    "evicted": _("it was there, and was evicted"), "different salt": _("another salt: not shared on purpose"),
    "disabled": _("prefix caching is off"), "hash collision": _("hash collision: tokens differ"),
}  # fmt: skip
BINS = 10  # of the share of a prompt that was found


# ------------------------------------------------------------------------------------------------------------------ look-ups


@dataclass(frozen=True)
class Lookups:
    """Of requests that came for the first time. ``shares``: counts by share found, BINS equal bins; a bin holds its upper end, the first
    also 0. ``reasons``: (reason, look-ups, tokens that were not found), the most frequent first."""

    count: int
    asked: int
    hit: int
    shares: tuple[int, ...]
    reasons: tuple[tuple[str, int, int], ...]

    @property
    def hit_share(self) -> float:
        return self.hit / self.asked if self.asked else math.nan


class LookupRows:
    """Takes the events of a run in order; the newest KEPT_LOOKUPS look-ups and the newest tree."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.lookups: deque[PrefixLookup] = deque(maxlen=KEPT_LOOKUPS)
        self.tree: PrefixTree | None = None

    def feed(self, events: Iterable[Event]) -> bool:
        """Whether any of them matters here."""
        took = False
        for event in events:
            if isinstance(event, EngineStarted):
                self.clear()
            elif isinstance(event, PrefixLookup):
                if not event.recompute:
                    self.lookups.append(event)
            elif isinstance(event, PrefixTree):
                self.tree = event
            else:
                continue
            took = True
        return took

    def seen(self) -> Lookups:
        shares, reasons, missed = [0] * BINS, Counter[str](), Counter[str]()
        for event in self.lookups:
            share = event.num_hit_tokens / event.num_tokens if event.num_tokens else 0.0
            shares[min(BINS - 1, max(0, math.ceil(share * BINS) - 1))] += 1
            reasons[event.miss_reason] += 1
            missed[event.miss_reason] += event.num_tokens - event.num_hit_tokens
        asked, hit = sum(e.num_tokens for e in self.lookups), sum(e.num_hit_tokens for e in self.lookups)
        told = tuple((reason, n, missed[reason]) for reason, n in reasons.most_common())
        return Lookups(len(self.lookups), asked, hit, tuple(shares), told)


# ------------------------------------------------------------------------------------------------------------------ the tree

TREE = (
    "left",
    "right",
    "bottom",
    "top",
    "text",
    "label",
    "tokens",
    "depth",
    "hits",
    "blocks",
    "held",
    "holders",
    "state",
    "alpha",
    "ink",
    "node",
)


LETTERS = 84  # of a label over the whole width


@dataclass(frozen=True)
class Placed:
    """A node and the rows that it spans: those of all its leaves."""

    node: PrefixTreeNode
    top: int
    rows: int


def placed(nodes: Sequence[PrefixTreeNode]) -> list[Placed]:
    """An icicle: each leaf has a row, a node the rows of what follows it. Parents before children, the most used branch first.

    A node whose parent is not among ``nodes`` begins a tree of its own.
    """
    known = {node.node_id for node in nodes}
    children: dict[int, list[PrefixTreeNode]] = {}
    for node in nodes:
        children.setdefault(node.parent_id if node.parent_id in known else -1, []).append(node)
    for group in children.values():
        group.sort(key=lambda n: (n.root_hash, -n.hits, n.node_id))
    order: list[tuple[PrefixTreeNode, int]] = []  # depth first, with the number of the parent in ``order``
    stack = [(node, -1) for node in reversed(children.get(-1, []))]
    while stack:
        node, parent = stack.pop()
        order.append((node, parent))
        stack += [(child, len(order) - 1) for child in reversed(children.get(node.node_id, []))]
    rows = [0] * len(order)
    for i in range(len(order) - 1, -1, -1):
        rows[i] = rows[i] or 1  # a leaf
        if order[i][1] >= 0:
            rows[order[i][1]] += rows[i]
    out: list[Placed] = []
    used: dict[int, int] = {-1: 0}  # the next free row under each parent
    for i, (node, parent) in enumerate(order):
        top = used[parent]
        out.append(Placed(node, top, rows[i]))
        used[parent] = top + rows[i]
        used[i] = top
    return out


def tree_columns(tree: PrefixTree) -> dict[str, list[Any]]:
    """One row a node: tokens along x, row 0 at the top. ``alpha`` grows with the hits."""
    most = max((node.hits for node in tree.nodes), default=0)
    columns: dict[str, list[Any]] = {name: [] for name in TREE}
    end = max((node.depth + node.num_tokens for node in tree.nodes), default=1) or 1
    for place in placed(tree.nodes):
        node = place.node
        alpha = 0.18 + 0.72 * (math.log1p(node.hits) / math.log1p(most) if most else 0.0)
        state = (
            _("cannot be reached: what is before it was evicted")
            if not node.reachable
            else _("in use")
            if node.num_held
            else _("cached, nobody holds it")
        )
        text = node.text.replace("\n", "⏎")
        letters = max(0, round(LETTERS * node.num_tokens / end) - 1)
        shown = (
            node.depth, node.depth + node.num_tokens, place.top + place.rows - 0.06, place.top + 0.06, text[:80] + ("…" if len(text) > 80 else ""),
            text[:letters], node.num_tokens, node.depth, node.hits, len(node.block_ids), node.num_held, ", ".join(node.holders) or "–", state,
            alpha, "#ffffff" if alpha > 0.5 else "#8a8f98", node.node_id,
        )  # fmt: skip
        for name, value in zip(TREE, shown, strict=True):
            columns[name].append(value)
    return columns


# ------------------------------------------------------------------------------------------------------------------ the gain


def gain(prefill_s: float, decode_s: float, share: float) -> float:
    """How many times faster a request is done when ``share`` of its prompt is found. ValueError for a share outside [0, 1] or times below 0."""
    if not 0 <= share <= 1 or prefill_s < 0 or decode_s < 0 or prefill_s + decode_s <= 0:
        raise ValueError(f"share must lie in [0, 1] and times be >= 0, not both 0; got {share}, {prefill_s} and {decode_s}")
    left = (1 - share) * prefill_s + decode_s
    return (prefill_s + decode_s) / left if left > 0 else math.inf


@dataclass(frozen=True)
class Served:
    """A request that ran alone: what it took from its first step on."""

    name: str
    num_prompt_tokens: int
    num_output_tokens: int
    share: float  # of the prompt, found in the cache
    prefill_s: float
    decode_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


@dataclass(frozen=True)
class Group:
    """Requests of equal lengths that ran alone: ``cold`` found nothing, and their mean gives P and D."""

    num_prompt_tokens: int
    num_output_tokens: int
    cold: tuple[Served, ...]
    warm: tuple[Served, ...]

    @property
    def prefill_s(self) -> float:
        return float(np.mean([s.prefill_s for s in self.cold]))

    @property
    def decode_s(self) -> float:
        return float(np.mean([s.decode_s for s in self.cold]))

    def gained(self, served: Served) -> float:
        return (self.prefill_s + self.decode_s) / served.total_s

    @property
    def title(self) -> str:
        return _("{n:,} tokens in, {m:,} out").format(n=self.num_prompt_tokens, m=self.num_output_tokens)


def served_alone(history: History) -> list[Served]:
    """The requests of all loads that shared no step with another, in order."""
    out = []
    for load in history.usable():
        shared = {run.request_id for step in load.steps if len({r.request_id for r in step.runs}) > 1 for run in step.runs}
        out += [
            served
            for record in history.records(load)
            if record.request_id not in shared and (served := served_of(record)) is not None
        ]
    return out


def served_of(record: RequestRecord) -> Served | None:
    """None where its times are not known."""
    if math.isnan(record.scheduled_s) or record.num_output_tokens < 2 or record.num_preemptions:
        return None
    first, last = record.token_times_s[0], record.token_times_s[-1]
    share = record.num_cached_tokens / record.num_prompt_tokens
    return Served(
        record.request_id, record.num_prompt_tokens, record.num_output_tokens, share, first - record.scheduled_s, last - first
    )


def groups(served: Sequence[Served]) -> list[Group]:
    """Those of equal lengths, where some found nothing and some something; the newest last."""
    by: dict[tuple[int, int], list[Served]] = {}
    for s in served:
        key = (s.num_prompt_tokens, s.num_output_tokens)
        by[key] = [*by.pop(key, []), s]
    found = []
    for (n, m), of in by.items():
        cold, warm = tuple(s for s in of if s.share == 0), tuple(s for s in of if s.share > 0)
        if cold and warm:
            found.append(Group(n, m, cold, warm))
    return found
