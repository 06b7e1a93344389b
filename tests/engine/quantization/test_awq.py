"""AWQ: nothing changes before rounding, exponent 0 is plain rounding, and the search finds what trying everything finds."""

import pytest
import torch

from engine.quantization.awq import CLIP_RATIOS, awq_curve, awq_scales, quantize_awq
from engine.quantization.base import Calibration
from engine.quantization.calibration import Collector, output_error
from engine.quantization.intn import quantize_int


def problem(rows: int = 24, columns: int = 64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Calibration]:
    """A weight, and inputs of which a few channels are far larger than the others."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    x = torch.randn(200, columns, generator=generator) * (1.2 * torch.randn(columns, generator=generator)).exp()
    collector = Collector(columns, keep_rows=200)
    collector.add(x)
    return weight, x, collector.finish()


@pytest.mark.parametrize("alpha", [0.0, 0.35, 1.0])
def test_the_function_is_the_same_before_rounding(alpha: float) -> None:
    weight, x, seen = problem()
    scales = awq_scales(seen, alpha).double()
    torch.testing.assert_close(
        (x.double() / scales) @ (weight.double() * scales).T, x.double() @ weight.double().T, rtol=0, atol=1e-10
    )


def test_scales_are_the_power_of_the_mean_magnitude() -> None:
    _, x, seen = problem()
    scales = awq_scales(seen, 0.7).double()
    torch.testing.assert_close(
        scales / scales[0], (x.double().abs().mean(0) / x.double().abs().mean(0)[0]) ** 0.7, rtol=1e-5, atol=0
    )
    assert float(scales.log().mean()) == pytest.approx(0, abs=1e-6)
    assert bool((awq_scales(seen, 0.0) == 1).all())
    for alpha in (-0.1, 1.1):
        with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\]"):
            awq_scales(seen, alpha)


@pytest.mark.parametrize("symmetric", [False, True])
def test_exponent_0_is_plain_rounding(symmetric: bool) -> None:
    weight, x, _ = problem()
    collector = Collector(64)
    collector.add(x.sign())  # all channels have the same mean: every exponent gives the same scales, and the first is taken
    got, plain = quantize_awq(weight, collector.finish(), 4, 16, symmetric), quantize_int(weight, 4, 16, symmetric)
    assert got.method == "awq" and got.input_scales is None
    assert torch.equal(got.codes, plain.codes) and torch.equal(got.scales, plain.scales)
    assert (got.minima is None and plain.minima is None) or torch.equal(got.minima, plain.minima)


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_curve_is_the_output_error_on_the_inputs(symmetric: bool) -> None:
    weight, x, seen = problem(8, 32)
    curve = awq_curve(weight, seen, 3, 16, symmetric, grid=8)
    assert curve.alpha.tolist() == [i / 8 for i in range(9)]
    for alpha, error in zip(curve.alpha.tolist(), curve.error.tolist(), strict=True):
        scales = awq_scales(seen, alpha).double()
        rounded = quantize_int((weight * scales.float()), 3, 16, symmetric).dequantize().double() / scales
        assert error == pytest.approx(float((x.double() @ (weight.double() - rounded).T).square().sum(1).mean()), rel=1e-4)
    assert curve.error[curve.best] == curve.error.min()


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_best_exponent_is_taken_and_beats_plain_rounding(bits: int, seed: int) -> None:
    weight, _, seen = problem(seed=seed)
    curve, got = awq_curve(weight, seen, bits, 16), quantize_awq(weight, seen, bits, 16)
    error = output_error(weight - got.dequantize(), seen)
    assert error == float(curve.error.min())
    assert float(curve.error[0]) == output_error(weight - quantize_int(weight, bits, 16).dequantize(), seen)
    assert error < 0.9 * float(curve.error[0])
    assert got.input_scales is not None and torch.equal(got.input_scales, awq_scales(seen, float(curve.alpha[curve.best])))


def test_codes_stand_for_the_scaled_weight() -> None:
    weight, x, seen = problem()
    got = quantize_awq(weight, seen, 8, 16)
    assert got.input_scales is not None
    scaled = got.dequantize() * got.input_scales
    step = got.per_column(got.scales).float()
    assert bool(((scaled - weight * got.input_scales).abs() <= 0.76 * step).all())  # half a step, and float16's of the minimum
    assert got.nbytes == 24 * 64 + 2 * 2 * 24 * 4 + 4 * 64
    torch.testing.assert_close((x / got.input_scales) @ scaled.T, x @ got.dequantize().T, rtol=1e-4, atol=1e-4)


def test_clipping_finds_each_rows_best_range() -> None:
    weight, _, seen = problem(12, 16)  # one group: its own error is the row's
    curve = awq_curve(weight, seen, 2, 16)
    scales = awq_scales(seen, float(curve.alpha[curve.best]))
    errors = []
    for ratio in (1.0, *CLIP_RATIOS):
        narrow = torch.stack([row.clamp(row.min() * ratio, row.max() * ratio) for row in weight * scales])
        e = (weight - quantize_int(narrow, 2, 16).dequantize() / scales).double()
        errors.append(0.5 * ((e @ seen.hessian) * e).sum(1))
    expected = float(torch.stack(errors).amin(0).sum())
    got = output_error((weight - quantize_awq(weight, seen, 2, 16, clip=True).dequantize()).double(), seen)
    assert got == pytest.approx(expected, rel=1e-5)
    assert got < float(curve.error.min())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "size"), [(2, 16), (4, 24), (4, 100)])
def test_clipping_is_never_worse(bits: int, size: int, symmetric: bool) -> None:
    for seed in range(4):
        weight, _, seen = problem(8, 64, seed)
        with_, without = (quantize_awq(weight, seen, bits, size, symmetric, clip=clip) for clip in (True, False))
        assert with_.method == "awq" and with_.scales.shape == without.scales.shape
        assert output_error(weight - with_.dequantize(), seen) <= output_error(weight - without.dequantize(), seen)


def test_clipping_is_dropped_where_the_groups_errors_add_up() -> None:
    """One row and inputs that rise and fall together: what is best for each group alone can be worse for their sum."""
    dropped = 0
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, 64, generator=generator)
        collector = Collector(64)
        collector.add(torch.randn(200, 1, generator=generator) + 0.1 * torch.randn(200, 64, generator=generator))
        seen = collector.finish()
        with_, without = (quantize_awq(weight, seen, 3, 16, clip=clip) for clip in (True, False))
        assert output_error(weight - with_.dequantize(), seen) <= output_error(weight - without.dequantize(), seen)
        dropped += torch.equal(with_.scales, without.scales)
    assert 0 < dropped < 6


def test_a_dead_channel_has_a_finite_positive_scale() -> None:
    weight, x, _ = problem()
    x[:, 7] = 0
    collector = Collector(64)
    collector.add(x)
    seen = collector.finish()
    for alpha in (0.0, 0.5, 1.0):
        scales = awq_scales(seen, alpha)
        assert bool((torch.isfinite(scales) & (scales > 0)).all())
    got = quantize_awq(weight, seen, 4, 16, clip=True)
    assert bool(torch.isfinite(got.dequantize()).all())
    nothing = Collector(64)
    nothing.add(torch.zeros(4, 64))
    assert torch.equal(quantize_awq(weight, nothing.finish(), 4, 16).codes, quantize_int(weight, 4, 16).codes)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_inf_or_nan_in_the_weight(value: float) -> None:
    weight, _, seen = problem()
    weight[1, 2] = value
    with pytest.raises(ValueError, match="inf or NaN"):
        quantize_awq(weight, seen)


def test_bad_options() -> None:
    weight, _, seen = problem()
    with pytest.raises(ValueError, match="64 columns, the calibration is of a layer with 32 inputs"):
        quantize_awq(weight, problem(8, 32)[2])
    with pytest.raises(ValueError, match="integer weights have"):
        quantize_awq(weight, seen, bits=1)
    with pytest.raises(ValueError, match="group_size=0"):
        quantize_awq(weight, seen, group_size=0)
    with pytest.raises(ValueError, match="at least 1 step, got 0"):
        awq_curve(weight, seen, grid=0)
    with pytest.raises(ValueError, match="overflows float32"):
        quantize_awq(weight * 1e30, seen)
