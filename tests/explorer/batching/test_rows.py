"""The schedule read from events: slots, tokens, the queue, loads; against what the engine recorded and a walk through it by hand."""

import math
from itertools import pairwise

import numpy as np
import pytest

from engine.events.types import RequestFinished, RequestPreempted, StepDone
from engine.measures import RequestRecord
from explorer.batching.rows import DECODE, PADDING, PREEMPTED, PREFILL, STALLED, SWAPPED, BatchRows, as_steps, cut
from tests.explorer.batching.made import Recorded


def fed(run: Recorded, pieces: int = 1) -> BatchRows:
    rows = BatchRows()
    for part in np.array_split(np.arange(len(run.events)), pieces):
        rows.feed([run.events[i] for i in part])
    return rows


@pytest.fixture(scope="module")
def continuous() -> Recorded:
    return Recorded().drive()


@pytest.mark.parametrize("policy", ["continuous", "static", "dynamic"])
def test_a_request_keeps_one_slot_and_shares_it_with_nobody(policy: str) -> None:
    run = Recorded(batching=policy).drive()
    rows, steps = fed(run), [e for e in run.events if isinstance(e, StepDone)]
    assert [row.step for row in rows.steps] == [e.step for e in steps]
    slots: dict[str, set[int]] = {}
    for row, event in zip(rows.steps, steps, strict=True):
        cells = row.each()
        worked = [(rows.names[request], n, phase) for _slot, phase, request, n, _first in cells if phase <= PADDING]
        assert sorted(worked) == sorted(
            (r.request_id, r.num_tokens, ("prefill", "decode", "padding").index(r.phase)) for r in event.runs
        )
        assert (row.prefill_tokens, row.decode_tokens, row.padding_tokens) == tuple(
            sum(n for _name, n, phase in worked if phase == which) for which in (PREFILL, DECODE, PADDING)
        )
        owners: dict[int, int] = {}
        for slot, _phase, request, _n, _first in cells:
            assert 0 <= slot < event.max_num_seqs
            assert owners.setdefault(slot, request) == request, "two requests in one slot"
            slots.setdefault(rows.names[request], set()).add(slot)
    assert len(slots) == 12 and all(len(found) == 1 for found in slots.values())
    assert (sum(row.padding_tokens for row in rows.steps) > 0) == (policy != "continuous")


def test_a_slot_is_free_again_once_its_request_has_ended(continuous: Recorded) -> None:
    rows = fed(continuous)
    ended = {e.request_id: e.step for e in continuous.events if isinstance(e, RequestFinished)}
    for row in rows.steps:
        for _slot, _phase, request, _n, _first in row.each():
            assert row.step <= ended[rows.names[request]]


def test_a_request_of_one_token_leaves_at_once() -> None:
    run = Recorded(max_num_seqs=2)
    run.ask(4, 1, "one")
    run.ask(4, 6, "long")
    rows = fed(run.steps())
    last = max(row.step for row in rows.steps if any(rows.names[c[2]] == "one" for c in row.each()))
    assert last == rows.steps[0].step and not any(c[1] == STALLED for row in rows.steps for c in row.each())


def test_pieces_do_not_matter(continuous: Recorded) -> None:
    assert list(fed(continuous, 37).steps) == list(fed(continuous).steps)


def test_whoever_has_no_token_of_the_budget_is_seen_to_wait() -> None:
    run = Recorded(max_num_seqs=4, max_num_batched_tokens=64)
    for i in range(4):
        run.ask(9, 8, f"r-{i}")
    run.steps(3)
    run.engine.reconfigure(max_num_batched_tokens=2)
    rows = fed(run.steps())
    narrow = [row for row in rows.steps if row.budget == 2]
    assert narrow
    for row in narrow:
        worked = {c[2] for c in row.each() if c[1] in (PREFILL, DECODE)}
        stalled = {c[2] for c in row.each() if c[1] == STALLED}
        assert (
            len(worked) <= 2
            and not worked & stalled
            and len(worked | stalled)
            == row.running + sum(e.step == row.step for e in run.events if isinstance(e, RequestFinished))
        )
    assert any(c[1] == STALLED for row in narrow for c in row.each())


def test_the_pool_takes_a_slot_away_and_the_row_says_so() -> None:
    run = Recorded(max_num_seqs=4, num_kv_blocks=12, block_size=4, enable_prefix_caching=False)
    for i in range(4):
        run.ask(8, 16, f"r-{i}")
    rows = fed(run.steps())
    preempted = [e for e in run.events if isinstance(e, RequestPreempted)]
    assert preempted, "this load must overfill the pool"
    marked = {rows.names[c[2]] for row in rows.steps for c in row.each() if c[1] == PREEMPTED}
    assert marked <= {e.request_id for e in preempted} and marked
    assert rows.measures().num_preemptions == len(preempted)
    for row in rows.steps:  # each counts from its own moment on
        assert rows.measures(step=row.step).num_preemptions == sum(e.step <= row.step for e in preempted)


def test_a_request_that_is_swapped_out_is_told_from_one_that_is_computed_again() -> None:
    run = Recorded(
        max_num_seqs=4, num_kv_blocks=12, block_size=4, enable_prefix_caching=False, preemption_mode="swap", swap_space=1
    )
    for i in range(4):
        run.ask(8, 16, f"r-{i}")
    rows = fed(run.steps())
    phases = {c[1] for row in rows.steps for c in row.each()}
    assert SWAPPED in phases and PREEMPTED not in phases


def test_a_load_is_known_by_its_requests_names() -> None:
    run = Recorded(max_num_seqs=2)
    run.drive("load3A", num_requests=5)
    run.engine.reconfigure(max_num_seqs=4, by="me")
    run.drive("load3B", num_requests=5)
    run.ask(4, 4, "somebody")
    rows = fed(run.steps())
    assert list(rows.loads) == ["load3A", "load3B"]
    a, b = rows.loads.values()
    assert (a.num_sent, a.num_ended, a.over, b.over) == (5, 5, True, True)
    assert (a.knobs["max_num_seqs"], b.knobs["max_num_seqs"]) == (2, 4)
    assert a.last_step < b.first_step <= b.last_step < rows.steps[-1].step
    assert [text for _step, text in rows.marks] == ["max_num_seqs = 4"]
    for letter, load in (("A", a), ("B", b)):
        measures = rows.measures(load.name)
        assert measures.num_completed == 5 and measures.steps is not None
        steps = [row for row in rows.steps if load.first_step <= row.step <= load.last_step]
        assert measures.steps.num_steps == len(steps) and measures.steps.running_max <= (2 if letter == "A" else 4)
        assert {r.request_id for r in rows.records(load.name)} == {f"load3{letter}-{i}" for i in range(5)}


def test_a_load_that_shares_its_steps_says_so() -> None:
    run = Recorded()
    run.ask(4, 30, "somebody")
    run.steps(2)
    run.drive("load1", num_requests=3)
    rows = fed(run)
    assert rows.loads["load1"].others > 0


def test_measures_at_a_step_are_those_of_what_had_happened(continuous: Recorded) -> None:
    rows = fed(continuous)
    middle = rows.steps[len(rows.steps) // 2].step
    before = BatchRows()
    for event in continuous.events:
        before.feed([event])
        if isinstance(event, StepDone) and event.step == middle:
            break
    then, now = rows.measures(step=middle), before.measures()
    assert then.num_output_tokens == now.num_output_tokens
    assert then.itl_s.count == now.itl_s.count and then.itl_s.p99 == pytest.approx(now.itl_s.p99)
    assert then.ttft_s.p50 == pytest.approx(now.ttft_s.p50)
    assert then.steps == now.steps
    assert rows.measures().num_completed == 12


def test_a_record_is_cut_at_a_time() -> None:
    record = RequestRecord("r", 1.0, 5, finish_s=4.0, outcome="length")
    record.token_times_s.extend([2.0, 3.0, 4.0])
    assert cut(record, 4.0) is record
    early = cut(record, 3.5)
    assert list(early.token_times_s) == [2.0, 3.0] and early.outcome == "unfinished" and math.isnan(early.finish_s)
    assert record.outcome == "length" and len(record.token_times_s) == 3


def test_steps_are_found_by_their_number(continuous: Recorded) -> None:
    rows = fed(continuous)
    numbers = [row.step for row in rows.steps]
    for first, last in ((0, 10**9), (3, 5), (numbers[-1] - 2, numbers[-1]), (numbers[-1] + 1, numbers[-1] + 5), (4, 3)):
        assert [row.step for row in rows.between(first, last)] == [n for n in numbers if first <= n <= last]
    assert rows.at(0) is None and rows.at(10**9) == rows.steps[-1]
    assert all(a < b for a, b in pairwise(numbers))


def test_what_the_measures_read_is_what_the_steps_say(continuous: Recorded) -> None:
    rows = fed(continuous)
    steps = as_steps(list(rows.steps))
    for name in ("waiting", "running", "prefill_tokens", "decode_tokens", "padding_tokens", "kv_usage"):
        assert np.array_equal(steps.column(name), rows.collector.steps.column(name), equal_nan=True), name


def test_an_engine_that_starts_anew_begins_a_new_schedule(continuous: Recorded) -> None:
    rows = fed(continuous)
    rows.taken()
    rows.feed(continuous.events[:2])
    assert rows.restarted and not rows.steps and not rows.loads and not rows.names


def test_names_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from explorer.batching import rows as module

    monkeypatch.setattr(module, "KEPT_NAMES", 5)
    rows = BatchRows()
    assert [rows._number(f"r-{i}") for i in range(9)] == list(range(9))
    assert (
        list(rows.names.values()) == [f"r-{i}" for i in range(4, 9)]
        and rows.number_of("r-0") == -1
        and rows.number_of("r-8") == 8
    )
