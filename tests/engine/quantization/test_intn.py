import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.quantization.intn import quantize_int, what_if


def weight(rows: int = 4, columns: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def groups_of(row: torch.Tensor, size: int) -> list[torch.Tensor]:
    return [row[start : start + size] for start in range(0, len(row), size)]


@pytest.mark.parametrize("size", [1, 7, 32, 64, 96, 500])
@pytest.mark.parametrize("bits", range(2, 9))
def test_asymmetric_grid_runs_from_least_to_largest_and_codes_are_its_nearest(bits, size):
    w = weight()
    q = quantize_int(w, bits, size)
    codes = q.unpacked()
    for n in range(4):
        for g, group in enumerate(groups_of(w[n], size)):
            exact = (float(group.max()) - float(group.min())) / (2**bits - 1)
            assert abs(float(q.scales[n, g]) - exact) <= exact / 1024
            assert abs(float(q.minima[n, g]) - float(group.min())) <= exact / 8
            grid = torch.arange(2**bits).double() * q.scales[n, g].double() + q.minima[n, g].double()
            off = (group.double()[:, None] - grid).abs()
            chosen = off.gather(1, codes[n, g * size : g * size + len(group)].long()[:, None])[:, 0]
            assert bool((chosen <= off.amin(1) + 1e-6 * exact).all())


@pytest.mark.parametrize("size", [1, 7, 32, 96])
@pytest.mark.parametrize("bits", range(2, 9))
def test_symmetric_grid_gives_its_longer_side_to_the_largest_magnitude(bits, size):
    w = weight(seed=1)
    q = quantize_int(w, bits, size, symmetric=True)
    assert q.minima is None and q.zero_points is None
    codes = q.unpacked()
    for n in range(4):
        for g, group in enumerate(groups_of(w[n], size)):
            largest = float(group[group.abs().argmax()])
            exact = -largest / 2 ** (bits - 1)
            assert abs(float(q.scales[n, g]) - exact) <= abs(exact) / 512
            mine = codes[n, g * size : g * size + len(group)]
            assert mine[group.abs().argmax()] == 0  # the outermost code
            grid = (torch.arange(2**bits).double() - 2 ** (bits - 1)) * q.scales[n, g].double()
            off = (group.double()[:, None] - grid).abs()
            chosen = off.gather(1, mine.long()[:, None])[:, 0]
            assert bool((chosen <= off.amin(1) + 1e-6 * abs(exact)).all())


def test_ties_go_to_the_even_code():
    row = torch.tensor([[0.0, 15.0, 0.5, 1.5, 2.5, 3.5, 14.5]])
    assert quantize_int(row, 4, 7).unpacked().tolist() == [[0, 15, 0, 2, 2, 4, 14]]
    signed = torch.tensor([[-8.0, 0.5, 1.5, -0.5, -1.5, 7.5]])
    assert quantize_int(signed, 4, 6, symmetric=True).unpacked().tolist() == [[0, 8, 10, 8, 6, 15]]


def test_a_matrix_of_q4_1_comes_back_exactly():
    """Scale and minimum in float16, groups of 32, every group with the codes 0 and 15: what a GGUF file of that type stores."""
    random = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (64, 18, 32), generator=random)
    ends = torch.rand(64, 18, 32, generator=random).argsort(-1)
    codes.scatter_(2, ends[..., :1], 0).scatter_(2, ends[..., 1:2], 15)
    scales = (torch.rand(64, 18, generator=random) * 0.03 + 1e-4).half()
    minima = (-scales.float() * (4 + 8 * torch.rand(64, 18, generator=random))).half()
    w = (codes * scales.float()[..., None] + minima.float()[..., None]).view(64, 576)
    q = quantize_int(w, 4, 32)
    assert torch.equal(q.unpacked().view(64, 18, 32), codes.to(torch.uint8))
    assert q.scales.dtype == q.minima.dtype == torch.float16
    assert torch.equal(q.scales, scales) and torch.equal(q.minima, minima)
    assert torch.equal(q.dequantize(), w)
    # In the 16 bits that the model computes with, the numbers move a little, the codes not at all.
    assert torch.equal(quantize_int(w.bfloat16(), 4, 32).unpacked(), q.unpacked())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_all_zero_and_constant_groups_come_back_exactly(bits, symmetric):
    w = weight()
    w[0, :32] = 0
    w[2] = 0
    q = quantize_int(w, bits, 32, symmetric)
    back = q.dequantize()
    assert bool(torch.isfinite(q.scales).all()) and bool((back[0, :32] == 0).all()) and bool((back[2] == 0).all())
    if not symmetric:
        w[1, 32:64] = 0.1  # what float16 does not hold
        assert torch.equal(quantize_int(w, bits, 32).dequantize()[1, 32:64], w[1, 32:64])


def test_a_width_that_the_group_does_not_divide_ends_in_a_shorter_group():
    w = weight(4, 70)
    q = quantize_int(w, 4, 32)
    assert q.scales.shape == (4, 3) and q.dequantize().shape == (4, 70)
    assert torch.equal(q.dequantize()[:, 64:], quantize_int(w[:, 64:], 4, 6).dequantize())
    assert torch.equal(q.dequantize()[:, :64], quantize_int(w[:, :64], 4, 32).dequantize())


def test_a_group_of_the_whole_width_or_more_is_one_scale_a_row():
    w = weight()
    assert quantize_int(w, 4, 96).scales.shape == (4, 1)
    wider = quantize_int(w, 4, 4096)
    assert wider.group_size == 96 and torch.equal(wider.dequantize(), quantize_int(w, 4, 96).dequantize())


EXTREME = st.one_of(
    st.floats(-(2.0**126), 2.0**126, width=32),
    st.floats(-1.0, 1.0, width=32),
    st.sampled_from([0.0, -0.0, 2.0**-149, 2.0**126, -(2.0**126), 1e-6, -1e-9, 65504.0]),
)


@settings(max_examples=150)
@given(
    hnp.arrays("float32", st.tuples(st.integers(1, 3), st.integers(1, 12)), elements=EXTREME),
    st.integers(2, 8),
    st.integers(1, 12),
    st.booleans(),
)
def test_any_finite_weight_stays_finite_and_within_its_step(w, bits, size, symmetric):
    w = torch.from_numpy(w)
    q = quantize_int(w, bits, size, symmetric)
    back = q.dequantize()
    for held in (q.scales, q.minima, back):
        assert held is None or bool(torch.isfinite(held).all())
    for n in range(w.shape[0]):
        for g, group in enumerate(groups_of(w[n], size)):
            low, high = float(group.min()), float(group.max())
            top = 2**bits - 1
            step = max(-low, high) / 2 ** (bits - 1) if symmetric else (high - low) / top
            # Half a step; symmetric: one step at the end of the shorter side; and what storing scale and minimum moves the ends.
            bound = step * ((1.0 if symmetric else 0.5 + 1 / 8) + top / 512) + 2.0**-149 * 2**bits
            error = (back[n, g * size : g * size + len(group)].double() - group.double()).abs()
            assert float(error.max()) <= bound + 1e-6 * max(-low, high)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [1, 32, 50, 96, 500])
@pytest.mark.parametrize("bits", range(2, 9))
def test_what_if_is_what_quantising_would_give(bits, size, symmetric):
    w = weight(seed=4)
    seen, q = what_if(w, bits, size, symmetric), quantize_int(w, bits, size, symmetric)
    assert torch.equal(seen.dequantized, q.dequantize()) and seen.dequantized.is_contiguous()
    assert torch.equal(seen.scales, q.scales) and (seen.minima is None) == symmetric
    assert seen.bits_per_weight == q.bits_per_weight and seen.group_size == q.group_size


def test_more_bits_and_smaller_groups_lose_less():
    w = weight(64, 192)

    def lost(bits, size):
        return float((what_if(w, bits, size).dequantized - w).norm())

    by_bits = [lost(bits, 32) for bits in range(2, 9)]
    assert by_bits == sorted(by_bits, reverse=True)
    by_size = [lost(4, size) for size in (16, 32, 64, 192)]
    assert by_size == sorted(by_size)


@pytest.mark.parametrize("round_weight", [quantize_int, what_if])
def test_bad_input_is_refused(round_weight):
    w = weight()
    with pytest.raises(ValueError, match="2, 3, 4, 5, 6, 7 or 8 bits, got 9"):
        round_weight(w, 9, 32)
    for size in (0, -1):
        with pytest.raises(ValueError, match=f"group_size={size}"):
            round_weight(w, 4, size)
    for bad in (float("inf"), float("nan")):
        broken = w.clone()
        broken[0, 3] = bad
        with pytest.raises(ValueError, match="inf or NaN"):
            round_weight(broken, 4, 32)
    with pytest.raises(ValueError, match="matrix"):
        round_weight(w[0], 4, 32)


def test_the_weight_itself_is_left_alone():
    w = weight()
    kept = w.clone()
    quantize_int(w, 4, 32)
    what_if(w, 4, 50, symmetric=True)
    assert torch.equal(w, kept)
