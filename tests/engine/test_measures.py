"""The measures, against timelines worked out by hand and the textbook's definitions written out once more."""

import math
import statistics
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.measures import COMPLETED, NAMES, Distribution, Limits, RequestRecord, Steps, measure


def record(arrival: float, times: list[float], outcome: str = "length", prompt: int = 10, **fields) -> RequestRecord:
    finish = times[-1] if times else arrival
    values = {"finish_s": finish, **fields}
    return RequestRecord("r", arrival, prompt, array("d", times), outcome=outcome, **values)


def test_a_timeline_by_hand() -> None:
    a = record(1.0, [1.5, 1.6, 1.9], scheduled_s=1.25)  # TTFT 0.5, ITL 0.1 and 0.3, TPOT 0.2, E2E 0.9
    b = record(2.0, [2.25], prompt=30, scheduled_s=2.0, num_cached_tokens=16)  # one token: no ITL, no TPOT
    c = record(2.5, [], "queue full")
    d = record(2.6, [3.0, 3.5], "abort", finish_s=6.0, num_preemptions=2)
    m = measure([a, b, c, d])
    assert m.duration_s == 5.0  # from 1.0 to 6.0
    assert m.outcomes == {"stop": 0, "length": 2, "abort": 1, "error": 0, "queue full": 1, "unfinished": 0}
    assert (m.num_requests, m.num_completed, m.num_preemptions) == (4, 2, 2)
    assert (m.num_prompt_tokens, m.num_output_tokens, m.num_cached_tokens) == (50, 6, 16)
    assert m.request_throughput == pytest.approx(2 / 5) and m.output_throughput == pytest.approx(6 / 5)
    assert m.input_throughput == pytest.approx(10.0)
    assert (m.ttft_s.count, m.ttft_s.mean, m.ttft_s.p50, m.ttft_s.max) == pytest.approx((2, 0.375, 0.375, 0.5))
    assert m.ttft_s.p90 == pytest.approx(0.475) and m.ttft_s.p99 == pytest.approx(0.4975)
    assert (m.itl_s.count, m.itl_s.mean, m.itl_s.max) == pytest.approx((2, 0.2, 0.3))
    assert (m.tpot_s.count, m.tpot_s.mean) == pytest.approx((1, 0.2))
    assert (m.e2e_s.count, m.e2e_s.mean) == pytest.approx((2, (0.9 + 0.25) / 2))
    assert (m.queue_s.count, m.queue_s.max) == pytest.approx((2, 0.25))
    assert m.steps is None


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        (Limits(), 3),
        (Limits(ttft_s=0.5), 2),
        (Limits(ttft_s=0.4999), 1),
        (Limits(tpot_s=0.2), 2),
        (Limits(ttft_s=0.5, tpot_s=0.2), 1),
    ],
)
def test_goodput_counts_who_keeps_both_limits(limits: Limits, good: int) -> None:
    records = [record(0, [0.5, 1.0]), record(0, [0.25]), record(0, [2.0, 2.125]), record(0, [0.1, 0.2], "error")]
    m = measure(records, limits=limits, duration_s=10, refused=2)
    assert m.goodput == pytest.approx(good / 10) and m.good_share == pytest.approx(good / 6)
    assert m.outcomes["queue full"] == 2


def test_nothing_to_measure() -> None:
    m = measure([])
    assert m.num_requests == 0 and m.duration_s == 0
    assert math.isnan(m.output_throughput) and math.isnan(m.ttft_s.p99) and m.ttft_s.count == 0
    assert "none" in m.table()


def test_requests_under_way_count_where_asked() -> None:
    going = record(0, [1.0, 2.0], "unfinished", finish_s=math.nan)
    assert measure([going]).ttft_s.count == 0
    m = measure([going], unfinished=True)
    assert (m.ttft_s.p50, m.itl_s.p50, m.tpot_s.count, m.e2e_s.count, m.duration_s) == (1.0, 1.0, 0, 0, 2.0)


TIMES = st.lists(st.floats(0, 100), max_size=8).map(sorted)


@given(st.lists(st.tuples(st.floats(0, 50), TIMES, st.sampled_from(["stop", "length", "abort", "error"])), max_size=12))
def test_against_the_definitions_written_out(rows: list[tuple[float, list[float], str]]) -> None:
    records = [record(arrival, [arrival + t for t in times], outcome) for arrival, times, outcome in rows]
    m = measure(records)
    ttft, itl, tpot = [], [], []
    for r in records:
        if r.outcome in COMPLETED and r.token_times_s:
            ttft.append(r.token_times_s[0] - r.arrival_s)
            itl += [b - a for a, b in zip(r.token_times_s, r.token_times_s[1:])]
            if r.num_output_tokens > 1:
                tpot.append((r.token_times_s[-1] - r.token_times_s[0]) / (r.num_output_tokens - 1))
    for got, want in ((m.ttft_s, ttft), (m.itl_s, itl), (m.tpot_s, tpot)):
        assert got.count == len(want)
        if want:
            assert got.mean == pytest.approx(statistics.fmean(want))
            cuts = statistics.quantiles(want, n=100, method="inclusive") if len(want) > 1 else want * 99
            assert (got.p50, got.p90, got.p99) == pytest.approx((cuts[49], cuts[89], cuts[98]))


def test_values_that_say_nothing_are_left_out() -> None:
    assert Distribution.of([math.nan, 2.0]).count == 1
    assert Distribution.of(np.array([1.0, 3.0])).p50 == 2.0


def step(**values: float) -> dict[str, float]:
    base = {"end_s": 1, "step_s": 1, "waiting": 0, "running": 1, "kv_usage": 0.5, "prefill_tokens": 0, "decode_tokens": 1}
    return {**base, "padding_tokens": 0, "token_budget": 10, **values}


def test_steps_count_by_the_time_they_took() -> None:
    steps = Steps()
    steps.append(**step(step_s=3, waiting=4, running=2, kv_usage=0.2, prefill_tokens=6, decode_tokens=2))
    steps.append(**step(step_s=1, waiting=0, running=6, kv_usage=0.6, decode_tokens=2, padding_tokens=2))
    m = measure([], steps).steps
    assert m is not None and (m.num_steps, m.step_s) == (2, 4)
    assert (m.kv_usage, m.kv_usage_max) == pytest.approx((0.3, 0.6))
    assert (m.waiting, m.waiting_max, m.running, m.running_max) == (3, 4, 3, 6)
    assert (m.step_tokens, m.budget_share, m.padding_share) == pytest.approx((6, 0.6, 2 / 12))


def test_steps_are_bounded_and_say_so() -> None:
    steps = Steps(capacity=10)
    for i in range(25):
        steps.append(**step(end_s=i))
    assert len(steps) <= 10 and len(steps) + steps.num_dropped == 25
    assert steps.column("end_s")[-1] == 24
    with pytest.raises(ValueError, match="capacity"):
        Steps(capacity=1)


def test_names_and_table() -> None:
    steps = Steps()
    steps.append(**step())
    m = measure([record(0, [1.0, 2.0])], steps, Limits(ttft_s=2, tpot_s=0.5))
    metrics = m.as_metrics()
    assert set(metrics) == set(NAMES.values())
    assert metrics["vllm:generation_tokens_total"] == 2 and metrics["vllm:time_to_first_token_seconds"].p50 == 1.0
    assert metrics["vllm:kv_cache_usage_perc"] == 0.5
    text = m.table()
    for part in ("TTFT <= 2000 ms and TPOT <= 500 ms", "goodput", "TPOT", "KV use", "1 length"):
        assert part in text
    steps.append(**step(kv_usage=math.nan))
    assert "KV use                not known" in measure([], steps).table()


@pytest.mark.parametrize("bad", [{"ttft_s": 0}, {"tpot_s": -1}, {"ttft_s": "1"}, {"tpot_s": math.nan}])
def test_limits_are_checked(bad: dict) -> None:
    with pytest.raises(ValueError, match="seconds > 0"):
        Limits(**bad)
