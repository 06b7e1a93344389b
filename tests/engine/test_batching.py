"""Static and dynamic batching, priorities, the watermark and the queue's limit: the scheduler alone, on steps of fixed time."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events.recorder import Recorder
from engine.kvcache.pool import BlockPool
from engine.load.ideal import harmonic, static_padding_share
from engine.request import QueueFull, Request, SamplingParams
from engine.scheduler import Schedule, Scheduler
from engine.waiting import PRIORITY_STEPS, Waiting


def make(num_blocks: int = 400, block_size: int = 4, **limits: Any) -> Scheduler:
    recorder = Recorder()
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "enable_prefix_caching": False, **limits}
    return Scheduler(BlockPool(num_blocks, block_size, recorder), recorder, **limits)


def request(name: str, prompt: int, output: int = 4, priority: int = 0) -> Request:
    return Request(name, [1] * prompt, SamplingParams(max_tokens=output), 0, priority=priority)


def step(scheduler: Scheduler, check: bool = True) -> Schedule:
    """One step, and what the engine does after it."""
    schedule = scheduler.schedule()
    assert sum(run.num_tokens for run in (*schedule.runs, *schedule.padding)) <= scheduler.max_num_batched_tokens
    scheduler.batcher.end_padding(schedule)
    for run in schedule.runs:
        r = run.request
        r.num_computed_tokens += run.num_tokens
        if run.sample:
            r.token_ids.append(7)
            if r.num_tokens - r.num_prompt_tokens == r.params.max_tokens:
                scheduler.finish(r)
    if check:
        held = {r.request_id: r.block_ids for r in (*scheduler.running, *scheduler.waiting, *scheduler.batcher.ended)}
        scheduler.pool.check_integrity(held)
    return schedule


def told(schedule: Schedule) -> tuple[dict[str, int], dict[str, int]]:
    return (
        {r.request.request_id: r.num_tokens for r in schedule.runs},
        {r.request.request_id: r.num_tokens for r in schedule.padding},
    )


def run_out(scheduler: Scheduler, most: int = 5000, check: bool = True) -> list[Schedule]:
    steps = []
    while scheduler.running or scheduler.waiting:
        steps.append(step(scheduler, check))
        assert steps[-1].runs or steps[-1].padding, "a step without work"
        assert len(steps) < most
    return steps


# -- static ---------------------------------------------------------------------------------------------------------------


def test_a_static_batch_starts_together_pads_and_ends_together():
    scheduler = make(max_num_seqs=2, batching="static", max_num_batched_tokens=12)
    for name, prompt, output in (("a", 6, 2), ("b", 9, 4), ("c", 2, 1)):
        scheduler.add(request(name, prompt, output))
    assert told(step(scheduler)) == ({"a": 6, "b": 6}, {})  # a has its first token, and waits
    assert told(step(scheduler)) == ({"b": 3}, {"a": 3})  # up to b's length; b has its first token
    assert told(step(scheduler)) == ({"a": 1, "b": 1}, {})  # a has ended
    assert [r.request_id for r in scheduler.batcher.ended] == ["a"] and scheduler.pool.num_used > 3
    assert told(step(scheduler)) == ({"b": 1}, {"a": 1})
    assert told(step(scheduler)) == ({"b": 1}, {"a": 1})
    assert scheduler.pool.num_used == 0 and [r.request_id for r in scheduler.waiting] == ["c"]
    assert told(step(scheduler)) == ({"c": 2}, {})


def test_who_comes_while_a_batch_runs_waits_for_its_end():
    scheduler = make(max_num_seqs=4, batching="static")
    scheduler.add(request("a", 3, 3))
    step(scheduler)
    scheduler.add(request("b", 3, 1, priority=-9))
    assert [told(s)[0] for s in run_out(scheduler)] == [{"a": 1}, {"a": 1}, {"b": 3}]


@pytest.mark.parametrize("lengths", ["equal", "uniform", "exponential"])
def test_static_against_continuous_reaches_the_ideal_ratio(lengths: str):
    """All output, steps of one second, a queue that never runs dry: equal lengths 1, uniform below 2, exponential H_B."""
    seqs, count = 8, 8 * 160
    rng = np.random.default_rng(5)
    made = {
        "equal": np.full(count, 20),
        "uniform": rng.integers(1, 41, count),
        "exponential": np.maximum(1, rng.exponential(40.0, count).round().astype(int)),
    }[lengths]
    steps = {}
    for batching in ("static", "continuous"):
        scheduler = make(num_blocks=1000, max_num_seqs=seqs, batching=batching)
        for i, n in enumerate(made):
            scheduler.add(request(str(i), 1, int(n)))
        steps[batching] = run_out(scheduler, 100_000, check=False)
    ratio = len(steps["static"]) / len(steps["continuous"])
    ideal = {"equal": 1.0, "uniform": 2 * seqs / (seqs + 1), "exponential": harmonic(seqs)}[lengths]
    assert abs(ratio / ideal - 1) < 0.04 and (lengths != "uniform" or ratio < 2)
    computed = sum(r.num_tokens for s in steps["static"] for r in s.runs)
    padding = sum(r.num_tokens for s in steps["static"] for r in s.padding)
    assert padding / (padding + computed) == pytest.approx(static_padding_share([int(n) for n in made], seqs), abs=0.01)


def test_padding_takes_no_block_from_a_request_and_ended_members_give_way():
    scheduler = make(num_blocks=6, max_num_seqs=2, batching="static")
    scheduler.add(request("a", 8, 1))
    scheduler.add(request("b", 8, 16))
    steps = run_out(scheduler)
    assert sum(r.sample for s in steps for r in s.runs) == 17
    assert len([s for s in steps if s.padding]) < 15  # a's two blocks went to b, which needs five


def test_a_member_that_cannot_be_admitted_is_not_waited_for():
    scheduler = make(max_num_seqs=4, batching="static", max_num_batched_tokens=8)
    for name in "abc":
        scheduler.add(request(name, 8, 2))
    step(scheduler)
    scheduler.max_num_seqs = 1  # b and c have no place any more
    assert [told(s)[0] for s in run_out(scheduler)] == [{"a": 1}, {"b": 8}, {"b": 1}, {"c": 8}, {"c": 1}]


def test_the_policy_changes_in_the_middle_of_a_run():
    scheduler = make(max_num_seqs=2)
    for name, n in (("a", 2), ("b", 6), ("c", 3)):
        scheduler.add(request(name, 4, n))
    step(scheduler)
    scheduler.batching = "static"  # those that run are a batch now
    assert [told(step(scheduler)) for _ in range(2)] == [({"a": 1, "b": 1}, {}), ({"b": 1}, {"a": 1})]
    scheduler.batching = "continuous"
    assert told(step(scheduler)) == ({"b": 1, "c": 4}, {})
    run_out(scheduler)
    assert scheduler.pool.num_used == 0


# -- dynamic --------------------------------------------------------------------------------------------------------------


def test_a_dynamic_batch_waits_to_be_full_or_for_its_time(monkeypatch: pytest.MonkeyPatch):
    now = [0]
    monkeypatch.setattr("engine.batching.time.monotonic_ns", lambda: now[0])
    scheduler = make(max_num_seqs=2, batching="dynamic", batching_timeout_ms=40)
    assert scheduler.batcher.ready_in_s() == 0.0  # nobody waits: nothing to wait for
    scheduler.add(request("a", 3))
    assert scheduler.batcher.ready_in_s() == pytest.approx(0.040)
    now[0] = 30_000_000
    assert scheduler.batcher.ready_in_s() == pytest.approx(0.010)
    scheduler.add(request("b", 3))
    assert scheduler.batcher.ready_in_s() == 0.0  # full
    run_out(scheduler)
    scheduler.add(request("c", 3))
    now[0] = 50_000_000
    assert scheduler.batcher.ready_in_s() == 0.0  # it has waited for longer than the limit
    step(scheduler)
    scheduler.add(request("d", 3))
    now[0] = 0
    assert scheduler.batcher.ready_in_s() == 0.0  # a batch runs


# -- everything together ----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_everybody_is_served_under_any_arrivals_and_changes(data: st.DataObject):
    """No starvation: with arrivals, aborts and moved knobs in any order every request ends, and no block is lost."""
    scheduler = make(
        num_blocks=data.draw(st.integers(8, 30)), max_num_seqs=data.draw(st.integers(1, 4)),
        max_num_batched_tokens=data.draw(st.integers(4, 24)), enable_chunked_prefill=True,
        batching=data.draw(st.sampled_from(("continuous", "static"))), watermark=data.draw(st.sampled_from((0.0, 0.2))),
        scheduling_policy=data.draw(st.sampled_from(("fcfs", "priority"))),
    )  # fmt: skip
    alive: list[Request] = []
    for i in range(data.draw(st.integers(1, 25))):
        if data.draw(st.booleans()):
            r = request(f"r{i}", data.draw(st.integers(1, 14)), data.draw(st.integers(1, 12)), data.draw(st.integers(-2, 2)))
            alive.append(r)
            scheduler.add(r)
        move = data.draw(st.integers(0, 9))
        if move == 0:
            scheduler.batching = data.draw(st.sampled_from(("continuous", "static")))
        elif move == 1:
            scheduler.scheduling_policy = data.draw(st.sampled_from(("fcfs", "priority")))
        elif move == 2:
            scheduler.max_num_seqs = data.draw(st.integers(1, 4))
        elif move == 3 and alive:
            victim = data.draw(st.sampled_from(alive))
            if victim.status != "finished":
                scheduler.finish(victim)
        elif move == 4:
            scheduler.preempt_all()
        if scheduler.running or scheduler.waiting:
            step(scheduler)
    run_out(scheduler)
    assert all(r.status == "finished" for r in alive) and scheduler.pool.num_used == 0 and not scheduler.batcher.ended


# -- priorities, and the queue ------------------------------------------------------------------------------------------------


def test_the_urgent_come_first_and_the_least_urgent_is_preempted():
    scheduler = make(num_blocks=6, max_num_seqs=3, scheduling_policy="priority")
    for name, priority in (("low", 5), ("high", -5), ("middle", 0)):
        scheduler.add(request(name, 7, 9, priority))
    schedule = step(scheduler)
    assert [r.request.request_id for r in schedule.runs] == ["high", "middle", "low"] == [r.request_id for r in scheduler.running]
    for _ in range(3):
        step(scheduler)
    assert scheduler.waiting[0].request_id == "low" and scheduler.waiting[0].status == "preempted"


def test_nobody_starves_under_priority():
    """Urgent requests arrive for ever, faster than they are served; the one that is not urgent runs once it has aged."""
    scheduler = make(max_num_seqs=1, scheduling_policy="priority")
    patient = request("patient", 1, 1, priority=1)
    scheduler.add(patient)
    waited = 0
    while patient.status != "finished":
        scheduler.add(request(f"urgent-{waited}", 1, 2))
        step(scheduler)
        waited += 1
        assert waited < 4 * PRIORITY_STEPS
    assert waited > PRIORITY_STEPS  # and not before


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(("add", "back", "pop", "remove", "policy", "step")), st.integers(-3, 3)), max_size=40))
def test_the_queue_against_a_sorted_list(moves):
    queue, model, names = Waiting(), [], iter(range(1000))  # model: (front, rank, order, request)
    gone: list[Request] = []
    front = 0
    for move, value in moves:
        if move == "add":
            r = request(str(next(names)), 1, priority=value)
            queue.append(r)
            model.append([0, r])
        elif move == "back" and gone:
            r = gone.pop()
            front -= 1
            queue.appendleft(r)
            model.append([front if queue.policy == "fcfs" else 0, r])
        elif move == "pop" and model:
            r = queue.popleft()
            assert r is model[0][1]
            gone.append(model.pop(0)[1])
        elif move == "remove" and model:
            r = model.pop(value % len(model))[1]
            queue.remove(r)
        elif move == "policy":
            queue.policy = "priority" if queue.policy == "fcfs" else "fcfs"
        elif move == "step":
            queue.step += 100
        by_rank = queue.policy == "priority"
        model.sort(
            key=lambda e: (
                e[0],
                (e[1].priority * PRIORITY_STEPS + e[1].arrived_step) if by_rank and not e[0] else 0,
                e[1].arrival_order,
            )
        )
        assert [e[1] for e in model] == list(queue) and len(queue) == len(model)
    with pytest.raises(RuntimeError, match="does not wait"):
        queue.remove(request("x", 1))


def test_admission_keeps_the_watermark_free_while_others_run():
    scheduler = make(num_blocks=10, watermark=0.3)
    scheduler.add(request("a", 16))
    scheduler.add(request("b", 16))
    step(scheduler)
    assert [r.request_id for r in scheduler.running] == ["a"]  # b's 4 would leave 2 of 10, and 3 are to stay free
    scheduler.watermark = 0.1
    step(scheduler)
    assert [r.request_id for r in scheduler.running] == ["a", "b"]
    alone = make(num_blocks=4, watermark=0.9)
    alone.add(request("c", 12))
    assert step(alone).runs  # nobody runs: nothing is kept free


def test_a_full_queue_refuses():
    scheduler = make(max_num_seqs=1, max_num_waiting=2)
    scheduler.add(request("a", 1))
    step(scheduler)
    for name in "bc":
        scheduler.check_queue()
        scheduler.add(request(name, 1))
    with pytest.raises(QueueFull, match="queue full: 2 requests wait, max_num_waiting is 2"):
        scheduler.check_queue()


def test_order_of_arrival_is_kept_among_equals():
    queue = Waiting("priority")
    requests = [request(str(i), 1, priority=i % 2) for i in range(8)]
    for r in requests:
        queue.append(r)
    order = [int(r.request_id) for r in queue]
    assert order == [0, 2, 4, 6, 1, 3, 5, 7] and all(a is not b for a, b in pairwise(queue))
