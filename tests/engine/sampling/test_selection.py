"""The head of the order, and the sums over whole rows, against sorting and adding everything."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.selection import head, mass, masses


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
