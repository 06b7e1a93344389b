"""The law of the text under speculation, integrated exactly on six tokens, is the target's; and the classic faults are not."""

import pytest
import torch

from engine.request import SamplingParams
from engine.speculation import acceptance
from tests.engine.speculation.laws import VOCAB, Models, processed, speculated_law, target_law, total_variation

EXACT = 1e-12
CHAINS = [(1,), (1, 1), (1, 1, 1)]
TREES = [(3,), (6,), (2, 2), (3, 1), (1, 2, 1)]
PARAMS = [
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.7, top_p=0.85),
    SamplingParams(temperature=1.3, top_k=3),
    SamplingParams(temperature=1, min_p=0.2),
]


@pytest.mark.parametrize("shape", CHAINS + TREES, ids=str)
@pytest.mark.parametrize("holes", [0.0, 0.4])
def test_the_law_is_the_targets(shape, holes):
    for seed, params in enumerate(PARAMS):
        models = Models(seed, params, holes)
        law, want = speculated_law(models, shape), target_law(models, len(shape) + 1)
        assert float(law.sum()) == pytest.approx(1, abs=EXACT)
        assert total_variation(law, want) < EXACT


def test_of_disjoint_p_and_q():
    """Nothing that is drafted can come, and everything that can come is not drafted."""
    models = Models(0)
    logits = torch.tensor([1.0, 2.0, 0.5, -torch.inf, -torch.inf, -torch.inf])
    models.logits = lambda who, prefix: logits if who == "p" else logits.flip(0)
    assert total_variation(speculated_law(models, (3, 1)), target_law(models, 3)) < EXACT


def test_of_equal_p_and_q_everything_is_accepted():
    models = Models(3, holes=0.0)
    models.q = models.p
    p = models.p(())
    assert all(acceptance.Place(p).weigh(token, p)[2] == 1.0 for token in range(VOCAB) if float(p[token]))
    assert total_variation(speculated_law(models, (2, 1)), target_law(models, 3)) < EXACT


def greedy(models):
    """A drafter that takes its likeliest token, whatever it says of it."""
    return lambda prefix: torch.nn.functional.one_hot(models.q(prefix).argmax(), VOCAB).double()


def raw_q(models):
    """Drawn from the processed distribution, but compared with the raw one."""
    drawn = {prefix: models.q(prefix) for prefix in prefixes(2)}
    raw = {prefix: processed(models.logits("q", prefix), SamplingParams()) for prefix in drawn}
    models.q = raw.__getitem__
    return drawn.__getitem__


def raw_p(models):
    """The target's raw distribution decides, where the text should follow the processed one."""
    raw = {prefix: processed(models.logits("p", prefix), SamplingParams()) for prefix in prefixes(2)}
    models.p = raw.__getitem__


def prefixes(depth):
    out = [()]
    for _ in range(depth):
        out += [(*prefix, token) for prefix in out for token in range(VOCAB)]
    return dict.fromkeys(out)


def residual_is_p(p, q):
    return p, 1.0


def residual_not_cut(p, q):
    left = (p - q).abs()
    return left / left.sum(), float(left.sum())


def q_not_renormalised(q, taken):
    return q


@pytest.mark.parametrize("shape", [(1,), (1, 1), (2, 1)], ids=str)
@pytest.mark.parametrize(
    "fault",
    [
        "soft q for a greedy draft",
        "residual = p",
        "residual = |p - q|",
        "raw q for a processed one",
        "raw p for a processed one",
        "accepted when likeliest",
        "accepted by q / p",
        "always accepted",
    ],
)
def test_the_classic_faults_are_caught(monkeypatch, fault, shape):
    models = Models(1, SamplingParams(temperature=0.8, top_k=4), holes=0.0)
    want, drawn_from = target_law(models, len(shape) + 1), None
    assert total_variation(speculated_law(models, shape), want) < EXACT
    match fault:
        case "soft q for a greedy draft":
            drawn_from = greedy(models)
        case "residual = p":
            monkeypatch.setattr(acceptance, "residual", residual_is_p)
        case "residual = |p - q|":
            monkeypatch.setattr(acceptance, "residual", residual_not_cut)
        case "raw q for a processed one":
            drawn_from = raw_q(models)
        case "raw p for a processed one":
            raw_p(models)
        case "accepted when likeliest":
            largest = {float(models.p(prefix).max()) for prefix in prefixes(2)}
            monkeypatch.setattr(acceptance, "accept_probability", lambda p, q: float(p in largest))
        case "accepted by q / p":
            monkeypatch.setattr(acceptance, "accept_probability", lambda p, q: min(1.0, q / p) if p else 0.0)
        case "always accepted":
            monkeypatch.setattr(acceptance, "accept_probability", lambda p, q: 1.0)
    assert total_variation(speculated_law(models, shape, drawn_from), want) > 1e-3


def test_a_tree_whose_siblings_are_weighed_against_the_whole_q_is_caught(monkeypatch):
    models = Models(1, SamplingParams(temperature=1), holes=0.0)
    monkeypatch.setattr(acceptance, "left_over", q_not_renormalised)
    assert total_variation(speculated_law(models, (1, 1)), target_law(models, 3)) < EXACT, "a chain has no siblings"
    assert total_variation(speculated_law(models, (3,)), target_law(models, 2)) > 1e-3
