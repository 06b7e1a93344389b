"""KL, total variation and nuclei against numpy, mpmath-free high precision and the sampler's own definition; kept references."""

import math
from decimal import Decimal, getcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.quantization.quality import divergence as d
from engine.quantization.quality.perplexity import perplexity
from engine.quantization.quality.reference import Reference, in_lockstep, spread
from engine.sampling.processors import apply_top_p
from tests.engine.quantization.quality.models import Bigrams, Bytes, transformer

TEXT = "The miller counts sacks; the heron counts fish. Neither has ever compared notes with the other. " * 2
ROWS = hnp.arrays(np.float64, (2, 12), elements=st.floats(-40, 40))


def exact_kl(p: np.ndarray, q: np.ndarray) -> float:
    """In 50 decimal digits."""
    getcontext().prec = 50
    of = [[Decimal(float(x)).exp() for x in row] for row in (p, q)]
    (a, sum_a), (b, sum_b) = ((row, sum(row)) for row in of)
    return float(sum(x / sum_a * ((x / sum_a).ln() - (y / sum_b).ln()) for x, y in zip(a, b)))


@given(ROWS)
def test_kl_and_variation(rows):
    p, q = torch.from_numpy(rows)[:, None]
    assert float(d.kl_divergence(p, q)) == pytest.approx(exact_kl(*rows), rel=1e-9, abs=1e-13)
    shares = [np.exp(row - row.max()) / np.exp(row - row.max()).sum() for row in rows]
    variation = float(d.total_variation(p, q))
    assert variation == pytest.approx(max(0.0, sum(x - y for x, y in zip(*shares) if x > y)), abs=1e-12)
    assert 2 * variation**2 <= float(d.kl_divergence(p, q)) + 1e-12  # Pinsker
    assert float(d.kl_divergence(p, p + 3.5)) == pytest.approx(0, abs=1e-14)  # a shift changes no probability


def test_tokens_without_mass():
    inf = math.inf
    p = torch.tensor([[0.0, 0.0, -inf], [0.0, 0.0, 0.0]])
    q = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -inf]])
    assert d.kl_divergence(p, q).tolist() == [pytest.approx(math.log(1.5)), inf]
    assert d.total_variation(p, q).tolist() == pytest.approx([1 / 3, 1 / 3])


@given(st.integers(0, 10_000), st.sampled_from([0.01, 0.3, 0.9, 0.999, 1.0]), st.sampled_from([0.0, 0.2, 2.0, 6.0]))
def test_nucleus_is_the_samplers(seed, top_p, spread_by):
    """Larger than the head that is looked at first; rounded, so that there are ties, also at the head's edge."""
    x = (spread_by * torch.randn(3, d._HEAD + 300, generator=torch.Generator().manual_seed(seed))).round(decimals=1)
    want = apply_top_p(x, top_p).isfinite()
    assert [ids.tolist() for ids in d.nucleus(x, top_p)] == [row.nonzero()[:, 0].tolist() for row in want]


def test_nucleus_change():
    p = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()
    q = torch.tensor([0.5, 0.1, 0.05, 0.35, 0.0]).log()
    change = d.nucleus_change(p, q, 0.85)
    assert (change.entered, change.left, change.stayed) == ([3], [1, 2], 1)
    assert change.mass_entered == pytest.approx(0.35) and change.mass_left == pytest.approx(0.5)
    tied = d.nucleus_change(torch.zeros(6), torch.tensor([0.0, 0, 0, 0, 0, 1e-3]), 0.3)  # of equals the lowest id
    assert (tied.left, tied.entered) == ([1], [5])
    for top_p in (0, 1.5, -0.1):
        with pytest.raises(ValueError, match=r"top_p must lie in \(0, 1\]"):
            d.nucleus_change(p, q, top_p)


def test_accumulated_equals_all_at_once():
    generator = torch.Generator().manual_seed(1)
    p = 3 * torch.randn(50, 70, generator=generator)
    q = p + 0.4 * torch.randn(50, 70, generator=generator)
    found = d.Accumulator(0.8)
    for start, stop in ((0, 1), (1, 20), (20, 50)):
        found.add(p[start:stop], q[start:stop], range(start + 5, stop + 5), "a" if start < 20 else "b")
    got = found.result()
    kl = np.array([exact_kl(x, y) for x, y in zip(p.double().numpy(), q.double().numpy())])
    np.testing.assert_allclose(got.kl.numpy(), kl, rtol=1e-9)
    assert got.mean_kl == pytest.approx(kl.mean()) and got.standard_error == pytest.approx(kl.std(ddof=1) / 50**0.5)
    assert [got.kl_quantile(x) for x in (0.5, 0.9, 0.99)] == pytest.approx(np.quantile(kl, [0.5, 0.9, 0.99]).tolist())
    worst = int(kl.argmax())
    assert got.max_kl == (pytest.approx(kl.max()), "a" if worst < 20 else "b", worst + 5)
    assert got.top1_agreement == (p.argmax(-1) == q.argmax(-1)).double().mean()
    sets = [[set(np.flatnonzero(np.isfinite(row))) for row in apply_top_p(x, 0.8).numpy()] for x in (p, q)]
    assert got.entered.tolist() == [len(b - a) for a, b in zip(*sets)]
    assert got.left.tolist() == [len(a - b) for a, b in zip(*sets)]
    assert got.nucleus_overlap == pytest.approx(np.mean([len(a & b) / len(a | b) for a, b in zip(*sets)]))


def test_wrong_rows():
    found = d.Accumulator()
    with pytest.raises(ValueError, match=r"the reference \[2, 5\] and \[2, 6\]"):
        found.add(torch.zeros(2, 5), torch.zeros(2, 6), range(2))
    q = torch.zeros(2, 5)
    q[1, 3] = math.nan
    with pytest.raises(ValueError, match="mill: 1 of 5 logits that predict token 8 are inf or NaN"):
        found.add(torch.zeros(2, 5), q, range(7, 9), "mill")
    with pytest.raises(ValueError, match="the reference's logits have NaN"):
        found.add(q, torch.zeros(2, 5), range(2))
    with pytest.raises(ValueError, match="nothing was compared"):
        found.result()


@pytest.mark.parametrize("noise", [0.05, 1.0])
def test_a_kept_reference_gives_what_lockstep_gives(noise):
    model = Bigrams(TEXT)
    other, ids = model.damaged(noise), Bytes().encode(TEXT)
    exact = in_lockstep(model, other, ids, window=32, stride=20, text="mill")
    assert exact.positions == list(range(1, len(ids)))
    reference = Reference({"mill": ids}, 32, 20, positions=64)
    perplexity(model, ids, window=32, stride=20, watch=reference.recorder("mill"))
    found = d.Accumulator(kept=reference.held)
    perplexity(other, ids, window=32, stride=20, watch=reference.comparer("mill", found))
    kept = found.result()
    assert kept.positions == spread(len(ids), 32, 20, 64) and len(kept) == len(reference) == 64
    at = [t - 1 for t in kept.positions]
    # Rows that are 2e-7 nats off change KL by at most about 2 sqrt(2e-7 KL) at a position, either way; the mean by much less.
    assert bool(((kept.kl - exact.kl[at]).abs() <= 2e-6 + 4 * (2e-7 * exact.kl[at]).sqrt()).all())
    assert kept.mean_kl == pytest.approx(float(exact.kl[at].mean()), rel=5e-3)
    # By the triangle inequality and Pinsker's, rows that are at most 1e-6 nats off change it by at most sqrt(1e-6 / 2).
    assert float((kept.variation - exact.variation[at]).abs().max()) <= (1e-6 / 2) ** 0.5
    assert kept.same_top.tolist() == exact.same_top[at].tolist() and "64 whole rows in float16" in kept.kept
    assert reference.nbytes == 64 * 256 * 2


def test_a_model_does_not_differ_from_its_own_kept_rows():
    """Also with logits as large as real ones, 20 and more, where float16 itself is 0.016 coarse."""
    logits, tokenizer = transformer()
    ids = tokenizer.encode(TEXT)
    shifted = lambda token_ids: logits(token_ids) + 30
    reference = Reference({"mill": ids}, 64, 32, positions=100)
    perplexity(shifted, ids, window=64, stride=32, watch=reference.recorder("mill"))
    found = d.Accumulator()
    perplexity(shifted, ids, window=64, stride=32, watch=reference.comparer("mill", found))
    kept = found.result()
    assert float(kept.kl.max()) < 1e-6 and kept.top1_agreement == 1.0


def test_spread():
    assert spread(11, 8, 4, 5) == [2, 4, 6, 8, 10]
    assert spread(5, 8, 4, 100) == [1, 2, 3, 4]
    assert spread(9, 4, 4, 99) == [1, 2, 3, 5, 6, 7]
    with pytest.raises(ValueError, match="at least 1, got 0"):
        spread(9, 4, 4, 0)


def test_a_reference_that_was_not_recorded():
    reference = Reference({"a": [1, 2, 3, 4], "b": [3, 2, 1]}, 4, 2, positions=4)
    assert reference.positions == {"a": [1, 3], "b": [1, 2]} and not reference.complete
    with pytest.raises(RuntimeError, match="rows for 0 of its 4 positions"):
        reference.comparer("a", d.Accumulator())
    with pytest.raises(ValueError, match="at least a position in each"):
        Reference({"a": [1, 2], "b": [1, 2]}, positions=1)
