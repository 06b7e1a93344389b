"""The page's view without a browser: what it shows, what it asks of a session, what a recorded run says."""

import math
import time
from typing import Any

import pytest

from explorer.base import Clock
from explorer.mirror import Mirror
from explorer.quantization import words
from explorer.quantization.rows import MATRICES, QUANTITIES, Change, heat_map
from explorer.quantization.scenes import SCENES
from explorer.quantization.view import PANELS, TABS, QuantizationView
from explorer.quantization.whatif import COMPARED
from explorer.store import EventStore
from tests.explorer.quantization.tabs import Desk, layer_quantized, matrix, progress, started, weights
from tests.explorer.quantization.test_rows import at


class Bench:
    """A view with a store, and a session that writes down what it is asked for."""

    def __init__(self, live: bool = True, **params: Any) -> None:
        self.store = EventStore()
        self.store.replayed = not live
        self.desk = Desk() if live else None
        self.view = QuantizationView(self.store, self.desk, Clock(owner="ann"), **params)
        self.matrices = self.view.matrices

    def give(self, *events: Any) -> None:
        self.store.append(events)
        self.view.update()

    def fill(self, count: int = 30, **changes: Any) -> None:
        self.give(
            *(layer_quantized(layer, name, sqnr_db=20 + layer / 10, **changes) for layer in range(count) for name in MATRICES)
        )

    def asked(self, name: str) -> list[Any]:
        return [(args, named) for called, args, named in self.desk.calls if called == name] if self.desk is not None else []


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.give(started(), weights())
    made.fill()
    return made


def test_the_engine_is_asked_once_what_rounding_did_and_again_after_it_started_anew(bench: Bench) -> None:
    assert bench.asked("watch_weights") == [(("ann",), {})]
    bench.view.update()
    assert len(bench.asked("watch_weights")) == 1
    bench.give(started())
    assert len(bench.asked("watch_weights")) == 2


def test_nobody_asks_for_what_another_has_asked_for() -> None:
    store = EventStore()
    store.append([started(), weights(), layer_quantized()])
    desk = Desk()
    QuantizationView(store, desk, Clock(owner="bob"))
    assert [call for call in desk.calls if call[0] == "watch_weights"] == []


def test_the_head_says_what_runs_how_and_who_was_computed_again() -> None:
    bench = Bench()
    bench.give(started())
    assert "engine compares" in bench.view.now.object  # asked, not answered yet
    bench.give(weights(recomputed=["a", "b"]))
    bench.fill(rows=576, columns=576)
    text = bench.view.now.object
    assert "int4" in text and "groups of 32 columns" in text and "5.000 bits" in text and "packed kernel" in text
    assert "2 running requests were computed again" in text
    sixteen = 2 * 30 * 7 * 576 * 576
    assert words.sixteen_bits(bench.view.change, 30) == sixteen and f"{100 * 66_000_000 / sixteen:.1f} % of 16 bits" in text


def test_weights_that_run_dequantised_are_called_so() -> None:
    bench = Bench()
    bench.give(started(), weights("nf4", 64, forms={"dequantized": 120}))
    assert "the memory is not saved" in bench.view.now.object


def test_the_map_has_a_cell_for_each_matrix_and_a_click_looks_inside(bench: Bench) -> None:
    heat = bench.matrices.heat
    assert len(heat.cells.data["layer"]) == 210 and bench.matrices.map.visible and not bench.matrices.no_map.visible
    assert "0.q_proj" in bench.matrices.told.object
    tap = type("Tap", (), {"x": 7.2, "y": 3.9})
    bench.matrices._tapped(tap)
    assert (bench.view.layer, bench.view.matrix) == (7, "gate_proj")
    bench.view.update()
    bench.view.update()
    assert bench.asked("observe_matrix") == [(("ann", 7, "gate_proj"), {})]
    assert heat.chosen.data == {"layer": [7], "row": [4]}
    bench.matrices._tapped(type("Tap", (), {"x": -3.0, "y": 3.9}))
    bench.matrices._tapped(type("Tap", (), {"x": 31.0, "y": 3.9}))  # no such layer
    assert bench.view.layer == 7


def test_a_matrix_is_fetched_again_when_other_weights_run_and_not_before(bench: Bench) -> None:
    bench.view.param.update(layer=3)
    bench.view.update()
    bench.give(at(matrix(), 1, 2))
    assert len(bench.asked("observe_matrix")) == 1 and bench.matrices.inside.visible
    bench.view.update()
    assert len(bench.asked("observe_matrix")) == 1
    bench.give(at(weights("int8", 0), 1, 3))
    bench.view.update()
    assert len(bench.asked("observe_matrix")) == 2
    bench.give(at(matrix(), 1, 4))
    bench.view.update()
    assert len(bench.asked("observe_matrix")) == 2


def look_inside(bench: Bench) -> None:
    bench.view.layer = 3
    bench.give(matrix())
    for _i in range(len(COMPARED)):
        bench.view.update()


def test_a_knob_of_the_what_if_moves_numbers_and_pictures_and_not_the_engine(bench: Bench) -> None:
    look_inside(bench)
    four = bench.matrices.tried
    before = len(bench.desk.calls)
    bench.matrices.bits.value = 2
    bench.view.update()
    two = bench.matrices.tried
    assert two.how.bits == 2 and two.sqnr_db < four.sqnr_db - 9 and len(bench.desk.calls) == before
    assert len(bench.matrices.figures.level_marks.data["x"]) == 4 and "8" not in bench.matrices.level_words.object[:20]
    assert f"{two.sqnr_db:.1f} dB" in bench.matrices.numbers.object
    bench.view.levels = "nf4"  # by an address
    bench.view.update()
    assert bench.matrices.levels.value == "nf4" and bench.matrices.bits.disabled and bench.matrices.tried.how.levels == "nf4"
    bench.matrices.by.value = True
    bench.view.update()
    assert len(bench.matrices.figures.channel_line.data["channel"]) == 192


def test_the_default_checkpoints_grid_is_named_and_compared(bench: Bench) -> None:
    look_inside(bench)
    text = bench.matrices.source.object
    assert "GGUF Q4_1" in text and "groups of 32" in text and "16 bits" in text
    assert len(bench.matrices.compared) == len(COMPARED) and bench.matrices.table.object.count("<tr") == len(COMPARED) + 1
    same = dict(bench.matrices.compared)[COMPARED[0]]
    assert f"{same['sqnr_db']:.1f} dB of SQNR" in text


def test_a_grid_is_made_live_where_the_engine_has_it(bench: Bench) -> None:
    look_inside(bench)
    assert bench.matrices.run.disabled and "what runs" in bench.matrices.why.object  # int4 in groups of 32 runs already
    bench.matrices.bits.value = 5
    bench.view.update()
    assert bench.matrices.run.disabled and "5 bits" in bench.matrices.why.object
    bench.matrices.bits.value = 3
    bench.matrices.symmetric.value = True
    bench.view.update()
    assert not bench.matrices.run.disabled
    bench.matrices.run.clicks += 1
    knobs = {"quantization": "int3", "quantization_group_size": 32, "quantization_options": {"symmetric": True}}
    assert bench.asked("reconfigure") == [(("ann",), knobs)]
    bench.desk.status = "died"
    bench.view.update()
    assert bench.matrices.run.disabled and bench.matrices.fetch.disabled


def test_weights_in_the_making_have_a_bar_and_can_be_cancelled(bench: Bench) -> None:
    bench.give(at(progress("rounding", 3, 30, method="gptq"), 1, 5))
    assert (
        "3 of 30 layers" in bench.view.progress.object
        and 'aria-valuenow="10"' in bench.view.progress.object
        and bench.view.cancel.visible
    )
    bench.view.cancel.clicks += 1
    assert bench.asked("cancel_quantization") == [(("ann",), {})]
    bench.give(at(progress("failed: <not enough> memory", method="gptq"), 1, 6))
    assert not bench.view.cancel.visible and "&lt;not enough&gt; memory" in bench.view.progress.object
    bench.give(at(weights("gptq", 64), 1, 7))
    assert bench.view.progress.object == ""


def test_scenes_move_the_weights_and_then_say_what_to_look_at(bench: Bench) -> None:
    from engine.weights.plan import make_plan

    for i, (key, scene) in enumerate(SCENES.items()):
        make_plan(*scene.knobs.values())  # the engine would take it
        bench.view._scene_clicked(key, None)
        assert bench.asked("reconfigure")[i:] == [(("ann",), scene.knobs)]
        bench.view.update()
        assert bench.view.said.object == ""  # other weights run still
        method, group = scene.knobs["quantization"] or "", scene.knobs["quantization_group_size"] or 0
        bench.give(at(weights(method, group), 1, 9 + i))
        assert scene.look[:20] in bench.view.said.object


def test_weights_as_loaded_have_nothing_to_lose() -> None:
    only = Bench()
    plain = weights("", 0, forms={"plain": 120}, linear_bytes=212_000_000, bits_per_weight=16.0)
    only.give(started(), plain, layer_quantized(method="", sqnr_db=float("inf"), output_error=0.0))
    assert "nothing was rounded" in only.view.now.object and "100.0 % of 16 bits" in only.view.now.object
    assert "nothing is lost" in only.matrices.told.object
    only.view.quantity = "outliers"
    only.view.update()
    assert "Most outliers" in only.matrices.told.object


def test_a_grid_on_which_the_weights_stand_already_is_not_called_unrounded() -> None:
    lossless = layer_quantized(sqnr_db=math.inf, max_error=0.0)
    for method, wanted in (("int4", "stand on this very grid"), ("", "nothing was rounded")):
        change = Change(1, weights(method, 32 if method else 0), {(3, "down_proj"): lossless})
        found = heat_map(change, QUANTITIES["sqnr"])
        assert found.exact and wanted in words.map_html(change, QUANTITIES["sqnr"], found.exact, 1)


def test_a_recorded_run_shows_what_it_has_and_names_what_it_lacks() -> None:
    nothing = Bench(live=False)
    nothing.give(started())
    assert "Nobody had looked at the weights" in nothing.view.now.object and "Nobody had looked" in nothing.matrices.no_map.object
    assert "no matrix was looked into" in nothing.matrices.no_matrix.object
    bench = Bench(live=False)
    bench.give(started(), weights())
    bench.fill()
    bench.view.layer = 3
    bench.give(matrix())
    assert bench.matrices.inside.visible and bench.matrices.tried is not None and bench.matrices.map.visible
    bench.matrices.group.value = 128  # a what-if needs no engine
    bench.view.update()
    assert bench.matrices.tried.how.group_size == 128


def test_a_matrix_that_cannot_be_read_is_a_message() -> None:
    bench = Bench(live=False)
    fields = {name: getattr(matrix(), name) for name in matrix().__struct_fields__}
    bench.view.layer = 3
    bench.give(started(), weights(), type(matrix())(**{**fields, "weight": b"12"}))
    assert "weight must be" in bench.matrices.state.object and not bench.matrices.inside.visible


def test_without_an_engine_the_page_says_so() -> None:
    store, desk = EventStore(), Desk()
    desk.status = "starting"
    view = QuantizationView(store, desk, Clock(owner="ann"))
    view.update()
    assert words.NO_ENGINE in view.now.object and desk.calls == []
    desk.status = "running"
    store.append([started()])
    view.update()
    assert [call[0] for call in desk.calls] == ["watch_weights"] and "Asked" in view.now.object


def test_a_tab_is_built_when_it_is_opened_and_knows_what_has_been(bench: Bench) -> None:
    assert list(bench.view.panels) == ["matrices"]
    for index, key in enumerate(TABS):
        bench.view.tabs.active = index
        assert bench.view.tab == key
        bench.view.update()
        assert key in bench.view.panels
    assert (
        isinstance(bench.view.panels["token"], PANELS["token"])
        and bench.view.panels["token"].quantized[3, "down_proj"].layer == 3
    )
    bench.view.tab = "trade"  # by an address
    assert bench.view.tabs.active == 2
    drawn: list[str] = []
    for key, panel in bench.view.panels.items():
        panel.update = lambda key=key: drawn.append(key)
    bench.view.update()
    assert drawn == ["trade"]


def test_all_of_it_can_be_mirrored_in_a_notebook(bench: Bench) -> None:
    for index in range(len(TABS)):
        bench.view.tabs.active = index
        bench.view.update()
    assert Mirror(bench.view).spec()


def test_nothing_is_sent_while_nothing_changes(bench: Bench) -> None:
    look_inside(bench)
    mirror = Mirror(bench.view)
    mirror.spec()
    for _i in range(3):
        bench.view.update()
    assert mirror.drain() in ([], None) or not mirror.drain()


def test_a_knob_is_answered_within_a_tenth_of_a_second() -> None:
    """On the largest matrix of the default model; processor time, since others may be at work on this machine."""
    import torch

    rows, columns = 576, 1536
    small = matrix(rows=4, columns=16)
    fields = {name: getattr(small, name) for name in small.__struct_fields__}
    weight, inputs = 0.1 * torch.randn(rows, columns), torch.randn(64, columns)
    fields |= {
        "rows": rows, "columns": columns, "weight": weight.half().numpy().tobytes(), "input_rows": 64, "inputs": inputs.half().numpy().tobytes(),
    }  # fmt: skip
    bench = Bench()
    bench.give(started(), weights())
    bench.view.layer = 3
    bench.give(type(small)(**fields))
    for _i in range(len(COMPARED)):
        bench.view.update()
    took = []
    for bits in (2, 3, 5, 6, 7, 8, 4):
        begin = time.process_time()
        bench.matrices.bits.value = bits
        bench.view.update()
        took.append(1e3 * (time.process_time() - begin))
        assert bench.matrices.tried.how.bits == bits
    print(f"knob to picture: {sorted(took)[len(took) // 2]:.0f} ms")
    assert sorted(took)[len(took) // 2] < 100
