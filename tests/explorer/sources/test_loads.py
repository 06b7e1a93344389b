"""Loads on a session's engine: their pace, their bounds, whose they are. The engine is a tiny real one in a thread of its own."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from engine.events.types import RequestAdded, RequestFinished
from engine.load.arrivals import Burst, Poisson
from engine.load.generate import Load, conversations
from engine.load.lengths import Equal
from explorer.session import Session
from explorer.sources.inkernel import EngineThread
from explorer.sources.loads import MAX_REQUESTS, Loads, Paced
from tests.engine.engines import tiny_engine


def load(num_requests: int = 6, **more: Any) -> Load:
    facts: dict[str, Any] = {
        "arrivals": Burst(),
        "prompt": Equal(6),
        "output": Equal(5),
        "vocab_size": 250,
        "first_token": 5,
        "seed": 3,
    }
    return Load(num_requests=num_requests, **{**facts, **more})


def times(agenda: Paced, until: float = 1e9) -> list[float]:
    return [due.time_s for due in agenda.due(until)]


def test_arrivals_come_at_the_rate() -> None:
    made = list(conversations(load(40, arrivals=Poisson(1.0))))
    assert times(Paced(made, 4.0)) == pytest.approx([c.time_s / 4 for c in made])


def test_a_new_rate_holds_at_once_for_what_is_left_of_the_wait() -> None:
    made = list(conversations(load(30, arrivals=Poisson(1.0))))
    agenda = Paced(made, 1.0)
    now = (made[9].time_s + made[10].time_s) / 2
    before = times(agenda, now)
    agenda.set_rate(10.0, now)
    after = times(agenda)
    assert before == pytest.approx([c.time_s for c in made[:10]])
    assert after == pytest.approx([now + (c.time_s - now) / 10 for c in made[10:]])
    assert np.all(np.diff(before + after) >= 0)


@pytest.mark.parametrize("rate", [0, -1.0, float("inf"), float("nan")])
def test_what_is_no_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate must be a number of arrivals a second > 0"):
        Paced(conversations(load()), 1.0).set_rate(rate, 0.0)
    with pytest.raises(ValueError, match="rate must be a number of arrivals a second > 0"):
        Loads().start(None, "me", load(), rate=rate)


def test_a_load_without_bounds_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_REQUESTS:,}"):
        Loads().start(None, "me", load(MAX_REQUESTS + 1), rate=1.0)
    with pytest.raises(ValueError, match="got None"):
        Loads().start(None, "me", load(None, duration_s=5.0, arrivals=Poisson(1.0)), rate=1.0)  # type: ignore[arg-type]


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session(EngineThread(tiny_engine(max_model_len=64, max_num_seqs=4)))
    made.start()
    try:
        yield made
    finally:
        made.stop()


def wait(there: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def events(session: Session, kind: type) -> list[Any]:
    return [e for e in session.store.since(0)[0] if isinstance(e, kind)]


def test_a_load_runs_to_its_end_in_the_viewers_name(session: Session) -> None:
    me = session.join()
    name = session.start_load(me, load(), rate=1.0)
    assert name is not None
    assert session.start_load(me, load(), rate=1.0) is None and "stop it first" in session.take_notices(me)[0]
    wait(lambda: session.loads.of(me).over)  # type: ignore[union-attr]
    state = session.loads.of(me)
    assert state is not None and (state.sent, state.finished, state.refused, state.failed, state.waiting) == (6, 6, 0, 0, 0)
    added = events(session, RequestAdded)
    assert {e.request_id for e in added} == {f"{name}-{i}" for i in range(6)} and {e.owner for e in added} == {me}
    assert {e.cache_salt for e in added} == {name}
    other = session.start_load(me, load(), rate=1.0)
    assert other not in (None, name)


def test_the_queue_limit_refuses_and_counts(session: Session) -> None:
    me = session.join()
    session.start_load(me, load(30), rate=1.0, max_waiting=2)
    wait(lambda: session.loads.of(me).over)  # type: ignore[union-attr]
    state = session.loads.of(me)
    assert state is not None and state.refused > 0 and state.finished + state.refused == 30


def test_the_engines_own_queue_limit_is_counted_too(session: Session) -> None:
    me = session.join()
    session.reconfigure(me, max_num_waiting=1)
    session.start_load(me, load(30), rate=1.0)
    wait(lambda: session.loads.of(me).over)  # type: ignore[union-attr]
    state = session.loads.of(me)
    assert state is not None and state.failed == 0 and state.refused > 0
    assert state.refused == session.loads.refused(state.name) == 30 - len(
        events(session, RequestAdded)
    ) and not session.take_notices(me)


def test_stopping_ends_what_runs(session: Session) -> None:
    me = session.join()
    session.start_load(me, load(500, output=Equal(40), arrivals=Poisson(1.0)), rate=30.0)
    wait(lambda: session.loads.of(me).sent >= 3)  # type: ignore[union-attr]
    session.loads.stop(me)
    wait(lambda: session.loads.of(me).over)  # type: ignore[union-attr]
    state = session.loads.of(me)
    assert state is not None and state.sent < 500
    wait(lambda: len(events(session, RequestFinished)) == state.sent)
    assert not session.store.latest().live


def test_a_viewer_who_leaves_takes_the_load_along(session: Session) -> None:
    me = session.join()
    session.start_load(me, load(500, output=Equal(40), arrivals=Poisson(1.0)), rate=30.0)
    wait(lambda: session.loads.of(me).sent >= 3)  # type: ignore[union-attr]
    session.leave(me)
    wait(lambda: events(session, RequestAdded) and not session.store.latest().live)
    sent = len(events(session, RequestAdded))
    time.sleep(0.3)
    assert len(events(session, RequestAdded)) == sent and session.loads.of(me) is None


def test_a_refused_request_of_a_load_is_told_to_nobody_else(session: Session) -> None:
    me, other = session.join(), session.join()
    session.reconfigure(other, max_num_seqs=4)
    session.start_load(me, load(3, prompt=Equal(200)), rate=1.0)
    wait(lambda: session.loads.of(me).over)  # type: ignore[union-attr]
    state = session.loads.of(me)
    assert state is not None and state.failed == 3 and state.error
    assert session.take_notices(other) == [] and session.take_notices(me) == []
