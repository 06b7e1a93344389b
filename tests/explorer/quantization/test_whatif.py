"""One matrix under any grid: against the engine's own functions, and against float64 code written out."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.quantization.error import output_error, weight_error
from engine.quantization.methods import quantize
from explorer.quantization import whatif
from explorer.quantization.whatif import BINS, COMPARED, ROW, How, Matrix, levels_of, live_knobs
from tests.explorer.quantization.tabs import matrix


def oracle(how: How, w: torch.Tensor) -> torch.Tensor:
    if how.levels == "fp8":
        return quantize(w, "fp8")
    if how.levels == "nf4":
        return quantize(w, "nf4", how.group_size)
    from engine.quantization.intn import quantize_int

    return quantize_int(w, how.bits, how.group_size or w.shape[1], how.symmetric)


@pytest.mark.parametrize("how", [*COMPARED, How("int", 5, 16), How("int", 7, 576, True)], ids=lambda how: how.label)
def test_the_numbers_are_those_of_the_engines_own_rounding(how: How) -> None:
    m = Matrix(matrix())
    tried, packed = m.tried(how), oracle(how, m.weight)
    expected = weight_error(m.weight, packed)
    assert tried.sqnr_db == pytest.approx(expected.sqnr_db, abs=1e-3) and tried.max_error == pytest.approx(
        expected.max_error, rel=1e-5
    )
    assert tried.bits_per_weight == packed.bits_per_weight
    assert tried.output_error == pytest.approx(output_error(m.inputs, m.weight, packed), rel=1e-4)
    np.testing.assert_allclose(tried.by_output, expected.error_by_output.numpy(), rtol=1e-4, atol=1e-9)
    np.testing.assert_allclose(tried.by_input, expected.error_by_input.numpy(), rtol=1e-4, atol=1e-9)
    assert tried.normalized.counts.sum() == tried.errors.counts.sum() == m.weight.numel()
    numbers = m.compare(how)
    assert numbers["sqnr_db"] == pytest.approx(tried.sqnr_db) and numbers["output_error"] == pytest.approx(
        tried.output_error, rel=1e-5
    )


@pytest.mark.parametrize(
    "how", [How("int", 4, 64), How("int", 3, 64, True), How("nf4", 4, 64), How("fp8")], ids=lambda how: how.label
)
def test_every_rounded_weight_stands_on_one_of_the_drawn_levels(how: How) -> None:
    """Normalised by its own group as the picture normalises the weights, in float64."""
    m = Matrix(matrix())
    w, rounded = m.weight.double().numpy(), oracle(how, m.weight).dequantize().double().numpy()
    size = w.shape[1] if how.levels == "fp8" else 64
    for row in range(4):
        for start in range(0, w.shape[1], size):
            group, made = w[row, start : start + size], rounded[row, start : start + size]
            if how.levels == "int" and not how.symmetric:
                middle, half = (group.max() + group.min()) / 2, (group.max() - group.min()) / 2
            else:
                middle, half = 0.0, abs(group).max()
                if how.levels == "int" and abs(group.min()) < group.max():
                    half = -half
            places = (made - middle) / half
            distance = abs(places[:, None] - levels_of(how)[None]).min(1)
            # The scale is kept in 16 bits (NF4's in 8): a little beside the ideal levels, far less than halfway to the next.
            assert distance.max() < (0.05 if how.levels == "nf4" else 0.003)


def test_a_weight_on_the_grid_already_is_a_picture_of_spikes_and_loses_next_to_nothing() -> None:
    event = matrix()
    on_grid = quantize(Matrix(event).weight, "int4", 32).dequantize()
    m = Matrix(replace_weight(event, on_grid))
    tried = m.tried(How("int", 4, 32))
    assert tried.sqnr_db > 60 and m.tried(How("int", 4, 128)).sqnr_db < 30
    spikes = tried.normalized.counts[:: (BINS - 1) // 15]
    assert len(spikes) == 16 and spikes.sum() > 0.99 * m.weight.numel()


def replace_weight(event, weight: torch.Tensor):
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    return type(event)(**{**fields, "weight": weight.half().numpy().tobytes()})


def test_normalised_groups_reach_both_ends_and_short_ones_are_their_own() -> None:
    m = Matrix(matrix(rows=4, columns=100))
    even = m.normalized(64, about_zero=False)
    assert even.shape == (4, 100)
    for part in (even[:, :64], even[:, 64:]):
        assert torch.allclose(part.amin(1), torch.tensor(-1.0)) and torch.allclose(part.amax(1), torch.tensor(1.0))
    turned = m.normalized(64, about_zero=True, signed=True)
    assert torch.allclose(turned[:, :64].amin(1), torch.tensor(-1.0)) and float(turned.max()) < 1
    assert torch.allclose(m.normalized(64, True).abs(), turned.abs())


def test_zeros_and_constants_are_rounded_to_themselves() -> None:
    event = matrix(rows=4, columns=64)
    for value in (0.0, 0.25):
        m = Matrix(replace_weight(event, torch.full((4, 64), value)))
        tried = m.tried(How("int", 4, 32))
        assert tried.sqnr_db == math.inf and tried.max_error == 0 == tried.output_error
        assert (
            tried.errors.counts.sum() == 256 and np.isfinite(tried.errors.edges).all() and np.isfinite(tried.scales.edges).all()
        )


def test_of_a_large_matrix_some_output_channels_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whatif, "MOST", 48 * 192 // 3)
    m = Matrix(matrix())
    assert m.every == 3 and m.weight.shape == (16, 192)
    assert m.tried(How()).normalized.counts.sum() == 16 * 192


def test_what_runs_is_compared_as_it_was_observed() -> None:
    event = matrix()
    assert Matrix(event).compare_running(4.5) is None
    w = Matrix(event).weight
    packed = quantize(w, "int3", 32)
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    fields |= {"running_dtype": "float32", "running": packed.dequantize().contiguous().numpy().tobytes()}
    found = Matrix(type(event)(**fields)).compare_running(4.0)
    assert found["sqnr_db"] == pytest.approx(weight_error(w, packed).sqnr_db, abs=1e-3) and found["bits_per_weight"] == 4.0


@pytest.mark.parametrize(
    "changes", [{"weight": b"123"}, {"dtype": "bfloat16"}, {"input_rows": 17}, {"running_dtype": "float32", "running": b""}]
)
def test_bytes_that_do_not_fit_are_an_error(changes: dict[str, object]) -> None:
    event = matrix()
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    with pytest.raises(ValueError, match="must be"):
        Matrix(type(event)(**{**fields, **changes}))


def test_nan_in_a_matrix_is_an_error() -> None:
    w = Matrix(matrix()).weight.clone()
    w[0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        Matrix(replace_weight(matrix(), w))


def test_what_can_run_live_is_what_the_engine_has() -> None:
    from engine.weights.plan import make_plan

    for levels in whatif.LEVELS:
        for bits in whatif.BITS:
            for group in whatif.GROUP_SIZES:
                for symmetric in (False, True):
                    knobs, why = live_knobs(How(levels, bits, group, symmetric))
                    assert (knobs is None) == bool(why)
                    if knobs is not None:
                        plan = make_plan(knobs["quantization"], knobs["quantization_group_size"], knobs["quantization_options"])
                        assert plan.method == knobs["quantization"]
    assert live_knobs(How("int", 4, 32))[0] == {
        "quantization": "int4",
        "quantization_group_size": 32,
        "quantization_options": None,
    }
    assert live_knobs(How("int", 3, 64, True))[0]["quantization_options"] == {"symmetric": True}
    assert live_knobs(How("nf4", 5, 64))[0]["quantization"] == "nf4"  # its bits are its own
    assert "5 bits" in live_knobs(How("int", 5, 32))[1]
    assert live_knobs(How("int", 8, ROW, True))[0]["quantization"] == "int8" and "symmetric" in live_knobs(How("int", 8, 32))[1]
    assert "group size" in live_knobs(How("int", 4, ROW))[1]


def test_levels_are_as_many_as_the_codes() -> None:
    for bits in whatif.BITS:
        for symmetric in (False, True):
            assert len(levels_of(replace(How(), bits=bits, symmetric=symmetric))) == 1 << bits
    assert len(levels_of(How("nf4"))) == 16 and len(levels_of(How("fp8"))) == 253
    assert all((np.diff(levels_of(how)) > 0).all() and abs(levels_of(how)).max() == 1 for how in COMPARED)
