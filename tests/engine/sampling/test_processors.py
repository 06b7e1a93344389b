"""The processors against transformers' where the definitions agree, against float64 Python where they do not."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampling.processors import (
    ORDER,
    TokenCounts,
    apply_min_p,
    apply_penalties,
    apply_temperature,
    apply_top_k,
    apply_top_p,
    probabilities,
    process,
)
from tests.engine.sampling import oracle

INF = math.inf
logits_st = st.lists(
    st.one_of(st.floats(-20, 20, width=32), st.just(-INF), st.integers(-3, 3).map(float)), min_size=1, max_size=40
).filter(lambda x: max(x) > -INF)


def kept(x: torch.Tensor) -> list[set[int]]:
    return [set(torch.nonzero(r > -INF).flatten().tolist()) for r in x]


def distinct(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Rows without ties: there transformers keeps the same tokens."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=g) * 3


class TestAgainstTransformers:
    @pytest.mark.parametrize("k", [1, 3, 50, 10**6])
    def test_top_k(self, k):
        from transformers import TopKLogitsWarper

        x = distinct(8, 200, k)
        assert kept(apply_top_k(x, k)) == kept(TopKLogitsWarper(k)(None, x))

    @pytest.mark.parametrize("p", [0.05, 0.3, 0.9, 0.99])
    def test_top_p(self, p):
        from transformers import TopPLogitsWarper

        x = distinct(8, 200, 1)
        assert kept(apply_top_p(x, p)) == kept(TopPLogitsWarper(p)(None, x))

    @pytest.mark.parametrize("p", [0.001, 0.1, 0.9])
    def test_min_p(self, p):
        from transformers import MinPLogitsWarper

        x = distinct(8, 200, 2)
        assert kept(apply_min_p(x, p)) == kept(MinPLogitsWarper(p)(None, x))

    @pytest.mark.parametrize("t", [0.2, 1.0, 3.0])
    def test_temperature(self, t):
        from transformers import TemperatureLogitsWarper

        x = distinct(4, 50, 3)
        torch.testing.assert_close(
            probabilities(apply_temperature(x, t)), probabilities(TemperatureLogitsWarper(t)(None, x.double()))
        )

    @pytest.mark.parametrize("penalty", [0.7, 1.3])
    def test_repetition(self, penalty):
        from transformers import RepetitionPenaltyLogitsProcessor

        x = distinct(3, 50, 4)
        history = torch.randint(0, 50, (3, 20))
        ours = apply_penalties(
            x, [TokenCounts(h[:12].tolist(), h[12:].tolist()) for h in history], [penalty] * 3, [0] * 3, [0] * 3
        )
        assert torch.equal(ours, RepetitionPenaltyLogitsProcessor(penalty)(history, x))

    def test_the_orders_differ(self):
        """vLLM filters min_p before top_p, transformers after: here that is one token, so the order is checked, not assumed."""
        from transformers import MinPLogitsWarper, TopPLogitsWarper

        x = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1]]).log()
        *_, (_, ours) = process(x, SamplingParams(min_p=0.3, top_p=0.72))
        theirs = MinPLogitsWarper(0.3)(None, TopPLogitsWarper(0.72)(None, x))
        assert kept(ours) == [{0, 1}] == kept(theirs)
        *_, (_, ours) = process(x, SamplingParams(min_p=0.3, top_p=0.71))
        assert kept(ours) == [{0}]  # 0.5 of 0.7 is 0.714
        assert kept(MinPLogitsWarper(0.3)(None, TopPLogitsWarper(0.71)(None, x))) == [{0, 1}]


@given(logits_st, st.integers(-1, 50))
@settings(max_examples=200, deadline=None)
def test_top_k(x, k):
    order = oracle.ordered(x)
    expected = {i for i in (order[:k] if k > 0 else order) if x[i] > -INF}
    assert kept(apply_top_k(torch.tensor([x]), k)) == [expected]


@given(logits_st, st.floats(1e-12, 1.0))
@settings(max_examples=200, deadline=None)
def test_top_p(x, p):
    probs, before, expected, margin = oracle.softmax(x), 0.0, set(), 1.0
    for i in oracle.ordered(x):
        margin = min(margin, abs(before - p)) if before > 0 else margin
        if (before < p or p == 1) and x[i] > -INF:
            expected.add(i)
        before += probs[i]
    if margin > 1e-12:
        assert kept(apply_top_p(torch.tensor([x]), p)) == [expected]


@given(logits_st, st.floats(0.0, 1.0))
@settings(max_examples=200, deadline=None)
def test_min_p(x, p):
    probs = oracle.softmax(x)
    if min(abs(q - p * max(probs)) for q in probs if q != max(probs) or p == 1) > 1e-12 if len(set(probs)) > 1 else True:
        expected = {i for i, q in enumerate(probs) if q >= p * max(probs) and x[i] > -INF}
        assert kept(apply_min_p(torch.tensor([x]), p)) == [expected]


@given(
    logits_st,
    st.lists(st.integers(0, 100), max_size=8),
    st.lists(st.integers(0, 100), max_size=8),
    st.sampled_from([0.5, 1.0, 1.7]),
    st.sampled_from([-1.0, 0.0, 0.8]),
    st.sampled_from([-0.3, 0.0, 0.4]),
)
@settings(max_examples=200, deadline=None)
def test_penalties(x, prompt, output, repetition, presence, frequency):
    prompt, output = [t % len(x) for t in prompt], [t % len(x) for t in output]
    params = SamplingParams(repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency)
    raw = torch.tensor([x])
    got = apply_penalties(raw, [TokenCounts(prompt, output)], [repetition], [presence], [frequency])
    assert raw.tolist() == [x], "the input was changed"
    np.testing.assert_allclose(got[0].numpy(), oracle.penalised(x, params, prompt, output), rtol=1e-6, atol=1e-6)


def test_penalty_signs():
    """Divides a positive logit, multiplies a negative one; presence and frequency do not see the prompt."""
    x = torch.tensor([[2.0, -2.0, 2.0, -2.0, 0.0]])
    assert apply_penalties(x, [TokenCounts([0, 1, 4])], [2.0], [1.0], [1.0]).tolist() == [[1.0, -4.0, 2.0, -2.0, 0.0]]
    assert apply_penalties(x, [TokenCounts([], [0, 0, 1])], [1.0], [0.5], [0.25]).tolist() == [[1.0, -2.75, 2.0, -2.0, 0.0]]


def test_counts_grow_with_the_output():
    prompt, output = [5, 5, 7], list(np.random.default_rng(0).integers(0, 300, 500))
    grown = TokenCounts(prompt)
    for n in (1, 1, 3, 200, 500):
        grown.update(output[:n])
        fresh = TokenCounts(prompt, output[:n])
        assert (
            dict(zip(grown.ids.tolist(), grown.counts.tolist(), strict=True))
            == {t: output[:n].count(t) for t in {*prompt, *output[:n]}}
            == dict(zip(fresh.ids.tolist(), fresh.counts.tolist(), strict=True))
        )
    with pytest.raises(RuntimeError, match="from 500 to 3"):
        grown.update(output[:3])


def test_ties_are_kept_by_id():
    x = torch.tensor([[1.0, 2.0, 2.0, 2.0, 1.0]])
    assert kept(apply_top_k(x, 2)) == [{1, 2}]
    assert kept(apply_top_k(x, 4)) == [{0, 1, 2, 3}]
    assert kept(apply_top_p(torch.zeros(1, 4), 0.5)) == [{0, 1}]  # the mass before the third is not < 0.5
    assert kept(apply_top_p(torch.zeros(1, 4), 0.51)) == [{0, 1, 2}]
    assert kept(apply_min_p(x, 1.0)) == [{1, 2, 3}]
    assert kept(apply_temperature(x, 0)) == [{1}]


def test_one_parameter_a_row():
    x = distinct(3, 20, 5)
    values = torch.tensor([1.0, 4.0, 0.0])
    together = apply_top_k(x, values)
    assert torch.equal(together, torch.cat([apply_top_k(x[i : i + 1], int(v)) for i, v in enumerate(values)]))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: apply_temperature(x, 0.7),
        lambda x: apply_min_p(x, 0.3),
        lambda x: apply_top_k(x, 2),
        lambda x: apply_top_p(x, 0.6),
    ],
)
def test_edges(f):
    assert kept(f(torch.tensor([[-INF, 1.0, -INF]]))) == [{1}]
    assert kept(f(torch.full((1, 3), -INF))) == [set()]
    assert bool(f(torch.tensor([[1.0, math.nan, 2.0]])).isnan().any())
    assert kept(f(torch.tensor([[3.0]]))) == [{0}]
    infinite = f(torch.tensor([[INF, 0.0, INF, -INF]]))
    assert probabilities(infinite)[0].tolist() in ([0.5, 0.0, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0])


def test_probabilities():
    assert probabilities(torch.tensor([[INF, 1.0, INF]])).tolist() == [[0.5, 0.0, 0.5]]
    assert probabilities(torch.full((1, 2), -INF)).tolist() == [[0.0, 0.0]]
    x = distinct(3, 100, 6)
    torch.testing.assert_close(probabilities(x), torch.softmax(x.double(), -1))


def test_the_order_is_stated_and_run():
    names = [name for name, _ in process(torch.zeros(1, 3), SamplingParams())]
    assert tuple(names) == ORDER == ("penalties", "temperature", "min_p", "top_k", "top_p")
    bf16 = distinct(1, 50, 7).bfloat16()
    assert all(x.dtype in (torch.float32, torch.float64) for _, x in process(bf16, SamplingParams()))
