import math

import pytest
import torch

from engine.quantization.error import Histogram, decibels, histogram, outlier_share, output_error, weight_error
from engine.quantization.intn import quantize_int, what_if


def weight(rows: int = 7, columns: int = 96, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def test_numbers_are_those_of_their_definitions():
    w = weight(130, 700)  # more than is looked at together
    q = quantize_int(w, 4, 32)
    e = q.dequantize().double() - w.double()
    seen = weight_error(w, q)
    assert seen.sqnr_db == pytest.approx(10 * math.log10(float(w.double().square().sum() / e.square().sum())), abs=1e-4)
    assert seen.max_error == pytest.approx(float(e.abs().max()), rel=1e-6)
    assert seen.mean_error == pytest.approx(float(e.abs().mean()), rel=1e-6)
    assert torch.allclose(seen.error_by_output.double(), e.square().mean(1).sqrt(), rtol=1e-5)
    assert torch.allclose(seen.error_by_input.double(), e.square().mean(0).sqrt(), rtol=1e-5)
    assert seen.bits_per_weight == q.bits_per_weight
    off = (w.double() - w.double().mean()).abs()
    assert seen.outlier_share == float((off > 3 * w.double().std(correction=0)).double().mean()) > 0


def test_numbers_already_dequantised_give_the_same():
    w = weight()
    seen = what_if(w, 3, 32)
    a, b = weight_error(w, quantize_int(w, 3, 32)), weight_error(w, seen.dequantized, bits_per_weight=seen.bits_per_weight)
    assert a.sqnr_db == b.sqnr_db and a.max_error == b.max_error and a.bits_per_weight == b.bits_per_weight
    assert torch.equal(a.errors.counts, b.errors.counts) and weight_error(w, seen.dequantized).bits_per_weight is None


def test_a_known_signal_to_noise():
    w = torch.full((4, 8), 1.0)
    assert weight_error(w, w + 0.125).sqnr_db == pytest.approx(20 * math.log10(8))


@pytest.mark.parametrize("factor", [2.0**-120, 2.0**100])
def test_very_small_and_very_large_weights_have_the_same_ratio(factor):
    w = weight()
    rounded = quantize_int(w, 4, 32).dequantize()
    plain, scaled = weight_error(w, rounded), weight_error(w * factor, rounded * factor)
    assert scaled.sqnr_db == pytest.approx(plain.sqnr_db, abs=1e-3) and scaled.max_error == pytest.approx(
        plain.max_error * factor
    )
    assert torch.allclose(scaled.error_by_input / factor, plain.error_by_input) and scaled.outlier_share == plain.outlier_share


def test_without_error_and_without_signal():
    w = weight()
    seen = weight_error(w, w.clone())
    assert seen.sqnr_db == math.inf and seen.max_error == seen.mean_error == 0 and int(seen.errors.counts.sum()) == w.numel()
    nothing = weight_error(torch.zeros(3, 4), torch.zeros(3, 4))
    assert nothing.sqnr_db == math.inf and nothing.outlier_share == 0 and (nothing.weights.low, nothing.weights.high) == (-1, 1)
    assert weight_error(torch.zeros(3, 4), torch.ones(3, 4)).sqnr_db == -math.inf
    assert decibels(1.0, 0.1) == pytest.approx(10)


@pytest.mark.parametrize("bins", [1, 2, 7, 64, 1000])
def test_histogram_counts_each_value_once_in_the_bin_between_its_edges(bins):
    x = torch.cat((weight().flatten(), torch.tensor([0.0, 0.5, -0.5])))
    h = histogram(x, bins)
    assert (h.low, h.high) == (-0.5, 0.5) and h.counts.dtype == torch.int64 and int(h.counts.sum()) == len(x)
    place = h.bin_of(x)
    assert torch.equal(torch.bincount(place, minlength=bins), h.counts)
    assert len(h.edges) == bins + 1 and h.edges[0] == -0.5 and h.edges[-1] == 0.5
    slack = 1e-6
    assert bool((x >= h.edges[place.long()] - slack).all()) and bool((x <= h.edges[place.long() + 1] + slack).all())


def test_histogram_edges_belong_to_the_bin_above_but_for_the_last():
    h = histogram(torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), 4)
    assert h.counts.tolist() == [1, 1, 1, 2]
    assert h.bin_of(torch.tensor([-9.0, 0.5, 9.0])).tolist() == [0, 0, 3]


@pytest.mark.parametrize("constant", [0.02, 1e30, -1e30, 2.0**-149])
def test_histogram_of_a_constant_has_bins_with_a_width(constant):
    h = histogram(torch.full((3, 5), constant), 8)
    assert h.low < constant < h.high and int(h.counts.max()) == 15


def test_error_histogram_is_even_about_zero_and_picks_out_its_weights():
    w = weight()
    rounded = quantize_int(w, 2, 32).dequantize()
    seen = weight_error(w, rounded, bins=16)
    assert seen.errors.low == -seen.errors.high == -seen.max_error
    mask = seen.errors.bin_of(rounded - w) == 3
    assert mask.shape == w.shape and int(mask.sum()) == int(seen.errors.counts[3]) > 0


def test_outliers_lie_beyond_three_standard_deviations():
    w = torch.ones(1, 1000) * 5
    w[0, ::2] = 7  # mean 6, deviation 1
    assert outlier_share(w) == 0
    w[0, 0], w[0, 1] = 6 + 40, 6 - 40
    assert outlier_share(w) == 2 / 1000 and outlier_share(w, 100) == 0
    normal = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))
    assert outlier_share(normal) == pytest.approx(0.0027, rel=0.05)


def test_output_error_is_of_the_layers_output():
    w, x = weight(), weight(11, 96, seed=1)
    q = quantize_int(w, 3, 32)
    exact = x.double() @ w.double().T
    expected = float((x.double() @ q.dequantize().double().T - exact).norm() / exact.norm())
    assert output_error(x, w, q) == pytest.approx(expected, rel=1e-5)
    assert output_error(x, w, q.dequantize()) == output_error(x, w, q)
    assert output_error(x, w, w) == 0 and output_error(x, torch.zeros_like(w), w) == math.inf
    assert output_error(torch.zeros_like(x), w, q) == 0


def test_bad_input_is_refused():
    w = weight()
    with pytest.raises(ValueError, match=r"\[7, 96\], got \[7, 95\]"):
        weight_error(w, w[:, :-1])
    with pytest.raises(ValueError, match="1 bin or more, got 0"):
        weight_error(w, w, bins=0)
    for bad in (float("nan"), float("inf")):
        broken = w.clone()
        broken[0, 0] = bad
        for pair in ((w, broken), (broken, w)):
            with pytest.raises(ValueError, match="must be finite"):
                weight_error(*pair)
    with pytest.raises(ValueError, match="shapes must be"):
        output_error(w[:, :5], w, w)
    assert isinstance(weight_error(w, w).weights, Histogram)
