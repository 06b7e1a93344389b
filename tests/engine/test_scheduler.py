"""The scheduler alone, without a model: every step within its limits, everybody served in the end, exact decisions."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.events.recorder import Recorder
from engine.events.types import PrefixLookup, RequestPreempted
from engine.kvcache.pool import BlockPool
from engine.request import Request, SamplingParams
from engine.scheduler import Schedule, Scheduler


def make(num_blocks: int = 16, block_size: int = 4, **limits: Any) -> tuple[Scheduler, list]:
    events: list = []
    recorder = Recorder()
    recorder.attach(events.append)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 16, **limits}
    return Scheduler(BlockPool(num_blocks, block_size, recorder), recorder, **limits), events


def request(name: str, length: int, *, first: int = 0) -> Request:
    return Request(name, list(range(first, first + length)), SamplingParams(), 0)


def commit(scheduler: Scheduler, schedule: Schedule, token: int = 7) -> None:
    """What the engine does after the forward pass, as far as the scheduler sees it."""
    for run in schedule.runs:
        old = run.request.num_computed_tokens
        run.request.num_computed_tokens += run.num_tokens
        scheduler.cache_full_blocks(run.request, old)
        if run.sample:
            run.request.token_ids.append(token)


def step(scheduler: Scheduler) -> list[tuple[str, int, int, bool]]:
    schedule = scheduler.schedule()
    commit(scheduler, schedule)
    return [(r.request.request_id, r.start, r.num_tokens, r.sample) for r in schedule.runs]


def test_decodes_come_first_and_a_long_prompt_gets_what_is_left():
    scheduler, _ = make()
    scheduler.add(request("a", 5))
    assert step(scheduler) == [("a", 0, 5, True)]
    scheduler.add(request("b", 30, first=100))
    assert step(scheduler) == [("a", 5, 1, True), ("b", 0, 15, False)]
    assert step(scheduler) == [("a", 6, 1, True), ("b", 15, 15, True)]
    assert step(scheduler) == [("a", 7, 1, True), ("b", 30, 1, True)]


def test_batch_size_lowered_while_running():
    scheduler, _ = make()
    for i in range(3):
        scheduler.add(request(f"r{i}", 2, first=10 * i))
    assert [r[0] for r in step(scheduler)] == ["r0", "r1", "r2"]
    scheduler.max_num_seqs = 2
    assert [r[0] for r in step(scheduler)] == ["r0", "r1"]
    scheduler.finish(scheduler.running[0])
    assert [r[0] for r in step(scheduler)] == ["r1", "r2"]


def test_the_latest_is_preempted_and_comes_back_first():
    scheduler, events = make(num_blocks=4, enable_prefix_caching=False)
    scheduler.add(request("a", 8))
    scheduler.add(request("b", 7, first=50))
    scheduler.add(request("c", 2, first=90))
    assert [r[0] for r in step(scheduler)] == ["a", "b"]  # c has no block left
    assert [r[0] for r in step(scheduler)] == ["a"]  # a needs a third block: b gives its two back
    (event,) = [e for e in events if isinstance(e, RequestPreempted)]
    assert (event.request_id, event.num_computed_tokens, event.for_request_id) == ("b", 7, "a")
    assert [r.request_id for r in scheduler.waiting] == ["b", "c"]
    scheduler.finish(scheduler.running[0])
    assert step(scheduler)[0] == ("b", 0, 8, True)  # its seven prompt tokens and the one it had produced


def test_prefix_hits_are_shared_and_explained():
    scheduler, events = make(max_num_batched_tokens=64)
    scheduler.add(request("a", 9))
    step(scheduler)
    scheduler.add(request("b", 9))
    assert ("b", 8, 1, True) in step(scheduler)
    a, b = scheduler.running
    assert a.block_ids[:2] == b.block_ids[:2] and a.block_ids[2] != b.block_ids[2]
    lookups = [(e.request_id, e.num_hit_tokens, e.miss_reason) for e in events if isinstance(e, PrefixLookup)]
    assert lookups == [("a", 0, "no such prefix"), ("b", 8, "")]


def test_without_chunked_prefill_prompts_stay_whole():
    scheduler, _ = make(enable_chunked_prefill=False, num_blocks=32)
    scheduler.add(request("a", 10))
    scheduler.add(request("b", 10, first=100))
    scheduler.add(request("c", 40, first=200))  # longer than the budget: runs alone
    assert step(scheduler) == [("a", 0, 10, True)]
    assert step(scheduler) == [("a", 10, 1, True), ("b", 0, 10, True)]
    assert [r[0] for r in step(scheduler)] == ["a", "b"]
    for r in list(scheduler.running):
        scheduler.finish(r)
    assert step(scheduler) == [("c", 0, 40, True)]


def test_copy_on_write_for_all_but_the_last_holder():
    scheduler, _ = make(max_num_batched_tokens=64)
    parent = request("p", 6)
    scheduler.add(parent)
    schedule = scheduler.schedule()
    parent.num_computed_tokens = 6
    scheduler.cache_full_blocks(parent, 0)
    children = [
        Request(f"p#{i}", parent.token_ids, parent.params, 0, parent_id="p", group_id="p", sample_index=i) for i in (1, 2)
    ]
    for child in children:
        scheduler.fork(parent, child)
    for r in (parent, *children):
        r.token_ids.append(9)
    assert scheduler.running == [parent, *children]
    schedule = scheduler.schedule()
    assert schedule.copies == [(1, 2), (1, 3)]
    assert [r.request.block_ids for r in schedule.runs] == [[0, 2], [0, 3], [0, 1]]
    assert [scheduler.pool.ref_counts[b] for b in range(4)] == [3, 1, 1, 1]


def test_finishing_twice_is_a_broken_invariant():
    scheduler, _ = make()
    r = request("a", 3)
    scheduler.add(r)
    scheduler.finish(r)
    with pytest.raises(RuntimeError, match="twice"):
        scheduler.finish(r)


@settings(max_examples=120)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 2)), min_size=1, max_size=10),
    num_blocks=st.integers(11, 24), block_size=st.sampled_from([1, 3, 4]), max_num_seqs=st.integers(1, 5), budget=st.integers(1, 20),
    caching=st.booleans(), chunked=st.booleans(),
)  # fmt: skip
def test_limits_hold_and_everybody_finishes(lengths, num_blocks, block_size, max_num_seqs, budget, caching, chunked):
    limits = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "enable_prefix_caching": caching,
        "enable_chunked_prefill": chunked,
    }
    scheduler, _ = make(num_blocks, block_size, **limits)
    room = num_blocks * block_size
    todo = {}
    for i, (prompt, output, family) in enumerate(lengths):
        prompt = min(prompt, room - 1)
        todo[f"r{i}"] = min(prompt + output, room)
        scheduler.add(request(f"r{i}", prompt, first=100 * family))
    for _ in range(20_000):
        if not scheduler.running and not scheduler.waiting:
            break
        schedule = scheduler.schedule()
        assert schedule.runs, "a step that does nothing with work to do"
        assert len(schedule.runs) <= max_num_seqs
        total = sum(r.num_tokens for r in schedule.runs)
        assert total <= budget or (not chunked and (len(schedule.runs) == 1 or total - schedule.runs[0].num_tokens < budget))
        for r in schedule.runs:
            assert r.num_tokens >= 1 and r.start == r.request.num_computed_tokens
            assert r.sample == (r.start + r.num_tokens == r.request.num_tokens)
            assert len(r.request.block_ids) * block_size >= r.start + r.num_tokens
        commit(scheduler, schedule)
        for r in list(scheduler.running):
            if r.num_tokens >= todo[r.request_id]:
                scheduler.finish(r)
        scheduler.pool.check_integrity({r.request_id: r.block_ids for r in scheduler.running})
    else:
        raise AssertionError("not everybody finished")
    assert scheduler.pool.num_used == 0
