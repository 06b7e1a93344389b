"""The store: views read states and events while a thread appends; stepping is cheap; an engine that starts anew begins a new run."""

import random
import threading
import time
from pathlib import Path

import pytest

from engine.events.state import State
from engine.events.types import Event
from explorer.store import EventStore
from tests.engine.events.simulate import Simulation, simulate


def replayed(events: list[Event], step: int) -> State:
    return State().apply_all(e for e in events if e.step <= step)


def same(a: State, b: State) -> bool:
    return a.snapshot(finished=True) == b.snapshot(finished=True)


def test_states_at_any_step_in_any_order() -> None:
    events = simulate(150, seed=1)
    store = EventStore()
    store.append(events)
    order = [*range(0, 151, 10), *range(150, 0, -7), *random.Random(0).choices(range(151), k=60)]
    held = [(step, store.at(step)) for step in order]
    for step, state in held:  # also those that were handed out first: nothing has changed them since
        assert same(state, replayed(events, step)), step
    assert (store.first_step, store.last_step, store.dropped) == (0, 150, 0)
    assert store.started is events[0]


def test_the_last_step_grows_while_it_is_shown() -> None:
    events = simulate(20, seed=2)
    store = EventStore()
    for i in range(0, len(events), 3):
        store.append(events[i : i + 3])
        assert same(store.latest(), State().apply_all(events[: i + 3]))
        assert store.latest() is store.latest()


def test_a_step_out_of_range_is_refused() -> None:
    store = EventStore()
    assert same(store.at(0), State())
    store.append(simulate(10))
    with pytest.raises(ValueError, match="steps 0 to 10"):
        store.at(11)


def test_an_engine_that_starts_anew_begins_a_new_run() -> None:
    store = EventStore()
    first, second = simulate(30, seed=3), simulate(10, seed=4)
    store.append(first)
    _, cursor, _ = store.since(0)
    assert store.run == 0
    store.append(second)
    assert store.run == 1 and store.last_step == 10 and store.dropped == 0
    events, cursor, missed = store.since(cursor)
    assert repr(events) == repr(second) and missed == 0 and cursor == len(first) + len(second)
    assert same(store.at(5), replayed(second, 5))


def test_a_saved_run_is_replayed(tmp_path: Path) -> None:
    store = EventStore()
    store.append(simulate(40, seed=5))
    store.save(tmp_path / "run.cutaway", {"note": "kept"})
    loaded = EventStore.load(tmp_path / "run.cutaway")
    assert loaded.replayed and not store.replayed and loaded.facts["note"] == "kept"
    assert same(loaded.at(33), store.at(33)) and len(loaded) == len(store)
    assert repr(loaded.window(7, 9)) == repr(store.window(7, 9))
    with pytest.raises(ValueError, match="not a recorded run"):
        (tmp_path / "junk").write_bytes(b"junk")
        EventStore.load(tmp_path / "junk")


def test_stepping_forward_costs_one_step_not_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    store = EventStore()
    store.append(simulate(300, seed=6))
    applied = 0
    apply_all = State.apply_all

    def counted(self: State, events: list[Event]) -> State:
        nonlocal applied
        applied += len(events)
        return apply_all(self, events)

    monkeypatch.setattr(State, "apply_all", counted)
    store.at(200)
    applied = 0
    for step in range(201, 251):
        store.at(step)
    assert applied == len(store.window(201, 250))


def test_views_read_while_a_thread_appends() -> None:
    store = EventStore(capacity=3000)
    simulation = Simulation(7)
    batch: list[Event] = []
    simulation.start(batch.append)
    failures: list[str] = []
    done = threading.Event()

    def poll() -> None:
        for _ in range(400):
            simulation.step()
            store.append(batch)
            batch.clear()
        done.set()

    def view() -> None:
        cursor = 0
        while not done.is_set():
            _, cursor, _ = store.since(cursor)
            try:
                for step in (store.last_step, random.randint(store.first_step, store.last_step)):
                    state = store.at(step)
                    if int((state.ref_counts > 0).sum()) != state.num_used_blocks or state.step > step:
                        failures.append(f"step {state.step} for {step}")
            except ValueError as error:
                if "not in the log" not in str(error):
                    failures.append(str(error))
            time.sleep(0.001)

    threads = [threading.Thread(target=poll), threading.Thread(target=view), threading.Thread(target=view)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.latest().snapshot().ref_counts == simulation.snapshot().ref_counts
