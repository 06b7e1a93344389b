"""GPTQ against optimal brain quantisation written out: the inverse Hessian of the columns that are left, anew for each column, in float64."""

from dataclasses import replace

import pytest
import torch

from engine.quantization.base import Calibration, QuantizedWeight
from engine.quantization.calibration import Collector, output_error
from engine.quantization.gptq import gptq_trace, inverse_factor, quantize_gptq
from engine.quantization.intn import grid, quantize_int


def correlated(rows: int, columns: int, seed: int) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns, columns, generator=generator) * torch.randn(columns, generator=generator).exp()
    collector = Collector(columns)
    collector.add(torch.randn(rows, columns, generator=generator) @ mix / columns**0.5)
    return collector.finish()


def with_hessian(hessian: torch.Tensor) -> Calibration:
    columns = len(hessian)
    return Calibration(1, torch.zeros(1, columns), hessian.double(), torch.ones(columns), torch.ones(columns))


def random_weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def damped(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    return hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)


def optimal_brain_quantization(
    weight: torch.Tensor, hessian: torch.Tensor, bits: int, size: int, symmetric: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The rounded weight, and the weight after each column, float64 [N, K]."""
    weight, after = weight.double(), []
    for i in range(weight.shape[1]):
        if i % size == 0:
            of_group = grid(weight[:, None, i : i + size], bits, symmetric)
        codes = of_group.codes(weight[:, i].view(-1, 1, 1)).view(-1)
        rounded = codes.double() * of_group.scales[:, 0].double()
        if of_group.minima is not None:
            rounded = rounded + of_group.minima[:, 0].double()
        inverse = torch.linalg.inv(hessian[i:, i:])
        weight = weight.clone()
        weight[:, i:] -= ((weight[:, i] - rounded) / inverse[0, 0])[:, None] * inverse[0]
        after.append(weight)
    return weight, after


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("bits", "size"), [(4, 4), (3, 16), (2, 5), (8, 6)])
@pytest.mark.parametrize("seed", [0, 1])
def test_is_optimal_brain_quantization(bits: int, size: int, symmetric: bool, seed: int) -> None:
    weight, seen = random_weight(6, 16, seed), correlated(80, 16, seed + 10)
    trace = gptq_trace(weight, seen, bits, size, symmetric, damping=0.01, block_columns=8)
    expected, after = optimal_brain_quantization(weight, damped(seen.hessian, 0.01), bits, size, symmetric)
    torch.testing.assert_close(trace.quantized.dequantize().double(), expected, rtol=0, atol=1e-6)
    for i, weights in enumerate(after):
        torch.testing.assert_close(trace.weights_after(i + 1).double(), weights, rtol=0, atol=3e-6)
    assert torch.equal(trace.weights_after(0), weight)
    with pytest.raises(ValueError, match="0 to 16 steps, got 17"):
        trace.weights_after(17)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("options", [{}, {"damping": 0.0}, {"act_order": True}, {"act_order": True, "static_groups": True}])
def test_is_plain_rounding_when_the_hessian_is_the_identity(symmetric: bool, options: dict[str, object]) -> None:
    weight = random_weight(7, 40, 3)
    got = quantize_gptq(weight, with_hessian(torch.eye(40) * 3.7), 4, 16, symmetric, **options)
    plain = quantize_int(weight, 4, 16, symmetric)
    assert torch.equal(got.codes, plain.codes) and torch.equal(got.scales, plain.scales)
    assert (got.minima is None and plain.minima is None) or torch.equal(got.minima, plain.minima)
    assert torch.equal(got.dequantize(), plain.dequantize())


def error_against_plain(bits: int, symmetric: bool, seed: int, **options: bool) -> float:
    weight, seen = random_weight(32, 64, seed), correlated(300, 64, seed + 100)
    got, plain = quantize_gptq(weight, seen, bits, 16, symmetric, **options), quantize_int(weight, bits, 16, symmetric)
    return output_error(weight - got.dequantize(), seen) / output_error(weight - plain.dequantize(), seen)


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize(("bits", "symmetric"), [(2, False), (3, False), (4, False), (4, True), (8, True)])
def test_output_error_on_the_same_grid_is_below_plain_roundings(bits: int, symmetric: bool, act_order: bool) -> None:
    """Greedy in the columns, so no theorem for a single row; over a matrix's rows it holds, with room, for inputs of very unlike size."""
    for seed in range(6):
        assert error_against_plain(bits, symmetric, seed, act_order=act_order, static_groups=True) < 0.9


@pytest.mark.parametrize(("bits", "act_order"), [(2, True), (3, False), (3, True), (4, False), (4, True), (8, False)])
def test_output_error_on_grids_found_on_the_way_is_below_plain_roundings(bits: int, act_order: bool) -> None:
    """Not at 2 bits in natural order: where small channels come before large ones, compensation widens the large ones' grids, and the
    coarser step can cost more than was won."""
    ratios = [error_against_plain(bits, False, seed, act_order=act_order) for seed in range(6)]
    assert max(ratios) < 1 and sum(ratios) / 6 < 0.8


def test_compensation_can_cost_more_than_it_wins_where_it_widens_the_grid() -> None:
    worst = max(range(12), key=lambda seed: error_against_plain(2, False, seed))
    assert error_against_plain(2, False, worst) > 1 > error_against_plain(2, False, worst, static_groups=True)


def test_the_columns_left_are_the_best_there_are() -> None:
    """After each step no change of the columns not yet rounded makes the (damped) output error less: its gradient there is 0."""
    weight, seen = random_weight(5, 24, 1), correlated(100, 24, 2)
    trace = gptq_trace(weight, seen, 3, 8, act_order=True)
    hessian = damped(seen.hessian, trace.damping)
    for steps in range(1, 24):
        gradient = (weight - trace.weights_after(steps)).double() @ hessian
        assert gradient[:, trace.order[steps:]].abs().max() < 1e-5 * gradient.abs().max()


@pytest.mark.parametrize("options", [{}, {"act_order": True}, {"act_order": True, "static_groups": True}])
def test_trace_numbers(options: dict[str, bool]) -> None:
    weight, seen = random_weight(5, 24, 4), correlated(100, 24, 5)
    trace = gptq_trace(weight, seen, 3, 8, **options)
    errors, compensations, outputs = trace.rounding_errors(), trace.compensations(), trace.output_errors(seen)
    for step, column in enumerate(trace.order.tolist()):
        before, after = trace.weights_after(step).double(), trace.weights_after(step + 1).double()
        assert errors[step] == pytest.approx(float((before - after)[:, column].norm()), abs=1e-5)
        moved = (before - after)[:, trace.order[step + 1 :]].norm(dim=0)
        torch.testing.assert_close(compensations[step, step + 1 :], moved, rtol=0, atol=1e-5)
        assert not bool(compensations[step, : step + 1].any())
        assert float(outputs[step]) == pytest.approx(output_error(weight.double() - after, seen), rel=1e-4)
    torch.testing.assert_close(trace.weights_after(24), trace.quantized.dequantize(), rtol=0, atol=3e-6)


@pytest.mark.parametrize("size", [8, 20, 48, 64])
def test_any_block_gives_the_same_codes(size: int) -> None:
    weight, seen = random_weight(8, 48, 6), correlated(200, 48, 7)
    one = quantize_gptq(weight, seen, 4, size, block_columns=1)
    for block in (5, 8, 16, 30, 48, 1000):
        assert torch.equal(quantize_gptq(weight, seen, 4, size, block_columns=block).codes, one.codes)


def test_act_order_is_the_permuted_problem() -> None:
    weight, seen = random_weight(8, 32, 8), correlated(100, 32, 9)
    order = seen.hessian.diagonal().argsort(descending=True)
    got = quantize_gptq(weight, seen, 4, 8, act_order=True)
    permuted = replace(seen, hessian=seen.hessian[order][:, order])
    expected = torch.empty_like(weight)
    expected[:, order] = quantize_gptq(weight[:, order], permuted, 4, 8).dequantize()
    assert torch.equal(got.dequantize(), expected)
    assert got.group_of_column is not None and got.group_of_column.dtype == torch.int32
    assert got.group_of_column[order].tolist() == [i // 8 for i in range(32)]


def test_static_groups_keep_the_columns_where_they_are() -> None:
    weight, seen = random_weight(8, 32, 8), correlated(100, 32, 9)
    got, plain = quantize_gptq(weight, seen, 4, 8, act_order=True, static_groups=True), quantize_int(weight, 4, 8)
    assert got.group_of_column is None and torch.equal(got.scales, plain.scales)
    assert got.bits_per_weight == plain.bits_per_weight
    assert output_error(weight - got.dequantize(), seen) < output_error(weight - plain.dequantize(), seen)
    natural = quantize_gptq(weight, seen, 4, 8, static_groups=True)
    assert torch.equal(natural.scales, plain.scales) and not torch.equal(natural.codes, plain.codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_result_is_a_whole_quantized_weight(bits: int) -> None:
    weight, seen = random_weight(6, 20, 1), correlated(60, 20, 1)
    got = quantize_gptq(weight.bfloat16(), seen, bits, 8)  # the last group has 4 columns
    assert isinstance(got, QuantizedWeight) and (got.method, got.bits, got.shape) == ("gptq", bits, (6, 20))
    assert got.scales.shape == (6, 3)
    torch.testing.assert_close(got.rows(2, 5).dequantize(), got.dequantize()[2:5])


def test_float16_and_float32_groups_meet() -> None:
    weight, seen = random_weight(4, 16, 1), with_hessian(torch.eye(16))
    weight[:, 8:] *= 1e-6  # scales that float16 cannot hold
    got = quantize_gptq(weight, seen, 4, 8)
    assert got.scales.dtype == torch.float32
    assert (got.dequantize() - weight)[:, 8:].abs().max() < 5e-7


def test_a_dead_channels_weight_does_not_matter() -> None:
    weight, seen = random_weight(6, 16, 2), correlated(60, 16, 3)
    seen.hessian[5], seen.hessian[:, 5] = 0, 0
    changed = weight.clone()
    changed[:, 5] = 1000
    got, other = (quantize_gptq(w, seen, 4, 8) for w in (weight, changed))
    assert torch.equal(got.dequantize(), other.dequantize())
    assert got.dequantize()[:, 5].abs().max() <= 0.5 * got.scales.max() + 1e-3  # 0, rounded
    assert gptq_trace(weight, seen, 4, 8, act_order=True).order[-1] == 5
    assert gptq_trace(weight, seen, 4, 8, damping=0.0).damping == 0  # a dead column does not make the Hessian singular
    nothing = with_hessian(torch.zeros(16, 16))
    assert float(quantize_gptq(weight, nothing, 4, 8).dequantize().abs().max()) == 0


def test_inverse_factor() -> None:
    hessian = correlated(100, 12, 0).hessian
    factor, used = inverse_factor(hessian, 0.02)
    assert used == 0.02 and torch.equal(factor, factor.triu())
    torch.testing.assert_close(factor.T @ factor, torch.linalg.inv(damped(hessian, 0.02)))


def test_a_singular_hessian_is_damped_more() -> None:
    for seed in range(20):  # of some, Cholesky's last pivot is positive by chance: rounding noise
        few = random_weight(15, 16, seed).double()
        trace = gptq_trace(random_weight(4, 16, seed), with_hessian(few.T @ few), 4, 8, damping=0.0)
        assert trace.damping == 0.01
        assert bool(torch.isfinite(trace.quantized.dequantize()).all())
    eigenvalues = torch.ones(16)
    eigenvalues[0] = -0.05
    basis = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0))).Q
    indefinite = basis @ torch.diag(eigenvalues) @ basis.T
    assert gptq_trace(random_weight(4, 16, 0), with_hessian((indefinite + indefinite.T) / 2), 4, 8).damping == 0.1


@pytest.mark.parametrize("worst", [-3.0, -100.0])
def test_a_hessian_that_is_not_positive_definite(worst: float) -> None:
    diagonal = torch.ones(16)
    diagonal[3] = worst
    with pytest.raises(ValueError, match="the Hessian is not positive definite"):
        quantize_gptq(random_weight(4, 16, 0), with_hessian(torch.diag(diagonal)), 4, 8)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_inf_or_nan_in_the_weight(value: float) -> None:
    weight = random_weight(4, 16, 0)
    weight[1, 2] = value
    with pytest.raises(ValueError, match="inf or NaN"):
        quantize_gptq(weight, correlated(40, 16, 0), 4, 8)


def test_compensation_that_overflows() -> None:
    """The small last channel is the only one left to make up for the errors of channels 10,000 times as large."""
    sizes = torch.tensor([1e4] * 15 + [1.0])
    x = (random_weight(100, 1, 0) + 1e-3 * random_weight(100, 16, 1)) * sizes
    with pytest.raises(ValueError, match=r"compensated weights overflow with damping 0\.01"):
        quantize_gptq(random_weight(4, 16, 0) * 2e37, with_hessian(x.T @ x), 2, 8)


def test_bad_options() -> None:
    weight, seen = random_weight(4, 16, 0), correlated(40, 16, 0)
    with pytest.raises(ValueError, match="calibration is of a layer with 12 inputs"):
        quantize_gptq(weight, correlated(40, 12, 0))
    for bits in (1, 9, 4.0, True):
        with pytest.raises(ValueError, match="integer weights have 2, 3, 4, 5, 6, 7 or 8 bits"):
            quantize_gptq(weight, seen, bits)
    with pytest.raises(ValueError, match="group_size=0"):
        quantize_gptq(weight, seen, 4, 0)
    with pytest.raises(ValueError, match="damping at least 0, got 128 and -1"):
        quantize_gptq(weight, seen, damping=-1)
    with pytest.raises(ValueError, match="block_columns must be at least 1"):
        quantize_gptq(weight, seen, block_columns=0)
