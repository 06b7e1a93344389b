"""The sampler against a float64 walk over the whole sorted vocabulary, at its edges, in law, and whatever the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampling.rng import uniform
from engine.sampling.sampler import Sampled, Sampler, SampleRow
from tests.engine.sampling.oracle import choose

INF = math.inf
f32 = lambda v: float(np.float32(v))


def row(params=None, seed=0, position=7, prompt=(), output=(), sample_index=0, **kw) -> SampleRow:
    return SampleRow(params or SamplingParams(**kw), seed, sample_index, position, prompt, output)


def sample_one(logits, head=64, observe_top=None, **kw) -> Sampled:
    x = torch.as_tensor(logits, dtype=torch.float32)
    return Sampler(len(x), head).sample(x[None], [row(**kw)], observe_top)[0]


def logits_of(kind: str, vocab: int, seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(vocab, generator=g)
    match kind:
        case "sharp":
            return x * 6
        case "flat":
            return x * 0.3
        case "tied":  # as bfloat16 logits are: few distinct values
            return (x * 4).round() / 2
        case "holes":
            return torch.where(torch.rand(vocab, generator=g) < 0.9, -INF, x * 2)
    raise AssertionError(kind)


params_st = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.05, 0.7, 1.0, 2.5]),
    top_k=st.sampled_from([0, -1, 1, 2, 7, 50, 400, 10**6]),
    top_p=st.sampled_from([1e-12, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 0.5, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, -1.5, 1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
)
KINDS = ["sharp", "flat", "tied", "holes"]


def compare(got: Sampled, raw: torch.Tensor, r: SampleRow, observed: int) -> bool:
    """Assert that one row is what the oracle says; False when a cut or the draw is too near an edge to tell."""
    u = uniform(r.seed, r.sample_index, r.position)
    want = choose(raw.double().tolist(), r.params, u, r.prompt_token_ids, r.output_token_ids, f32)
    if want.margin < 1e-5:
        return False
    assert got.error is None
    assert got.token_id == want.token_id
    assert got.prob == pytest.approx(want.prob, rel=1e-5)
    assert got.logprob == pytest.approx(want.logprob, abs=1e-5)
    assert got.rank == want.rank
    assert got.entropy == pytest.approx(want.entropy, abs=1e-5)
    if r.params.temperature == 0:
        assert (got.u, got.nucleus_size, got.nucleus_mass) == (None, 0, 0.0)
    else:
        everything = r.params.top_p == 1 and r.params.min_p == 0 and not 0 < r.params.top_k < len(raw)
        assert got.u == u
        assert got.nucleus_size == (len(raw) if everything else len(want.kept))
        assert got.nucleus_mass == pytest.approx(want.mass, abs=1e-5)
    order = sorted(range(len(raw)), key=lambda i: (-float(raw[i]), i))[:observed]
    assert [c[0] for c in got.candidates] == order
    logprobs = torch.log_softmax(raw.double(), -1)
    assert [c[1] for c in got.candidates] == pytest.approx(logprobs[order].tolist(), abs=1e-5)
    final = want.kept or [want.token_id]
    assert [c[2] > 0 for c in got.candidates if c[1] > -30] == [i in final for i in order if float(logprobs[i]) > -30]
    return True


@given(
    batch=st.lists(
        st.tuples(st.sampled_from(KINDS), st.integers(0, 10**6), params_st, st.integers(0, 2**64 - 1)), min_size=1, max_size=4
    ),
    vocab=st.sampled_from([1, 2, 5, 130, 2500]),
    head=st.sampled_from([1, 3, 64]),
    top=st.sampled_from([0, 1, 20]),
    history=st.lists(st.integers(0, 10**6), max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_against_the_whole_walk(batch, vocab, head, top, history):
    raw = torch.stack([logits_of(kind, vocab, seed) for kind, seed, _, _ in batch])
    if (raw == -INF).all(-1).any():
        return
    history = [t % vocab for t in history]
    rows = [row(p, seed, prompt=history[: i + 3], output=history[i + 3 :]) for i, (_, _, p, seed) in enumerate(batch)]
    before = raw.clone()
    got = Sampler(vocab, head).sample(raw, rows, top)
    assert torch.equal(raw, before), "the caller's logits were changed"
    for g, x, r in zip(got, raw, rows, strict=True):
        compare(g, x, r, min(top, vocab))
    assert [g.token_id for g in Sampler(vocab, head).sample(raw, rows)] == [g.token_id for g in got], "observing changed a token"
