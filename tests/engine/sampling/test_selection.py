"""The head of the order, and the sums over whole rows, against sorting and adding everything."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.processors import TokenCounts, penalise
from engine.sampling.selection import SMALL, head, head_before, mass, masses


@given(
    vocab=st.sampled_from([1, 7, 1024, 1025, 1032, 3001, 9001]),
    k=st.sampled_from([1, 2, 64, 200]),
    values=st.sampled_from([3, 50, 1000, 10**6]),
    holes=st.sampled_from([0.0, 0.5, 0.99]),
    clustered=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=150, deadline=None)
def test_head_is_the_beginning_of_the_order(vocab, k, values, holes, clustered, seed):
    """Down to the floor the head is exact, ties by id, and nothing above the floor is missing from it."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-values, values, (3, vocab), generator=g).float()
    if clustered:
        x = x.sort(dim=-1, descending=seed % 2 == 0).values
    x = torch.where(torch.rand(x.shape, generator=g) < holes, -math.inf, x)
    h = head(x, k)
    order = torch.sort(x, dim=-1, descending=True, stable=True)
    for r, size in enumerate(h.size_S.tolist()):
        assert h.ids_SK[r, :size].tolist() == order.indices[r, :size].tolist()
        assert h.values_SK[r].tolist() == order.values[r, : h.values_SK.shape[-1]].tolist()
        assert size == int((x[r] > h.floor_S1[r]).sum())
        if h.values_SK.shape[-1] < vocab:
            assert h.values_SK.shape[-1] == k and float(h.floor_S1[r]) == float(order.values[r, k - 1])


@given(
    vocab=st.sampled_from([SMALL + 1, 3001]),
    k=st.sampled_from([1, 20, 64]),
    values=st.sampled_from([3, 50, 10**6]),
    penalty=st.sampled_from([1.0, 1.1, 3.0]),
    history=st.sampled_from([0, 1, 30, 900]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=100, deadline=None)
def test_head_before_penalties_is_that_of_the_raw_rows(vocab, k, values, penalty, history, seed):
    """Down to its floor it is the raw order, and it is cut no shorter than the two heads that it is made of allow."""
    g = torch.Generator().manual_seed(seed)
    raw = torch.randint(-values, values, (3, vocab), generator=g).float()
    likely = raw.topk(200).indices  # penalties that take away from the head as well
    counts = [
        TokenCounts([], torch.cat([likely[r, :: r + 2], torch.randint(0, vocab, (history * r,), generator=g)]).tolist()[:history])
        for r in range(3)
    ]
    changed = penalise(raw, counts, [penalty] * 3, [0.5] * 3, [0.0, 0.25, 0.0])
    assert changed.raised == []
    after = raw.index_put((changed.rows, changed.ids), changed.after)
    h = head(after, 64)
    found = head_before(h, raw, changed, k)
    order = torch.sort(raw, dim=-1, descending=True, stable=True)
    for r, size in enumerate(found.size_S.tolist()):
        assert found.ids_SK[r, :size].tolist() == order.indices[r, :size].tolist()
        assert found.values_SK[r, :size].tolist() == order.values[r, :size].tolist()
        assert size == int((raw[r] > found.floor_S1[r]).sum())
        assert float(found.floor_S1[r]) == max(float(order.values[r, k - 1]), float(h.floor_S1[r]))


@pytest.mark.parametrize("vocab", [1, 63, 65, 5003])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_masses(vocab, rows):
    g = torch.Generator().manual_seed(vocab + rows)
    x = torch.randn(rows, vocab, generator=g) * 4
    x[:, 1::3] = -math.inf
    top, t = x.amax(-1, keepdim=True), torch.linspace(0.3, 3, rows, dtype=torch.float64).unsqueeze(-1)
    d = (x - top).double()
    p = torch.softmax(d, -1)
    entropy = -torch.xlogy(p, p).sum(-1)
    at_t, at_one, h = masses(x, top, t)
    torch.testing.assert_close(at_t, torch.exp(d / t).sum(-1), rtol=3e-7, atol=0)
    torch.testing.assert_close(at_one, torch.exp(d).sum(-1), rtol=3e-7, atol=0)
    torch.testing.assert_close(h, entropy, rtol=0, atol=2e-6)
    assert torch.equal(mass(x, top, t), at_t)
    assert torch.equal(mass(x, top), at_one)
    assert torch.equal(masses(x, top)[0], at_one)
    assert torch.equal(mass(x[:1], top[:1], t[:1]), at_t[:1]), "depends on the rows beside it"
    known = [float(each) == 1 for each in t]
    for row in range(0, rows, 2):
        known[row], t[row] = True, 1.0
    assert torch.equal(masses(x, top, t, known)[0], mass(x, top, t)), "rows at 1 are not weighed twice"


def test_the_entropy_of_flat_and_of_sharp_rows():
    """Its terms are float32: 1e-5 nats is what is promised, whatever the row looks like."""
    g = torch.Generator().manual_seed(5)
    scale = torch.tensor([0.0, 0.1, 1.0, 3.0, 10.0, 40.0]).unsqueeze(-1)
    x = torch.randn(6, 49_152, generator=g) * scale + torch.tensor([0.0, 90.0, -500.0, 7.0, 0.0, 0.0]).unsqueeze(-1)
    x[4, 1000:] = -math.inf
    p = torch.softmax(x.double(), -1)
    found = masses(x, x.amax(-1, keepdim=True))[2]
    torch.testing.assert_close(found, -torch.xlogy(p, p).sum(-1), rtol=0, atol=1e-5)
    x[2, 17] = math.nan
    again = masses(x, x.amax(-1, keepdim=True))[2]
    assert again.isnan().tolist() == [False, False, True, False, False, False]
    assert torch.equal(again[[0, 1, 3, 4, 5]], found[[0, 1, 3, 4, 5]])
