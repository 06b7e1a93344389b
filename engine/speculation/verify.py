"""Which of the drafted tokens are kept, and what follows them. Nothing else in the engine accepts or rejects.

Three rules, one for each draft:

"draw": the target's own draw decides. Its token of a place is drawn from the main random stream as without a draft; a drafted
token is accepted while it equals it. For drafts in which nothing was drawn (n-gram, Lookahead, Medusa, temperature 0) and for
"coupled" ones. The text is that of plain decoding with the same seed, to the token.

"rejection": for drafts that were drawn from a q. A token is accepted with probability min(1, p / q); after a rejection the place
follows the normalised positive part of p - q, and the next sibling is tried against that, or a token is drawn from it. The law of
the text is that of plain decoding; the arithmetic, with its sources, is in ``engine.speculation.acceptance``.

"typical": Medusa's (arXiv 2401.10774, section 3.3.1), which is *not* lossless: a token is accepted when its p exceeds
min(0.09, 0.3 exp(-H(p))), and the longest path of such tokens is kept (of equals the likeliest). The paper accepts the first token
of a step without a test, since there it is the target's own; here the target's own token ends the step before, and so every
drafted one is tested. p is after the processors: at temperature 0 only the likeliest token passes, which is greedy decoding.

Whatever the rule, the step ends with a token of the target's own after the accepted ones. Stop tokens and max_tokens are not looked
at here: the committer cuts what lies behind them.

A row of logits with NaN is an error of its request only when the accepted path reaches it.

Shapes: S rows of logits, V vocabulary, N nodes of a draft. Row 0 of a request stands after its last token, row 1 + i after node i.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.sampling import selection
from engine.sampling.distribution import Distributions
from engine.sampling.rng import STREAM_ACCEPT, STREAM_RESIDUAL, uniform
from engine.sampling.sampler import Sampled, Sampler, SampleRow
from engine.speculation.acceptance import Place, typical_threshold
from engine.speculation.base import Draft
from engine.speculation.draw import walk

_FEW = 8  # rows
_MOST = 1 << 20  # numbers of a distribution that are computed at once (8 MiB)


@dataclass(slots=True)
class Asked:
    """One request's part of a step. An empty draft is plain decoding."""

    draft: Draft
    row: SampleRow  # of the first drafted position: what the target would sample there without a draft
    first_row: int  # of its 1 + N rows of the logits
    acceptance: str = "rejection"

    @property
    def rule(self) -> str:
        if self.acceptance == "typical":
            return "typical"
        return "draw" if self.draft.q is None or self.acceptance == "coupled" else "rejection"


@dataclass(slots=True)
class NodeVerdict:
    """What became of a drafted token; see ``engine.events.types.VerifiedNode``.

    Under "rejection" p and q are as they were compared: what the rejection of elder siblings has left of them. Under "typical" a
    token with ``accept`` 1 may still be "rejected": another path was longer.
    """

    outcome: str = "not reached"
    p: float = math.nan
    q: float = math.nan
    u: float | None = None
    accept: float = math.nan
    top: list[tuple[int, float]] = field(default_factory=list)  # likeliest tokens of p in its place, where observed


@dataclass(slots=True)
class Verdict:
    """What a request gained: the accepted tokens, then the target's own. See ``engine.events.types.DraftVerified``.

    With an ``error`` there is no token of the target's own, and ``sampled`` holds what was accepted before it.
    """

    rule: str
    nodes: list[NodeVerdict]
    path: list[int] = field(default_factory=list)
    sampled: list[Sampled] = field(default_factory=list)
    own: str = ""  # "corrected" | "bonus"
    own_u: float | None = None
    own_prob: float = math.nan  # in the distribution that it was drawn from
    residual: list[tuple[int, float]] = field(default_factory=list)  # its likeliest tokens, where observed
    residual_mass: float = 0.0
    error: str | None = None


@torch.inference_mode()
def verify(asked: Sequence[Asked], logits: Tensor, sampler: Sampler, observe_top: int | None = None) -> list[Verdict]:
    """A verdict for each of ``asked``, in order. ``logits`` [S, V]; ``observe_top`` as for ``Sampler.sample``.

    ValueError where rows or a draft's q do not fit.
    """
    trials = [_Trial(one, logits) for one in asked]
    _follow_draws([t for t in trials if t.asked.rule == "draw"], logits, sampler, observe_top)
    for t, laws in _with_laws([t for t in trials if t.asked.rule != "draw"], logits, sampler):
        follow = _follow_rejection if t.asked.rule == "rejection" else _follow_typical
        follow(t, laws, observe_top)
    _tell(trials, logits, sampler, observe_top)
    _draw_own([t for t in trials if t.own_node is not None], logits, sampler, observe_top)
    return [t.verdict for t in trials]


class _Trial:
    """One request under way: its tree, its rows, and the verdict that grows."""

    def __init__(self, asked: Asked, logits: Tensor) -> None:
        draft = asked.draft
        self.asked, self.logits = asked, logits
        self.tokens = draft.token_ids
        self.parents = draft.parents
        self.count = draft.num_proposed
        if not 0 <= asked.first_row <= len(logits) - 1 - self.count:
            raise ValueError(f"a draft of {self.count} from row {asked.first_row} does not lie in {len(logits)} rows of logits")
        if asked.rule == "rejection" and (draft.q is None or draft.q.shape != (len(draft), logits.shape[-1])):
            got = None if draft.q is None else list(draft.q.shape)
            raise ValueError(f"q must be [{len(draft)}, {logits.shape[-1]}] (nodes, vocabulary), got {got}")
        self.children: dict[int, list[int]] = {}
        for node in range(self.count):
            self.children.setdefault(self.parents[node], []).append(node)
        self.verdict = Verdict(asked.rule, [NodeVerdict() for _ in range(self.count)])
        self.at = -1  # where the target's own draws have led
        self.drawn: dict[int, Sampled] = {}  # the target's own draw after each node that was read
        self.own_node: int | None = None  # the node after which the target's own token is still to be drawn
        self.told: list[tuple[int, Sampled]] = []  # tokens chosen by a test, by the node whose row they come from

    def row(self, node: int) -> int:
        return self.asked.first_row + 1 + node

    def sample_row(self, node: int) -> SampleRow:
        """What the token after ``node`` is sampled with."""
        path: list[int] = []
        while node >= 0:
            path.append(self.tokens[node])
            node = self.parents[node]
        return self.asked.row.after(path[::-1]) if path else self.asked.row

    def chose(self, node: int, token: int, prob: float, u: float | None, size: int) -> None:
        one = Sampled(token, u=u, prob=prob, nucleus_size=size)
        self.told.append((node, one))
        self.verdict.sampled.append(one)

    def observed(self, observe_top: int | None) -> bool:
        return observe_top is not None or self.asked.row.params.logprobs is not None


def _sample(rows: list[tuple[_Trial, int]], logits: Tensor, sampler: Sampler, observe_top: int | None) -> list[Sampled]:
    """The target's own draw after each of these nodes."""
    if not rows:
        return []
    at = [t.row(node) for t, node in rows]
    part = logits if at == list(range(len(logits))) else logits[torch.tensor(at, device=logits.device)]
    return sampler.sample(part, [t.sample_row(node) for t, node in rows], observe_top)


class _Laws:
    """p after the nodes of one trial that have children: rows ``first ..`` of what was computed for several."""

    def __init__(self, t: _Trial, first: int, found: Distributions) -> None:
        self._row = {node: first + i for i, node in enumerate(t.children)}
        self._found = found

    def p(self, node: int) -> Tensor:
        return self._found.p[self._row[node]]

    def error(self, node: int) -> str | None:
        return self._found.errors[self._row[node]]

    def size(self, node: int) -> int:
        return self._found.sizes[self._row[node]]


def _with_laws(trials: list[_Trial], logits: Tensor, sampler: Sampler) -> Iterator[tuple[_Trial, _Laws]]:
    """The distributions that each trial's children are held against: of several trials at once, but not of more than memory is for."""
    most = max(1, _MOST // logits.shape[-1])
    i = 0
    while i < len(trials):
        group = [trials[i]]
        while i + len(group) < len(trials) and sum(len(t.children) for t in group) < most:
            group.append(trials[i + len(group)])
        i += len(group)
        nodes = [(t, node) for t in group for node in t.children]
        if nodes:
            at = torch.tensor([t.row(node) for t, node in nodes], device=logits.device)
            found = sampler.distributions(logits[at], [t.sample_row(node) for t, node in nodes])
        else:
            found = Distributions(torch.empty(0, logits.shape[-1]), [], [])
        first = 0
        for t in group:
            yield t, _Laws(t, first, found)
            first += len(t.children)


def _follow_draws(trials: list[_Trial], logits: Tensor, sampler: Sampler, observe_top: int | None) -> None:
    """Down all trees at once, a level at a time: what is drawn at random or observed costs too much to do it for rows in vain.

    But a call costs as much as two or three rows, and the largest logit next to nothing: of few rows, and of greedy requests that
    nobody observes, all are read in the first call.
    """
    few = sum(1 + t.count for t in trials) <= _FEW
    rows = []
    for t in trials:
        greedy = t.asked.row.params.temperature == 0 and not t.observed(observe_top)
        rows += [(t, node) for node in range(-1, t.count if few or greedy else 0)]
    while rows:
        for (t, node), one in zip(rows, _sample(rows, logits, sampler, observe_top), strict=True):
            t.drawn[node] = one
        trials = [t for t in trials if _descend(t, sampler, observe_top)]
        rows = [(t, t.at) for t in trials]


def _descend(t: _Trial, sampler: Sampler, observe_top: int | None) -> bool:
    """Follow the target's own draws as far as they are known. Whether there is a row to be read where that ends."""
    v = t.verdict
    while (own := t.drawn.get(t.at)) is not None:
        if own.error is not None:
            v.error = own.error
            return False
        v.sampled.append(own)
        kids = t.children.get(t.at, [])
        hit = next((child for child in kids if t.tokens[child] == own.token_id), None)
        for child in kids:
            v.nodes[child].outcome = "accepted" if child == hit else "rejected"
        _weigh_drawn(t, t.at, own, sampler, observe_top)
        if hit is None:
            v.own, v.own_u, v.own_prob = "corrected" if kids else "bonus", own.u, own.prob
            return False
        v.path.append(hit)
        t.at = hit
    return True


def _weigh_drawn(t: _Trial, node: int, own: Sampled, sampler: Sampler, observe_top: int | None) -> None:
    """p of the children of a node where the target's own draw decides, as far as it is known or asked for."""
    greedy = t.asked.row.params.temperature == 0
    known = {c[0]: c[2] for c in own.candidates}
    top = sorted(((token, p) for token, p in known.items() if p > 0), key=lambda entry: -entry[1])
    whole: Tensor | None = None
    for child in t.children.get(node, []):
        one, token = t.verdict.nodes[child], t.tokens[child]
        if token == own.token_id:
            one.p = own.prob
        elif greedy:
            one.p = 0.0
        elif token in known:
            one.p = known[token]
        elif observe_top is not None:
            if whole is None:
                whole = sampler.distributions(t.logits[t.row(node)][None], [t.sample_row(node)]).p[0]
            one.p = float(whole[token])
        one.accept, one.top = one.p, top


def _follow_rejection(t: _Trial, laws: _Laws, observe_top: int | None) -> None:
    v, node, first, q = t.verdict, -1, t.asked.row, t.asked.draft.q
    assert q is not None  # else the rule would be another
    while node in t.children:
        position = first.position + len(v.path)
        v.error = laws.error(node)
        if v.error is not None:
            return
        p = laws.p(node)
        place, top = Place(p), _likeliest(p, observe_top)
        hit = None
        for sibling, child in enumerate(t.children[node]):
            one, token = v.nodes[child], t.tokens[child]
            one.p, one.q, one.accept = place.weigh(token, q[child])
            one.top = top
            one.u = uniform(first.seed, first.sample_index, position, STREAM_ACCEPT, sibling)
            if one.u < one.accept:
                one.outcome, hit = "accepted", child
                t.chose(node, token, float(p[token]), one.u, laws.size(node))
                break
            one.outcome = "rejected"
            place.reject()
        if hit is None:
            v.own, v.own_u = "corrected", uniform(first.seed, first.sample_index, position, STREAM_RESIDUAL)
            token = walk(place.p[None], [v.own_u])[0]
            v.own_prob, v.residual_mass, v.residual = float(place.p[token]), place.mass, _likeliest(place.p, observe_top)
            t.chose(node, token, float(p[token]), v.own_u, laws.size(node))
            return
        v.path.append(hit)
        node = hit
    t.own_node = node


def _follow_typical(t: _Trial, laws: _Laws, observe_top: int | None) -> None:
    v = t.verdict
    reached = {-1: (0, 0.0)}  # node -> length of the path to it, log of the product of p along it
    for node in range(t.count):  # parents come before their children
        parent = t.parents[node]
        if parent not in reached or laws.error(parent) is not None:
            continue
        p, one, (depth, score) = laws.p(parent), v.nodes[node], reached[parent]
        one.outcome, one.p, one.top = "rejected", float(p[t.tokens[node]]), _likeliest(p, observe_top)
        one.accept = float(one.p > typical_threshold(p))
        if one.accept:
            reached[node] = (depth + 1, score + math.log(one.p))
    node = t.own_node = max(reached, key=lambda n: (*reached[n], -n))
    while node >= 0:
        v.path.insert(0, node)
        v.nodes[node].outcome = "accepted"
        node = t.parents[node]
    for node in v.path:
        parent = t.parents[node]
        t.chose(parent, t.tokens[node], v.nodes[node].p, None, laws.size(parent))


def _draw_own(trials: list[_Trial], logits: Tensor, sampler: Sampler, observe_top: int | None) -> None:
    """The target's own token from the main stream, where the test has not given it yet."""
    rows = [(t, t.own_node) for t in trials if t.own_node is not None]
    for (t, node), own in zip(rows, _sample(rows, logits, sampler, observe_top), strict=True):
        v = t.verdict
        if own.error is not None:
            v.error = own.error
            continue
        v.sampled.append(own)
        v.own, v.own_u, v.own_prob = "corrected" if node in t.children else "bonus", own.u, own.prob


def _tell(trials: list[_Trial], logits: Tensor, sampler: Sampler, observe_top: int | None) -> None:
    """Fill in what is asked about tokens that a test chose: how they stand in the target's own distribution."""
    wanted = [(t, node, one) for t in trials if t.observed(observe_top) for node, one in t.told]
    if not wanted:
        return
    at = torch.tensor([t.row(node) for t, node, _ in wanted], device=logits.device)
    chosen = [(one.token_id, one.prob, one.u) for _, _, one in wanted]
    told = sampler.tell(logits[at], [t.sample_row(node) for t, node, _ in wanted], chosen, observe_top)
    for (t, _, one), full in zip(wanted, told, strict=True):
        t.verdict.sampled[next(i for i, s in enumerate(t.verdict.sampled) if s is one)] = full


def _likeliest(p: Tensor, count: int | None) -> list[tuple[int, float]]:
    """The likeliest tokens of float64 [V] with any mass, and their probabilities."""
    if not count:
        return []
    h = selection.head(p[None], min(count, len(p)))
    entries = zip(h.ids_SK[0, :count].tolist(), h.values_SK[0, :count].tolist(), strict=True)
    return [(token, value) for token, value in entries if value > 0]
