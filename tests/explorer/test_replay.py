"""A recorded run in place of the engine: opened, labelled, left again; and what is wrong with a file is said."""

import base64
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.events.log import EventLog
from engine.events.types import RequestAdded
from engine.messages import Loading
from explorer.export.files import Files
from explorer.pages import PAGES
from explorer.replay import Replay
from explorer.runs import DEFAULT_RUN, SHIPPED
from explorer.shell import Shell
from tests.engine.events.simulate import simulate
from tests.explorer.conftest import Clock, Desk

MAX_SHIPPED = 300 * 1024


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_run_is_small_whole_and_made_by_the_default_model(name: str) -> None:
    run = SHIPPED[name]
    assert run.path.stat().st_size <= MAX_SHIPPED
    log = EventLog.load(run.path, check=True)
    assert log.started is not None and log.started.config["model"] == "smollm2-135m" and log.last_step > 30
    from engine.model.store import KNOWN

    assert log.started.model["sha256"] == KNOWN["smollm2-135m"].sha256
    assert {"cutaway", "torch", "python"} <= set(log.started.versions)


def test_shipped_runs_show_what_they_are_said_to_show() -> None:
    from engine.events.types import BlockEvicted, BlockShared, KnobChanged, PoolResized, RequestPreempted

    kinds = {name: {type(e) for e in EventLog.load(run.path)} for name, run in SHIPPED.items()}
    assert BlockShared in kinds["shared-prefix"]
    assert {RequestPreempted, BlockEvicted, KnobChanged, PoolResized} <= kinds["full-pool"]


@pytest.mark.parametrize("name", SHIPPED)
def test_every_page_shows_a_recorded_run_at_any_step(desk: Desk, name: str) -> None:
    shell = Shell(desk.session, f"?run={name}")
    assert shell.replay is not None and shell.store is shell.replay.store
    last = shell.store.last_step
    for slug in PAGES:
        shell.open(slug)
        assert shell.view is not None and shell.view.session is None
        for step in (0, 1, last // 2, last):
            shell.clock.goto(step, shell.store.first_step, last)
            shell.tick()
    assert "replayed" in shell.replay_bar.text.object and "Replayed" in shell.status.object
    assert not shell.engine.visible and shell.replay_bar.root.visible


def test_going_live_and_back_by_the_address(desk: Desk) -> None:
    desk.send(max_tokens=6)
    desk.run(5)
    shell = Shell(desk.session, "?run=full-pool&page=kv-cache")
    assert shell.clock.playing and shell.clock.step < 40 and shell.slug == "kv-cache"
    assert shell.address() == "?run=full-pool&page=kv-cache"
    shell.clock.goto(9, 0, 99)
    assert shell.url.search == "?run=full-pool&page=kv-cache&step=9"
    shell.look_at(None)
    assert shell.url.search == "?page=kv-cache" and shell.url.push and shell.store is desk.store
    assert shell.view is not None and shell.view.session is desk.session and shell.clock.live and shell.engine.visible
    shell.go("?run=full-pool&step=9")
    assert shell.replay is not None and (shell.clock.step, shell.clock.playing, shell.slug) == (9, False, "run")
    shell.go("")
    assert shell.replay is None and shell.clock.live
    shell.tick()


def test_one_browser_looks_at_a_run_while_another_is_live(desk: Desk) -> None:
    one, two = Shell(desk.session, "?run=full-pool"), Shell(desk.session)
    desk.send(two.clock.owner, max_tokens=6)
    desk.run(3)
    one.tick()
    two.tick()
    assert one.store.last_step != two.store.last_step == 3


def test_an_unknown_run_is_said_and_live_is_shown(desk: Desk) -> None:
    shell = Shell(desk.session, "?run=../../secret")
    shell.tick()
    assert (
        shell.replay is None
        and "no recorded run named" in shell.banner.text.object
        and "&#x27;../../secret" in shell.banner.text.object
    )


@pytest.mark.parametrize("why", ["fetching", "no engine"])
def test_a_recorded_run_shows_while_there_is_no_model(desk: Desk, why: str) -> None:
    desk.store.clear()
    desk.session.status = "starting" if why == "fetching" else "died"
    if why == "fetching":
        desk.session._take(Loading("fetching smollm2-135m", 0.25))
    shell = Shell(desk.session)
    assert shell.replay is not None and shell.replay.name == DEFAULT_RUN
    shell.tick()
    assert "Nothing below is being computed now" in shell.replay_bar.text.object
    desk.session.status = "running"
    shell.tick()
    assert "The engine is ready" in shell.replay_bar.text.object and shell.replay is not None  # nobody is pulled away
    shell.replay_bar.live.clicks += 1
    assert shell.replay is None


def test_a_model_that_only_loads_is_waited_for_live(desk: Desk) -> None:
    desk.store.clear()
    desk.session.status = "starting"
    desk.session._take(Loading("loading smollm2-135m"))
    assert Shell(desk.session).replay is None


def test_two_runs_are_compared_where_one_was_looked_at_before(desk: Desk, tmp_path: Path) -> None:
    shell = Shell(desk.session, "?run=full-pool")
    assert not shell.replay_bar.compare.visible  # nothing had run before
    shell.go("?run=shared-prefix")
    bar = shell.replay_bar
    assert bar.compare.visible and "More requests than the pool can hold" in bar.compare.label
    bar.compare.clicks += 1
    assert wait_for(lambda: bar._verifier is not None and bar._verifier.said()[1])
    shell.tick()
    text = bar.report.object
    assert (
        bar.report.visible
        and "First run: More requests" in text
        and "max_num_seqs: 6 → 4" in text
        and "only in the first run" in text
    )
    desk.send(max_tokens=5)
    desk.run(6)
    shell.look_at(None)
    shell.go("?run=full-pool")
    bar.compare.clicks += 1
    assert wait_for(lambda: bar._verifier is not None and bar._verifier.said()[1])
    assert "the engine&#x27;s run" not in bar.text.object and "First run: the engine's run" in bar._verifier.said()[0]  # type: ignore[union-attr]


def wait_for(done: Any, seconds: float = 60) -> bool:
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        time.sleep(0.01)
    return bool(done())


# -- files that are opened ----------------------------------------------------------------------------------------------------


def give(files: Files, name: str, data: bytes, piece: int = 1000) -> None:
    """As the browser sends a file."""
    for offset in range(0, max(1, len(data)), piece):
        part = data[offset : offset + piece]
        fields = {"name": name, "offset": offset, "data": base64.b64encode(part).decode(), "last": offset + piece >= len(data)}
        files.action = {"seq": files.action.get("seq", 0) + 1, "kind": "piece", **fields}


def saved(folder: Path, events: list[Any]) -> bytes:
    log = EventLog()
    log.extend(events)
    log.save(folder / "run.cutaway")
    return (folder / "run.cutaway").read_bytes()


def test_a_file_comes_in_piece_by_piece_and_leaves_nothing_behind(desk: Desk, tmp_path: Path) -> None:
    shell = Shell(desk.session)
    give(shell.take_out.files, "mine <b>.cutaway", saved(tmp_path, simulate(40)))
    assert shell.replay is not None and shell.replay.store.last_step == 40 and shell.replay.name is None
    assert shell.take_out.files._folder is None
    shell.tick()
    assert "mine &lt;b&gt;.cutaway" in shell.replay_bar.text.object
    assert "run=" not in shell.url.search  # nobody else could open it
    assert shell.replay.problem == ""


@pytest.mark.parametrize("what", ["script", "cut", "newer", "empty", "no steps"])
def test_a_file_that_is_no_run_is_said_and_nothing_changes(desk: Desk, tmp_path: Path, what: str) -> None:
    good = saved(tmp_path, simulate(10))
    data = {
        "script": b"<script>alert(1)</script>" * 99,
        "cut": good[:-20],
        "newer": good[:8] + b"\x09" + good[9:],
        "empty": b"",
        "no steps": saved(tmp_path, simulate(0)),
    }[what]
    shell = Shell(desk.session)
    give(shell.take_out.files, "<img src=x>.cutaway", data)
    assert shell.replay is None and "&lt;img src=x&gt;.cutaway: " in shell.banner.text.object
    assert (
        "<script>" not in shell.banner.text.object
        and str(tmp_path.parent) not in shell.banner.text.object
        and "cutaway-run-" not in shell.banner.text.object
    )


def test_a_notice_of_a_refused_file_goes_when_another_one_is_opened(desk: Desk, tmp_path: Path) -> None:
    shell = Shell(desk.session)
    give(shell.take_out.files, "bad.cutaway", b"junk")
    assert "bad.cutaway: not a recorded run" in shell.banner.text.object
    give(shell.take_out.files, "good.cutaway", saved(tmp_path, simulate(40)))
    assert shell.replay is not None and "bad.cutaway" not in shell.banner.text.object and not shell.banner.root.visible


def test_a_file_that_another_one_takes_the_place_of_is_said(desk: Desk, tmp_path: Path) -> None:
    shell = Shell(desk.session)
    first = {"name": "first.cutaway", "offset": 0, "data": base64.b64encode(bytes(9)).decode(), "last": False}
    shell.take_out.files.action = {"seq": 1, "kind": "piece", **first}
    give(shell.take_out.files, "second.cutaway", saved(tmp_path, simulate(40)))
    assert shell.replay is not None and shell.replay.title == "second.cutaway"
    assert "first.cutaway was not opened: second.cutaway was chosen meanwhile." in shell.banner.text.object


def test_a_run_does_not_play_on_before_the_page_is_drawn(desk: Desk, make_clock: Callable[..., Clock]) -> None:
    shell = Shell(desk.session, "?run=shared-prefix")
    clock = make_clock("explorer.shell", time.monotonic() + 5.0)
    begun = shell.clock.step
    shell.tick()
    assert shell.clock.step <= begun + 3  # five seconds while the browser loaded are not played at once
    begun = shell.clock.step

    class Document:
        def add_next_tick_callback(self, callback: Any) -> None:
            pass

    shell.document = Document()
    for _tick in range(20):
        clock.now += 0.1
        shell.tick()
    assert shell.clock.step == begun and shell.clock.playing
    for part in (shell.view.answers.cards, shell.view.gauges):  # type: ignore[union-attr]
        part.action = {"seq": 1, "kind": "ready"}
    for _tick in range(20):
        clock.now += 0.1
        shell.tick()
    assert 8 <= shell.clock.step - begun <= 12


def test_a_page_that_is_never_drawn_is_not_waited_for_without_end(desk: Desk, make_clock: Callable[..., Clock]) -> None:
    shell = Shell(desk.session, "?run=shared-prefix")
    clock = make_clock("explorer.shell", time.monotonic())
    shell.document = type("Document", (), {"add_next_tick_callback": lambda self, callback: None})()
    begun = shell.clock.step
    for _tick in range(90):
        clock.now += 0.1
        shell.tick()
    assert shell.clock.step > begun + 5


def test_pieces_out_of_order_and_junk_are_ignored(desk: Desk) -> None:
    shell = Shell(desk.session)
    files = shell.take_out.files
    for seq, fields in enumerate(
        (
            {"name": "x", "offset": 5, "data": "", "last": True},
            {"name": "x", "offset": 0, "data": "no base64!", "last": True},
            {"name": 7, "offset": 0, "data": "", "last": True},
            {"name": "x", "offset": -1, "data": "AAAA", "last": True},
            {"name": "x", "offset": 0, "data": "A" * (4 * files.piece), "last": True},
        ),
        1,
    ):
        files.action = {"seq": seq, "kind": "piece", **fields}
    assert shell.replay is None and files._folder is None
    files.limit = 100
    give(files, "large", bytes(1000), piece=90)
    assert files._size <= 100 and shell.replay is None


def test_a_run_whose_events_are_damaged_is_left_with_a_message(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames and checksums are right; what is wrong shows when it is read."""
    data = saved(tmp_path, simulate(40))
    monkeypatch.setattr(Replay, "_check", lambda self: None)
    shell = Shell(desk.session)
    give(shell.take_out.files, "run", data)
    assert shell.replay is not None
    replay, sealed = shell.replay, shell.replay.store.log._sealed
    sealed[0] = sealed[0]._replace(chunk=sealed[0].chunk._replace(data=b"junk"))
    replay.store.log._decoded.clear()
    replay.store._states.clear()
    shell.clock.goto(20, 0, 40)
    assert shell.replay is None and "cannot be read on" in shell.banner.text.object


@pytest.mark.parametrize("page", ["sampling", "run"])
def test_a_run_that_a_view_stumbles_over_is_left_with_a_message(
    desk: Desk, tmp_path: Path, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Something that opening does not look for: the page is built for it, or opened later."""
    monkeypatch.setattr("explorer.store.check_sampling", lambda _requests: None)
    monkeypatch.setattr(Replay, "_check", lambda self: None)
    events = simulate(40)
    at = next(i for i, e in enumerate(events) if isinstance(e, RequestAdded))
    fields = {f: getattr(events[at], f) for f in events[at].__struct_fields__}
    events[at] = RequestAdded(**{**fields, "sampling": {**fields["sampling"], "beam_width": [1]}})
    data = saved(tmp_path, events)
    shell = Shell(desk.session)
    shell.open(page)
    give(shell.take_out.files, "run", data)
    shell.open("sampling")
    assert shell.replay is None and "cannot be read on" in shell.banner.text.object
    shell.tick()
    assert shell.view is not None


def test_a_small_file_of_huge_events_is_refused(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = saved(tmp_path, simulate(40))
    monkeypatch.setattr("explorer.replay.MAX_RAW", 1000)
    monkeypatch.setattr("explorer.replay.MAX_RAW_AN_EVENT", 1)
    shell = Shell(desk.session)
    give(shell.take_out.files, "bomb", data)
    assert shell.replay is None and "can be shown here" in shell.banner.text.object


def test_a_background_check_finds_what_opening_does_not(desk: Desk, tmp_path: Path) -> None:
    saved(tmp_path, simulate(40))
    replay = Replay.of_file("run", tmp_path / "run.cutaway")
    sealed = replay.store.log._sealed
    sealed[0] = sealed[0]._replace(chunk=sealed[0].chunk._replace(data=b"junk"))
    replay._check()
    assert "contradicts itself" in replay.problem


def test_a_long_run_is_taken_in_around_the_shown_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bars and states as when all of it is taken in, wherever one goes."""
    from explorer.base import Clock
    from explorer.run.view import RunView
    from explorer.store import EventStore

    store = EventStore.load(SHIPPED["full-pool"].path)
    whole = RunView(store, None, Clock(live=False))
    monkeypatch.setattr("explorer.base.LONG_RUN", 50)
    for name, steps in (("BEFORE", 12), ("AFTER", 9), ("DRAWN", 4)):
        monkeypatch.setattr(f"explorer.base.STEPS_{name}", steps)
    clock = Clock(live=False)
    view = RunView(store, None, clock)
    for step in (5, 70, 71, 137, 20, 64, 0):
        clock.goto(step, store.first_step, store.last_step)
        view.update()
        near = range(max(1, step - 3), min(step + 1, store.last_step) + 1)
        bars = {(b.request_id, b.step, b.phase, b.num_tokens) for b in view.rows.steps_between(near.start, near.stop - 1)}
        want = {(b.request_id, b.step, b.phase, b.num_tokens) for b in whole.rows.steps_between(near.start, near.stop - 1)}
        assert bars == want, step
        live = {v.request_id for v in store.at(step).live}
        assert live <= set(view.rows.requests)
