"""Driving an engine in a process of its own."""

from array import array
from collections.abc import Iterator

import pytest

from engine import messages as m
from engine.config import EngineConfig
from engine.load.arrivals import Burst, Constant
from engine.load.generate import Arrival, Conversation, Load, conversations
from engine.load.lengths import Equal, Uniform
from engine.load.process import ProcessLoad, drive_process
from engine.measures import RequestRecord
from engine.process import EngineProcess
from engine.request import SamplingParams

FAKE = "tests.engine.fake_engine:FakeEngine"


def started(process: EngineProcess) -> None:
    for _ in range(1000):
        if any(isinstance(x, m.Ready) for x in process.poll(0.1)):
            return
    raise AssertionError("it never came up")


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    with EngineProcess(EngineConfig(model="fake", num_kv_blocks=4), factory=FAKE) as process:
        started(process)
        yield process


@pytest.mark.parametrize("observe", [True, False])
def test_a_load_of_conversations(process: EngineProcess, observe: bool) -> None:
    made = Load(arrivals=Constant(100.0), num_requests=6, prompt=Equal(3), output=Uniform(2, 9), turns=Equal(2))
    process.observe(observe)
    results = drive_process(process, conversations(made))
    measures = results.measures()
    assert measures.num_completed == 12 and measures.num_output_tokens == sum(
        a.max_tokens for c in conversations(made) for a in c.turns
    )
    wanted = {f"load-{a.index}": a for c in conversations(made) for a in c.turns}
    for record in results.records:
        arrival = wanted[record.request_id]
        assert record.num_output_tokens == arrival.max_tokens and record.turn == arrival.turn
        # the fake engine answers with max_tokens tokens, and the second turn sends all that was said
        first = wanted[f"load-{arrival.index - arrival.turn}"]
        assert record.num_prompt_tokens == (3 if not arrival.turn else 3 + first.max_tokens + 3)
        times = list(record.token_times_s)
        assert times == sorted(times) and times[0] >= record.arrival_s
    assert (measures.steps is not None) == observe
    if observe:  # the engine's own times: a step of the fake one takes half a millisecond, what is sent comes in batches
        assert 0.0004 < measures.itl_s.p50 < 0.02 and all(r.queue_s >= 0 for r in results.records)


def test_refusals_a_full_queue_and_a_stop(process: EngineProcess) -> None:
    params = SamplingParams(max_tokens=100_000)
    talks = [Conversation((Arrival(0, 0.0, (), SamplingParams(max_tokens=2), 0),))]
    talks += [Conversation((Arrival(i, 0.0, (5,), params, i),)) for i in range(1, 7)]
    results = drive_process(process, talks, max_waiting=4, stop_s=0.3)
    measures = results.measures()
    assert measures.outcomes["queue full"] == 3 and measures.outcomes["abort"] == 3 and measures.outcomes["error"] == 1
    assert results.first_error == "the prompt is empty" and results.num_waiting == 0


def test_a_draft_beyond_the_end_is_cut(process: EngineProcess) -> None:
    load = ProcessLoad(process, conversations(Load(arrivals=Burst(), num_requests=1)), owner="drafts")
    load.pump()
    record: RequestRecord = load.results.live["drafts-0"][1]
    load.results.tokens("drafts-0", 4, 1.0)
    load.take(m.Finished("drafts-0", 0, "stop", "", [1, 2], "", 5))
    assert record.token_times_s == array("d", [1.0, 1.0]) and record.num_cached_tokens == 5 and load.done


def test_a_death_is_told() -> None:
    made = Load(arrivals=Burst(), num_requests=1, output=Equal(100_000))
    with EngineProcess(EngineConfig(model="fake", num_kv_blocks=4), factory=FAKE) as process:
        started(process)
        beside = ProcessLoad(process, conversations(made), owner="beside")  # which another loop polls for
        beside.pump()
        process.add_request("exit")
        with pytest.raises(RuntimeError, match="code 7"):
            drive_process(process, conversations(made))
        beside.take(m.Died("ended with code 7", 7, "", []))
        assert beside.done and beside.results.first_error == "ended with code 7"
