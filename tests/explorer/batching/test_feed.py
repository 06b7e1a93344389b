"""What a schedule's canvas is sent: decoded here as its script does it, and held to the rows."""

import json
import struct
from typing import Any

import numpy as np
import pytest

from explorer.batching.feed import BLOCK, FOLLOWED, Feed, show_whole
from explorer.batching.figure import EDGES_MS, GapsFigure, gaps_ms
from explorer.batching.rows import CELL, DECODE, BatchRows, StepRow
from explorer.canvas.schedule import Schedule

Step = tuple[int, int]


def row(step: int, cells: int = 3) -> StepRow:
    packed = b"".join(CELL.pack(slot | DECODE << 16, slot + step // 100, 1, step) for slot in range(cells))
    return StepRow(step, step * 0.1, step * 0.1 + 0.05, packed, 2, cells, 64, 8, 0, cells, 0, 5, 0.5)


class Browser:
    """Keeps what the canvas's script would."""

    def __init__(self, canvas: Schedule) -> None:
        self.canvas, self.steps, self.names, self.marks, self.seq, self.wholes = canvas, [], {}, [], -1, 0  # type: ignore[var-annotated]
        canvas.param.watch(lambda _e: self.take(), "steps")
        canvas.param.watch(lambda _e: self.more(), "more")

    def take(self) -> None:
        self.steps, self.names, self.marks, self.seq = [], {}, [], -1
        self.wholes += 1
        if self.canvas.steps:
            self.enter(self.canvas.steps)

    def more(self) -> None:
        before, after = struct.unpack_from("<2I", self.canvas.more)
        if after <= self.seq:
            return
        if before != self.seq:
            self.canvas.resync += 1
            return
        self.enter(self.canvas.more)

    def enter(self, data: bytes) -> None:
        _before, self.seq, count, num_cells, size, _none = struct.unpack_from("<6I", data)
        times = np.frombuffer(data, "<f8", 2 * count, 24)
        steps = np.frombuffer(data, "<u4", 6 * count, 24 + 16 * count).reshape(-1, 6)
        at = 24 + 40 * count
        cells = np.frombuffer(data, "<u4", 4 * num_cells, at).reshape(-1, 4)
        more = json.loads(data[at + 16 * num_cells :])
        assert len(data) == at + 16 * num_cells + size
        self.names |= {int(k): v for k, v in more["names"].items()}
        self.marks += [tuple(mark) for mark in more["marks"]]
        for i, (step, n, waiting, running, budget, slots) in enumerate(steps.tolist()):
            self.steps.append((step, times[2 * i], times[2 * i + 1], waiting, running, budget, slots, cells[:n].tolist()))
            cells = cells[n:]

    @property
    def numbers(self) -> list[int]:
        return [step[0] for step in self.steps]


@pytest.fixture
def rows() -> BatchRows:
    made = BatchRows()
    made.names = {i: f"r-{i}" for i in range(200)}
    return made


def add(rows: BatchRows, *numbers: int, mark: str = "") -> None:
    for n in numbers:
        rows.steps.append(row(n))
        rows.new_steps.append(rows.steps[-1])
    if mark:
        rows.marks.append((numbers[-1], mark))
        rows.new_marks.append(rows.marks[-1])


def schedule() -> Schedule:
    return Schedule(lambda _n: None, lambda _n: None)


def test_what_arrives_is_what_was_sent(rows: BatchRows) -> None:
    canvas = schedule()
    browser = Browser(canvas)
    add(rows, *range(1, 21), mark="batching = static")
    add(rows, *range(21, 40), mark="after the last step shown")
    show_whole(canvas, rows, list(rows.steps))
    assert browser.numbers == list(range(1, 40)) and browser.marks == [(20, "batching = static")]
    step, t0, t1, waiting, running, budget, slots, cells = browser.steps[6]
    assert (step, t0, t1, waiting, running, budget, slots) == (7, pytest.approx(0.7), pytest.approx(0.75), 2, 3, 64, 8)
    assert cells == [[slot | DECODE << 16, slot, 1, 7] for slot in range(3)]
    assert browser.names == {0: "r-0", 1: "r-1", 2: "r-2"}


def test_only_what_is_new_is_sent_while_it_is_followed(rows: BatchRows) -> None:
    canvas = schedule()
    browser, feed = Browser(canvas), Feed(canvas, rows)
    add(rows, *range(1, 10))
    feed.update(9, True, False)
    rows.taken()
    for n in range(10, 60):
        add(rows, n, mark=f"knob {n}" if n % 20 == 0 else "")
        feed.update(n, True, False)
        rows.taken()
    feed.update(59, True, False)
    assert browser.wholes == 1 and browser.numbers == list(range(1, 60)) and canvas.at == 59
    assert browser.marks == [(20, "knob 20"), (40, "knob 40")]


def test_a_browser_that_missed_one_gets_the_whole(rows: BatchRows) -> None:
    canvas = schedule()
    browser, feed = Browser(canvas), Feed(canvas, rows)
    add(rows, 1, 2, 3)
    feed.update(3, True, False)
    rows.taken()
    browser.seq = 77  # something went by
    browser.seq -= 100
    add(rows, 4)
    feed.update(4, True, False)
    rows.taken()
    assert canvas.resync == 1
    feed.update(4, True, False)
    assert browser.numbers == [1, 2, 3, 4] and browser.wholes == 2


def test_steps_that_came_behind_another_tab_are_there_afterwards(rows: BatchRows) -> None:
    canvas = schedule()
    browser, feed = Browser(canvas), Feed(canvas, rows)
    add(rows, 1, 2, 3)
    feed.update(3, True, False)
    rows.taken()
    add(rows, 4, 5)
    rows.taken()  # nobody drew
    add(rows, 6)
    feed.update(6, True, False)
    assert browser.numbers == [1, 2, 3, 4, 5, 6]


def test_a_long_run_is_sent_in_part_and_whole_where_one_looks(rows: BatchRows) -> None:
    canvas = schedule()
    browser, feed = Browser(canvas), Feed(canvas, rows)
    add(rows, *range(1, 6001))
    feed.update(6000, True, False)
    rows.taken()
    assert browser.numbers == list(range(6001 - FOLLOWED, 6001))
    feed.update(5990, False, False)
    assert browser.wholes == 1 and canvas.at == 5990 and not canvas.live
    feed.update(1700, False, False)
    assert 1700 - BLOCK in browser.numbers and 1700 + BLOCK in browser.numbers and canvas.at == 1700
    feed.update(6000, True, False)
    assert browser.numbers[-1] == 6000


def test_a_saved_run_shows_the_same_whatever_way_one_came(rows: BatchRows) -> None:
    add(rows, *range(1, 3001))
    walked, jumped = schedule(), schedule()
    feed = Feed(walked, rows)
    for step in (1, 2, 499, 500, 501, 1200, 2999, 1600):
        feed.update(step, False, True)
        rows.taken()
    Feed(jumped, rows).update(1600, False, True)
    assert (walked.steps, walked.at, walked.live) == (jumped.steps, jumped.at, jumped.live) and not walked.more


def test_a_new_engine_empties_it(rows: BatchRows) -> None:
    canvas = schedule()
    browser, feed = Browser(canvas), Feed(canvas, rows)
    add(rows, 1, 2)
    feed.update(2, True, False)
    rows.forget()
    feed.update(-1, True, False)
    assert canvas.steps == b"" and browser.numbers == []


@pytest.mark.parametrize("action", [{"kind": "select", "request": True}, {"kind": "select", "request": "1"}, {"kind": "goto", "step": -3}, {"kind": "rm", "step": 1}])  # fmt: skip
def test_what_a_browser_must_not_say_is_ignored(action: dict[str, Any]) -> None:
    heard: list[int] = []
    canvas = Schedule(heard.append, heard.append)
    canvas.action = {"seq": 1, **action}
    assert heard == []
    canvas.action = {"seq": 2, "kind": "select", "request": 4}
    canvas.action = {"seq": 3, "kind": "goto", "step": 9}
    assert heard == [4, 9]


def test_gaps_fall_into_their_bins() -> None:
    from engine.measures import RequestRecord

    records = []
    for start in (0.0, 5.0):
        record = RequestRecord("r", start, 3)
        record.token_times_s.extend([start + 1, start + 1.01, start + 1.06])
        records.append(record)
    gaps = gaps_ms([*records, RequestRecord("none", 0.0, 3)])
    assert np.allclose(np.sort(gaps), [10, 10, 50, 50])
    made = GapsFigure()
    made.show(gaps, {"p50": 30.0, "p90": 50.0, "p99": float("nan")})
    data = made.source.data
    assert data["count"] == [2, 2] and data["left"][0] <= 10 <= data["right"][0] and data["left"][1] <= 50 <= data["right"][1]
    assert made.lines["p50"].location == 30.0 and made.lines["p50"].visible and not made.lines["p99"].visible
    made.show(np.array([1e-6, 1e9]), {})
    assert made.source.data["count"] == [1, 1] and made.source.data["right"][-1] == EDGES_MS[-1]
