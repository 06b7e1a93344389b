"""Driving an engine by its steps: what was sent when, what came when, and a load that is too much."""

import tracemalloc

import pytest

from engine.load.agenda import Agenda, Results
from engine.load.arrivals import Burst, Constant, Poisson
from engine.load.drive import SimulatedClock, drive
from engine.load.generate import Arrival, Conversation, Load, conversations
from engine.load.ideal import continuous_steps
from engine.load.lengths import Equal, Exponential, Uniform
from engine.measures import Limits
from engine.request import SamplingParams
from tests.engine.engines import tiny_engine
from tests.engine.load.slots import SlotEngine


def load(**fields) -> Load:
    return Load(**{"prompt": Equal(3), "output": Equal(4), **fields})


def test_times_on_a_simulated_clock() -> None:
    results = drive(SlotEngine(2), conversations(load(arrivals=Constant(4.0), num_requests=3)), clock=SimulatedClock(0.1))
    first, second, third = sorted(results.records, key=lambda r: r.arrival_s)
    assert list(first.token_times_s) == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert second.arrival_s == 0.25 and list(second.token_times_s) == pytest.approx([0.4, 0.5, 0.6, 0.7])
    assert third.arrival_s == 0.5 and third.ttft_s == pytest.approx(0.1)
    assert second.scheduled_s == pytest.approx(0.3) and second.queue_s == pytest.approx(0.05)
    m = results.measures(Limits(ttft_s=0.12))
    assert (m.num_completed, m.num_output_tokens, m.num_prompt_tokens) == (3, 12, 9)
    assert m.goodput * m.duration_s == pytest.approx(2)
    assert m.steps is not None and m.steps.num_steps == 9 and m.steps.kv_usage_max == 0.5


def test_time_passes_as_slots_allow() -> None:
    made = load(arrivals=Burst(), num_requests=200, output=Exponential(9))
    results = drive(SlotEngine(8), conversations(made), clock=SimulatedClock(1.0))
    lengths = [c.turns[0].max_tokens for c in conversations(made)]
    assert results.measures().duration_s == continuous_steps(lengths, 8)


def test_a_step_may_take_what_it_computed() -> None:
    clock = SimulatedClock(lambda step: 0.1 * len(step.runs))
    results = drive(SlotEngine(4), conversations(load(arrivals=Burst(), num_requests=4)), clock=clock)
    assert results.measures().itl_s.p50 == pytest.approx(0.4)
    with pytest.raises(ValueError, match="observe"):
        drive(SlotEngine(4), conversations(load(num_requests=1)), clock=SimulatedClock(lambda step: 1.0), observe=False)
    with pytest.raises(ValueError, match="step_s"):
        SimulatedClock(0)
    with pytest.raises(ValueError, match="real clock"):
        drive(tiny_engine(batching="dynamic"), conversations(load(num_requests=1)), clock=clock)


def test_too_much_load_for_minutes_stays_bounded() -> None:
    """Twenty times what it can do, for four simulated minutes: the queue keeps its limit, and memory stops growing with what is refused."""
    grown = {}
    for minutes in (1, 4):
        engine, made = (
            SlotEngine(2),
            load(arrivals=Poisson(10.0), duration_s=60.0 * minutes, prompt=Uniform(1, 40), output=Equal(40)),
        )
        tracemalloc.start()
        results = drive(engine, conversations(made), clock=SimulatedClock(0.1), max_waiting=10, observe=False)
        grown[minutes] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        m = results.measures()
        assert engine.most_waiting <= 10
        assert m.outcomes["queue full"] == results.num_refused and 30 * minutes <= m.num_completed <= 30 * minutes + 14
        assert m.num_requests == pytest.approx(10 * 60 * minutes, rel=0.1)
        assert m.ttft_s.max < 2 * 10 * 4.0  # what waited did not wait for long
    assert grown[4] < grown[1] + 300_000  # 90 more records of 40 tokens, and not 1,800 more requests
    assert "queue full" in m.table()


def test_the_records_kept_are_bounded_too() -> None:
    results = Results(capacity=5)
    for i in range(20):
        due = next(Agenda([Conversation((Arrival(i, 0.0, (1,), SamplingParams(), 0),))]).due(0.0))
        results.sent(str(i), due, 0.0)
        results.ended(str(i), "length", 1.0)
    assert [r.request_id for r in results.records] == ["15", "16", "17", "18", "19"]


def test_turns_go_on_from_the_answers() -> None:
    engine = SlotEngine(2)
    made = load(arrivals=Burst(), num_requests=2, turns=Equal(3), think_s=1.0, priorities={4: 1})
    results = drive(engine, conversations(made), clock=SimulatedClock(0.1))
    assert results.measures().num_completed == 6
    for talk in conversations(made):
        prompt: list[int] = []
        for turn in talk.turns:
            prompt += turn.token_ids
            assert engine.prompts[f"load-{turn.index}"] == prompt and engine.priorities[f"load-{turn.index}"] == 4
            prompt += range(turn.max_tokens)
        records = sorted((r for r in results.records if r.conversation == talk.turns[0].conversation), key=lambda r: r.turn)
        for turn, before, after in zip(talk.turns[1:], records, records[1:]):
            assert after.arrival_s == pytest.approx(before.finish_s + turn.think_s)


def test_what_is_refused_is_told_and_ends_its_conversation() -> None:
    params = SamplingParams(max_tokens=2)
    talks = [
        Conversation((Arrival(0, 0.0, (13,), params, 0), Arrival(1, None, (5,), params, 0, 1))),
        Conversation((Arrival(2, 0.0, (5,), params, 1),)),
    ]
    results = drive(SlotEngine(2), talks, clock=SimulatedClock(0.1))
    assert {r.request_id: (r.outcome, r.message) for r in results.records} == {
        "load-0": ("error", "13 is refused"),
        "load-2": ("length", ""),
    }
    assert results.first_error == "13 is refused" and results.num_waiting == 0


def test_a_run_that_is_stopped() -> None:
    engine = SlotEngine(1)
    results = drive(
        engine, conversations(load(arrivals=Constant(10.0), duration_s=100.0)), clock=SimulatedClock(0.1), stop_s=2.05
    )
    m = results.measures()
    assert m.num_completed == 5 and m.outcomes["abort"] == 16 and m.num_requests == 21
    assert not engine.has_unfinished() and results.num_waiting == 0 and not results.live


def test_a_busy_engine_and_a_load_out_of_order_are_refused() -> None:
    engine = SlotEngine(1)
    engine.add_request([1], SamplingParams(), owner="ada", request_id="a")
    with pytest.raises(ValueError, match="other requests"):
        drive(engine, [])
    talks = [Conversation((Arrival(i, t, (1,), SamplingParams(), i),)) for i, t in enumerate((1.0, 0.5))]
    with pytest.raises(ValueError, match="order of time"):
        drive(SlotEngine(1), talks, clock=SimulatedClock(0.1))
    with pytest.raises(ValueError, match="max_waiting"):
        Results(max_waiting=0)


def test_the_real_engine_in_real_time() -> None:
    engine = tiny_engine(max_num_seqs=2)
    made = Load(
        arrivals=Constant(20_000.0), num_requests=6, prompt=Uniform(2, 9), output=Uniform(1, 6), prefix_share=1.0, prefix_length=8, vocab_size=200,
        first_token=3, turns=Equal(2), seed=3,
    )  # fmt: skip
    results = drive(engine, conversations(made))
    m = results.measures()
    assert m.num_completed == 12 and m.num_output_tokens == sum(a.max_tokens for c in conversations(made) for a in c.turns)
    assert m.num_cached_tokens >= 5 * 8  # the prefix, and of each second turn the first one
    assert all(r.arrival_s <= r.scheduled_s <= r.token_times_s[0] for r in results.records)
    assert m.steps is not None and 0 < m.steps.kv_usage < 1 and m.steps.running_max == 2 and m.steps.waiting_max >= 2
    assert not engine.recorder.on
    engine.check_integrity()
