"""Records from events, live or saved, against what the engine itself gave out."""

import math

import pytest

from engine.events.log import EventLog
from engine.events.types import Run
from engine.load.collector import PADDING, Collector, step_tokens
from engine.measures import Limits
from engine.request import SamplingParams
from engine.speculation.config import SpeculativeConfig
from tests.engine.engines import Checked, tiny_engine


def run(engine, prompts: list[tuple[list[int], SamplingParams]]) -> tuple[EventLog, dict]:
    with engine.record() as log:
        for prompt, params in prompts:
            engine.add_request(prompt, params)
        done = Checked(engine, poison=False).run()
    return log, done


def events(log: EventLog) -> list:
    return log.since(0).events


def params(tokens: int, **fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": tokens, "ignore_eos": True, "temperature": 0, **fields})


def check(collector: Collector, done: dict) -> None:
    records = {r.request_id: r for r in collector.records}
    for request_id, output in done.items():
        for i, one in enumerate(output.outputs):
            record = records[f"{request_id}#{i}" if i else request_id]
            assert (record.num_output_tokens, record.outcome) == (len(one.token_ids), one.finish_reason)
            times = list(record.token_times_s)
            assert times == sorted(times) and record.finish_s == times[-1]
            assert record.arrival_s <= record.scheduled_s <= times[0]


def test_requests_siblings_and_steps() -> None:
    log, done = run(
        tiny_engine(max_num_seqs=3),
        [([5, 6, 7], params(4)), ([9] * 20, params(1)), ([8, 4], params(5, n=3, temperature=1.0, seed=1))],
    )
    collector = Collector().feed(events(log))
    check(collector, done)
    m = collector.measures(Limits(ttft_s=100))
    assert m.num_completed == 5 and m.num_prompt_tokens == 25  # the siblings' prompt counts once
    assert m.num_output_tokens == sum(len(o.token_ids) for d in done.values() for o in d.outputs)
    assert m.good_share == 1 and m.steps is not None and m.steps.running_max <= 5 and 0 < m.steps.kv_usage_max < 1


def test_live_and_saved_give_the_same(tmp_path) -> None:
    engine = tiny_engine(max_num_seqs=2)
    live = Collector()
    engine.recorder.attach(lambda event: live.feed([event]))
    log, _ = run(engine, [([5, 6, 7], params(4)), ([9] * 6, params(3)), ([5, 6], params(6))])
    log.save(tmp_path / "run.cutaway")
    saved = Collector().feed(EventLog.load(tmp_path / "run.cutaway").since(0).events)
    a, b = live.measures(), saved.measures()
    for name in ("ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s"):
        assert (
            getattr(a, name).p90 == pytest.approx(getattr(b, name).p90, abs=1e-6)
            and getattr(a, name).count == getattr(b, name).count
        )
    assert a.outcomes == b.outcomes
    assert len(live.steps) == len(saved.steps) and b.num_completed == 3


def test_beams_are_one_request() -> None:
    log, done = run(tiny_engine(), [([5, 6, 7], params(5, beam_width=3, n=2)), ([8], params(2))])
    records = {r.request_id: r for r in Collector().feed(events(log)).records}
    assert set(records) == set(done)
    assert records["req-0"].num_output_tokens == 5 and records["req-1"].num_output_tokens == 2


def test_drafts_give_several_tokens_at_once() -> None:
    prompt = [5, 6, 7, 8] * 5
    engine = tiny_engine(speculative=SpeculativeConfig("ngram", num_speculative_tokens=3))
    log, done = run(engine, [(prompt, params(17)), (prompt[1:], params(9))])
    check(Collector().feed(events(log)), done)


def test_preempted_and_aborted() -> None:
    engine = tiny_engine(num_kv_blocks=8, max_num_seqs=3)
    with engine.record() as log:
        for i in range(3):
            engine.add_request([3 + i] * 6, params(18))
        engine.add_request([9, 9], params(50), request_id="gone")
        for _ in range(200):
            engine.step()
            if not any(r.request_id.startswith("req") for r in (*engine.scheduler.running, *engine.scheduler.waiting)):
                break
        engine.abort("gone")
        engine.step()
    collector = Collector().feed(events(log))
    m = collector.measures()
    assert m.num_preemptions == sum(type(e).__name__ == "RequestPreempted" for e in events(log)) > 0
    assert m.outcomes["length"] == 3 and m.outcomes["abort"] == 1 and m.num_output_tokens >= 54


def test_a_branch_counts_what_it_computed() -> None:
    engine = tiny_engine()
    run(engine, [([5, 6, 7], params(8))])
    with engine.record() as log:
        engine.branch("req-0", 6, 40, branch_id="other")  # three tokens of output are the source's, the fourth is forced
        branched = Checked(engine, poison=False).run()
    (record,) = Collector().feed(events(log)).records
    assert record.num_output_tokens == len(branched["other"].token_ids) - 4


def test_who_was_there_before_is_left_out() -> None:
    engine = tiny_engine()
    engine.add_request([5, 6, 7], params(6))
    engine.step()
    with engine.record() as log:
        engine.add_request([8, 9], params(2))
        while engine.has_unfinished():
            engine.step()
    collector = Collector().feed(events(log))
    assert collector.num_unknown == 1 and [r.request_id for r in collector.records] == ["req-1"]


def test_under_way_and_nothing() -> None:
    engine = tiny_engine()
    with engine.record() as log:
        engine.add_request([5, 6, 7], params(6))
        engine.step()
    (record,) = Collector().feed(events(log)).records
    assert record.outcome == "unfinished" and record.num_output_tokens == 1 and math.isnan(record.finish_s)
    assert Collector().feed(events(log)).measures().ttft_s.count == 1
    assert Collector().measures().num_requests == 0


def test_finished_ones_are_bounded() -> None:
    log, _ = run(tiny_engine(), [([5 + i], params(1)) for i in range(7)])
    assert [r.request_id for r in Collector(capacity=3).feed(events(log)).records] == ["req-4", "req-5", "req-6"]


def test_padding_is_a_phase() -> None:
    assert step_tokens([Run("a", "prefill", 0, 5, True), Run("b", PADDING, 0, 3, False), Run("c", "decode", 9, 1, True)]) == {
        "prefill": 5, "decode": 1, "padding": 3,
    }  # fmt: skip
