"""The what-if replay: against the engine's own scheduler step by step, and against timelines and ratios known by hand."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.events.recorder import Recorder
from engine.events.types import Run, StepDone
from engine.kvcache.pool import BlockPool
from engine.load.arrivals import Burst
from engine.load.cost import StepCost, fit_step_cost, num_contexts
from engine.load.generate import Load, make_load
from engine.load.ideal import continuous_steps, harmonic, static_padding_share, static_steps
from engine.load.lengths import Equal, Exponential, Uniform
from engine.load.replay import Cell, Replayed, from_load, from_records, replay
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.waiting import PRIORITY_STEPS

UNIT = StepCost(1.0)  # every step takes a second


def scheduled(
    requests: list[Replayed],
    seqs: int,
    budget: int,
    chunked: bool,
    blocks: int,
    size: int,
    batching: str = "continuous",
    policy: str = "fcfs",
) -> list[list[tuple[int, int]]]:
    """What the engine's scheduler runs in each step of a second: (request, tokens), padding last."""
    pool = BlockPool(blocks, size, Recorder())
    scheduler = Scheduler(
        pool, pool.recorder, max_num_seqs=seqs, max_num_batched_tokens=budget, enable_prefix_caching=False, enable_chunked_prefill=chunked,
        batching=batching, scheduling_policy=policy,
    )  # fmt: skip
    coming = sorted(enumerate(requests), key=lambda pair: pair[1].arrival_s)
    now, steps = 0.0, []
    while coming or scheduler.waiting or scheduler.running:
        if not (scheduler.waiting or scheduler.running):
            now = max(now, coming[0][1].arrival_s)
        while coming and coming[0][1].arrival_s <= now:
            i, r = coming.pop(0)
            params = SamplingParams(max_tokens=r.num_output_tokens)
            scheduler.add(Request(str(i), [1] * r.num_prompt_tokens, params, 0, priority=r.priority))
        schedule = scheduler.schedule()
        steps.append([(int(run.request.request_id), run.num_tokens) for run in (*schedule.runs, *schedule.padding)])
        scheduler.batcher.end_padding(schedule)
        for run in schedule.runs:
            run.request.num_computed_tokens += run.num_tokens
            if run.sample:
                run.request.token_ids.append(1)
                if run.request.num_tokens - run.request.num_prompt_tokens == run.request.params.max_tokens:
                    scheduler.finish(run.request)
        now += 1.0
        assert len(steps) < 3000
    return steps


REQUESTS = st.lists(
    st.builds(Replayed, st.integers(0, 30).map(float), st.integers(1, 12), st.integers(1, 8), priority=st.integers(-1, 1)),
    min_size=1, max_size=10,
)  # fmt: skip
POLICIES = st.sampled_from(["fcfs", "priority"])


@settings(max_examples=100, deadline=None)
@given(REQUESTS, st.integers(1, 4), st.integers(1, 16), st.booleans(), st.integers(5, 40), POLICIES)
@example([Replayed(0, 4, 6, priority=1), Replayed(2, 4, 4, priority=-1)], 2, 16, True, 40, "priority")  # the later one goes first
def test_it_decides_as_the_scheduler_does(
    requests: list[Replayed], seqs: int, budget: int, chunked: bool, blocks: int, policy: str
) -> None:
    """Also where the pool is full and requests are preempted: 5 blocks of 4 hold the longest of them alone."""
    want = scheduled(requests, seqs, budget, chunked, blocks, 4, policy=policy)
    got = replay(
        requests, UNIT, max_num_seqs=seqs, max_num_batched_tokens=budget, chunked=chunked, num_kv_blocks=blocks, block_size=4,
        scheduling_policy=policy,
    )  # fmt: skip
    assert [[(c.request, c.num_tokens) for c in step.cells] for step in got.steps] == want
    for record, request in zip(got.records, requests, strict=True):
        assert (record.outcome, record.num_output_tokens) == ("length", request.num_output_tokens)


@settings(max_examples=100, deadline=None)
@given(REQUESTS, st.integers(1, 4), st.integers(4, 16), st.booleans())
def test_a_static_batch_is_the_schedulers(requests: list[Replayed], seqs: int, budget: int, chunked: bool) -> None:
    want = scheduled(requests, seqs, budget, chunked, 400, 4, "static")
    got = replay(requests, UNIT, "static", max_num_seqs=seqs, max_num_batched_tokens=budget, chunked=chunked)
    assert [sorted((c.request, c.num_tokens) for c in step.cells) for step in got.steps] == [sorted(step) for step in want]


@settings(max_examples=80, deadline=None)
@given(REQUESTS, st.integers(1, 4), st.integers(1, 16), st.booleans(), st.sampled_from(("continuous", "static", "dynamic")))
def test_every_policy_serves_everybody_and_no_slot_twice(requests, seqs: int, budget: int, chunked: bool, policy: str) -> None:
    got = replay(requests, UNIT, policy, max_num_seqs=seqs, max_num_batched_tokens=budget, chunked=chunked, max_wait_s=2.5)
    computed = dict.fromkeys(range(len(requests)), 0)
    for step, after in zip(got.steps, [*got.steps[1:], None]):
        assert step.end_s == step.start_s + 1 and (after is None or after.start_s >= step.end_s)
        owners = {cell.slot: cell.request for cell in step.cells}
        assert len({cell.request for cell in step.cells}) == len(owners) <= seqs
        for cell in step.cells:
            assert owners[cell.slot] == cell.request and 0 <= cell.slot < seqs
            computed[cell.request] += cell.num_tokens * (cell.phase != "padding")
    for i, (record, request) in enumerate(zip(got.records, requests, strict=True)):
        assert (record.outcome, record.num_output_tokens) == ("length", request.num_output_tokens)
        assert computed[i] == request.num_prompt_tokens + request.num_output_tokens - 1
        assert record.arrival_s <= record.scheduled_s < record.token_times_s[0] and record.finish_s == record.token_times_s[-1]
    m = got.measures().steps
    assert m is not None and (policy != "continuous" or m.padding_share == 0)


def test_a_static_batch_by_hand() -> None:
    requests = [Replayed(0, 3, 1), Replayed(0, 1, 3), Replayed(0.5, 2, 2)]
    got = replay(requests, UNIT, "static", max_num_seqs=2)
    assert [step.cells for step in got.steps] == [
        (Cell(0, 0, "prefill", 3), Cell(1, 1, "prefill", 1), Cell(1, 1, "padding", 2)),
        (Cell(1, 1, "decode", 1), Cell(0, 0, "padding", 1)),
        (Cell(1, 1, "decode", 1), Cell(0, 0, "padding", 1)),
        (Cell(0, 2, "prefill", 2),),
        (Cell(0, 2, "decode", 1),),
    ]
    assert [list(r.token_times_s) for r in got.records] == [[1.0], [1.0, 2.0, 3.0], [4.0, 5.0]]
    m = got.measures()
    assert m.steps is not None and m.steps.padding_share == pytest.approx(4 / 13)
    assert [r.queue_s for r in got.records] == [0, 0, 2.5]


def test_a_dynamic_batch_waits_for_more_but_not_for_long() -> None:
    requests = [Replayed(0, 1, 1), Replayed(0.3, 1, 1), Replayed(3, 1, 1), Replayed(9, 1, 1)]
    full = replay(requests, UNIT, "dynamic", max_num_seqs=2, max_wait_s=1.0)
    assert [(s.start_s, len(s.cells)) for s in full.steps] == [(0.3, 2), (4.0, 1), (10.0, 1)]
    static = replay(requests, UNIT, "static", max_num_seqs=2)
    assert [(s.start_s, len(s.cells)) for s in static.steps] == [(0.0, 1), (1.0, 1), (3.0, 1), (9.0, 1)]


def test_padded_prefill_in_chunks() -> None:
    got = replay([Replayed(0, 5, 1), Replayed(0, 2, 2)], UNIT, "static", max_num_seqs=2, max_num_batched_tokens=4)
    assert [step.cells for step in got.steps] == [
        (Cell(0, 0, "prefill", 4),),
        (Cell(0, 0, "prefill", 1), Cell(1, 1, "prefill", 2), Cell(1, 1, "padding", 1)),
        (Cell(1, 1, "padding", 2),),
        (Cell(1, 1, "decode", 1), Cell(0, 0, "padding", 1)),
    ]


@pytest.mark.parametrize(("lengths", "ratio"), [(Equal(20), 1.0), (Uniform(1, 40), 2 * 8 / 9), (Exponential(20), harmonic(8))])
def test_the_ideal_ratios_come_out_of_whole_replays(lengths, ratio: float) -> None:
    """Prompts of one token, a fixed step time, everything there at once: the steps are those of the ideal, the ratio that of theory."""
    load = from_load(make_load(Load(arrivals=Burst(), num_requests=1200, prompt=Equal(1), output=lengths)))
    outputs = [r.num_output_tokens for r in load]
    static, continuous = (replay(load, UNIT, p, max_num_seqs=8) for p in ("static", "continuous"))
    assert len(static.steps) == static_steps(outputs, 8) and len(continuous.steps) == continuous_steps(outputs, 8)
    gain = continuous.measures().output_throughput / static.measures().output_throughput
    assert gain == pytest.approx(ratio, rel=0.06)
    steps = static.measures().steps
    assert steps is not None and steps.padding_share == pytest.approx(static_padding_share(outputs, 8))


def test_a_budget_bounds_the_stall_of_a_long_prompt() -> None:
    """Claim 8: without chunks a decode waits for the whole prompt; with them at most for a budget, and the prompt's first token is later."""
    cost = StepCost(0.01, 0.001)
    requests = [Replayed(0, 1, 900), Replayed(5, 2000, 1)]
    whole, chunks = (
        replay(requests, cost, max_num_batched_tokens=4000, chunked=False),
        replay(requests, cost, max_num_batched_tokens=100),
    )
    assert whole.measures().itl_s.max == pytest.approx(0.01 + 2.001)
    assert chunks.measures().itl_s.max == pytest.approx(0.01 + 0.1)
    assert chunks.records[1].ttft_s > whole.records[1].ttft_s


def test_cached_tokens_are_not_computed_and_priorities_go_first() -> None:
    requests = [Replayed(0, 9, 2), Replayed(0, 40, 1, num_cached_tokens=32, priority=3), Replayed(0, 4, 1, priority=1)]
    got = replay(requests, UNIT, max_num_seqs=1, scheduling_policy="priority")
    assert [[(c.request, c.num_tokens) for c in s.cells] for s in got.steps] == [[(0, 9)], [(0, 1)], [(2, 4)], [(1, 8)]]


def test_a_request_ages_past_more_urgent_ones_that_come_all_the_time() -> None:
    requests = [Replayed(0, 1, 1, priority=1), *(Replayed(float(t), 1, 1) for t in range(400))]
    got = replay(requests, UNIT, max_num_seqs=1, scheduling_policy="priority")
    ran = next(i for i, step in enumerate(got.steps) if step.cells[0].request == 0)
    want = scheduled(requests, 1, 512, True, 40, 4, policy="priority")
    assert ran == want.index([(0, 1)]) <= PRIORITY_STEPS + 1


def test_one_that_can_never_fit_says_so_and_the_others_go_on() -> None:
    got = replay([Replayed(0, 30, 5), Replayed(0, 3, 2), Replayed(9, 40, 1)], UNIT, num_kv_blocks=8, block_size=4)
    assert [r.outcome for r in got.records] == ["error", "length", "error"] and "never fits" in got.records[0].message
    assert len(got.steps) == 2


def test_preemption_is_counted() -> None:
    got = replay([Replayed(0, 4, 9), Replayed(0, 4, 9)], UNIT, num_kv_blocks=4, block_size=4)
    m = got.measures()
    assert m.num_preemptions == sum(len(s.preempted) for s in got.steps) > 0
    assert m.steps is not None and m.steps.kv_usage_max == 1.0


def test_records_go_round() -> None:
    first = replay([Replayed(2.0, 4, 3), Replayed(3.5, 5, 2, 4)], UNIT)
    again = from_records(first.records)
    assert again == [Replayed(0.0, 4, 3, 0, 0, "0"), Replayed(1.5, 5, 2, 4, 0, "1")]
    with pytest.raises(ValueError, match="later turn"):
        from_load(make_load(Load(num_requests=1, turns=Equal(2))))


@pytest.mark.parametrize(
    "fields",
    [{"policy": "magic"}, {"max_num_seqs": 0}, {"max_num_batched_tokens": 1.5}, {"block_size": 0}, {"scheduling_policy": "lifo"}],
)
def test_values_are_checked(fields: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        replay([Replayed(0, 1, 1)], UNIT, **fields)
    for bad in ((0, 1, 0), (0, 0, 1), (0, 4, 1, 4)):
        with pytest.raises(ValueError, match=r"tokens"):
            Replayed(*bad)


# -- what a step costs -----------------------------------------------------------------------------------------------------


def step_done(runs: list[Run], step_ms: float) -> StepDone:
    return StepDone(
        step=1, time_ns=0, runs=runs, num_waiting=0, num_running=0, token_budget=1, max_num_seqs=1, used_blocks=0, cached_free_blocks=0,
        schedule_ms=0, forward_ms=0, sample_ms=0, commit_ms=0, step_ms=step_ms, record_ms=0, flops=0, weight_bytes=0, kv_read_bytes=0,
        kv_write_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize("costs", [(0.02, 0.001, 1e-6), (0.02, 0.001, 0.0), (0.0, 0.001, 1e-6), (0.02, 0.0, 0.0)])
def test_the_fit_finds_the_costs(costs: tuple[float, float, float]) -> None:
    rng, truth, events = np.random.default_rng(0), StepCost(*costs), []
    for _ in range(60):
        runs = [Run("r", "decode", int(rng.integers(0, 900)), int(rng.integers(1, 60)), True) for _ in range(rng.integers(1, 6))]
        seconds = truth(sum(r.num_tokens for r in runs), sum(num_contexts(r.start, r.num_tokens) for r in runs))
        events.append(step_done(runs, 1e3 * seconds))
    fit = fit_step_cost([*events, step_done([], 1.0)])
    assert (fit.base_s, fit.per_token_s, fit.per_context_s) == pytest.approx(costs, rel=1e-6, abs=1e-9)
    assert fit.num_steps == 60 and fit.error_share < 1e-6


def test_no_cost_is_negative_and_the_error_is_told() -> None:
    shrinking = [step_done([Run("r", "prefill", 0, n, True)], 100.0 / n) for n in (1, 2, 5, 10)]
    fit = fit_step_cost(shrinking)
    assert min(fit.base_s, fit.per_token_s, fit.per_context_s) >= 0 and fit.error_share > 0.3
    assert fit.base_s == pytest.approx(np.mean([0.1, 0.05, 0.02, 0.01]))
    with pytest.raises(ValueError, match="no step"):
        fit_step_cost([])
    with pytest.raises(ValueError, match="not all 0"):
        StepCost(0.0)


def test_contexts_are_the_pairs() -> None:
    for start, n in ((0, 1), (0, 5), (7, 1), (7, 4)):
        assert num_contexts(start, n) == sum(position + 1 for position in range(start, start + n))
