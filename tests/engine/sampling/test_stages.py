"""What is told of the candidates, stage by stage, against the processors applied to the whole row."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events.types import Candidate, TokenSampled
from engine.request import SamplingParams
from engine.sampling.candidates import STAGES, left, shares
from engine.sampling.processors import ORDER, TRANSFORMERS_ORDER, TokenCounts, probabilities, process, removed_by
from engine.sampling.sampler import Sampled, Sampler, SampleRow
from tests.engine.sampling.test_sampler import KINDS, logits_of, params_st, row

FILTERS = ("min_p", "top_k", "top_p")


def event(s: Sampled) -> TokenSampled:
    top = [Candidate(c[0], str(c[0]), *c[1:]) for c in s.candidates]
    return TokenSampled(
        step=1, time_ns=0, request_id="r", position=0, index=0, token_id=s.token_id, text="", logprob=s.logprob, rank=s.rank,
        u=s.u, prob=s.prob, nucleus_size=s.nucleus_size, nucleus_mass=s.nucleus_mass, entropy=s.entropy, top=top,
        kept_sizes=s.kept_sizes, kept_masses=s.kept_masses,
    )  # fmt: skip


def near_a_cut(raw: torch.Tensor, params: SamplingParams, counts: TokenCounts) -> bool:
    """Whether rounding (exponentials are float32) could decide which tokens a filter keeps, or how many share a tie."""
    stages = dict(process(raw, params, counts))
    p = probabilities(stages["temperature"])[0]
    if params.min_p and float((p - params.min_p * p.max()).abs().min()) < 1e-6 and params.min_p < 1:
        return True
    q = probabilities(stages["top_k"])[0].sort(descending=True).values
    return bool(params.top_p < 1 and float((q.cumsum(-1) - params.top_p).abs().min()) < 1e-6)


@given(
    st.sampled_from(KINDS), st.integers(0, 10**6), params_st, st.sampled_from([3, 130, 2500]), st.sampled_from([1, 7, 64]),
    st.lists(st.integers(0, 10**6), max_size=12),
)  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_each_stage_is_that_of_the_whole_row(kind, seed, params, vocab, head, history):
    raw = logits_of(kind, vocab, seed)[None]
    history = [t % vocab for t in history]
    counts = TokenCounts(history[:4], history[4:])
    if (raw == -math.inf).all() or near_a_cut(raw, params, counts):
        return
    s = Sampler(vocab, head).sample(raw, [row(params, seed, prompt=history[:4], output=history[4:])], 15)[0]
    e, stages = event(s), {"raw": raw, **dict(process(raw, params, counts))}
    ids = [c.token_id for c in e.top]
    told = shares(e)
    assert tuple(told) == STAGES
    for name, x in stages.items():
        want = probabilities(x)[0, ids].tolist()
        assert told[name] == pytest.approx(want, rel=2e-5, abs=1e-9), name
    gone = removed_by(raw, params, counts)[0, ids].tolist()
    possible = [bool(raw[0, i] > -math.inf) for i in ids]
    assert [c.removed_by for c, ok in zip(e.top, possible, strict=True) if ok] == [
        "" if g < 0 else ORDER[g] for g, ok in zip(gone, possible, strict=True) if ok
    ]
    if params.temperature == 0:
        assert (e.kept_sizes, e.kept_masses) == ([1, 1, 1], [1.0, 1.0, 1.0])
        assert left(e, vocab)["temperature"] == 1
        return
    tempered = probabilities(stages["temperature"])[0]
    cut = False
    for i, name in enumerate(FILTERS):
        value = getattr(params, name)
        cut |= value < 1 if name == "top_p" else value > 0 if name == "min_p" else 0 < value < vocab
        kept = stages[name][0] > -math.inf
        assert e.kept_masses[i] == pytest.approx(float(tempered[kept].sum()), abs=2e-6), name
        assert e.kept_sizes[i] == (int(kept.sum()) if cut else vocab), name
        assert left(e, vocab)[name] == e.kept_sizes[i]
    assert e.nucleus_size == e.kept_sizes[2]


def test_all_masses_are_told_where_the_head_is_short():
    """min_p keeps hundreds of tokens, top_k then few: the first filter's count needs the whole row, the token does not."""
    raw = logits_of("flat", 5000, 1)[None]
    params = SamplingParams(min_p=0.05, top_k=10)
    s = Sampler(5000).sample(raw, [row(params, 3)], 5)[0]
    kept = dict(process(raw, params))["min_p"][0] > -math.inf
    assert s.kept_sizes[0] == int(kept.sum()) > 64 and s.kept_sizes[1:] == [10, 10]


@pytest.mark.parametrize("largest", [9.0, 60.0, 5000.0, 3e38])
def test_a_penalty_that_takes_nearly_all_the_mass_away(largest):
    """The raw distribution is told right however far the token that had it all has fallen."""
    raw = logits_of("flat", 3000, 2)[None]
    raw[0, 7] = largest
    params = SamplingParams(temperature=0.7, repetition_penalty=1000.0, top_p=0.9)
    s = Sampler(3000).sample(raw, [row(params, 1, prompt=[7])], 3)[0]
    p = torch.softmax(raw[0].double(), -1)
    assert s.candidates[0][:2] == (7, pytest.approx(float(p[7].log()), abs=1e-6))
    assert s.candidates[0][3] == pytest.approx(float(process_last(raw, params)[7]), abs=1e-5)
    assert s.entropy == pytest.approx(float(-torch.xlogy(p, p).sum()), abs=2e-6)


def process_last(raw: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Log-probabilities after the penalties, with token 7 in the prompt."""
    return probabilities(dict(process(raw, params, TokenCounts([7])))["penalties"])[0].log()


def test_broken_rows_do_not_disturb_what_is_told_of_others():
    raw = torch.stack([logits_of("sharp", 300, 1), torch.full((300,), math.nan), torch.full((300,), -math.inf)])
    rows = [SampleRow(SamplingParams(top_p=0.9), 1, 0, 5)] * 3
    good, *bad = Sampler(300).sample(raw, rows, 4)
    assert repr(good) == repr(Sampler(300).sample(raw[:1], rows[:1], 4)[0])
    assert [b.error is not None and b.candidates == [] for b in bad] == [True, True]


def test_the_orders_keep_different_tokens():
    """min_p before top_p (vLLM) or after it (transformers): with these numbers one token apart."""
    from transformers import MinPLogitsWarper, TopPLogitsWarper

    x = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1]]).log()
    params = SamplingParams(min_p=0.3, top_p=0.71)
    ours, theirs = removed_by(x, params)[0].tolist(), removed_by(x, params, order=TRANSFORMERS_ORDER)[0].tolist()
    assert ours == [-1, 4, 2, 2, 2] and theirs == [-1, -1, 4, 3, 3]
    kept = MinPLogitsWarper(0.3)(None, TopPLogitsWarper(0.71)(None, x))[0] > -math.inf
    assert kept.tolist() == [g < 0 for g in theirs]


@given(
    st.integers(0, 10**6), st.sampled_from([0.5, 1.0, 1.8]), st.sampled_from([0, 3, 40]), st.sampled_from([0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3]), st.sampled_from([1.0, 1.4]),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_transformers_order_is_transformers(seed, temperature, top_k, top_p, min_p, repetition):
    """The same kept sets as the warpers that ``generate`` builds, in the order in which it builds them."""
    from transformers import GenerationConfig, GenerationMixin

    raw = logits_of("sharp", 200, seed)[None] / 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition)
    config = GenerationConfig(
        do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p or None, repetition_penalty=repetition
    )
    mixin = GenerationMixin()
    mixin.config = type("Config", (), {"is_encoder_decoder": False})()
    history = torch.tensor([[1, 5, 5, 9]])
    chain = mixin._get_logits_processor(config, input_ids_seq_length=4, device="cpu")
    theirs = chain(history, raw.double())
    *_, (_, ours) = process(raw, params, TokenCounts([1, 5, 5, 9]), TRANSFORMERS_ORDER)
    p = probabilities(dict(process(raw, params, TokenCounts([1, 5, 5, 9]), ("penalties", "temperature", "top_k")))["top_k"])
    edges = p.sort(descending=True).values.cumsum(-1)
    if top_p < 1 and float((edges - top_p).abs().min()) < 1e-6:
        return
    assert ((ours > -math.inf) == (theirs > -math.inf)).all()


def test_an_unknown_processor():
    with pytest.raises(ValueError, match=r"order must consist of penalties.*got 'typical_p'"):
        list(process(torch.zeros(1, 3), SamplingParams(), order=("typical_p",)))
