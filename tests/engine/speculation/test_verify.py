"""Acceptance as the engine does it, with its own draws: the tokens of plain decoding, or their law."""

import math

import pytest
import torch

from engine.request import SamplingParams
from engine.sampling.processors import TokenCounts
from engine.sampling.rng import STREAM_ACCEPT, STREAM_RESIDUAL, uniform
from engine.sampling.sampler import Sampler, SampleRow
from engine.speculation.base import Draft
from engine.speculation.draw import DraftSampler, walk
from engine.speculation.verify import Asked, verify
from tests.engine.speculation.laws import VOCAB, Models, target_law

INF = math.inf
PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0, repetition_penalty=1.6, frequency_penalty=0.5),
    SamplingParams(temperature=1, presence_penalty=0.9, logprobs=2),
]


def row(params=PARAMS[1], seed=7, position=3, prompt=(1, 2), output=(0,), sample_index=0) -> SampleRow:
    return SampleRow(params, seed, sample_index, position, list(prompt), list(output))


class Target:
    """Logits that depend on the whole path, on any vocabulary."""

    def __init__(self, vocab=VOCAB, seed=0):
        self.vocab, self.seed = vocab, seed

    def logits(self, path=()) -> torch.Tensor:
        g = torch.Generator().manual_seed(hash((self.seed, *path)) % 2**31)
        return 2 * torch.randn(self.vocab, generator=g)

    def rows(self, draft: Draft) -> torch.Tensor:
        paths = [()]
        for token, parent in zip(draft.token_ids, draft.parents, strict=True):
            paths.append((*paths[1 + parent], token))
        return torch.stack([self.logits(path) for path in paths])

    def plain(self, sampler: Sampler, first: SampleRow, count: int, top=None) -> list:
        """What decoding token by token gives."""
        out, path = [], []
        for _ in range(count):
            at = SampleRow(first.params, first.seed, first.sample_index, first.position + len(path))
            at.prompt_token_ids, at.output_token_ids = first.prompt_token_ids, [*first.output_token_ids, *path]
            out += sampler.sample(self.logits(tuple(path))[None], [at], top)
            path.append(out[-1].token_id)
        return out


def tree_of(sampler, target, first, wrong, shape=(2, 2, 1)) -> Draft:
    """A tree whose right path is that of plain decoding up to depth ``wrong``, and the last of its siblings each time."""
    right = [s.token_id for s in target.plain(sampler, first, len(shape))]
    tokens, parents, trunk = [], [], -1
    for depth, width in enumerate(shape):
        others = [t for t in range(target.vocab) if t != right[depth]]
        for sibling in range(width):
            last = sibling == width - 1 and depth < wrong
            tokens.append(right[depth] if last else others[sibling])
            parents.append(trunk)
        trunk = len(tokens) - 1
    return Draft(tokens, parents)


@pytest.mark.parametrize("top", [None, 4])
@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 1)], ids=str)
def test_the_targets_own_draw_gives_the_tokens_of_plain_decoding(params, shape, top):
    """In one batch of drafts that are right to different depths: tokens, and all that is told of them, are the same."""
    sampler = Sampler(VOCAB)
    asked, logits, want = [], [], []
    for i in range(12):
        target, first, wrong = Target(seed=i), row(params, seed=i, position=3 + i), i % (len(shape) + 1)
        draft = tree_of(sampler, target, first, wrong, shape)
        asked.append(Asked(draft, first, sum(len(x) for x in logits), "coupled" if i % 2 else "rejection"))
        logits.append(target.rows(draft))
        want.append((wrong, target.plain(sampler, first, wrong + 1, top)))
    for got, (wrong, plain), one in zip(verify(asked, torch.cat(logits), sampler, top), want, asked, strict=True):
        assert [s.token_id for s in got.sampled] == [s.token_id for s in plain]
        if top is not None:
            assert repr(got.sampled) == repr(plain)
        assert got.rule == "draw" and got.error is None and len(got.path) == wrong
        assert [one.draft.token_ids[node] for node in got.path] == [s.token_id for s in plain[:-1]]
        assert got.own == ("bonus" if wrong == len(shape) else "corrected")
        reached = [i for i, parent in enumerate(one.draft.parents) if parent == -1 or parent in got.path]
        for i, node in enumerate(got.nodes):
            assert node.outcome == ("accepted" if i in got.path else "rejected" if i in reached else "not reached")
            if top is not None and i in reached:
                p = float(_p_of(sampler, one, logits, asked, i))
                assert (node.p, node.accept) == (pytest.approx(p, abs=1e-6), node.p)


def _p_of(sampler, one, logits, asked, node):
    draft, path, at = one.draft, [], one.draft.parents[node]
    while at >= 0:
        path.insert(0, draft.token_ids[at])
        at = draft.parents[at]
    x = torch.cat(logits)[one.first_row + 1 + draft.parents[node]]
    return sampler.distributions(x[None], [one.row.after(path)]).p[0, draft.token_ids[node]]


def test_an_empty_draft_is_plain_decoding():
    sampler, target, first = Sampler(VOCAB), Target(), row()
    got = verify([Asked(Draft([], []), first, 0)], target.logits()[None], sampler)[0]
    assert (got.sampled, got.own, got.path) == (target.plain(sampler, first, 1), "bonus", [])


def test_a_window_is_no_proposal():
    """Nodes that are only computed cannot be accepted, not even when they are right."""
    sampler, target, first = Sampler(VOCAB), Target(), row(PARAMS[0])
    right = [s.token_id for s in target.plain(sampler, first, 3)]
    draft = Draft([right[0], right[1], right[2]], [-1, 0, 1], num_window=2)
    got = verify([Asked(draft, first, 0)], target.rows(draft), sampler)[0]
    assert (got.path, [s.token_id for s in got.sampled], got.own) == ([0], right[:2], "bonus")
    assert len(got.nodes) == 1


def drawn_drafts(models, firsts, shape, acceptance="rejection") -> list[Draft]:
    """Trees that are drawn as drafters draw: every node at depth d gets ``shape[d]`` children. All requests at once."""
    drawer, drafts, q = DraftSampler(VOCAB), [Draft([], []) for _ in firsts], [[] for _ in firsts]
    level = [(i, (), -1) for i in range(len(firsts))]
    for width in shape:
        logits = torch.stack([models.logits("q", path) for _, path, _ in level])
        drawn = drawer.draw(logits, [firsts[i].after(path) for i, path, _ in level], width, acceptance)
        below = []
        for (i, path, node), one in zip(level, drawn, strict=True):
            for token in one.token_ids:
                drafts[i].token_ids.append(token)
                drafts[i].parents.append(node)
                q[i].append(one.q)
                below.append((i, (*path, token), len(drafts[i]) - 1))
        level = below
    for draft, rows in zip(drafts, q, strict=True):
        draft.q = None if acceptance == "coupled" else torch.stack(rows)
    return drafts


def rows_of(models, draft):
    paths = [()]
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        paths.append((*paths[1 + parent], token))
    return torch.stack([models.logits("p", path) for path in paths])


@pytest.mark.parametrize("shape", [(1, 1), (3, 2)], ids=str)
def test_sampled_drafts_follow_the_law_of_the_target(shape):
    """Chi-square of the first two tokens with the engine's own draws, each step in the same place with another seed.

    The second token of a step that gained only one is drawn as the next step would. Passed by chance about once in 10^5.
    """
    n, sampler = 600, Sampler(VOCAB)
    models = Models(5, SamplingParams(temperature=0.9, top_p=0.95), holes=0.15, likeness=0.3)
    asked, logits, at = [], [], 0
    firsts = [row(models.params, seed) for seed in range(n)]
    for first, draft in zip(firsts, drawn_drafts(models, firsts, shape), strict=True):
        asked.append(Asked(draft, first, at))
        at += 1 + len(draft)
        logits.append(rows_of(models, draft))
    counts, lengths, whole, short = torch.zeros(VOCAB, VOCAB), set(), [], []
    for one, got in zip(asked, verify(asked, torch.cat(logits), sampler), strict=True):
        tokens = [s.token_id for s in got.sampled]
        lengths.add(len(tokens))
        (whole if len(tokens) > 1 else short).append((one, tokens))
    later = torch.stack([models.logits("p", (tokens[0],)) for _, tokens in short])
    for (_, tokens), s in zip(short, sampler.sample(later, [one.row.after(tokens) for one, tokens in short]), strict=True):
        tokens.append(s.token_id)
    for _, tokens in whole + short:
        counts[tokens[0], tokens[1]] += 1
    assert lengths == {1, 2, 3}
    expected = target_law(models, 2) * n
    assert counts[expected == 0].sum() == 0
    used = expected > 5
    cells = torch.cat([counts[used], counts[~used].sum()[None]]), torch.cat([expected[used], expected[~used].sum()[None]])
    chi2 = float(((cells[0] - cells[1]) ** 2 / cells[1].clamp(min=1e-9)).sum())
    freedom = int(used.sum())
    assert freedom > 8
    assert chi2 < freedom + 4.5 * math.sqrt(2 * freedom) + 10


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2)], ids=str)
def test_coupled_drafts_give_the_tokens_of_plain_decoding_and_are_often_right(shape):
    sampler, models = Sampler(VOCAB), Models(5, SamplingParams(temperature=1), holes=0.0, likeness=0.8)
    accepted = 0
    firsts = [row(models.params, seed) for seed in range(40)]
    for first, draft in zip(firsts, drawn_drafts(models, firsts, shape, "coupled"), strict=True):
        got = verify([Asked(draft, first, 0, "coupled")], rows_of(models, draft), sampler)[0]
        path = []
        for s in got.sampled:
            plain = sampler.sample(models.logits("p", tuple(path))[None], [first.after(path)])[0]
            assert s.token_id == plain.token_id
            path.append(s.token_id)
        accepted += len(got.path)
    assert accepted > 40


def test_what_is_told_of_a_rejection():
    """q on one token, p on others: rejected with its own u, and the token drawn from what is left of p."""
    x = torch.tensor([[2.0, 1.0, 0.0, -INF], [0.0, 0.0, 0.0, 0.0]])
    p = torch.softmax(x[0].double(), -1)
    q = torch.tensor([[0.9, 0.1, 0.0, 0.0]], dtype=torch.float64)
    sampler = Sampler(4)
    for seed in range(24):
        first = row(seed=seed)
        got = verify([Asked(Draft([0], [-1], q), first, 0)], x, sampler, 3)[0]
        node, u = got.nodes[0], uniform(seed, 0, 3, STREAM_ACCEPT)
        assert (node.p, node.q, node.u) == (pytest.approx(float(p[0])), 0.9, u)
        assert node.accept == pytest.approx(float(p[0]) / 0.9)
        assert [token for token, _ in node.top] == [0, 1, 2]
        if u < node.accept:
            assert (node.outcome, got.path, got.own) == ("accepted", [0], "bonus")
            assert (got.sampled[0].u, got.sampled[0].prob) == (u, pytest.approx(float(p[0])))
            assert got.sampled[1] == sampler.sample(x[1:], [first.after([0])], 3)[0]
            continue
        left = (p - q[0]).clamp(min=0)
        assert (node.outcome, got.path, got.own) == ("rejected", [], "corrected")
        assert got.residual_mass == pytest.approx(float(left.sum()))
        assert got.residual == [(t, pytest.approx(float(left[t] / left.sum()))) for t in (1, 2)]
        assert got.own_u == uniform(seed, 0, 3, STREAM_RESIDUAL) == got.sampled[0].u
        token = got.sampled[0].token_id
        assert token == walk(left[None], [got.own_u])[0]
        assert (got.own_prob, got.sampled[0].prob) == (
            pytest.approx(float(left[token] / left.sum())),
            pytest.approx(float(p[token])),
        )
        assert got.sampled[0].logprob == pytest.approx(float(p[token].log()), abs=1e-5)


class TestOddDrafts:
    X = torch.tensor([[1.0, 0.5, 0.0, -INF], [0.0, 1.0, 2.0, 3.0]])

    def of_seeds(self, token, q, seeds):
        q = torch.tensor([q], dtype=torch.float64)
        asked = [Asked(Draft([token], [-1], q), row(seed=seed), 2 * i) for i, seed in enumerate(seeds)]
        return verify(asked, self.X.repeat(len(asked), 1), Sampler(4))

    def one(self, token, q, seed=1):
        return self.of_seeds(token, q, [seed])[0]

    def test_p_of_0_where_q_is_not(self):
        for got in self.of_seeds(3, [0.0, 0.0, 0.5, 0.5], range(30)):
            assert (got.nodes[0].p, got.nodes[0].accept, got.nodes[0].outcome) == (0.0, 0.0, "rejected")
            assert got.sampled[0].token_id in (0, 1), "p - q is not positive elsewhere"

    @pytest.mark.parametrize("q", [[0.0, 1.0, 0.0, 0.0], [math.nan] * 4, [0.0] * 4, [0.5, 0.6, -0.1, 0.0]], ids=str)
    def test_a_token_that_cannot_have_been_drawn_is_passed_over(self, q):
        """The place then follows p itself: over many seeds each token as often as p says."""
        counts = [0] * 4
        for got in self.of_seeds(0, q, range(300)):
            assert (got.nodes[0].outcome, got.nodes[0].accept, got.error) == ("rejected", 0.0, None)
            assert math.isnan(got.nodes[0].q)
            counts[got.sampled[0].token_id] += 1
        p = torch.softmax(self.X[0], -1)
        for count, share in zip(counts, p.tolist(), strict=True):
            assert abs(count - 300 * share) <= 4.5 * math.sqrt(300 * share * (1 - share))

    def test_p_equal_to_q(self):
        p = torch.softmax(self.X[0].double(), -1).tolist()
        assert all(got.path == [0] for token in range(3) for got in self.of_seeds(token, p, range(10)))

    def test_siblings_that_take_all_of_q(self):
        """The second draw has nothing left to be drawn from: it is passed over."""
        q = torch.tensor([[0.0, 0.0, 0.0, 1.0]] * 2, dtype=torch.float64)
        got = verify([Asked(Draft([3, 2], [-1, -1], q), row(), 0)], torch.cat([self.X, self.X[1:]]), Sampler(4))[0]
        assert [n.outcome for n in got.nodes] == ["rejected", "rejected"] and len(got.sampled) == 1

    def test_q_of_the_wrong_shape(self):
        with pytest.raises(ValueError, match=r"q must be \[1, 4\]"):
            self.one(0, [0.5, 0.5])

    def test_rows_that_are_not_there(self):
        with pytest.raises(ValueError, match="2 rows"):
            verify([Asked(Draft([0], [-1]), row(), 1)], self.X, Sampler(4))

    def test_a_stop_token_inside_is_kept_like_any_other(self):
        """The committer cuts what lies behind it: here its followers are told, too."""
        sampler, target = Sampler(VOCAB), Target()
        first = row(SamplingParams(temperature=0, stop_token_ids=tuple(range(VOCAB))))
        draft = Draft.chain([s.token_id for s in target.plain(sampler, first, 3)])
        assert len(verify([Asked(draft, first, 0)], target.rows(draft), sampler)[0].sampled) == 4


@pytest.mark.parametrize("rule", ["draw", "rejection", "typical"])
@pytest.mark.parametrize("value, message", [(math.nan, "NaN"), (-INF, "every logit is -inf")])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_broken_row_harms_only_whoever_reaches_it(rule, value, message, bad):
    """A chain of two: the first is accepted, the second is not. Row 2 is never reached."""
    x = torch.tensor([[9.0, 0.0, 0.0], [9.0, -INF, -INF], [0.0, 0.0, 9.0]])
    x[bad] = value
    q = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    draft = Draft([0, 1], [-1, 0], q if rule == "rejection" else None)
    acceptance = "typical" if rule == "typical" else "rejection"
    good = Asked(Draft.chain([2]), row(PARAMS[0]), 3)
    rows = torch.cat([x, torch.tensor([[0.0, 0.0, 1.0], [5.0, 0.0, 0.0]])])
    got, other = verify([Asked(draft, row(seed=2), 0, acceptance), good], rows, Sampler(3))
    assert [s.token_id for s in other.sampled] == [2, 0]
    if bad == 2:
        assert got.error is None and [s.token_id for s in got.sampled] == [0, 0]
    else:
        assert message in got.error and [s.token_id for s in got.sampled] == [0] * bad


class TestTypical:
    def ask(self, x, draft, params=PARAMS[1], top=None):
        return verify([Asked(draft, row(params), 0, "typical")], x, Sampler(x.shape[1]), top)[0]

    def test_the_threshold(self):
        """min(0.09, 0.3 exp(-H)): flat over 4 tokens it is 0.075, and 0.25 passes; flat over 20 it is 0.015, and 0.05 passes."""
        p = torch.tensor([[0.92, 0.08]])
        assert self.ask(torch.cat([p, p]).log(), Draft.chain([1])).nodes[0].accept == 0.0, "0.08 < 0.09 < 0.3 exp(-0.28)"
        p = torch.tensor([[0.905, 0.095]])
        assert self.ask(torch.cat([p, p]).log(), Draft.chain([1])).nodes[0].accept == 1.0
        flat = torch.zeros(2, 20)
        assert self.ask(flat, Draft.chain([5])).path == [0]
        flat[0, 5] = -1.5  # p = 0.0116: below 0.3 / 19.6
        assert self.ask(flat, Draft.chain([5])).path == []

    def test_the_longest_path_is_kept(self):
        """Two of the first place pass; the likelier one leads nowhere."""
        x = torch.full((5, 4), -9.0)
        x[0, :2] = torch.tensor([1.0, 0.5])
        x[1, 3] = x[2, 2] = x[3, 0] = x[4, 1] = 5.0
        got = self.ask(x, Draft([0, 1, 0, 2], [-1, -1, 0, 1]), top=2)
        assert got.path == [1, 3] and [s.token_id for s in got.sampled][:2] == [1, 2]
        assert [(n.outcome, n.accept) for n in got.nodes] == [("rejected", 1), ("accepted", 1), ("rejected", 0), ("accepted", 1)]
        assert (got.sampled[2].token_id, got.own, got.rule) == (1, "bonus", "typical")

    def test_at_temperature_0_it_is_greedy_decoding(self):
        sampler, target, first = Sampler(VOCAB), Target(), row(PARAMS[0])
        draft = tree_of(sampler, target, first, 2)
        got = verify([Asked(draft, first, 0, "typical")], target.rows(draft), sampler)[0]
        assert [s.token_id for s in got.sampled] == [s.token_id for s in target.plain(sampler, first, 3)]


def test_the_counts_of_the_request_are_left_alone():
    """Penalties look at the drafted tokens of their own path only, and the request's counts do not learn of them."""
    sampler, params = Sampler(VOCAB), PARAMS[3]
    counts = TokenCounts([1, 2])
    first = SampleRow(params, 7, 0, 3, [1, 2], [0], counts)
    draft = Draft([3, 4, 5], [-1, -1, 1])
    verify([Asked(draft, first, 0)], Target().rows(draft), sampler)
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {1: 0, 2: 0, 0: 1}
