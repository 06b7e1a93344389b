"""SmoothQuant: the product is unchanged before rounding, and W8A8 with outlier channels loses less after it."""

import pytest
import torch

from engine.quantization.base import Calibration
from engine.quantization.calibration import Collector
from engine.quantization.int8 import matmul_w8a8, quantize_int8_w8a8
from engine.quantization.smoothquant import quantize_smooth, smooth_scales


def calibrated(x: torch.Tensor) -> Calibration:
    collector = Collector(x.shape[1])
    collector.add(x)
    return collector.finish()


def problem(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight [24, 64] and inputs [100, 64], three channels of which are 100 times the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(100, 64, generator=generator)
    x[:, [3, 17, 40]] *= 100
    return torch.randn(24, 64, generator=generator), x


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_equation_4_and_the_product_it_leaves_alone(alpha: float) -> None:
    weight, x = problem()
    scales = smooth_scales(weight, calibrated(x), alpha)
    assert scales.dtype == torch.float32
    for j in range(64):
        expected = max(abs(v) for v in x[:, j].tolist()) ** alpha / max(abs(v) for v in weight[:, j].tolist()) ** (1 - alpha)
        assert float(scales[j]) == pytest.approx(expected, rel=1e-6)
    s = scales.double()
    torch.testing.assert_close((x.double() / s) @ (weight.double() * s).T, x.double() @ weight.double().T, rtol=0, atol=1e-9)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_outlier_channels_cost_less(static: bool, seed: int) -> None:
    weight, x = problem(seed)
    exact = x.double() @ weight.double().T
    smoothed = quantize_smooth(weight, calibrated(x), 0.5, static)
    rough = quantize_int8_w8a8(weight, activation_scale=float(x.abs().max()) / 127 if static else None)
    errors = [float((matmul_w8a8(x, q).double() - exact).norm()) for q in (smoothed, rough)]
    assert errors[0] < 0.5 * errors[1]


def test_what_is_held() -> None:
    weight, x = problem()
    seen = calibrated(x)
    dynamic, static = quantize_smooth(weight, seen), quantize_smooth(weight, seen, static=True)
    assert dynamic.method == "int8_w8a8" and dynamic.activation_bits == 8 and dynamic.activation_scale is None
    assert dynamic.input_scales is not None and torch.equal(dynamic.input_scales, smooth_scales(weight, seen))
    assert static.activation_scale == pytest.approx(float((x / dynamic.input_scales).abs().max()) / 127, rel=1e-6)
    assert torch.equal(static.codes, dynamic.codes)
    scaled = weight * dynamic.input_scales
    error = (dynamic.dequantize() * dynamic.input_scales - scaled).abs()
    assert bool((error <= 0.51 * dynamic.scales.float()).all())


def test_dead_channels_have_finite_positive_scales() -> None:
    weight, x = problem()
    x[:, 5] = 0
    weight[:, 9] = 0
    x[:, 11], weight[:, 11] = 0, 0
    for alpha in (0.0, 0.5, 1.0):
        scales = smooth_scales(weight, calibrated(x), alpha)
        assert bool((torch.isfinite(scales) & (scales > 0)).all())
    live = [j for j in range(64) if j not in (5, 9, 11)]
    got = quantize_smooth(weight, calibrated(x))
    assert got.input_scales is not None and got.input_scales[5] <= got.input_scales[live].min()
    exact = x.double() @ weight.double().T
    assert float((matmul_w8a8(x, got).double() - exact).norm() / exact.norm()) < 0.02
    zero = calibrated(torch.zeros(3, 64))
    assert bool(torch.isfinite(quantize_smooth(weight, zero).dequantize()).all())
    with pytest.raises(ValueError, match="every calibration input is zero"):
        quantize_smooth(weight, zero, static=True)


def test_bad_input() -> None:
    weight, x = problem()
    seen = calibrated(x)
    for alpha in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\]"):
            quantize_smooth(weight, seen, alpha)
    with pytest.raises(ValueError, match="calibration is of a layer with 32 inputs"):
        quantize_smooth(weight, calibrated(x[:, :32]))
    weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="inf or NaN"):
        smooth_scales(weight, seen)
