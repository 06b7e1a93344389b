"""Calibration statistics against the plain formulas over all rows at once."""

import pytest
import torch

from engine.quantization.calibration import (
    CHUNK_ROWS,
    Collector,
    check_calibration,
    output_error,
    output_error_by_columns,
)


def inputs(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)


def collect(x: torch.Tensor, batches: list[int] | int | None = None, **options: object):
    collector = Collector(x.shape[1], **options)
    for batch in x.split(batches or x.shape[0]):
        collector.add(batch)
    return collector.finish()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-6)])
@pytest.mark.parametrize("batch", [7, 3000])
def test_statistics_are_those_of_all_rows(dtype: torch.dtype, tolerance: float, batch: int) -> None:
    x = inputs(2 * CHUNK_ROWS + 77, 9)
    seen = collect(x, batch, dtype=dtype)
    exact = 2 * x.double().T @ x.double() / len(x)
    assert seen.rows == len(x) and seen.hessian.dtype == dtype
    assert (seen.hessian.double() - exact).norm() <= tolerance * exact.norm()
    torch.testing.assert_close(seen.abs_mean, x.double().abs().mean(0).float())
    assert torch.equal(seen.abs_max, x.abs().amax(0))


def test_kept_rows_do_not_depend_on_the_batches_and_come_in_order() -> None:
    x = torch.arange(500.0)[:, None].repeat(1, 3)
    whole, cut = collect(x, keep_rows=40).inputs, collect(x, [1, 3, 200, 296], keep_rows=40).inputs
    assert whole.shape == (40, 3) and torch.equal(whole, cut)
    assert bool((whole[:, 0].diff() > 0).all())  # in order, no row twice
    assert not torch.equal(whole, collect(x, keep_rows=40, seed=1).inputs)
    assert torch.equal(collect(x[:10], keep_rows=40).inputs, x[:10])  # fewer than asked for: all of them


def test_kept_rows_are_a_uniform_sample() -> None:
    x = torch.arange(50.0)[:, None]
    counts = torch.zeros(50)
    for seed in range(300):
        counts[collect(x, 25, keep_rows=10, seed=seed).inputs[:, 0].long()] += 1
    chi_square = float(
        ((counts - 60) ** 2 / (60 * 0.8)).sum()
    )  # each row is kept with probability 1/5; about chi-square, 49 degrees
    assert chi_square < 94  # 1 in 10,000 above it


def test_more_rows_may_follow_finish_and_the_callers_buffer_may_change() -> None:
    x = inputs(64, 5)
    collector = Collector(5)
    buffer = x[:32].clone()
    collector.add(buffer)
    buffer.fill_(7)
    first = collector.finish()
    collector.add(x[32:])
    torch.testing.assert_close(first.hessian, collect(x[:32]).hessian)
    torch.testing.assert_close(collector.finish().hessian, collect(x).hessian, rtol=1e-5, atol=1e-5)
    assert torch.equal(first.inputs, x[:32]) and first.rows == 32


def test_16_bit_inputs_and_a_dead_channel() -> None:
    x = inputs(100, 4).bfloat16()
    x[:, 2] = 0
    seen = collect(x)
    assert torch.equal(seen.inputs, x.float())
    assert seen.abs_max[2] == 0 and seen.abs_mean[2] == 0
    assert not bool(seen.hessian[2].any()) and not bool(seen.hessian[:, 2].any())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_inf_or_nan_is_refused_and_nothing_of_the_batch_is_added(value: float) -> None:
    x = inputs(20, 3)
    collector = Collector(3)
    collector.add(x)
    bad = x.clone()
    bad[4, 1] = value
    with pytest.raises(ValueError, match="1 values that are inf or NaN, of 60"):
        collector.add(bad)
    assert torch.equal(collector.finish().hessian, collect(x).hessian) and collector.rows == 20


def test_bad_shapes_and_options() -> None:
    with pytest.raises(ValueError, match=r"\[rows, 3\], got \[4, 2\]"):
        Collector(3).add(torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"\[rows, 3\], got \[3\]"):
        Collector(3).add(torch.zeros(3))
    with pytest.raises(ValueError, match="float32 or float64"):
        Collector(3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="at least 1"):
        Collector(0)
    with pytest.raises(ValueError, match="no calibration inputs"):
        Collector(3).finish()
    empty = Collector(3)
    empty.add(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="no calibration inputs"):
        empty.finish()
    large = Collector(2)
    large.add(torch.full((4, 2), 1e25))
    with pytest.raises(ValueError, match="overflow"):
        large.finish()


def test_check_calibration() -> None:
    seen = collect(inputs(30, 6))
    check_calibration(seen, 6)
    with pytest.raises(ValueError, match="8 columns, the calibration is of a layer with 6 inputs"):
        check_calibration(seen, 8)
    seen.hessian[1, 2] += 1
    with pytest.raises(ValueError, match="not symmetric"):
        check_calibration(seen, 6)
    seen.hessian[1, 2] = float("nan")
    with pytest.raises(ValueError, match="inf or NaN"):
        check_calibration(seen, 6)


def test_output_error_is_that_of_the_outputs() -> None:
    x, error = inputs(200, 8).double(), torch.randn(5, 8, dtype=torch.float64)
    seen = collect(x)
    assert output_error(error, seen) == pytest.approx(float((x.float().double() @ error.T).square().sum(1).mean()), rel=1e-6)


@pytest.mark.parametrize("order", [None, torch.tensor([3, 0, 5, 1, 2, 4])])
def test_output_error_by_columns(order: torch.Tensor | None) -> None:
    error, seen = torch.randn(5, 6), collect(inputs(50, 6))
    naive, partial = [], torch.zeros_like(error)
    for column in range(6) if order is None else order.tolist():
        partial[:, column] = error[:, column]
        naive.append(output_error(partial.double(), seen))
    torch.testing.assert_close(output_error_by_columns(error, seen, order), torch.tensor(naive, dtype=torch.float64))
