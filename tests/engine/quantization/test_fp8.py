import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.quantization import levels
from engine.quantization.fp8 import quantize_fp8
from tests.engine.quantization import packed_values

VALUES = sorted((v, c) for c in range(256) if (v := packed_values.e4m3(c)) == v and c != 0x80)


def weight(rows: int = 4, columns: int = 80, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def nearest(x: float) -> float:
    """The value of e4m3 closest to ``x``, ties to the even mantissa, saturating at 448."""
    least = min(abs(v - x) for v, _ in VALUES)
    return next(v for v, _ in sorted(VALUES, key=lambda p: p[1] & 1) if abs(v - x) == least)


@pytest.mark.parametrize("per", ["channel", "tensor"])
def test_codes_are_the_nearest_values_at_the_stored_scale(per):
    w = weight()
    q = quantize_fp8(w, per)
    largest = w.abs().amax(1, keepdim=True) if per == "channel" else w.abs().amax().view(1, 1)
    assert q.scales.shape == largest.shape and q.group_size == (80 if per == "channel" else 0)
    assert torch.allclose(q.scales.double(), largest.double() / 448, rtol=1 / 512, atol=0)
    got = levels.FP8_E4M3[q.codes.long()]
    quotient = w / q.scales.float()
    assert got.tolist() == [[nearest(v) for v in row] for row in quotient.tolist()]


def test_every_value_of_the_format_comes_back():
    finite = torch.tensor([v for v, _ in VALUES])[None]
    q = quantize_fp8(finite)
    assert q.scales.tolist() == [[1.0]] and torch.equal(q.dequantize(), finite)
    assert set(q.codes[0].tolist()) == {c for _, c in VALUES}


def test_ties_go_to_the_even_mantissa():
    q = quantize_fp8(torch.tensor([[448.0, 17.0, 19.0, -17.0, 2.0**-10, 3 * 2.0**-10]]))
    assert q.dequantize().tolist() == [[448, 16, 20, -16, 0, 2 * 2.0**-9]]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_the_stored_scale_leaves_beyond_448_saturates(sign):
    """Float16 rounds this scale down, which takes the largest weight past the format's end."""
    scale = 1.0 + 0.49 * 2.0**-10
    w = torch.tensor([[sign * 448 * scale, 1.0]], dtype=torch.float64).float()
    q = quantize_fp8(w)
    assert float(q.scales) == 1.0 and float(w[0, 0] / q.scales[0, 0]) * sign > 448
    assert q.dequantize()[0, 0] == sign * 448


@settings(max_examples=150)
@given(
    hnp.arrays("float32", st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=st.floats(-(2.0**126), 2.0**126, width=32))
)
def test_no_finite_weight_turns_into_nan(w):
    w = torch.from_numpy(w)
    for per in ("channel", "tensor"):
        q = quantize_fp8(w, per)
        assert not bool(((q.codes & 0x7F) == 0x7F).any()) and bool(torch.isfinite(q.scales).all())
        largest = w.double().abs().amax(1, keepdim=True) if per == "channel" else w.double().abs().amax()
        # Half a step: a 16th of the value, or half of 2**-9 scales near 0; a subnormal scale has lost digits of its own.
        bound = (w.double().abs() / 15.9).clamp_min(largest / 448 * 2.0**-10 * 1.01) + largest / 512 + 448 * 2.0**-149
        assert bool(((q.dequantize().double() - w.double()).abs() <= bound).all())


def test_zeros_come_back_as_zeros():
    w = weight()
    w[1] = 0
    for per in ("channel", "tensor"):
        assert bool((quantize_fp8(w, per).dequantize()[1] == 0).all())
    assert bool((quantize_fp8(torch.zeros(2, 3)).dequantize() == 0).all())


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match='"channel" or per "tensor", got \'token\''):
        quantize_fp8(weight(), "token")
    for bad in (float("inf"), float("-inf"), float("nan")):
        w = weight()
        w[2, 3] = bad
        with pytest.raises(ValueError, match="inf or NaN"):
            quantize_fp8(w)
