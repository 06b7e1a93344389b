"""The log: any step rebuilt, also after its beginning was dropped, from memory and from a file; readers with cursors."""

import random
import threading
from pathlib import Path

import pytest

from engine.events import log as log_module
from engine.events.codec import Chunk, CodecError, encode_chunks
from engine.events.log import EventLog
from engine.events.runfile import write_file
from engine.events.state import State
from engine.events.types import EngineStarted, Event, StepDone
from tests.engine.events.simulate import Simulation, simulate


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "SEAL_EVENTS", 64)


def replayed(events: list[Event], step: int) -> State:
    return State().apply_all(e for e in events if e.step <= step)


def frames(events: list[Event]) -> list[tuple[str, Chunk]]:
    return [("E", chunk) for chunk in encode_chunks(events)]


def same(a: State, b: State) -> bool:
    return a.snapshot(finished=True) == b.snapshot(finished=True) and a.engine == b.engine


def test_any_step_is_what_a_full_replay_gives() -> None:
    events = simulate(200, seed=1)
    log = EventLog()
    log.extend(events)
    assert (log.first_step, log.last_step, len(log), log.dropped) == (0, 200, len(events), 0)
    steps = list(range(201))
    random.Random(0).shuffle(steps)
    for step in steps:
        assert same(log.at(step), replayed(events, step)), step


def test_any_kept_step_after_the_beginning_was_dropped() -> None:
    events = simulate(200, seed=2)
    log = EventLog(capacity=500)
    log.extend(events)
    assert 375 <= len(log) <= 625 and log.dropped == len(events) - len(log)
    assert log.first_step > 0 and isinstance(log.started, EngineStarted)
    for step in range(log.first_step, log.last_step + 1):
        assert same(log.at(step), replayed(events, step)), step
    for step in (log.first_step - 1, log.last_step + 1, -1):
        with pytest.raises(ValueError, match="not in the log"):
            log.at(step)


def test_keyframes_are_thinned_and_every_step_can_still_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "KEYFRAME_BYTES", 60_000)
    events = simulate(300, seed=3)
    log = EventLog(capacity=2000)
    log.extend(events)
    assert sum(k.nbytes for k in log._keyframes.values()) <= 60_000 and log._keyframe_every > 1
    for step in range(log.first_step, log.last_step + 1, 7):
        assert same(log.at(step), replayed(events, step)), step


def test_the_bytes_are_bounded() -> None:
    log = EventLog(max_bytes=20_000)
    log.extend(simulate(400, seed=4))
    assert sum(len(s.chunk.data) for s in log._sealed) <= 20_000 and log.dropped > 0


def test_going_on_from_a_state_gives_the_same() -> None:
    events = simulate(120, seed=5)
    log = EventLog()
    log.extend(events)
    before = None
    for step in range(0, 121, 3):
        before = log.state_at(step, before)
        assert same(before[0], replayed(events, step))
        assert log.since(before[1], 1).events[0].step > step if step < 120 else before[1] == log.next_index


def test_events_come_back_as_they_were_with_a_cursor() -> None:
    events = simulate(100, seed=6)
    log = EventLog()
    cursor, got = 0, []
    for i in range(0, len(events), 37):
        log.extend(events[i : i + 37])
        new, cursor, missed = log.since(cursor)
        assert missed == 0
        got += new
    assert repr(got) == repr(events) and cursor == log.next_index  # repr: NaN is not equal to itself
    assert repr(list(log)) == repr(events)
    assert [e.step for e in log.since(100, 10).events] == [e.step for e in events[100:110]]
    assert log.since(cursor).events == [] == log.since(cursor + 5).events
    with pytest.raises(ValueError):
        log.since(-1)


def test_a_reader_that_is_late_is_told_what_it_missed() -> None:
    log = EventLog(capacity=200)
    events = simulate(100, seed=7)
    log.extend(events)
    got, cursor, missed = log.since(10)
    assert missed == log.dropped - 10 and cursor == len(events)
    assert repr(got) == repr(events[log.dropped :])


def test_a_window_of_steps() -> None:
    events = simulate(80, seed=8)
    log = EventLog()
    log.extend(events)
    assert repr(log.window(20, 29)) == repr([e for e in events if 20 <= e.step <= 29])
    assert log.window(500, 600) == []


def test_indices_go_on_after_clear() -> None:
    log = EventLog()
    events = simulate(30, seed=9)
    log.extend(events)
    log.clear()
    assert len(log) == 0 and log.started is None and log.since(0).events == []
    log.extend(events[:5])
    assert log.since(len(events)).cursor == len(events) + 5 and log.first_index == len(events)


def test_steps_never_go_back_and_bad_sizes_are_refused() -> None:
    log = EventLog()
    events = simulate(3)
    log.append(events[-1])
    with pytest.raises(ValueError, match="never go back"):
        log.append(events[0])
    for bad in (0, -1, 1.5):
        with pytest.raises(ValueError, match="capacity"):
            EventLog(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [1_000_000, 300])
def test_a_saved_log_is_the_log(tmp_path: Path, capacity: int) -> None:
    events = simulate(150, seed=10)
    log = EventLog(capacity)
    log.extend(events)
    log.save(tmp_path / "run.cutaway", {"seed": 3})
    loaded = EventLog.load(tmp_path / "run.cutaway")
    assert loaded.facts["seed"] == 3
    for name in ("first_step", "last_step", "dropped", "first_index", "next_index", "started"):
        assert getattr(loaded, name) == getattr(log, name), name
    assert repr(loaded.since(0)) == repr(log.since(0))
    for step in range(log.first_step, log.last_step + 1, 5):
        assert same(loaded.at(step), log.at(step))
    more = simulate(1, seed=11)[-1]
    loaded.append(StepDone(**{**{f: getattr(more, f) for f in more.__struct_fields__}, "step": 151, "runs": []}))
    loaded.save(tmp_path / "again.cutaway")
    assert EventLog.load(tmp_path / "again.cutaway").last_step == 151


def test_loading_the_end_only(tmp_path: Path) -> None:
    log = EventLog()
    log.extend(simulate(150, seed=12))
    log.save(tmp_path / "run.cutaway")
    end = EventLog.load(tmp_path / "run.cutaway", capacity=300)
    assert len(end) < 400 and end.last_step == 150 and same(end.at(149), log.at(149))


def test_an_empty_log_can_be_saved(tmp_path: Path) -> None:
    EventLog().save(tmp_path / "empty.cutaway")
    assert len(EventLog.load(tmp_path / "empty.cutaway")) == 0


def test_a_log_whose_events_contradict_each_other_says_so() -> None:
    events = simulate(40, seed=13)
    log = EventLog()
    with pytest.raises(ValueError, match="not known"):
        log.extend(events[:1] + events[20:])
    assert log._sealed == [] and len(log) == 64


def test_a_file_whose_events_contradict_each_other_is_refused(tmp_path: Path) -> None:
    events = simulate(40, seed=13)
    write_file(tmp_path / "bad.cutaway", frames(events[:1] + events[20:]), facts={})  # without the requests' arrivals
    with pytest.raises(CodecError, match=r"bad\.cutaway"):
        EventLog.load(tmp_path / "bad.cutaway")


def test_one_thread_appends_while_others_read() -> None:
    log = EventLog(capacity=1000)
    simulation = Simulation(14)
    simulation.start(log)
    failures: list[str] = []
    done = threading.Event()

    def read() -> None:
        cursor = 0
        while not done.is_set():
            new, after, missed = log.since(cursor)
            if after - cursor != missed + len(new):
                failures.append(f"{cursor} {after} {missed} {len(new)}")
            cursor = after
            try:
                log.at(log.last_step)
                log.at(max(log.first_step + 1, log.last_step - 50))
            except ValueError as error:
                if "not in the log" not in str(error):
                    failures.append(str(error))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(400):
        simulation.step()
    done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert same(log.at(400), log.at(400)) and log.at(400).snapshot().ref_counts == simulation.snapshot().ref_counts
