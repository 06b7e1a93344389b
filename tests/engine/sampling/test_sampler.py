"""The sampler against a float64 walk over the whole sorted vocabulary, at its edges, in law, and whatever the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampling.processors import TokenCounts, probabilities, process
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
    if want.margin < 3e-7:  # exponentials are float32
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
    final = set(want.kept or [want.token_id])
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


def test_the_comparison_compares():
    """Nearly all random rows are far enough from an edge to be compared: a draw seldom falls so near."""
    rows = [row(temperature=1.3, top_p=0.9, top_k=40, seed=i) for i in range(50)]
    raw = torch.stack([logits_of(KINDS[i % 4], 300, i) for i in range(50)])
    got = Sampler(300).sample(raw, rows, 5)
    assert sum(compare(g, x, r, 5) for g, x, r in zip(got, raw, rows, strict=True)) >= 45


@pytest.mark.parametrize("vocab", [1023, 1025, 5000, 49152])
@pytest.mark.parametrize("kind", KINDS)
def test_large_vocabularies(vocab, kind):
    """The head by groups, with and without a remainder, resolved and not."""
    rows = [
        row(temperature=t, top_p=p, top_k=k, seed=s)
        for s, (t, p, k) in enumerate([(1, 1, 0), (1, 0.9, 0), (0.6, 1, 30), (0, 1, 0), (2, 0.3, 200)])
    ]
    raw = torch.stack([logits_of(kind, vocab, s) for s in range(len(rows))])
    got = Sampler(vocab).sample(raw, rows, 20)
    assert sum(compare(g, x, r, 20) for g, x, r in zip(got, raw, rows, strict=True)) >= 3


@given(st.sampled_from(KINDS), st.integers(0, 10**6), params_st, st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_agrees_with_the_processors(kind, seed, params, draw_seed):
    """What the definitions keep, in their order, is what the sampler keeps."""
    raw = logits_of(kind, 1500, seed)
    prompt, output = [1, 2, 3], [3, 4, 4]
    got = Sampler(1500).sample(raw[None], [row(params, draw_seed, prompt=prompt, output=output)], 100)[0]
    *_, (name, final) = process(raw[None], params, TokenCounts(prompt, output))
    assert name == "top_p"
    p = probabilities(final)[0]
    assert got.prob == pytest.approx(float(p[got.token_id]), rel=1e-5)
    if params.temperature:
        size = int((final > -INF).sum())
        filtered = params.top_p < 1 or params.min_p or 0 < params.top_k < 1500
        assert abs(got.nucleus_size - (size if filtered else 1500)) <= (1 if params.top_p < 1 else 0)
    ids = [c[0] for c in got.candidates]
    assert [c[2] for c in got.candidates] == pytest.approx(p[ids].tolist(), rel=1e-4, abs=1e-7)


ALL_PARAMS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.5, top_k=50),
    SamplingParams(temperature=0.8, min_p=0.02, top_p=0.99),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4),
    SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=3),
    SamplingParams(temperature=1, logprobs=5),
]


@pytest.mark.parametrize("vocab", [300, 5003])
@pytest.mark.parametrize("observe_top", [None, 0, 7])
def test_what_else_is_in_the_batch_changes_nothing(vocab, observe_top):
    """Equal to the last bit: alone, in any order, with rows of any other kind, and with broken rows beside it."""
    n = 24
    g = torch.Generator().manual_seed(1)
    raw = torch.stack([logits_of(KINDS[i % 4], vocab, i) for i in range(n)])
    rows = [
        row(ALL_PARAMS[i % len(ALL_PARAMS)], seed=i // 2, position=i, prompt=range(i, 40), output=range(i), sample_index=i % 3)
        for i in range(n)
    ]
    sampler = Sampler(vocab)
    alone = [sampler.sample(raw[i : i + 1], rows[i : i + 1], observe_top)[0] for i in range(n)]
    for size in (2, 5, n):
        order = torch.randperm(n, generator=g)[:size].tolist()
        assert repr(sampler.sample(raw[order], [rows[i] for i in order], observe_top)) == repr([alone[i] for i in order])
    broken = torch.stack([torch.full((vocab,), v) for v in (math.nan, -INF, INF)])
    mixed = sampler.sample(torch.cat([raw, broken]), rows + [row()] * 3, observe_top)
    assert repr(mixed[:n]) == repr(alone)
    assert [m.error is None for m in mixed[n:]] == [False, False, True]


def test_the_draw_is_that_of_seed_sample_and_position():
    raw = logits_of("flat", 5000, 3)[None]
    base = row(seed=5, position=9, sample_index=1)
    one = Sampler(5000).sample(raw, [base])[0]
    assert one.u == uniform(5, 1, 9)
    other = [
        row(seed=6, position=9, sample_index=1),
        row(seed=5, position=8, sample_index=1),
        row(seed=5, position=9, sample_index=2),
    ]
    assert len({Sampler(5000).sample(raw, [r])[0].token_id for r in [base, *other]}) == 4


def test_bfloat16_is_read_as_float32():
    raw = logits_of("tied", 5000, 3).bfloat16()[None].repeat(4, 1)
    rows = [row(ALL_PARAMS[i], seed=i) for i in range(4)]
    sampler = Sampler(5000)
    assert sampler.sample(raw, rows, 5) == sampler.sample(raw.float(), rows, 5)
    assert [s.token_id for s in sampler.sample(raw, rows)] == [s.token_id for s in sampler.sample(raw.float(), rows)]


def test_not_contiguous():
    raw = torch.stack([logits_of("sharp", 5000, s) for s in range(3)])
    rows = [row(ALL_PARAMS[i], seed=i) for i in range(3)]
    assert Sampler(5000).sample(raw.T.contiguous().T, rows) == Sampler(5000).sample(raw, rows)


@pytest.mark.parametrize("vocab", [5, 5000])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(top_p=0.7, top_k=3),
        SamplingParams(temperature=0.4, min_p=0.1),
        SamplingParams(temperature=2),
    ],
)
def test_frequencies_follow_the_processed_distribution(vocab, params):
    """Chi-square of 20,000 draws over the likeliest tokens and the rest; the threshold is passed about once in 10^5."""
    n = 20000 if vocab == 5 else 4000
    raw = logits_of("sharp", vocab, 11) * 0.3
    *_, (_, final) = process(raw[None], params)
    p = probabilities(final)[0].numpy()
    sampler = Sampler(vocab)
    batch = raw.expand(500, -1)
    tokens = [
        s.token_id
        for i in range(0, n, 500)
        for s in sampler.sample(batch, [row(params, seed=3, position=i + j) for j in range(500)])
    ]
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[p == 0].sum() == 0
    cells = np.argsort(-p)[:20]
    observed = np.append(counts[cells], n - counts[cells].sum())
    expected = np.append(p[cells], 1 - p[cells].sum()) * n
    used = expected > 5
    freedom = int(used.sum()) - 1
    chi2 = float((((observed - expected) ** 2) / np.maximum(expected, 1e-9))[used].sum())
    assert freedom == 0 or chi2 < freedom + 4.5 * math.sqrt(2 * freedom) + 10


class TestEdges:
    """Logits at the edge of sense, in a small vocabulary (sorted whole) and in a large one (cut into a head)."""

    @pytest.mark.parametrize("vocab", [4, 3000])
    def test_all_equal(self, vocab):
        x = torch.zeros(vocab)
        greedy = sample_one(x, temperature=0, observe_top=3)
        assert (greedy.token_id, greedy.rank, [c[0] for c in greedy.candidates]) == (0, 1, [0, 1, 2])
        drawn = sample_one(x, observe_top=0)
        assert drawn.token_id == int(drawn.u * vocab)  # ids in order, equal shares
        assert (drawn.rank, drawn.entropy) == (drawn.token_id + 1, pytest.approx(math.log(vocab)))
        assert sample_one(x, top_k=2, observe_top=0).nucleus_size == 2
        assert sample_one(x, top_p=0.5, observe_top=0).nucleus_size == vocab // 2

    @pytest.mark.parametrize("vocab", [4, 3000])
    @pytest.mark.parametrize(
        "kw", [{}, {"temperature": 0}, {"top_p": 0.3}, {"top_k": 50}, {"min_p": 0.2}, {"repetition_penalty": 2.0}]
    )
    def test_one_finite(self, vocab, kw):
        x = torch.full((vocab,), -INF)
        x[2] = -3.0
        s = sample_one(x, observe_top=2, **kw)
        assert (s.token_id, s.prob, s.logprob, s.rank, s.entropy, s.error) == (2, 1.0, 0.0, 1, 0.0, None)
        assert [c[:3] for c in s.candidates] == [(2, 0.0, 1.0), (0, -INF, 0.0)]

    @pytest.mark.parametrize("vocab", [4, 3000])
    @pytest.mark.parametrize(
        "kw", [{}, {"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.2}, {"temperature": 1e-3}, {"temperature": 1e6}]
    )
    def test_plus_infinity_takes_all_the_mass(self, vocab, kw):
        x = torch.randn(vocab)
        x[1] = x[3] = INF
        s = sample_one(x, observe_top=3, **kw)
        assert (s.token_id, s.prob, s.error) == (1 if s.u < 0.5 else 3, 0.5, None)
        assert (s.logprob, s.entropy) == (pytest.approx(math.log(0.5)), pytest.approx(math.log(2)))
        assert [c[0] for c in s.candidates][:2] == [1, 3]
        assert sample_one(x, temperature=0).token_id == 1

    @pytest.mark.parametrize("vocab", [4, 3000])
    @pytest.mark.parametrize(
        "kw", [{}, {"temperature": 0}, {"temperature": 0, "logprobs": 2}, {"top_k": 5, "repetition_penalty": 1.2}]
    )
    @pytest.mark.parametrize("value, message", [(math.nan, "NaN"), (-INF, "every logit is -inf")])
    def test_nothing_to_choose_from(self, vocab, kw, value, message):
        x = torch.randn(2, vocab)
        x[0, 1] = value
        if value == -INF:
            x[0] = value
        for observe_top in (None, 5):
            bad, good = Sampler(vocab).sample(x, [row(**kw), row(**kw)], observe_top)
            assert bad.token_id == -1 and message in bad.error
            assert good.error is None and 0 <= good.token_id < vocab

    @pytest.mark.parametrize("kw", [{}, {"temperature": 0}, {"top_p": 0.1}, {"top_k": 7}, {"min_p": 1.0}])
    def test_vocabulary_of_one(self, kw):
        s = sample_one([-2.5], observe_top=5, **kw)
        assert (s.token_id, s.prob, s.logprob, s.rank, s.candidates) == (0, 1.0, 0.0, 1, [(0, 0.0, 1.0, 0.0, 1.0, "")])

    @pytest.mark.parametrize("vocab", [4, 3000])
    def test_tiny_p_keeps_the_likeliest(self, vocab):
        for kw in ({"top_p": 1e-30}, {"top_p": 5e-324}, {"min_p": 1.0}, {"top_k": 1}):
            x = logits_of("sharp", vocab, 4)
            s = sample_one(x, observe_top=0, **kw)
            assert (s.token_id, s.nucleus_size, s.prob) == (int(x.argmax()), 1, 1.0)

    @pytest.mark.parametrize("vocab", [4, 3000])
    @pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-5])
    def test_tiny_temperature_is_greedy(self, vocab, temperature):
        x = logits_of("sharp", vocab, 4)
        assert sample_one(x, temperature=temperature).token_id == int(x.argmax())

    @pytest.mark.parametrize("vocab", [4, 3000])
    @pytest.mark.parametrize("temperature", [1e25, 1e300])
    def test_huge_temperature_is_uniform_over_what_is_possible(self, vocab, temperature):
        x = logits_of("sharp", vocab, 4)
        x[1::2] = -INF
        s = sample_one(x, temperature=temperature, observe_top=0)
        assert s.token_id == int(torch.sort(x, descending=True, stable=True).indices[int(s.u * vocab / 2)])
        assert s.prob == pytest.approx(2 / vocab)

    def test_huge_logits(self):
        s = sample_one([3e38, -3e38, 3e38], observe_top=1)
        assert (s.token_id, s.prob) == (0 if s.u < 0.5 else 2, 0.5)

    def test_top_k_above_the_vocabulary_is_off(self):
        x = logits_of("flat", 5000, 9)
        assert sample_one(x, top_k=10**9, observe_top=3) == sample_one(x, observe_top=3)


class TestObservation:
    def test_only_when_asked(self):
        raw = torch.stack([logits_of("sharp", 3000, s) for s in range(3)])
        got = Sampler(3000).sample(raw, [row(), row(logprobs=0), row(logprobs=4)])
        assert [math.isnan(s.logprob) for s in got] == [True, False, False]
        assert [len(s.top) for s in got] == [0, 0, 4]
        assert [len(s.candidates) for s in got] == [0, 0, 0]
        assert [len(s.candidates) for s in Sampler(3000).sample(raw, [row(), row(logprobs=0), row(logprobs=4)], 2)] == [2, 2, 2]

    def test_top_is_of_the_raw_distribution(self):
        raw = logits_of("sharp", 3000, 5)
        best = int(raw.argmax())
        s = Sampler(3000).sample(
            raw[None], [row(temperature=0, logprobs=2, presence_penalty=2.0, frequency_penalty=2.0, output=[best] * 20)]
        )[0]
        logprobs = torch.log_softmax(raw.double(), -1)
        assert s.token_id != best and s.rank == 2
        assert s.top[0] == (best, pytest.approx(float(logprobs[best]), abs=1e-5))
        assert s.logprob == pytest.approx(float(logprobs[s.token_id]), abs=1e-5)


class TestBadInput:
    @pytest.mark.parametrize("shape", [(2, 9), (1, 10), (3, 10), (10,)])
    def test_shape(self, shape):
        with pytest.raises(ValueError, match=r"logits must be \[2, 10\]"):
            Sampler(10).sample(torch.zeros(shape), [row(), row()])

    def test_token_outside_the_vocabulary(self):
        with pytest.raises(ValueError, match=r"token ids must lie in \[0, 10\)"):
            Sampler(10).sample(torch.zeros(1, 10), [row(repetition_penalty=1.1, prompt=[10])])

    def test_others(self):
        with pytest.raises(ValueError, match="observe_top"):
            Sampler(10).sample(torch.zeros(1, 10), [row()], -1)
        with pytest.raises(ValueError, match="vocab_size"):
            Sampler(0)

    def test_no_rows(self):
        assert Sampler(10).sample(torch.zeros(0, 10), []) == []
