"""The page's first two tabs in front of the real engine with a tiny model: loads, scenes, two schedulers, time and selection."""

import time
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

from explorer.base import Clock
from explorer.batching.load_settings import Settings
from explorer.batching.scenes import SCENES
from explorer.batching.view import BatchingView
from explorer.pace import Pace
from explorer.session import Session
from explorer.sources.inkernel import EngineThread
from explorer.store import EventStore
from tests.engine.engines import tiny_engine
from tests.explorer.batching.made import Recorded

SMALL = Settings(arrivals="at once", num_requests=10, prompt_tokens=8, output_tokens=6, seed=2)


@pytest.fixture(autouse=True)
def measures_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from explorer.batching.now import MeasuresPace

    monkeypatch.setattr(Pace, "seconds", 0.0)
    monkeypatch.setattr(MeasuresPace, "seconds", 0.0)


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session(EngineThread(tiny_engine(max_model_len=96, max_num_seqs=4, num_kv_blocks=128)))
    made.start()
    try:
        yield made
    finally:
        made.stop()


def opened(session: Session, **params: Any) -> BatchingView:
    view = BatchingView(session.store, session, Clock(owner=session.join()), **params)
    until(view, lambda: session.store.started is not None)
    return view


def until(view: BatchingView, there: Callable[[], Any], seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)
        view.update()
    view.update()


def run_load(view: BatchingView, settings: Settings = SMALL) -> str:
    name = view.panels["now"].load.start(settings)
    until(view, lambda: name in view.rows.loads and view.rows.loads[name].over and view.session.loads.of(view.clock.owner).over)
    return str(name)


def test_a_load_is_started_watched_and_measured(session: Session) -> None:
    view = opened(session)
    now = view.panels["now"]
    assert not now.full.visible and now.none.visible and now.canvas.steps == b""
    name = run_load(view)
    assert now.canvas.steps and now.full.visible and not now.none.visible
    assert now.scope.value == name and "10 finished" in now.load.state.object
    assert "10 requests: 10 complete" in now.line.object and "Output" in now.tiles.object and "TTFT" in now.table.object
    assert sum(now.gaps.source.data["count"]) == sum(len(r.token_times_s) - 1 for r in view.rows.records(name) if r.token_times_s)
    view.ttft_ms = 1
    view.update()
    assert "0.0 % kept the limits" in now.tiles.object


def test_a_tab_that_is_opened_later_is_drawn_before_it_comes_to_the_screen(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = opened(session)
    drawn: list[tuple[str, bool]] = []
    for where in ("whatif:WhatIfPanel", "stall:StallPanel"):
        module, _, name = where.partition(":")
        kind = getattr(import_module(f"explorer.batching.{module}"), name)
        real = kind.update

        def update(panel: Any, real: Any = real, tab: str = module) -> None:
            drawn.append((tab, bool(len(view.slots[tab]))))
            real(panel)

        monkeypatch.setattr(kind, "update", update)
    for tab in ("whatif", "stall"):
        view.tab = tab
        view.update()
    assert drawn == [("whatif", False), ("whatif", True), ("stall", False), ("stall", True)]


def test_the_arrival_rate_is_moved_while_it_runs(session: Session) -> None:
    view = opened(session)
    load = view.panels["now"].load
    load.start(SMALL.changed(arrivals="constant", rate=0.25, num_requests=6))
    owner = view.clock.owner
    until(view, lambda: session.loads.of(owner).sent == 1)  # type: ignore[union-attr]
    assert not load.stop_button.disabled and load.start_button.disabled
    load.form.rate.value = 64.0
    until(view, lambda: session.loads.of(owner).over)  # type: ignore[union-attr]
    state = session.loads.of(owner)
    assert state is not None and state.rate == 64.0 and state.finished == 6 and state.seconds < 20
    assert not load.start_button.disabled and load.stop_button.disabled


def test_a_load_that_cannot_be_says_why(session: Session) -> None:
    view = opened(session)
    load = view.panels["now"].load
    load.form.num_requests.value = 10**6
    assert load.start() is None
    assert "at most 5,000" in session.take_notices(view.clock.owner)[0]


def test_a_scene_sets_its_knobs_sends_its_load_and_says_what_to_see(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setitem(SCENES, "static", replace(SCENES["static"], load=SMALL))
    view = opened(session)
    now = view.panels["now"]
    now._scene_clicked("static")
    assert "Setting the knobs" in now.said.object
    until(view, lambda: view.rows.loads and next(iter(view.rows.loads.values())).over)
    assert "dotted is padding" in now.said.object and session.store.latest().knobs["batching"] == "static"
    assert "static" in now.now.object and next(iter(view.rows.loads.values())).knobs["max_num_seqs"] == 8
    assert view.measures("load1").steps.padding_share > 0  # type: ignore[union-attr]
    assert now.restore.visible
    now._restore()
    until(view, lambda: session.store.latest().knobs["batching"] == "continuous")
    assert session.store.latest().knobs["max_num_seqs"] == 4 and not now.restore.visible


@pytest.mark.parametrize("key", SCENES)
def test_every_scenes_knobs_are_taken_by_the_engine(session: Session, key: str) -> None:
    view = opened(session)
    session.reconfigure(view.clock.owner, **SCENES[key].knobs)
    until(view, lambda: all(session.store.latest().knobs.get(n) == v for n, v in SCENES[key].knobs.items()))
    assert not session.take_notices(view.clock.owner)


def test_time_and_selection_are_shared(session: Session) -> None:
    view = opened(session)
    name = run_load(view)
    now = view.panels["now"]
    middle = view.rows.steps[len(view.rows.steps) // 2].step
    now.canvas.action = {"seq": 1, "kind": "goto", "step": middle}
    view.update()
    assert now.canvas.at == middle and not now.canvas.live and f"Step {middle}:" in now.now.object
    assert view.measures(name, middle).num_output_tokens < view.measures(name).num_output_tokens
    number = view.rows.number_of(f"{name}-3")
    now.canvas.action = {"seq": 2, "kind": "select", "request": number}
    assert view.clock.request_id == f"{name}-3" and now.canvas.selected == number
    now.canvas.action = {"seq": 3, "kind": "select", "request": -1}
    assert view.clock.request_id is None and now.canvas.selected == -1
    view.axis = "time"
    assert now.canvas.axis == "time"
    view.clock.follow()
    view.update()
    assert now.canvas.live


def test_the_same_requests_under_two_schedulers(session: Session) -> None:
    view = opened(session, tab="compare")
    panel = view.panels["compare"]
    panel.load.fill(SMALL.changed(num_requests=12))
    panel.forms["A"].batch.value = panel.forms["B"].batch.value = 3
    before = session.store.latest().knobs
    panel._run()
    view.tab = "now"  # it goes on behind another tab
    until(view, lambda: not panel.stage.busy)
    view.tab = "compare"
    view.update()
    assert panel.stage.said == ("", "") and set(view.rows.loads) == {f"{panel.stage.name}A", f"{panel.stage.name}B"}
    a, b = (view.rows.loads[f"{panel.stage.name}{letter}"] for letter in "AB")
    assert (a.knobs["batching"], b.knobs["batching"]) == ("static", "continuous") and a.over and b.over
    asked = [
        sorted((r.request_id.rpartition("-")[2], r.num_prompt_tokens, r.num_output_tokens) for r in view.rows.records(run.name))
        for run in (a, b)
    ]
    assert asked[0] == asked[1] and len(asked[0]) == 12
    until(view, lambda: all(session.store.latest().knobs[n] == before[n] for n in ("batching", "max_num_seqs")))
    assert (panel.choice["A"].value, panel.choice["B"].value) == (a.name, b.name)
    assert "The same requests took" in panel.verdict.object and "Output tokens/s" in panel.table.object and panel.full.visible
    assert panel.sides["A"].extent[:2] == panel.sides["B"].extent[:2] and panel.sides["A"].steps != panel.sides["B"].steps
    assert view.measures(a.name).steps.padding_share > 0 == view.measures(b.name).steps.padding_share  # type: ignore[union-attr]
    panel.sides["A"].action = {"seq": 1, "kind": "select", "request": view.rows.number_of(f"{a.name}-5")}
    assert panel.sides["B"].selected == view.rows.number_of(f"{b.name}-5")
    panel.sides["A"].axis = "steps"
    assert panel.sides["B"].axis == "steps"


def test_stopping_a_comparison_puts_the_knobs_back(session: Session) -> None:
    view = opened(session, tab="compare")
    panel = view.panels["compare"]
    panel.load.fill(SMALL.changed(num_requests=200, arrivals="poisson", rate=2.0))
    panel._run()
    until(view, lambda: session.loads.of(view.clock.owner) is not None and session.loads.of(view.clock.owner).sent >= 1)  # type: ignore[union-attr]
    panel.stage.stop()
    until(view, lambda: session.store.latest().knobs["batching"] == "continuous" and session.loads.of(view.clock.owner).over)  # type: ignore[union-attr]
    assert "Stopped" in panel.said.object and not panel.start.disabled


def test_a_saved_run_of_two_loads_is_compared_without_an_engine() -> None:
    run = Recorded(max_num_seqs=2)
    run.drive("load5A", num_requests=6)
    run.engine.reconfigure(max_num_seqs=4)
    run.drive("load5B", num_requests=6)
    store: EventStore = run.store
    store.replayed = True
    view = BatchingView(store, None, Clock(step=store.last_step, live=False), tab="compare")
    view.update()
    panel = view.panels["compare"]
    assert (panel.choice["A"].value, panel.choice["B"].value) == ("load5A", "load5B")
    assert "The same requests took" in panel.verdict.object
    view.clock.goto(view.rows.loads["load5A"].last_step - 1, 0, store.last_step)
    view.update()
    assert panel.choice["B"].value == "" and panel.table.object == "" and panel.full.visible
    view.tab = "now"
    view.update()
    assert view.panels["now"].canvas.steps and view.panels["now"].stage is None


def test_every_stop_of_the_pages_knobs_is_taken_by_the_engine(session: Session) -> None:
    from engine.config import DRAINING_KNOBS
    from explorer.knobs import KNOBS

    view = opened(session)
    owner = view.clock.owner
    session.reconfigure(owner, preemption_mode="swap")
    for name in view.live_knobs:
        if name in DRAINING_KNOBS:
            continue  # each rebuilds the pool; the pool's own tests have them
        knob = KNOBS[name]
        for value in (*knob.options, *(choice for _label, choice in knob.choices)) or (False, True):
            session.reconfigure(owner, **{name: value})
            until(view, lambda name=name, value=value: session.store.latest().knobs.get(name) == value)  # type: ignore[misc]
    assert not session.take_notices(owner)
