from collections import Counter

import pytest

from engine.events.types import Event, RequestAdded, StepDone
from explorer.run import rows as rows_module
from explorer.run.rows import RunRows
from tests.explorer.conftest import Desk


def fed(desk: Desk) -> RunRows:
    rows = RunRows()
    rows.feed(desk.store.since(0).events)
    return rows


def phases(rows: RunRows, ordinal: int) -> list[str]:
    return [bar.phase for bar in rows.steps_between(0, 10_000) if bar.ordinal == ordinal]


def test_each_request_has_one_bar_for_each_step_it_was_there(make_desk: type[Desk]) -> None:
    desk = make_desk(max_num_seqs=1, max_num_batched_tokens=4)
    desk.send(prompt="x" * 40, max_tokens=2)  # 10 prompt tokens: three chunks, the last one gives the first token
    desk.send(prompt="x" * 16, max_tokens=1)
    desk.run(10)
    rows = fed(desk)
    assert phases(rows, 0) == ["prefill"] * 3 + ["decode"]
    assert phases(rows, 1) == ["waiting"] * 4 + ["prefill"]
    chunks = [(b.start, b.num_tokens) for b in rows.steps_between(0, 99) if b.ordinal == 0]
    assert chunks == [(0, 4), (4, 4), (8, 2), (10, 1)]


def test_a_preempted_request_shows_as_such_until_it_runs_again(make_desk: type[Desk]) -> None:
    desk = make_desk(num_kv_blocks=8, block_size=4)
    desk.send(prompt="x" * 40, count=2, max_tokens=12)
    desk.run(60)
    rows = fed(desk)
    seen = [phases(rows, k) for k in (0, 1)]
    assert any("preempted" in one and one[one.index("preempted") :].count("prefill") for one in seen)
    assert {row.reason for row in rows.requests.values()} == {"length"}


def test_tokens_keep_step_position_and_probability(desk: Desk) -> None:
    (request_id,) = desk.send(prompt="x" * 40, max_tokens=5)
    desk.run(5)
    tokens = list(fed(desk).requests[request_id].tokens)
    assert [t.position for t in tokens] == [10, 11, 12, 13, 14]
    assert [t.step for t in tokens] == [1, 2, 3, 4, 5]
    assert all(t.logprob <= 0 and t.ms == 6.0 for t in tokens)


def test_series_are_derived_from_the_steps(desk: Desk) -> None:
    desk.send(count=2, max_tokens=3)
    desk.run(3)
    rows = fed(desk)
    step = next(e for e in desk.store.since(0).events if isinstance(e, StepDone))
    assert rows.series["batch"][0] == (1, 2.0)
    assert rows.series["step_ms"][0] == (1, step.step_ms)
    assert rows.series["watching"][0][1] == pytest.approx(100 * step.record_ms / step.step_ms)
    assert rows.series["kv_use"][0][1] == pytest.approx(100 * step.used_blocks / 128)
    steps = [e for e in desk.store.since(0).events if isinstance(e, StepDone)]
    assert rows.series["tokens_per_second"][-1][1] == pytest.approx(1000 * 6 / sum(e.step_ms for e in steps))


def test_the_rate_forgets_what_is_older_than_its_window() -> None:
    rows = RunRows()

    def step(number: int, ms: float) -> StepDone:
        return StepDone(
            step=number, time_ns=0, runs=[], num_waiting=0, num_running=0, token_budget=1, max_num_seqs=1, used_blocks=0,
            cached_free_blocks=0, schedule_ms=0, forward_ms=ms, sample_ms=0, commit_ms=0, step_ms=ms, record_ms=0, flops=0,
            weight_bytes=0, kv_read_bytes=0, kv_write_bytes=0,
        )  # fmt: skip

    rows.feed(step(i, 300.0) for i in range(100))
    assert len(rows._recent) == 4  # 4 x 300 ms covers a second, 3 x 300 ms does not


def test_only_what_is_new_is_told(desk: Desk) -> None:
    rows = RunRows()
    desk.send(max_tokens=20)
    desk.run(5)
    events, cursor, _ = desk.store.since(0)
    rows.feed(events)
    rows.taken()
    desk.run(2)
    rows.feed(desk.store.since(cursor).events)
    assert [len(t) for t in rows.new_tokens.values()] == [2]
    assert [bar.step for bar in rows.new_bars] == [6, 7]
    assert {name: len(points) for name, points in rows.new_points.items()} == dict.fromkeys(rows.series, 2)


def test_memory_is_bounded_and_running_requests_stay(monkeypatch: pytest.MonkeyPatch, desk: Desk) -> None:
    monkeypatch.setattr(rows_module, "MAX_REQUESTS", 5)
    rows = RunRows()
    desk.send(prompt="x" * 16, max_tokens=1000)
    for _ in range(20):
        desk.send(max_tokens=1)
        desk.run()
    rows.feed(desk.store.since(0).events)
    assert len(rows.requests) == 5 and "r0" in rows.requests
    assert Counter(rows.dropped).most_common(1)[0][1] == 1 and len(rows.dropped) == 16
    assert len(rows.bars) <= rows_module.MAX_STEPS


def test_a_late_watcher_starts_from_the_snapshot(desk: Desk) -> None:
    desk.send(prompt="x" * 40, max_tokens=30)
    desk.run(4)
    snapshot = desk.store.latest().snapshot()
    cursor = desk.store.since(0).cursor
    desk.run(2)
    rows = RunRows()
    rows.feed([snapshot, *desk.store.since(cursor).events])
    row = rows.requests["r0"]
    assert row.before == 4 and [t.position for t in row.tokens] == [14, 15]


def test_a_new_engine_voids_what_was(desk: Desk) -> None:
    rows = RunRows()
    desk.send(max_tokens=2)
    desk.run(2)
    rows.feed(desk.store.since(0).events)
    desk.process.restart()
    desk.deliver()
    rows.taken()
    rows.feed(desk.store.since(0).events)
    assert not rows.requests and rows.restarted


def test_unknown_requests_are_not_an_error() -> None:
    rows = RunRows()
    events: list[Event] = [
        RequestAdded(step=0, time_ns=0, request_id="r", owner="o", prompt_token_ids=[1], prompt_text="t", sampling={})
    ]
    from engine.events.types import RequestFinished, TokenSampled

    rows.feed([RequestFinished(step=1, time_ns=0, request_id="gone", reason="stop")])
    rows.feed(
        [
            TokenSampled(
                step=1, time_ns=0, request_id="gone", position=1, index=0, token_id=1, text="", logprob=0.0, rank=1, u=None, prob=1.0,
                nucleus_size=0, nucleus_mass=1.0, entropy=0.0,
            )
        ]
    )  # fmt: skip
    rows.feed(events)
    assert list(rows.requests) == ["r"]
