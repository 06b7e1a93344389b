"""The whole distribution against the processors' definitions, and against what the sampler draws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampling.processors import TokenCounts, probabilities, process
from engine.sampling.sampler import Sampler, SampleRow
from tests.engine.sampling.test_sampler import KINDS, logits_of, params_st

INF = math.inf


def defined(raw: torch.Tensor, params: SamplingParams, counts: TokenCounts | None = None) -> np.ndarray:
    """float64 [V]: what the processors, one after the other, leave of a row."""
    *_, (_, final) = process(raw[None], params, counts)
    return probabilities(final)[0].numpy()


def near_an_edge(raw: torch.Tensor, params: SamplingParams, counts: TokenCounts) -> bool:
    """Whether a mass before some token lies so near ``top_p`` that float32 and float64 sums may cut on either side of it."""
    stages = dict(process(raw[None], params, counts))
    p = probabilities(stages["top_k"])[0].sort(descending=True).values
    before = p.cumsum(0) - p
    ratio = p / p[0]
    return bool(((before - params.top_p).abs() < 1e-6).any() or ((ratio - params.min_p).abs() < 1e-6)[1:].any())


@given(
    batch=st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 10**6), params_st), min_size=1, max_size=4),
    vocab=st.sampled_from([1, 2, 5, 130, 2500]),
    head=st.sampled_from([1, 3, 64]),
    history=st.lists(st.integers(0, 10**6), max_size=12),
)
@settings(max_examples=80, deadline=None)
def test_against_the_processors(batch, vocab, head, history):
    raw = torch.stack([logits_of(kind, vocab, seed) for kind, seed, _ in batch])
    if (raw == -INF).all(-1).any():
        return
    history = [t % vocab for t in history]
    rows = [SampleRow(p, 0, 0, 9, history[: i + 3], history[i + 3 :]) for i, (_, _, p) in enumerate(batch)]
    before = raw.clone()
    got = Sampler(vocab, head).distributions(raw, rows)
    assert torch.equal(raw, before), "the caller's logits were changed"
    assert got.p.dtype == torch.float64 and got.errors == [None] * len(rows)
    for i, (x, row) in enumerate(zip(raw, rows, strict=True)):
        counts = TokenCounts(row.prompt_token_ids, row.output_token_ids)
        if near_an_edge(x, row.params, counts):
            continue
        want = defined(x, row.params, counts)
        assert got.p[i].numpy() == pytest.approx(want, rel=1e-12, abs=1e-15)
        assert set(np.flatnonzero(got.p[i].numpy())) == set(np.flatnonzero(want))
        filtered = row.params.temperature == 0 or row.params.top_p < 1 or row.params.min_p or 0 < row.params.top_k < vocab
        if filtered and (x > -INF).all():
            assert got.sizes[i] == np.count_nonzero(want) or want.min() < 1e-300


@pytest.mark.parametrize("kind", ["flat", "tied"])
def test_of_a_large_vocabulary_and_in_bfloat16(kind):
    """Heads that suffice and heads that do not, in one batch; many ties in bfloat16."""
    params = [SamplingParams(temperature=t, top_p=p, top_k=k) for t, p, k in [(1, 1, 0), (1, 0.9, 0), (0.6, 1, 30), (2, 0.99, 0)]]
    params += [SamplingParams(temperature=0), SamplingParams(temperature=0.8, min_p=0.01)]
    raw = torch.stack([logits_of(kind, 49152, seed) for seed in range(6)]).bfloat16()
    got = Sampler(49152).distributions(raw, [SampleRow(p, 1, 0, 5) for p in params])
    for i, p in enumerate(params):
        assert got.p[i].numpy() == pytest.approx(defined(raw[i].float(), p), rel=1e-12, abs=1e-15)


@given(st.sampled_from(KINDS), st.integers(0, 10**6), params_st, st.integers(0, 2**64 - 1))
@settings(max_examples=40, deadline=None)
def test_the_sampler_draws_from_it(kind, seed, params, draw_seed):
    """Its token lies where u falls on the same probabilities in descending order, with the probability that it tells."""
    raw = logits_of(kind, 1500, seed)[None]
    rows = [SampleRow(params, draw_seed, 0, 4, [1, 2, 3], [3, 4, 4])]
    sampler = Sampler(1500)
    got, drawn = sampler.distributions(raw, rows).p[0], sampler.sample(raw, rows)[0]
    assert drawn.prob == pytest.approx(float(got[drawn.token_id]), rel=1e-6)
    if drawn.u is not None:
        above = float(got[got > got[drawn.token_id]].sum())
        upto = float(got[got >= got[drawn.token_id]].sum())
        assert above - 1e-6 <= drawn.u <= upto + 1e-6


@pytest.mark.parametrize("vocab", [4, 3000])
@pytest.mark.parametrize("kw", [{}, {"temperature": 0}, {"top_p": 0.5}, {"top_k": 2, "repetition_penalty": 1.2}, {"min_p": 0.1}])
def test_broken_rows_are_reported_and_harm_nobody(vocab, kw):
    g = torch.Generator().manual_seed(5)
    raw = torch.randn(4, vocab, generator=g)
    raw[1, 2], raw[2] = math.nan, -INF
    rows = [SampleRow(SamplingParams(**kw), 3, 0, 5, [1], [2])] * 4
    sampler = Sampler(vocab)
    got = sampler.distributions(raw, rows)
    assert [None if e is None else ("NaN" in e) for e in got.errors] == [None, True, False, None]
    assert (got.p[1:3] == 0).all()
    for i in (0, 3):
        assert torch.equal(got.p[i], sampler.distributions(raw[i : i + 1], rows[:1]).p[0])
        assert float(got.p[i].sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("kw", [{}, {"top_p": 0.6}, {"top_k": 1}, {"temperature": 0}])
def test_plus_infinity_takes_all_the_mass(kw):
    raw = torch.zeros(1, 5)
    raw[0, 1] = raw[0, 3] = INF
    p = Sampler(5).distributions(raw, [SampleRow(SamplingParams(**kw), 3, 0, 5)]).p[0].tolist()
    assert p == ([0, 1, 0, 0, 0] if kw.keys() & {"top_k", "temperature"} else [0, 0.5, 0, 0.5, 0])


def test_a_shape_that_does_not_fit():
    with pytest.raises(ValueError, match=r"\[1, 5\]"):
        Sampler(5).distributions(torch.zeros(1, 6), [SampleRow(SamplingParams(), 3, 0, 5)])


@given(st.sampled_from(KINDS), st.integers(0, 10**6), params_st, st.sampled_from([None, 0, 6]), st.sampled_from([3, 64]))
@settings(max_examples=40, deadline=None)
def test_a_token_chosen_otherwise_is_told_as_if_drawn(kind, seed, params, top, head):
    """Telling of the very token that was drawn gives what drawing it told."""
    raw = logits_of(kind, 700, seed)[None]
    rows = [SampleRow(params, seed, 0, 4, [1, 2, 3], [3, 4, 4])]
    sampler = Sampler(700, head)
    drawn = sampler.sample(raw, rows, top)[0]
    told = sampler.tell(raw, rows, [(drawn.token_id, drawn.prob, drawn.u)], top)[0]
    if params.temperature == 0:
        drawn.nucleus_mass = told.nucleus_mass  # NaN or 0: nobody looks
    assert repr(told) == repr(drawn)


def test_a_row_of_counts_goes_on_without_the_first_one_noticing():
    counts = TokenCounts([1, 2])
    row = SampleRow(SamplingParams(repetition_penalty=1.3), 3, 1, 4, [1, 2], [5, 5], counts)
    later = row.after([7, 5])
    assert (later.position, later.seed, later.sample_index, list(later.output_token_ids)) == (6, 3, 1, [5, 5, 7, 5])
    assert dict(zip(later.counts.ids.tolist(), later.counts.counts.tolist(), strict=True)) == {1: 0, 2: 0, 5: 2, 7: 0} | {
        7: 1,
        5: 3,
    }
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == {1: 0, 2: 0, 5: 2}
    plain = SampleRow(SamplingParams(), 3, 1, 4).after([7])
    assert (plain.position, list(plain.output_token_ids), plain.counts) == (5, [], None)
