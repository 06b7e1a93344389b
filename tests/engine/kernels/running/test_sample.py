"""The draw against sorting and adding up in float64. Draws that lie within 1e-5 of an edge are left out: there masses in float32 may decide."""

import math

import pytest
import torch

from engine.kernels.sample import naive_sample, sample
from engine.kernels.sample.naive import naive_walk
from tests.engine.kernels.running.cases import NAN

BLOCK = 64  # several blocks to a row


def draw(logits, u, temperature=1.0, top_k=1 << 30, top_p=1.0, min_p=None):
    rows = len(logits)
    device = logits.device
    f32 = {"dtype": torch.float32, "device": device}
    options = (
        torch.as_tensor(u, dtype=torch.float64, device=device),
        torch.full((rows,), temperature, **f32),
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, **f32),
        None if min_p is None else torch.full((rows,), min_p, **f32),
    )
    got = sample(logits, *options, block=BLOCK)
    want = naive_sample(logits.cpu(), *(o if o is None else o.cpu() for o in options))
    return got.cpu(), want


def clear(logits, u, temperature, top_k, top_p, min_p):
    """Whether the draw lies at least 1e-5 from each edge of the walk."""
    _, ends = naive_walk(logits.cpu(), temperature, top_k, float(torch.tensor(top_p)), float(torch.tensor(min_p or 0.0)))
    return bool(((ends - u).abs() > 1e-5).all())


# temperature, top_k, top_p, min_p
SETTINGS = [
    (0.0, 1 << 30, 0.6, None),
    (1.0, 1 << 30, 1.0, None),
    (0.7, 7, 1.0, None),
    (0.7, 1, 0.6, 0.2),
    (1.5, 1 << 30, 0.6, None),
    (3.0, 1 << 30, 1.0, 0.2),
    (3.0, 12, 0.8, 0.05),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p", "min_p"), SETTINGS)
def test_against_the_walk(temperature, top_k, top_p, min_p, device):
    logits = torch.randn(3, 100, device=device) * 3
    u = torch.tensor([0.0, 0.37, 0.999])
    got, want = draw(logits, u, temperature, top_k, top_p, min_p)
    for i in range(3):
        assert got[i] == want[i] or not clear(logits[i], float(u[i]), temperature, top_k, top_p, min_p), i
    assert (got == want).sum() >= 2


@pytest.mark.parametrize("vocab", [1, 63, 64, 65])
def test_sizes_and_ties(vocab, device):
    """Few different logits, so that ties decide nearly everywhere: by id."""
    logits = torch.randint(0, 3, (2, vocab), device=device).float()
    for options in ({"top_k": max(vocab // 2, 1)}, {"top_p": 0.5}):
        u = (torch.arange(2, dtype=torch.float64) + 0.4321) / 2
        got, want = draw(logits, u, **options)
        assert torch.equal(got, want)


@pytest.mark.parametrize(("top_p", "u", "token"), [(0.5, 0.99, 4), (0.45, 0.0, 0), (0.45, 0.79, 3), (1.0, 0.99, 9)])
def test_a_nucleus_among_equals(top_p, u, token, device):
    """Thirty equal logits, the first ten by id kept by top_k: the nucleus is the first of these, and ends among them."""
    got, want = draw(torch.zeros(1, 30, device=device), [u], top_k=10, top_p=top_p)
    assert got.tolist() == want.tolist() == [token]


def test_every_token_has_its_part(device):
    """Of twenty draws along [0, 1), as many fall on a token as its probability says."""
    p = torch.tensor([0.1, 0.4, 0.2, 0.3], device=device)
    got, want = draw(p.log().expand(20, 4).contiguous(), (torch.arange(20) + 0.5) / 20)
    assert torch.equal(got, want) and torch.bincount(got).tolist() == [2, 8, 4, 6]


def test_edges(device):
    inf = math.inf
    logits = torch.tensor([[1, NAN, 2], [-inf] * 3, [inf, 5, inf], [-inf, 3, -inf], [-0.0, 0.0, -1e30], [1e4, 1e4 + 1, -1e4]])
    got, want = draw(logits.to(device), [0.5, 0.5, 0.75, 0.9, 0.4, 0.5])
    assert got.tolist() == [-1, -1, 2, 1, 0, 1] and torch.equal(got, want)


def test_bad_input(device):
    one = torch.ones(1, device=device)
    good = {"u": one.double() / 2, "temperature": one, "top_k": one.int(), "top_p": one}
    logits = torch.zeros(1, 8, device=device)
    for name, value, match in (
        ("u", one.double(), r"u must be in \[0, 1\), got \[1.0\]"),
        ("temperature", -one, "temperature must be >= 0"),
        ("top_k", one.int() * 0, "top_k must be >= 1"),
        ("top_p", one * 0, r"top_p must be in \(0, 1\]"),
        ("u", one, "u must be float64"),
    ):
        with pytest.raises(ValueError, match=match):
            sample(logits, **{**good, name: value}, validate=True)
    with pytest.raises(ValueError, match="block must be a power of two"):
        sample(logits, **good, block=48)
