"""The page's view on a stand-in engine: what it asks for, what it shows at which step, and what it says where nothing is known."""

import json
import time
from typing import Any

import pytest

from engine.messages import Events
from explorer.base import Clock
from explorer.roofline.scenes import SCENES
from explorer.roofline.view import RooflineView
from explorer.store import EventStore
from tests.explorer.roofline.made import MODEL, memory, roofs, snapshot, started, step
from tests.explorer.roofline.test_planner import LLAMA3


def opened(desk: Any, *events: Any, **params: Any) -> RooflineView:
    desk.session.status = "running"
    desk.session.join()
    view = RooflineView(desk.store, desk.session, Clock(owner="guest-1"), **params)
    tell(desk, view, *events)
    return view


def tell(desk: Any, view: RooflineView, *events: Any) -> None:
    desk.session._take(Events(list(events)))
    view.update()


def studies(desk: Any) -> list[Any]:
    return [what for name, what in desk.process.calls if name == "study"]


def recorded(*events: Any) -> RooflineView:
    store = EventStore()
    store.append([started(), snapshot(), *events])
    return RooflineView(store)


def test_kept_roofs_are_asked_for_once_and_measured_when_pressed(desk: Any) -> None:
    view = opened(desk)
    assert studies(desk) == [("measure_roofs", {"again": False, "only_kept": True})]
    assert "Press Measure this device" in view.device.object and not view.measure.disabled
    view.measure.clicks += 1
    view.update()
    assert studies(desk)[1] == ("measure_roofs", {"again": False, "only_kept": False})
    assert "Measuring" in view.device.object and view.measure.disabled
    tell(desk, view, roofs())
    assert "Measuring" not in view.device.object and view.measure.label == "Measure again" and not view.measure.disabled
    assert "10.0 FLOP/B" in view.device.object and "2 threads" in view.device.object
    view.measure.clicks += 1
    assert studies(desk)[2] == ("measure_roofs", {"again": True, "only_kept": False})
    assert len(studies(desk)) == 3


def test_without_an_engine_nothing_is_asked_for(desk: Any) -> None:
    view = opened(desk)
    desk.session.status = "died"
    view.update()
    assert view.measure.disabled and "No engine has started" in view.device.object


def test_the_points_follow_the_step_on_the_screen() -> None:
    view = recorded(step(1, "prefill", tokens=32, flops=9e10), step(2, "decode"), roofs(2), step(3, "decode", "decode"))
    panel = view.panels["points"]
    assert "Step 3" in panel.now.object and len(panel.figure.steps["decode"].data["x"]) == 2
    assert "memory: moving the bytes takes 20.0 times" in panel.now.object and "40 % of the roof" in panel.now.object
    view.clock.goto(1, 1, 3)
    view.update()
    assert "Step 1" in panel.now.object and panel.figure.steps["decode"].data["x"] == []
    assert panel.figure.here.data == {"x": [225.0], "y": [9e11]}
    assert "less than the roofs allow" in panel.now.object  # 0.9 s of arithmetic in 0.1 s


def test_a_click_goes_to_the_step() -> None:
    view = recorded(step(1, "prefill", flops=9e10), step(2, "decode"))
    panel = view.panels["points"]
    panel._tapped(type("Tap", (), {"x": 224.0, "y": 9.1e11}))
    assert (view.clock.live, view.clock.step) == (False, 1)
    panel._tapped(type("Tap", (), {"x": None, "y": None}))
    assert view.clock.step == 1


def test_the_knobs_move_the_modelled_points_and_not_the_measured() -> None:
    view = recorded(step(1, "decode"), roofs(1))
    panel = view.panels["points"]
    decode = panel.figure.modelled["decode"]
    before = dict(decode.data)
    assert before["roofs"] == ["a processor", "H100 SXM"] and panel.figure.steps["decode"].data["x"] == [0.5]
    seen = [before["x"]]
    for name, value in (("batch", 64), ("context", 4096), ("weight_bits", 4), ("kv_heads", 9), ("kv_dtype", "int8")):
        setattr(view, name, value)
        view.update()
        assert decode.data["x"] not in seen, name
        seen.append(decode.data["x"])
    view.gpu = "l4"
    view.update()
    assert decode.data["roofs"] == ["a processor", "L4"] and decode.data["x"] == seen[-1]
    assert panel.figure.steps["decode"].data["x"] == [0.5] and "GQA" not in panel.what.object and "MHA" in panel.what.object


def test_what_this_device_has_no_rate_for_is_said_once_and_the_gpu_stays() -> None:
    view = recorded(step(1, "decode"), roofs(1, peak={"float32": 1e11}))
    view.weight_bits = 16
    view.update()
    panel = view.panels["points"]
    assert panel.table.object.count("no rate for &#x27;bfloat16&#x27;") == 1 and "H100 SXM, decode" in panel.table.object
    view.kv_heads = 2
    view.update()
    assert panel.table.object.count("divide the 9 query heads") == 1


def test_a_run_that_says_too_little_of_its_model_keeps_its_points(desk: Any) -> None:
    desk.send(max_tokens=3)
    desk.run(3)
    view = opened(desk)
    assert view.panels["points"].figure.steps["decode"].data["x"] and "facts lack" in view.panels["points"].table.object
    view.tab = "planner"
    view.update()
    assert "acts lack" in view.panels["planner"].said.object
    view.tab = "rules"
    view.update()
    assert "lack" in view.panels["rules"].body.object


def test_scenes_send_real_requests(desk: Any) -> None:
    view = opened(desk)
    view._scene_clicked("together")
    view.update()
    desk.deliver()
    desk.run(1)
    view.update()
    assert len(desk.process.running) == 8 == len(SCENES["together"].asks) and "weights are read once" in view.said.object


def test_the_planner_takes_a_pasted_config_and_refuses_another_with_one_message() -> None:
    view = recorded(step(1, "decode"))
    view.tab = "planner"
    view.update()
    panel = view.panels["planner"]
    assert "smollm2-135m fits" in panel.plan.object and not panel.back.visible
    panel.config.value = json.dumps(LLAMA3)
    view.update()
    assert "pasted config.json (llama) fits" in panel.plan.object and "15.0 GiB" in panel.plan.object and panel.back.visible
    assert "16 (GQA)" not in panel.plan.object and 32 in panel.kv_heads.options.values()
    panel.config.value = '{"model_type": "gpt2"}'
    view.update()
    assert panel.said.object.count("model_type must be one of") == 1 and not panel.plan.object and "no plan" in panel.times.object
    panel.back.clicks += 1
    view.update()
    assert "smollm2-135m fits" in panel.plan.object and not panel.said.object and not panel.back.visible


def test_heads_that_gpus_cannot_share_are_said() -> None:
    view = recorded(step(1, "decode"))
    view.param.update(tab="planner", tp=4)
    view.update()
    assert "divide the 9 query heads, got 4" in view.panels["planner"].said.object and not view.panels["planner"].plan.object


def test_the_engine_is_looked_into(desk: Any) -> None:
    view = opened(desk, tab="planner")
    panel = view.panels["planner"]
    panel.look.clicks += 1
    view.update()
    assert studies(desk)[-1] == ("measure_memory", {}) and "Looking" in panel.check.object and panel.look.disabled
    tell(desk, view, started(), snapshot(), memory())
    assert "1.000" in panel.check.object and "621 MiB" in panel.check.object and not panel.look.disabled


def test_a_recorded_run_without_measurements_says_so() -> None:
    view = recorded()
    assert "holds no measurement" in view.device.object and "step of the recorded run" in view.panels["points"].now.object
    view.tab = "planner"
    view.update()
    assert (
        "This run holds no such measurement" in view.panels["planner"].check.object
        and "360 MiB allocated" in view.panels["planner"].check.object
    )


def test_the_weights_of_the_shown_step_are_what_as_they_run_means() -> None:
    from engine.events.types import KnobChanged

    changed = KnobChanged(step=1, time_ns=1, name="quantization", old=None, new="int4")
    view = recorded(step(1, "decode"), changed, step(2, "decode"))
    assert view.method == "int4" and "4.25 bits" in view.panels["points"].what.object
    view.clock.goto(0, 0, 2)
    view.update()
    assert view.method is None and "32 bits" in view.panels["points"].what.object


def test_address_parameters_have_only_values_that_are_there() -> None:
    for name, value in (
        ("gpu", "abacus"),
        ("batch", 3),
        ("context", 5),
        ("weight_bits", 5),
        ("tp", 3),
        ("kv_heads", -1),
        ("tab", "x"),
    ):
        with pytest.raises(ValueError):
            setattr(recorded(), name, value)


def test_the_model_of_these_tests_is_the_default_one() -> None:
    assert MODEL["num_parameters"] == 134_515_008


def test_a_what_if_move_costs_little_and_touches_no_measured_point() -> None:
    """Of the 100 ms from slider to paint, the page's own part: processor time, so that a busy machine does not count."""
    view = recorded(*[step(n, "decode", "decode") for n in range(1, 401)], roofs(400))
    sources = view.panels["points"].figure.steps.values()
    changed: list[Any] = []
    for source in sources:
        source.on_change("data", lambda attr, old, new: changed.append(1))
    times = []
    for batch in (2, 4, 8, 16, 32, 64, 128):
        start = time.process_time()
        view.batch = batch
        view.update()
        times.append(time.process_time() - start)
    assert not changed and sorted(times)[3] < 0.05, times
