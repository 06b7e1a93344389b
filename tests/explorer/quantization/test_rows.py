"""What the page knows of a run, and the map's cells."""

import math

from explorer.quantization import rows
from explorer.quantization.rows import MATRICES, QUANTITIES, QuantizationRows, heat_map, text_of, worst
from tests.explorer.quantization.tabs import layer_quantized, matrix, progress, started, weights


def at(event: object, step: int, time_ns: int = 0) -> object:
    return type(event)(**{**{f: getattr(event, f) for f in event.__struct_fields__}, "step": step, "time_ns": time_ns})


def test_each_step_has_the_weights_that_ran_then() -> None:
    r = QuantizationRows()
    r.feed([started(), at(weights("int8", 0), 3, 10), layer_quantized(method="int8", sqnr_db=40.0)])
    r.feed([at(weights("int4", 32), 9, 20), layer_quantized(sqnr_db=20.0)])
    assert r.at(2) is None
    assert r.at(8).event.method == "int8" and r.at(8).layers[3, "down_proj"].sqnr_db == 40.0
    assert r.at(9).event.method == "int4" and r.at(99).layers[3, "down_proj"].sqnr_db == 20.0
    r.feed([started()])  # another engine
    assert r.at(99) is None and r.restarted and r.num_layers == 30


def test_what_is_said_again_for_a_latecomer_changes_nothing() -> None:
    r = QuantizationRows()
    first = at(weights(recomputed=["a"]), 1, 5)
    r.feed([first, layer_quantized(), at(weights(), 4, 9)])
    assert len(r.changes) == 1 and r.at(4).event.recomputed == ["a"] and len(r.at(4).layers) == 1
    assert not r.stale((3, "down_proj"))


def test_errors_of_weights_that_no_longer_run_are_not_mixed_in() -> None:
    r = QuantizationRows()
    r.feed([weights("int4"), at(weights("nf4", 64), 2), layer_quantized(method="int4")])
    assert r.at(2).layers == {}


def test_weights_in_the_making_are_told_until_they_run() -> None:
    r = QuantizationRows()
    r.feed([at(weights(), 1, 5), at(progress("rounding", method="gptq"), 2, 7), progress("measuring", done=1)])
    assert r.making(1) is None and r.making(2).doing == "rounding"
    r.feed([at(weights("gptq", 64), 3, 9)])
    assert r.making(3) is None
    r.feed([at(progress("cancelled", method="awq"), 4, 11)])
    assert rows.cancelled(r.making(4)) and not rows.failed(r.making(4))
    r.feed([at(progress("failed: no memory", method="awq"), 5, 12)])
    assert rows.failed(r.making(5))


def test_a_matrix_is_stale_once_other_weights_run_and_few_are_kept() -> None:
    r = QuantizationRows()
    r.feed([at(weights(), 1, 5), at(matrix(), 2, 6)])
    place = (3, "down_proj")
    assert r.matrix(place, 1) is None and r.matrix(place, 2) is not None and not r.stale(place)
    r.feed([at(weights("int8", 0), 3, 7)])
    assert r.stale(place) and not r.stale((0, "q_proj"))
    r.feed([at(matrix(layer), 4, 8) for layer in range(10, 14)])
    assert list(r.observed) == [(layer, "down_proj") for layer in (11, 12, 13)]


def change(**by_place: float) -> rows.Change:
    made = rows.Change(0, weights())
    for i, (name, value) in enumerate(by_place.items()):
        made.layers[i, name] = layer_quantized(i, name, sqnr_db=value, output_error=0.01 * (i + 1))
    return made


def test_cells_stand_in_the_order_in_which_a_token_meets_the_matrices() -> None:
    found = heat_map(change(down_proj=20.0, q_proj=14.0, v_proj=30.0), QUANTITIES["sqnr"])
    assert found.columns["layer"] == [0, 1, 2] and found.columns["row"] == [6, 0, 2]
    assert (found.low, found.high, found.exact) == (14.0, 30.0, False)
    assert found.columns["text"] == ["20.0 dB", "14.0 dB", "30.0 dB"]
    percent = heat_map(change(down_proj=20.0, q_proj=14.0), QUANTITIES["output"])
    assert percent.columns["value"] == [1.0, 2.0] and percent.columns["text"] == ["1.00 %", "2.00 %"]


def test_where_nothing_was_lost_no_cell_has_a_colour_of_its_own() -> None:
    found = heat_map(change(q_proj=math.inf, k_proj=math.inf), QUANTITIES["sqnr"])
    assert found.exact and all(math.isnan(v) for v in found.columns["value"]) and "nothing was lost" in found.columns["text"][0]
    mixed = heat_map(change(q_proj=math.inf, k_proj=12.0), QUANTITIES["sqnr"])
    assert not mixed.exact and mixed.low == 12.0 < mixed.high
    assert heat_map(None, QUANTITIES["sqnr"]).columns["layer"] == [] and not heat_map(None, QUANTITIES["sqnr"]).exact


def test_the_worst_are_those_that_lose_most_by_what_is_shown() -> None:
    made = change(q_proj=30.0, k_proj=10.0, v_proj=20.0, o_proj=math.inf)
    assert [e.name for e in worst(made, QUANTITIES["sqnr"], 2)] == ["k_proj", "v_proj"]
    assert [e.name for e in worst(made, QUANTITIES["output"], 1)] == ["o_proj"]
    assert text_of(QUANTITIES["sqnr"], layer_quantized(sqnr_db=math.nan)) == "–"
    assert len(MATRICES) == 7
