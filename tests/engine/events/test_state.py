"""The reducer against the truth: the real pool and scheduler, whose state after every step must be what the events rebuild."""

from typing import Any

import msgspec
import numpy as np
import pytest

from engine.events import reducer
from engine.events import types as t
from engine.events.state import UNSEEN, State
from tests.engine.events.simulate import Simulation, simulate

NOW = {"step": 1, "time_ns": 1}


def start(num_blocks: int = 8) -> State:
    knobs = {"max_num_seqs": 8}
    snapshot = t.Snapshot(
        step=0,
        time_ns=0,
        num_blocks=num_blocks,
        block_size=4,
        ref_counts=[0] * num_blocks,
        cached={},
        lru=[],
        requests=[],
        knobs=knobs,
    )
    return State().apply_all([snapshot])


def added(request_id: str = "r", tokens: int = 3) -> t.RequestAdded:
    return t.RequestAdded(
        **NOW,
        request_id=request_id,
        owner="ada",
        prompt_token_ids=list(range(tokens)),
        prompt_text="p",
        sampling={"temperature": 1.0},
    )


def step(request_id: str, start: int, count: int, sampled: bool, number: int = 1) -> t.StepDone:
    return t.StepDone(
        step=number, time_ns=1, runs=[t.Run(request_id, "prefill", start, count, sampled)], num_waiting=0, num_running=1, token_budget=1,
        max_num_seqs=1, used_blocks=0, cached_free_blocks=0, schedule_ms=0.0, forward_ms=0.0, sample_ms=0.0, commit_ms=0.0, step_ms=0.0,
        record_ms=0.0, flops=0.0, weight_bytes=0.0, kv_read_bytes=0.0, kv_write_bytes=0.0,
    )  # fmt: skip


def token(request_id: str, index: int, token_id: int = 9) -> t.TokenSampled:
    return t.TokenSampled(
        **NOW, request_id=request_id, position=3 + index, index=index, token_id=token_id, text="x", logprob=-1.0, rank=1, u=None, prob=1.0,
        nucleus_size=0, nucleus_mass=1.0, entropy=0.0,
    )  # fmt: skip


def equal(state: State, truth: t.Snapshot) -> None:
    """Everything that both know (texts and arrival times are not part of a simulation)."""
    mine = state.snapshot()
    assert mine.ref_counts == truth.ref_counts
    assert mine.cached == truth.cached
    assert mine.lru == truth.lru
    assert mine.knobs == truth.knobs
    assert (mine.num_blocks, mine.block_size, mine.step) == (truth.num_blocks, truth.block_size, truth.step)
    views = {r.request_id: msgspec.structs.replace(r, output_text="", arrived_ns=0) for r in mine.requests}
    assert views == {r.request_id: r for r in truth.requests}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_blocks", [24, 64])
def test_every_step_of_real_pools_is_rebuilt(seed: int, num_blocks: int) -> None:
    events: list[t.Event] = []
    simulation = Simulation(seed, num_blocks=num_blocks)
    simulation.start(events.append)
    state, done = State(), 0
    for _ in range(250):
        simulation.step()
        state.apply_all(events[done:])
        done = len(events)
        equal(state, simulation.snapshot())
    kinds = {type(e) for e in events}
    assert {t.RequestPreempted, t.RequestForked, t.BlockCopied, t.BlockShared, t.BlockEvicted, t.KnobChanged} <= kinds


def test_tokens_are_counted_when_nobody_watches_them() -> None:
    simulation = Simulation(5, tokens=False)
    events: list[t.Event] = []
    simulation.start(events.append)
    for _ in range(100):
        simulation.step()
    state = State().apply_all(events)
    assert any(r.output_token_ids for r in simulation.snapshot().requests)
    for r in simulation.snapshot().requests:
        view = state.requests[r.request_id]
        assert view.num_output_tokens == len(r.output_token_ids) and view.output_token_ids == []
        assert view.token_ids == r.prompt_token_ids + [UNSEEN] * len(r.output_token_ids)


def test_tokens_that_are_watched_late() -> None:
    state = start().apply_all(
        [added(), step("r", 0, 3, True), step("r", 3, 1, True, 2), token("r", 2, 77), step("r", 4, 1, True, 3)]
    )
    view = state.requests["r"]
    assert view.output_token_ids == [UNSEEN, UNSEEN, 77] and view.num_output_tokens == 3 and view.output_text == "x"
    state.apply(token("r", 1, 55))
    assert state.requests["r"].output_token_ids == [UNSEEN, 55, 77]


def test_a_late_watcher_starts_from_a_snapshot() -> None:
    simulation = Simulation(2)
    simulation.start(lambda event: None)
    for _ in range(50):
        simulation.step()
    events: list[t.Event] = [simulation.snapshot()]
    simulation.recorder.attach(events.append)
    state = State()
    for _ in range(50):
        simulation.step()
        state.apply_all(events)
        events.clear()
        equal(state, simulation.snapshot())


def test_a_snapshot_after_a_gap_ends_what_it_lacks() -> None:
    state = start().apply_all([added("gone"), added("there"), step("gone", 0, 3, True)])
    view = state.requests["there"].to_state()
    gap = t.Snapshot(
        step=9, time_ns=9, num_blocks=8, block_size=4, ref_counts=[0] * 8, cached={}, lru=[], requests=[view], knobs={}
    )
    state.apply(gap)
    assert state.requests["gone"].status == "finished" and "dropped" in state.requests["gone"].message
    assert [v.request_id for v in state.live] == ["there"]


def test_a_copy_and_its_original_do_not_touch_each_other() -> None:
    events = simulate(120, seed=3)
    half = len(events) // 2
    state = State().apply_all(events[:half])
    before = state.snapshot(finished=True)
    copies = [state.copy(), state.copy()]
    copies[0].apply_all(events[half:])
    assert state.snapshot(finished=True) == before == copies[1].snapshot(finished=True)
    state.apply_all(events[half:])
    assert copies[1].snapshot(finished=True) == before
    assert copies[0].snapshot(finished=True) == state.snapshot(finished=True) != before


def test_a_copy_shares_what_is_large() -> None:
    state = start(100_000).apply_all([added()])
    copy = state.copy()
    assert copy.ref_counts is state.ref_counts and copy.requests["r"] is state.requests["r"]
    copy.apply(t.BlockAllocated(**NOW, request_id="r", first_index=0, block_ids=[7]))
    assert (copy.ref_counts[7], state.ref_counts[7]) == (1, 0)
    assert (copy.requests["r"].block_ids, state.requests["r"].block_ids) == ([7], [])


def test_finished_requests_are_kept_within_a_bound() -> None:
    state = start()
    for i in range(300):
        state.apply_all([added(f"r{i}"), step(f"r{i}", 0, 3, True), t.RequestFinished(**NOW, request_id=f"r{i}", reason="stop")])
    state.apply(step("r299", 3, 1, False))
    assert len(state.requests) == reducer.MAX_FINISHED and list(state.requests)[-1] == "r299"
    assert state.live == []


@pytest.mark.parametrize("recompute", [False, True])
def test_a_request_runs_from_its_look_up_on(recompute: bool) -> None:
    """Between its place in the batch and the end of that step it holds blocks: neither waiting nor preempted."""
    state = start().apply_all([added()])
    if recompute:
        state.apply(t.RequestPreempted(**NOW, request_id="r", num_computed_tokens=0, for_request_id="r"))
    assert state.requests["r"].status == ("preempted" if recompute else "waiting")
    found = t.PrefixLookup(
        **NOW, request_id="r", num_tokens=3, num_hit_tokens=0, block_ids=[], miss_reason="no such prefix", recompute=recompute
    )
    state.apply_all([found, t.BlockAllocated(**NOW, request_id="r", block_ids=[0], first_index=0)])
    assert (state.requests["r"].status, state.requests["r"].block_ids) == ("running", [0])


def test_sampling_and_knobs_and_pool_changes() -> None:
    state = start()
    state.apply_all([
        added(),
        t.KnobChanged(**NOW, name="temperature", old=1.0, new=0.2, request_id="r"),
        t.KnobChanged(**NOW, name="block_size", old=4, new=8, draining=True),
    ])  # fmt: skip
    assert state.requests["r"].sampling == {"temperature": 0.2}
    assert state.draining == {"block_size": 8} and state.block_size == 4
    state.apply(t.PoolResized(**NOW, num_blocks=5, block_size=8, kv_bytes_per_block=1, kv_pool_bytes=5))
    assert state.draining == {} and state.block_size == 8 and state.ref_counts.tolist() == [0] * 5
    assert state.knobs == {"max_num_seqs": 8, "block_size": 8, "num_kv_blocks": 5}


def test_an_engine_that_starts_anew_forgets_everything() -> None:
    state = start().apply_all([added()])
    config = {"num_kv_blocks": 3, "block_size": 16}
    state.apply(
        t.EngineStarted(step=0, time_ns=5, config=config, model={}, device={}, versions={}, kv_bytes_per_block=1, kv_pool_bytes=3)
    )
    assert state.requests == {} and state.num_blocks == 3 and state.ref_counts.dtype == np.int32


BIG = 1 << 40


def snapshot_of(**fields: Any) -> t.Snapshot:
    """A Snapshot of one request, out of order only in ``fields``."""
    request = {
        "request_id": "r", "owner": "ada", "status": "running", "prompt_token_ids": [1, 2], "output_token_ids": [], "prompt_text": "",
        "output_text": "", "sampling": {}, "num_computed_tokens": 2, "block_ids": [0], **fields,
    }  # fmt: skip
    return t.Snapshot(
        **NOW,
        num_blocks=8,
        block_size=4,
        ref_counts=[1, *[0] * 7],
        cached={},
        lru=[],
        requests=[t.RequestState(**request)],
        knobs={},
    )


def test_a_snapshot_in_order_is_taken() -> None:
    assert start().apply_all([snapshot_of()]).requests["r"].block_ids == [0]


@pytest.mark.parametrize(
    "event",
    [
        t.RequestFinished(**NOW, request_id="nobody", reason="stop"),
        t.RequestFinished(**NOW, request_id="r", reason="stop", num_output_tokens=BIG),
        t.BlockAllocated(**NOW, request_id="r", first_index=0, block_ids=[8]),
        t.BlockAllocated(**NOW, request_id="r", first_index=0, block_ids=[-1]),
        t.BlockAllocated(**NOW, request_id="r", first_index=3, block_ids=[0]),
        t.BlockAllocated(**NOW, request_id="r", first_index=0, block_ids=[0] * 9),
        t.BlockFreed(**NOW, request_id="r", block_ids=[0] * 9, ref_counts=[0] * 9),
        t.BlockShared(**NOW, request_id="r", first_index=0, block_ids=[0, 1], ref_counts=[1]),
        t.BlockFreed(**NOW, request_id="r", block_ids=[0], ref_counts=[-1]),
        t.BlockCached(**NOW, block_id=99, block_hash=1, parent_hash=0),
        t.BlockCopied(**NOW, request_id="r", index=0, src=0, dst=BIG, src_ref_count=0),
        t.RequestForked(**NOW, request_id="r", parent_id="q", block_ids=[BIG], num_computed_tokens=3),
        t.RequestForked(**NOW, request_id="r", parent_id="q", block_ids=[], num_computed_tokens=BIG),
        step("r", 0, BIG, True),
        step("nobody", 0, 1, True),
        token("r", BIG),
        token("r", -1),
        added(),
        t.PoolResized(**NOW, num_blocks=BIG, block_size=1, kv_bytes_per_block=1, kv_pool_bytes=1),
        t.Snapshot(**NOW, num_blocks=BIG, block_size=1, ref_counts=[], cached={}, lru=[], requests=[], knobs={}),
        t.Snapshot(**NOW, num_blocks=1, block_size=1, ref_counts=[BIG], cached={}, lru=[], requests=[], knobs={}),
        t.Snapshot(**NOW, num_blocks=1, block_size=1, ref_counts=[0], cached={5: 1}, lru=[], requests=[], knobs={}),
        snapshot_of(block_ids=[8]),
        snapshot_of(block_ids=[-1]),
        snapshot_of(num_computed_tokens=-1),
        snapshot_of(num_computed_tokens=BIG),
    ],
)  # fmt: skip
def test_events_that_cannot_follow_are_refused(event: t.Event) -> None:
    state = start().apply_all([added()])
    with pytest.raises(ValueError):
        state.apply(event)


def test_what_is_no_event_is_refused() -> None:
    for apply in (State().apply, lambda x: State().apply_all([x])):
        with pytest.raises(ValueError, match="not an event"):
            apply("StepDone")  # type: ignore[arg-type]


def test_the_number_of_tokens_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "MAX_TOKENS", 100)
    monkeypatch.setattr("engine.events.state.MAX_TOKENS", 100)
    state = start().apply_all([added("a", 60)])
    with pytest.raises(ValueError, match="100 token ids"):
        state.apply(added("b", 60))
