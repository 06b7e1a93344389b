import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.quantization.int8 import matmul_w8a8, quantize_activations, quantize_int8, quantize_int8_w8a8
from engine.quantization.intn import quantize_int


def weight(rows: int = 5, columns: int = 48, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_codes_are_the_nearest_integers_at_the_stored_scale(per):
    w = weight()
    q = quantize_int8(w, per)
    assert q.scales.shape == ((5, 1) if per == "channel" else (1, 1)) and q.group_size == (48 if per == "channel" else 0)
    largest = w.abs().amax(1, keepdim=True) if per == "channel" else w.abs().amax().view(1, 1)
    assert torch.equal(q.scales, (largest.double() / 127).half())
    expected = [[round(v / float(q.scales[n if per == "channel" else 0, 0])) for v in row] for n, row in enumerate(w.tolist())]
    assert (q.unpacked().int() - 128).tolist() == [[max(-127, min(127, code)) for code in row] for row in expected]


def test_the_largest_weight_of_a_channel_takes_the_outermost_code_and_zero_the_middle():
    w = weight()
    w[1, 4] = 0
    codes = quantize_int8(w).unpacked().int() - 128
    assert codes.abs().amax(1).tolist() == [127] * 5 and codes[1, 4] == 0


def test_ties_go_to_even():
    assert (quantize_int8(torch.tensor([[127.0, 0.5, 1.5, -0.5, -2.5]])).unpacked().int() - 128).tolist() == [[127, 0, 2, 0, -2]]


def test_an_all_zero_channel_comes_back_as_zeros():
    w = weight()
    w[2] = 0
    for per in ("channel", "tensor"):
        q = quantize_int8(w, per)
        assert bool(torch.isfinite(q.scales).all()) and bool((q.dequantize()[2] == 0).all())
    assert bool((quantize_int8(torch.zeros(2, 3)).dequantize() == 0).all())


@settings(max_examples=100)
@given(
    hnp.arrays("float32", st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=st.floats(-(2.0**126), 2.0**126, width=32))
)
def test_any_finite_weight_stays_finite_and_within_half_a_step(w):
    w = torch.from_numpy(w)
    for per in ("channel", "tensor"):
        back = quantize_int8(w, per).dequantize()
        largest = w.double().abs().amax(1, keepdim=True) if per == "channel" else w.double().abs().amax()
        assert bool(((back.double() - w.double()).abs() <= largest * (0.5 / 127 + 1 / 512) + 2.0**-142).all())


@settings(max_examples=100)
@given(
    hnp.arrays("float32", st.tuples(st.integers(1, 4), st.integers(1, 9)), elements=st.floats(-(2.0**100), 2.0**100, width=32))
)
def test_each_token_is_rounded_at_its_own_scale(x):
    x = torch.from_numpy(x)
    codes, scales = quantize_activations(x)
    assert codes.dtype == torch.int8 and scales.shape == (len(x), 1)
    for t in range(len(x)):
        largest = float(x[t].abs().max())
        assert float(scales[t]) == pytest.approx(largest / 127, rel=1e-6, abs=2.0**-149)
        if largest > 1e-30:
            assert int(codes[t].abs().max()) == 127
        assert bool(((codes[t].double() * float(scales[t]) - x[t].double()).abs() <= largest * 0.5001 / 127 + 2.0**-142).all())


def test_a_static_scale_serves_all_tokens_and_cuts_off_beyond():
    codes, scales = quantize_activations(torch.tensor([[0.1, -0.25, 9.0], [0.0, -9.0, 0.05]]), scale=0.1)
    assert codes.tolist() == [[1, -2, 90], [0, -90, 0]] and scales.tolist() == [[pytest.approx(0.1)]] * 2
    codes, _ = quantize_activations(torch.tensor([[20.0, -20.0]]), scale=0.1)
    assert codes.tolist() == [[127, -127]]


def test_a_token_of_zeros_is_zeros():
    codes, scales = quantize_activations(torch.zeros(2, 5))
    assert bool((codes == 0).all()) and bool((scales == 0).all())


@pytest.mark.parametrize("static", [None, 0.02])
@pytest.mark.parametrize("smoothed", [False, True])
def test_w8a8_product_is_integers_summed_then_scaled(static, smoothed):
    w, x = weight(), weight(3, 48, seed=1) * 20
    smooth = torch.rand(48, generator=torch.Generator().manual_seed(2)) + 0.5 if smoothed else None
    q = quantize_int8_w8a8(w, activation_scale=static, smooth=smooth)
    assert (q.method, q.activation_bits, q.activation_scale) == ("int8_w8a8", 8, static)
    divided = x / smooth if smoothed else x
    weights = (q.unpacked().int() - 128).tolist()
    expected = []
    for row in divided:
        scale = float(torch.tensor(static or float(row.abs().max()) / 127, dtype=torch.float32))
        codes = [max(-127, min(127, round(v / scale))) for v in row.tolist()]
        expected.append(
            [sum(a * b for a, b in zip(codes, w_row)) * scale * float(q.scales[n, 0]) for n, w_row in enumerate(weights)]
        )
    assert torch.allclose(matmul_w8a8(x, q).double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)


def test_w8a8_sums_of_many_products_are_exact():
    """Partial sums of 3,072 products go past what float32 tells apart, and all but one product cancel."""
    w = torch.full((1, 3073), 127.0)
    w[0, 1536:] = -127.0
    w[0, 700] = 126.0
    w[0, 3072] = 2.0
    q = quantize_int8_w8a8(w)
    assert q.scales.tolist() == [[1.0]]
    x = torch.full((1, 3073), 127.0)
    x[0, 3072] = 1.0
    assert matmul_w8a8(x, q).tolist() == [[-127.0 + 2.0]]


def test_smoothing_leaves_the_function_as_it_was_but_for_rounding():
    w = weight()
    smooth = torch.rand(48, generator=torch.Generator().manual_seed(2)) + 0.5
    q = quantize_int8_w8a8(w, smooth=smooth)
    assert torch.equal(q.unpacked(), quantize_int8(w * smooth).unpacked()) and torch.equal(q.input_scales, smooth)
    half_a_step = q.scales.float() * 0.501 / smooth  # of the smoothed weight, in the units of the weight itself
    assert bool(((q.dequantize() - w).abs() <= half_a_step).all())


def test_bad_input_is_refused():
    w = weight()
    with pytest.raises(ValueError, match='"channel" or per "tensor", got \'group\''):
        quantize_int8(w, "group")
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="positive and finite"):
            quantize_int8_w8a8(w, activation_scale=scale)
    with pytest.raises(ValueError, match=r"each of 48 input channels, got \[47\]"):
        quantize_int8_w8a8(w, smooth=torch.ones(47))
    for value in (0.0, -1.0, float("nan"), float("inf")):
        smooth = torch.ones(48)
        smooth[5] = value
        with pytest.raises(ValueError, match="smooth must be positive and finite"):
            quantize_int8_w8a8(w, smooth=smooth)
    w[0, 0] = float("nan")
    for rounding in (quantize_int8, quantize_int8_w8a8):
        with pytest.raises(ValueError, match="inf or NaN"):
            rounding(w)
    with pytest.raises(ValueError, match="int8_w8a8, got int4"):
        matmul_w8a8(weight(), quantize_int(weight(), 4, 32))
