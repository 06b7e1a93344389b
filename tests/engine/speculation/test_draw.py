"""Drawing a draft: the walk against a search, siblings without replacement, reduced vocabularies, and what is told."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampling.rng import STREAM_DRAFT, uniform
from engine.sampling.sampler import Sampler, SampleRow
from engine.speculation.draw import DraftSampler, draft_u, walk
from tests.engine.sampling.test_sampler import KINDS, logits_of

HOT = SamplingParams(temperature=0.9, top_p=0.95)
COLD = SamplingParams(temperature=0)


def row(params=HOT, seed=4, position=6, output=(3, 3)) -> SampleRow:
    return SampleRow(params, seed, 1, position, [1, 2], list(output))


def searched(p, u):
    order = sorted((i for i in range(len(p)) if p[i] > 0), key=lambda i: (-p[i], i))
    target, summed = u * float(np.sum(p)), 0.0
    for i in order:
        summed += p[i]
        if summed > target:
            return i
    return order[-1] if order else -1


@given(st.lists(st.sampled_from([0.0, 0.125, 0.25, 1.0, 3.0]), min_size=1, max_size=12), st.integers(0, 2**10 - 1))
@settings(max_examples=150, deadline=None)
def test_the_walk_against_a_search(masses, u):
    """Many ties, sums that are exact; a row with no mass has no token."""
    p = torch.tensor([masses], dtype=torch.float64)
    assert walk(p, [u / 2**10]) == [searched(masses, u / 2**10)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_walk_over_a_large_row(kind):
    """Where the head suffices, where it does not, and up to the very end."""
    p = torch.softmax(logits_of(kind, 5000, 1).double(), -1)
    us = [0.0, 0.1, 0.5, 0.9, 0.99, 0.9999, 1 - 2**-53]
    got = walk(p.expand(len(us), -1), us)
    order = np.lexsort((np.arange(5000), -p.numpy()))
    ends = np.cumsum(p.numpy()[order])
    for token, u in zip(got, us, strict=True):
        at = int(np.flatnonzero(order == token)[0])
        assert p[token] > 0 and ends[at] - float(p[token]) <= u + 1e-12 and (u < ends[at] + 1e-12)


def test_children_are_drawn_without_replacement_with_a_number_each():
    x = logits_of("flat", 50, 2)[None]
    q = Sampler(50).distributions(x, [row()]).p[0]
    one = DraftSampler(50).draw(x, [row()], 4, num_top=3)[0]
    left = q.clone()
    for sibling, token in enumerate(one.token_ids):
        u = uniform(4, 1, 6, STREAM_DRAFT, sibling)
        assert draft_u(row(), sibling) == u and token == searched(left.numpy(), u)
        left[token] = 0.0
    assert len(set(one.token_ids)) == 4 and torch.equal(one.q, q)
    assert one.probs == q[one.token_ids].tolist()
    values, ids = q.sort(descending=True, stable=True)
    assert one.tops == list(zip(ids[:3].tolist(), values[:3].tolist(), strict=True))


def test_no_more_children_than_have_any_probability():
    x = torch.full((1, 50), -math.inf)
    x[0, [7, 9]] = torch.tensor([1.0, 0.0])
    one = DraftSampler(50).draw(x, [row(SamplingParams())], 4)[0]
    assert sorted(one.token_ids) == [7, 9] and float(one.q[one.token_ids[0]]) == one.probs[0]
    assert DraftSampler(50).draw(x, [row(COLD)], 4)[0].token_ids == [7, 9]


def test_a_coupled_draft_is_the_targets_own_draw_of_the_same_logits():
    for seed in range(20):
        x, first = logits_of("flat", 900, seed)[None], row(seed=seed)
        one = DraftSampler(900).draw(x, [first], 1, "coupled")[0]
        assert one.token_ids == [Sampler(900).sample(x, [first])[0].token_id] and one.q is None


def test_greedy_children_are_the_likeliest():
    x = logits_of("sharp", 900, 3)[None]
    one = DraftSampler(900).draw(x, [row(COLD)], 3, num_top=5)[0]
    p = torch.softmax(x[0].double(), -1)
    order = p.sort(descending=True, stable=True).indices.tolist()
    assert one.token_ids == order[:3] and one.q is None
    assert one.probs == pytest.approx(p[order[:3]].tolist()) and [t for t, _ in one.tops] == order[:5]


@pytest.mark.parametrize("params", [HOT, COLD, HOT.changed(repetition_penalty=1.5), COLD.changed(presence_penalty=1.5)], ids=str)
def test_a_reduced_vocabulary_is_the_whole_one_with_nothing_elsewhere(params):
    """Ids, probabilities and q are those of the target's vocabulary; penalties know the tokens by those."""
    vocab = torch.arange(1, 900, 3)
    spread = torch.full((2, 900), -math.inf)
    own = torch.stack([logits_of("flat", len(vocab), seed) for seed in (1, 2)])
    spread[:, vocab] = own
    rows = [row(params, output=[4, 4, 7]), row(params, seed=9, output=vocab[own[1].argsort()[-2:]].tolist())]
    got = DraftSampler(900, vocab).draw(own, rows, 3, num_top=4)
    want = DraftSampler(900).draw(spread, rows, 3, num_top=4)
    for a, b in zip(got, want, strict=True):
        assert a.token_ids == b.token_ids and a.probs == pytest.approx(b.probs, rel=1e-9)
        assert [t for t, _ in a.tops] == [t for t, _ in b.tops]
        assert (a.q is None) == (b.q is None) == (params.temperature == 0)
        if a.q is not None:
            assert a.q.shape == (900,) and torch.allclose(a.q, b.q, rtol=1e-9)


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_rows_with_nan_are_reported_and_harm_nobody(acceptance):
    x = torch.stack([logits_of("flat", 60, seed) for seed in range(4)])
    rows = [row(), row(), row(COLD), row(COLD)]
    drawer = DraftSampler(60)
    alone = [drawer.draw(x[i : i + 1], rows[i : i + 1], 2, acceptance)[0] for i in range(4)]
    x[0, 3] = x[2, 3] = math.nan
    got = drawer.draw(x, rows, 2, acceptance, num_top=2)
    assert [one.error is None for one in got] == [False, True, False, True]
    assert [one.token_ids for one in got] == [[], alone[1].token_ids, [], alone[3].token_ids]
    assert got[0].q is None and got[0].tops == []
