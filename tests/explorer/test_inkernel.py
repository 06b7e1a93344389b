"""An engine that its maker and the views' thread use in turns: nothing is lost, nothing is answered to the wrong side."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine import Engine, SamplingParams
from explorer.session import Session
from explorer.sources.inkernel import EngineThread
from explorer.sources.opening import open_source
from tests.engine.engines import tiny_engine

LONG = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)


def until(true: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = tiny_engine()
    yield made
    made.close()


@pytest.fixture
def session(engine: Engine) -> Session:
    found = open_source(engine).session
    assert found is not None
    until(lambda: found.status == "running")
    return found


def finished(session: Session) -> dict[str, str]:
    requests = session.store.latest().requests.values()
    return {r.request_id: r.finish_reason or "" for r in requests if r.status == "finished"}


def test_the_calls_give_what_they_give_without_a_thread(engine: Engine, session: Session) -> None:
    alone = tiny_engine()
    owner = session.join()
    for _ in range(3):
        session.submit("somebody else asks", LONG, owner)
    outputs = engine.generate(["hello", "again"], LONG)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in alone.generate(["hello", "again"], LONG)]
    pieces = []
    for piece in engine.stream("a stream", LONG):
        pieces.append(piece)
        time.sleep(0.005)  # the thread steps on meanwhile
    assert "".join(pieces) == alone.generate("a stream", LONG)[0].text
    until(lambda: len(finished(session)) == 6)
    assert set(finished(session).values()) == {"length"}
    assert session.process.unfinished == [] and not engine.has_unfinished()
    engine.check_integrity()


def test_steps_by_hand_give_the_makers_outputs_only(engine: Engine, session: Session) -> None:
    owner = session.join()
    session.submit("from a view", LONG, owner)
    mine = engine.add_request("from the cell", LONG)
    got: list[Any] = []
    while engine.has_unfinished():
        got += engine.step()
    assert {o.request_id for o in got} == {mine}
    assert sum(len(o.new_token_ids) for o in got) == 60 and got[-1].request.finish_reason == "length"
    until(lambda: len(finished(session)) == 2 and not session.process.unfinished)


def test_a_request_of_the_maker_runs_without_a_step(engine: Engine, session: Session) -> None:
    mine = engine.add_request("it runs by itself", LONG)
    until(lambda: mine in finished(session))
    assert [o.request_id for o in engine.take_outputs()].count(mine) > 0


def test_a_paused_engine_is_stepped_by_hand_only(engine: Engine, session: Session) -> None:
    session.pause(session.join())
    until(lambda: session.status == "paused")
    engine.add_request("x", LONG)
    step = engine.recorder.step
    time.sleep(0.2)
    assert engine.recorder.step == step
    engine.step()
    assert engine.recorder.step == step + 1
    until(lambda: session.store.last_step == step + 1)
    session.resume(session.viewers[0].owner)
    until(lambda: len(finished(session)) == 1)


def test_many_threads_at_once_leave_the_engine_whole(engine: Engine, session: Session) -> None:
    wrong: list[BaseException] = []

    def ask(i: int) -> None:
        try:
            if i % 3 == 0:
                assert len(engine.generate(f"thread {i}", LONG)[0].token_ids) == 60
            elif i % 3 == 1:
                assert len("".join(engine.stream(f"thread {i}", LONG))) > 0
            else:
                engine.abort(engine.add_request(f"thread {i}", LONG))
                engine.reconfigure(max_num_seqs=1 + i % 4)
            engine.check_integrity()
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(9)]
    for thread in threads:
        thread.start()
    owner = session.join()
    for _ in range(5):
        session.submit("from a view", LONG, owner)
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "somebody never got a turn"
    assert wrong == []
    until(lambda: not session.process.unfinished)
    engine.check_integrity()


def test_a_recording_begins_and_ends_between_steps(engine: Engine, session: Session) -> None:
    owner = session.join()
    for _ in range(4):
        session.submit("from a view", LONG, owner)
    for _ in range(5):
        with engine.record() as log:
            engine.generate("recorded", SamplingParams(max_tokens=3, ignore_eos=True))
        state, _index = log.state_at(log.last_step)  # it contradicts itself nowhere
        assert state.num_blocks == 64


def test_closing_says_so_and_ends_the_thread(engine: Engine, session: Session) -> None:
    owner = session.join()
    session.submit("never finished", SamplingParams(max_tokens=100, ignore_eos=True), owner)
    until(lambda: session.store.last_step > 2)
    engine.close()
    until(lambda: session.status == "died")
    assert session.message == "The engine was closed. What it recorded is still here."
    assert type(engine) is Engine and not session.process.alive
    with pytest.raises(ValueError, match="the engine was closed: make a new one"):
        open_source(engine)
    assert finished(session) == {"ask-0": "abort"}


def test_stopping_gives_the_engine_back(engine: Engine, session: Session) -> None:
    owner = session.join()
    session.submit("ends with its view", LONG, owner)
    mine = engine.add_request("stays", LONG)
    session.stop()
    assert type(engine) is Engine
    engine.check_integrity()
    got: list[Any] = []
    while engine.has_unfinished():
        got += engine.step()
    assert mine in {o.request_id for o in got if o.request is not None}


def test_all_views_of_an_engine_share_one_session(engine: Engine, session: Session) -> None:
    assert open_source(engine).session is session
    with pytest.raises(ValueError, match="no thread steps yet"):
        EngineThread(engine)


def test_an_engine_that_breaks_is_told(engine: Engine, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("blocks do not add up")

    monkeypatch.setattr(engine.scheduler, "schedule", broken)
    session.submit("x", LONG, session.join())
    until(lambda: session.status == "died")
    assert session.message == "The engine broke: RuntimeError: blocks do not add up. What it recorded is still here."


@pytest.mark.parametrize("source", [None, 3, [], object()])
def test_what_no_view_can_be_made_of_is_refused(source: Any) -> None:
    with pytest.raises(ValueError, match="a view is made of an Engine"):
        open_source(source)
