"""Two logs side by side: who is whom, where they part, and what the report says."""

from pathlib import Path
from typing import Any

import pytest

from engine.events.log import EventLog
from engine.events.types import Event, RequestAdded, StepDone, TokenSampled
from explorer.compare.comparison import align, compare
from explorer.compare.transcript import Trace, Transcript
from explorer.compare.words import pair_line, report, verdict
from tests.engine.events.simulate import simulate


def log_of(events: list[Event], capacity: int = 1_000_000) -> EventLog:
    log = EventLog(capacity)
    log.extend(events)
    return log


def edited(event: Event, **changes: Any) -> Event:
    return type(event)(**{**{f: getattr(event, f) for f in event.__struct_fields__}, **changes})


def trace(ordinal: int, name: str, prompt: list[int], sample_index: int = 0) -> Trace:
    return Trace(name, ordinal, "o", prompt, "", {}, 0, sample_index=sample_index)


def test_requests_are_aligned_by_name_then_by_prompt() -> None:
    a = [trace(0, "x", [1, 2]), trace(1, "y", [3]), trace(2, "z", [4]), trace(3, "x", [1, 2])]
    b = [trace(0, "y", [9]), trace(1, "x", [1, 2]), trace(2, "q", [3]), trace(3, "x", [1, 2])]
    pairs = [(x and x.ordinal, y and y.ordinal) for x, y in align(a, b)]
    assert pairs == [(0, 1), (1, 2), (2, None), (3, 3), (None, 0)]


def test_a_token_far_away_is_refused_before_room_is_made_for_it() -> None:
    events = simulate(20)
    at = next(i for i, e in enumerate(events) if isinstance(e, TokenSampled))
    log = log_of([*events[:at], edited(events[at], index=1 << 40), *events[at + 1 :]])
    with pytest.raises(ValueError, match="not known"):
        Transcript.of(log)


def test_a_transcript_holds_what_the_state_says(tmp_path: Path) -> None:
    events = simulate(150, seed=4)
    log = log_of(events)
    made = Transcript.of(log)
    assert made.steps == [e.step for e in events if isinstance(e, StepDone)] and made.tokens_watched
    assert [t.request_id for t in made.traces] == [e.request_id for e in events if isinstance(e, RequestAdded)]
    state = log.at(log.last_step)
    for t in made.traces:
        view = state.requests.get(t.request_id)
        if view is not None and view.arrived_step == t.arrived_step:
            assert t.token_ids == view.output_token_ids and t.num_output_tokens == view.num_output_tokens
            assert t.finish_reason == view.finish_reason


def test_a_run_equals_itself_and_a_file_of_it(tmp_path: Path) -> None:
    log = log_of(simulate(80))
    log.save(tmp_path / "run")
    c = compare(log, EventLog.load(tmp_path / "run"))
    assert c.same and c.first is None and c.environment == ()
    assert "all equal" in pair_line(c.pairs[0]) and verdict(c) in report(c)


def test_the_first_token_that_differs_is_found() -> None:
    events = simulate(80)
    places = [i for i, e in enumerate(events) if isinstance(e, TokenSampled)]
    at = places[len(places) // 2]
    changed = list(events)
    for i in (at, places[-1]):
        changed[i] = edited(events[i], token_id=events[i].token_id + 1)
    c = compare(log_of(events), log_of(changed))
    first = c.first
    assert first is not None and not c.same and c.schedule is None
    want = events[at]
    assert isinstance(want, TokenSampled)
    assert (first.a.request_id, first.index, first.steps) == (want.request_id, want.index, (want.step, want.step))
    assert first.position == want.position
    assert first.tokens == (events[at], changed[at])
    assert f"token {want.index + 1} of {want.request_id}" in verdict(c)


def test_a_step_that_ran_otherwise_is_found() -> None:
    events = simulate(80)
    places = [i for i, e in enumerate(events) if isinstance(e, StepDone) and len(e.runs) > 1]
    at = places[10]
    changed = list(events)
    changed[at] = edited(events[at], runs=events[at].runs[1:])
    c = compare(log_of(events), log_of(changed))
    assert c.schedule is not None and c.schedule.step == events[at].step and c.same_tokens and not c.same
    assert events[at].runs[0].request_id in c.schedule.words and "did not run" in c.schedule.words
    assert "another schedule" in verdict(c)


def test_a_shorter_run_ends_earlier() -> None:
    events = simulate(80)
    c = compare(log_of(events), log_of([e for e in events if e.step <= 60]))
    assert c.schedule is not None and c.schedule.step == 61 and "no such step" in c.schedule.words
    ends = [p.first for p in c.pairs if p.first is not None]
    assert ends and all(d.cause.kind == "end" and "record ends" in d.cause.words for d in ends)
    assert any(p.b is None for p in c.pairs)


@pytest.mark.parametrize("capacity", [200, 1_000_000])
def test_steps_are_counted_from_the_beginning_of_either_log(capacity: int) -> None:
    """The same run recorded by an engine that had run before: every step number is shifted."""
    events = simulate(60)
    late = [edited(e, step=e.step + 500) for e in events]
    c = compare(log_of(events), log_of(late))
    assert c.same
    short = log_of(events, capacity)
    assert compare(short, short).same


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from explorer.compare.__main__ import main

    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    log_of(simulate(40)).save(one)
    log_of(simulate(40, seed=1)).save(two)
    assert main([one, one]) == 0 and capsys.readouterr().out.startswith("The same:")
    assert main([one, two]) == 1 and "Not the same requests" in capsys.readouterr().out
    (tmp_path / "junk").write_bytes(b"x" * 100)
    assert main([one, str(tmp_path / "junk")]) == 2 and "not a recorded run" in capsys.readouterr().err
