import threading
import time
from collections.abc import Callable

import pytest

from engine.config import EngineConfig
from engine.events.types import RequestFinished
from engine.messages import Events, Ready
from engine.request import SamplingParams
from explorer.session import LOOK_S, WATCH_FEW, WATCH_TOP, Session, config_from_environment
from tests.explorer.conftest import Clock, Desk
from tests.explorer.fake import FakeProcess


def test_it_starts_once_and_events_reach_the_store() -> None:
    before = set(threading.enumerate())
    session = Session(FakeProcess(auto=True, step_s=0.001))
    try:
        session.start()
        session.start()
        owner = session.join()
        session.submit("hello there", SamplingParams(max_tokens=3), owner)
        deadline = time.monotonic() + 20
        while session.store.last_step < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert session.status == "running"
        assert session.store.latest().requests["r0"].owner == owner
        assert sum(t.name == "engine-messages" for t in set(threading.enumerate()) - before) == 1
    finally:
        session.stop()


def test_a_record_that_contradicts_itself_is_told_and_begun_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = desk.session.join()
    desk.send(owner, max_tokens=3)
    desk.run()
    run = desk.store.run

    def refuse(events: object) -> None:
        raise ValueError("event about request 'nobody'")

    with monkeypatch.context() as m:
        m.setattr(desk.store, "append", refuse)
        desk.session._take(Events([], 0))
    (notice,) = desk.session.take_notices(owner)
    assert "nobody" in notice
    assert desk.store.run > run and len(desk.store) == 0
    assert desk.session.process.calls[-2:] == [("observe", False), ("observe", True)]


def test_a_refusal_reaches_the_one_who_asked(desk: Desk) -> None:
    first, second = desk.session.join(), desk.session.join()
    desk.send(second, prompt="x" * 4_000_000)
    assert desk.session.take_notices(first) == []
    (notice,) = desk.session.take_notices(second)
    assert "4,000,000 characters" in notice
    assert desk.session.take_notices(second) == []  # shown once


def test_two_viewers_share_one_batch(desk: Desk) -> None:
    first, second = desk.session.join(), desk.session.join()
    desk.send(first, max_tokens=8)
    desk.send(second, max_tokens=8)
    desk.run()
    assert {view.owner for view in desk.store.latest().live} == {first, second}


def test_whoever_leaves_has_the_requests_aborted_and_the_blocks_come_back(desk: Desk) -> None:
    leaver, stayer = desk.session.join(), desk.session.join()
    desk.send(leaver, count=2, max_tokens=50)
    (kept,) = desk.send(stayer, max_tokens=50)
    desk.run(3)
    before = desk.store.latest().num_used_blocks
    desk.session.leave(leaver)
    desk.session.leave(leaver)  # Panel may tell it twice
    desk.deliver()
    state = desk.store.latest()
    assert [view.request_id for view in state.live] == [kept]
    assert state.num_used_blocks == len(state.requests[kept].block_ids) < before
    assert [viewer.owner for viewer in desk.session.viewers] == [stayer]


def test_tokens_are_watched_only_while_somebody_is_here(desk: Desk) -> None:
    owners = [desk.session.join(), desk.session.join()]
    for owner in owners:
        desk.session.leave(owner)
    watched = [call for call in desk.process.calls if call[0] in ("watch", "unwatch")]
    assert watched == [("watch", "tokens"), ("unwatch", "tokens")]


def test_many_candidates_are_recorded_only_while_somebody_looks_at_them(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, make_clock: Callable[..., Clock]
) -> None:
    clock = make_clock("explorer.session", 100.0)
    asked: list[int] = []
    monkeypatch.setattr(desk.process, "watch", lambda _kind, top: asked.append(top))
    first, second = desk.session.join(), desk.session.join()
    desk.session.look_at_candidates(first)
    desk.session.look_at_candidates("nobody")
    clock.now += LOOK_S / 2
    desk.session.look_at_candidates(second)
    clock.now += LOOK_S * 0.75  # the first has not said it again, the second still looks
    desk.session._watch()
    assert asked == [WATCH_FEW, WATCH_TOP]
    clock.now += LOOK_S
    desk.session._watch()
    assert asked == [WATCH_FEW, WATCH_TOP, WATCH_FEW]
    desk.session.look_at_candidates(first)
    desk.session.leave(first)
    assert asked == [WATCH_FEW, WATCH_TOP, WATCH_FEW, WATCH_TOP, WATCH_FEW]


def test_one_stops_and_changes_only_ones_own_requests(desk: Desk) -> None:
    mine, other = desk.session.join(), desk.session.join()
    (request_id,) = desk.send(mine, max_tokens=50)
    desk.session.abort(request_id, other)
    desk.session.update_sampling(request_id, other, temperature=0.0)
    assert not [c for c in desk.process.calls if c[0] in ("abort", "update_sampling")]
    desk.session.update_sampling(request_id, mine, temperature=0.0)
    desk.session.abort(request_id, mine)
    desk.deliver()
    assert ("update_sampling", (request_id, {"temperature": 0.0})) in desk.process.calls
    assert desk.store.latest().requests[request_id].finish_reason == "abort"


def test_a_dead_engine_is_a_message_and_can_be_started_again(desk: Desk) -> None:
    owner = desk.session.join()
    desk.send(owner)
    desk.run(2)
    desk.process.die("the engine's process was ended by signal 9")
    desk.deliver()
    assert desk.session.status == "died" and "signal 9" in desk.session.message
    assert desk.send(owner) == []
    assert "Restart" in desk.session.take_notices(owner)[0]
    run = desk.store.run
    desk.session.restart()
    desk.deliver()
    assert desk.session.status == "running" and desk.store.run == run + 1
    desk.send(owner)
    desk.run()
    assert desk.store.last_step == 1


def test_what_the_process_cannot_take_is_told(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = desk.session.join()

    def refuse(*_args: object, **_more: object) -> str:
        raise ValueError("AddRequest cannot be sent: surrogates not allowed")

    monkeypatch.setattr(desk.process, "add_request", refuse)
    assert desk.send(owner, prompt="\ud800") == []
    assert desk.session.take_notices(owner) == ["AddRequest cannot be sent: surrogates not allowed"]


def test_pause_is_the_engines_own_and_for_everybody(desk: Desk) -> None:
    owner = desk.session.join()
    desk.session.pause(owner)
    desk.deliver()
    assert desk.session.status == "paused"
    desk.session.resume(owner)
    desk.deliver()
    assert desk.session.status == "running"


def test_the_environment_configures_the_engine(monkeypatch: pytest.MonkeyPatch, make_desk: Callable[..., Desk]) -> None:
    monkeypatch.setenv("CUTAWAY_MODEL", "/somewhere/model")
    monkeypatch.setenv("CUTAWAY_MAX_NUM_SEQS", "3")
    assert config_from_environment() == EngineConfig(model="/somewhere/model", max_num_seqs=3)
    monkeypatch.setenv("CUTAWAY_MAX_NUM_SEQS", "many")
    with pytest.raises(ValueError, match="CUTAWAY_MAX_NUM_SEQS must be a whole number, got 'many'"):
        config_from_environment()


def test_notices_are_bounded(desk: Desk) -> None:
    owner = desk.session.join()
    for i in range(1000):
        desk.session.notify(owner, str(i))
    assert desk.session.take_notices(owner)[-1] == "999"
    desk.session.notify("nobody", "lost")  # no such viewer: no error


def test_whoever_leaves_while_the_engine_loads_leaves_no_request_behind() -> None:
    session = Session(FakeProcess())
    session.process.start()
    session.status = "starting"  # nothing has been read of the engine yet
    owner, stayer = session.join(), session.join()
    assert session.submit("hello there", SamplingParams(max_tokens=50), owner) is not None
    session.leave(owner)
    assert session.submit("a click that came too late", SamplingParams(max_tokens=50), owner) is None
    kept = session.submit("hello again", SamplingParams(max_tokens=50), stayer)
    for message in session.process.poll(0):
        session._take(message)
    assert session.status == "running"
    assert [view.request_id for view in session.store.latest().live] == [kept]


def test_an_engine_that_dies_as_soon_as_it_is_ready_does_not_stop_the_reading(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.session.join()

    def gone(*_args: object, **_more: object) -> None:
        raise RuntimeError("no engine is running: start() or restart() it")

    for name in ("watch", "unwatch", "observe", "abort_owner"):
        monkeypatch.setattr(desk.process, name, gone)
    desk.process.die("the engine's process was ended by signal 9")
    desk.session._take(Ready(desk.store.latest().engine))  # type: ignore[arg-type]
    desk.session._take(
        Events([RequestFinished(step=0, time_ns=0, request_id="", reason="", message="", num_output_tokens=-1)], 0)
    )
    desk.deliver()
    assert desk.session.status == "died"
    for owner in [desk.session.join(), *(viewer.owner for viewer in desk.session.viewers)]:
        desk.session.leave(owner)
    assert desk.session.viewers == []
