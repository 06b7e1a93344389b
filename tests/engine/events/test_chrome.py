"""The Chrome trace: valid JSON of the format, tracks that nest, the same counts as the events."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.events import types as t
from engine.events.chrome import write_chrome_trace
from engine.events.log import EventLog
from tests.engine.events.simulate import simulate
from tests.engine.events.test_state import added, step, token


def traced(path: Path, events: list[t.Event]) -> list[dict[str, Any]]:
    write_chrome_trace(path / "trace.json", events)
    return json.loads((path / "trace.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))[
        "traceEvents"
    ]


@pytest.fixture(scope="module")
def run() -> list[t.Event]:
    return simulate(300, seed=4, num_blocks=32)


def test_every_entry_is_of_the_format(tmp_path: Path, run: list[t.Event]) -> None:
    for e in traced(tmp_path, run):
        assert e["ph"] in "XiCM" and isinstance(e["pid"], int) and isinstance(e["name"], str)
        if e["ph"] == "X":
            assert e["ts"] >= 0 and e["dur"] >= 0 and isinstance(e["tid"], int)
        if e["ph"] == "C":
            assert all(isinstance(v, int | float) for v in e["args"].values())


def test_slices_of_a_track_nest_or_follow_each_other(tmp_path: Path, run: list[t.Event]) -> None:
    tracks = defaultdict(list)
    for e in traced(tmp_path, run):
        if e["ph"] == "X":
            tracks[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for slices in tracks.values():
        open_until: list[float] = []
        for start, end in sorted(slices, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= start + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6
            open_until.append(end)


def test_steps_and_runs_are_all_there(tmp_path: Path, run: list[t.Event]) -> None:
    entries = traced(tmp_path, run)
    steps = [e for e in run if isinstance(e, t.StepDone)]
    slices = [e for e in entries if e["ph"] == "X"]
    assert [e["name"] for e in slices if e["name"].startswith("step ")] == [f"step {s.step}" for s in steps]
    for phase in ("schedule", "forward", "sample", "commit"):
        assert sum(e["name"] == phase for e in slices) == len(steps)
    on_requests = [e for e in slices if e["pid"] == 2]
    assert sum(e["name"] == "decode" or e["name"].startswith("prefill") for e in on_requests) == sum(len(s.runs) for s in steps)
    assert sum(e["name"] == "preempted" for e in on_requests) > 0
    names = [e for e in entries if e["name"] == "thread_name" and e["pid"] == 2]
    assert len(names) == sum(isinstance(e, t.RequestAdded) for e in run)
    used = [e["args"]["used"] for e in entries if e["name"] == "KV blocks"]
    assert used == [s.used_blocks for s in steps]


def test_the_life_of_one_request(tmp_path: Path) -> None:
    def at(event: t.Event, ms: float) -> t.Event:
        changes: dict[str, Any] = {"time_ns": int(ms * 1e6)}
        if isinstance(event, t.StepDone):
            changes |= {"step_ms": 2.0, "forward_ms": 1.0, "schedule_ms": 0.5}
        return msgspec.structs.replace(event, **changes)

    entries = traced(tmp_path, [
        at(added(), 0), at(step("r", 0, 3, True), 7), at(t.RequestPreempted(step=2, time_ns=0, request_id="r", num_computed_tokens=3,
        for_request_id="q"), 8), at(token("r", 1), 11), at(t.RequestFinished(step=2, time_ns=0, request_id="r", reason="length"), 12),
        at(step("r", 0, 4, True, 2), 13),
    ])  # fmt: skip
    mine = [(e["name"], e["ts"], e["dur"]) for e in entries if e["ph"] == "X" and e["pid"] == 2]
    # preempted at 8 ms; it ended at 12 ms inside the step that computed it again
    assert mine == [
        ("waiting", 0, 5000),
        ("prefill chunk of 3", 5000, 2000),
        ("preempted", 8000, 4000),
        ("prefill chunk of 4", 11000, 2000),
    ]
    rate = [e for e in entries if e["name"] == "tokens/s"]
    assert rate[0]["args"]["tokens/s"] == pytest.approx(500)
    assert [e["args"]["token"] for e in entries if "token" in e.get("args", {})] == ["x"]


def test_a_log_without_its_beginning_still_names_its_requests(tmp_path: Path) -> None:
    log = EventLog(capacity=400)
    log.extend(simulate(100, seed=1))
    log.to_chrome_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["model"] == "simulated"
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names and not any("?" in name for name in names)


def test_odd_numbers_and_an_empty_log(tmp_path: Path) -> None:
    odd = msgspec.structs.replace(step("r", 0, 3, True), step_ms=float("nan"), forward_ms=float("inf"), commit_ms=-1.0)
    assert any(e["name"] == "step 1" for e in traced(tmp_path, [added(), odd]))
    assert traced(tmp_path, []) == []
