"""Whatever the policy, the tokens are those of transformers: static and dynamic batches, priorities, in any mixture and changed at will."""

import time

import pytest

from engine import SamplingParams
from engine.events.types import BlockFreed, RequestAdded, RequestFinished, RequestPreempted, StepDone
from engine.request import QueueFull
from tests.engine.engines import Checked, tiny_engine
from tests.engine.equal_tokens import assert_equal_tokens
from tests.engine.greedy import GREEDY, check_against_oracle, oracle, prompt

LENGTHS = [(6, 5), (19, 12), (3, 1), (11, 9), (30, 3), (1, 7)]  # prompt, output


def send(engine, **more) -> list[str]:
    return [
        engine.add_request(prompt(i, n), GREEDY.changed(max_tokens=out), priority=i % 3, **more)
        for i, (n, out) in enumerate(LENGTHS)
    ]


def check(outputs) -> None:
    for i, (output, (n, out)) in enumerate(zip(outputs, LENGTHS, strict=True)):
        want, margins = oracle(tuple(prompt(i, n)), out)
        assert_equal_tokens(output.token_ids, want, margins, output.request_id)


@pytest.mark.parametrize("kv", ["auto", "int8", "int4"])
@pytest.mark.parametrize(("caching", "chunk", "num_blocks"), [(True, 512, 64), (False, 7, 24), (True, 16, 14)])
@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_static_batch_gives_the_same_tokens(batching, caching, chunk, num_blocks, kv):
    config = {"enable_prefix_caching": caching, "max_num_batched_tokens": chunk, "num_kv_blocks": num_blocks, "max_num_seqs": 3}
    engine = tiny_engine(batching=batching, batching_timeout_ms=1, kv_cache_dtype=kv, **config)
    checked = Checked(engine, poison=kv == "auto")
    ids = send(engine)
    done = checked.run()
    if kv == "auto":
        check([done[i] for i in ids])
    else:
        alone = tiny_engine(kv_cache_dtype=kv, **config)
        same = send(alone)
        want = Checked(alone, poison=False).run()
        assert [done[i].token_ids for i in ids] == [want[i].token_ids for i in same]
    assert engine.pool.num_used == 0 and not engine.runner._tables
    padding = [r for e in checked.events if isinstance(e, StepDone) for r in e.runs if r.phase == "padding"]
    assert padding and not any(r.sampled for r in padding)


def test_speculation_beams_and_siblings_in_a_static_batch():
    def run(batching):
        engine = tiny_engine(batching=batching, max_num_seqs=6, speculative={"method": "ngram", "num_speculative_tokens": 3})
        checked = Checked(engine)
        ids = [
            engine.add_request(prompt(0, 9) * 3, GREEDY.changed(max_tokens=20)),
            engine.add_request(prompt(1, 7), SamplingParams(max_tokens=6, n=2, seed=3)),
            engine.add_request(prompt(2, 12), SamplingParams(temperature=0, max_tokens=5, beam_width=2, n=2)),
            engine.add_request(prompt(3, 4), GREEDY),
        ]
        done = checked.run()
        return [[o.token_ids for o in done[i].outputs] for i in ids]

    assert run("static") == run("continuous")


def test_a_batch_goes_on_when_siblings_have_taken_the_places_of_those_it_waits_for():
    engine = tiny_engine(batching="static", max_num_seqs=2, max_num_batched_tokens=8)
    checked = Checked(engine)
    three = engine.add_request(prompt(0, 5), SamplingParams(max_tokens=3, n=3, seed=1, ignore_eos=True))
    long = engine.add_request(prompt(1, 20), GREEDY)  # is in the middle of its prompt when the first forks
    done = checked.run(100)
    check_against_oracle([done[long]], [prompt(1, 20)])
    assert [len(output.token_ids) for output in done[three].outputs] == [3, 3, 3]
    runs = [(r.request_id, r.phase) for e in checked.events if isinstance(e, StepDone) for r in e.runs]
    assert runs.index((three, "decode")) > max(i for i, run in enumerate(runs) if run == (long, "prefill"))


def test_a_batch_goes_on_when_fewer_places_are_left_than_its_beams_take():
    engine = tiny_engine(batching="static", max_num_seqs=4, max_num_batched_tokens=8)
    checked = Checked(engine)
    beams = engine.add_request(prompt(2, 5), SamplingParams(temperature=0, max_tokens=4, beam_width=2, n=2, ignore_eos=True))
    long = engine.add_request(prompt(1, 30), GREEDY)
    checked.step()
    engine.reconfigure(max_num_seqs=1, enable_chunked_prefill=False)
    done = checked.run(100)
    check_against_oracle([done[long]], [prompt(1, 30)])
    assert len(done[beams].outputs) == 2


def test_a_place_is_told_until_the_batch_ends():
    engine = tiny_engine(batching="static", max_num_seqs=2)
    checked = Checked(engine)
    short = engine.add_request(prompt(0, 6), GREEDY.changed(max_tokens=1))
    engine.add_request(prompt(1, 6), GREEDY.changed(max_tokens=5))
    done = checked.run()
    ended = next(e.step for e in checked.events if isinstance(e, RequestFinished) and e.request_id == short)
    freed = [e.step for e in checked.events if isinstance(e, BlockFreed) and e.request_id == short]
    last = max(e.step for e in checked.events if isinstance(e, StepDone))
    assert ended == 1 and freed[-1] == last and len(done) == 2
    steps = [e for e in checked.events if isinstance(e, StepDone)]
    assert [[(r.request_id, r.phase) for r in e.runs if r.request_id == short] for e in steps[1:]] == [[(short, "padding")]] * (
        len(steps) - 1
    )
    assert all(e.flops > 0 for e in steps) and steps[1].flops > 1.5 * engine_alone(5)[1].flops


def engine_alone(output):
    engine = tiny_engine()
    checked = Checked(engine)
    engine.add_request(prompt(1, 6), GREEDY.changed(max_tokens=output))
    checked.run()
    return [e for e in checked.events if isinstance(e, StepDone)]


def test_knobs_move_in_the_middle_of_a_run():
    engine = tiny_engine(max_num_seqs=3, num_kv_blocks=24)
    checked = Checked(engine)
    ids = send(engine)
    moves = iter([{"batching": "static"}, {"scheduling_policy": "priority"}, {"batching": "continuous", "watermark": 0.3},
                  {"batching": "dynamic", "batching_timeout_ms": 1}, {"enable_chunked_prefill": False}, {"block_size": 8}])  # fmt: skip
    done = {}
    while engine.has_unfinished():
        for _ in range(2):
            done |= {o.request_id: o.request for o in checked.step() if o.request is not None}
        engine.reconfigure(**next(moves, {}))
        checked.check()
    check([done[i] for i in ids])
    assert engine.config.batching == "dynamic" and engine.pool.block_size == 8


def test_aborts_in_each_state_of_a_static_batch():
    engine = tiny_engine(batching="static", max_num_seqs=2, max_num_batched_tokens=8)
    checked = Checked(engine)
    ids = send(engine)
    checked.step()
    assert engine.abort(ids[0])  # computed, waits for the others
    checked.check()
    checked.step()
    assert engine.abort(ids[1])  # in the middle of its prompt: the batch ends
    checked.check()
    assert not engine.scheduler.batcher.ended
    assert engine.abort(ids[4])  # waits
    checked.run()
    assert engine.pool.num_used == 0


def test_a_dynamic_batch_does_not_spin_and_ends_its_wait():
    engine = tiny_engine(batching="dynamic", batching_timeout_ms=30, max_num_seqs=4)
    checked = Checked(engine)
    began = time.monotonic()
    engine.add_request(prompt(0, 5), GREEDY)
    calls = 0
    while not any(isinstance(e, StepDone) for e in checked.events):
        checked.step()
        calls += 1
    assert time.monotonic() - began >= 0.03 and calls <= 30
    assert checked.events[-1].step == 1  # waiting is no step


def test_a_failing_pass_in_a_static_batch_loses_nothing(monkeypatch):
    engine = tiny_engine(batching="static", max_num_seqs=2)
    checked = Checked(engine)
    ids = send(engine)
    for _ in range(3):
        checked.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.model, "forward", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
        with pytest.raises(RuntimeError, match="broken"):
            engine.step()
    checked.check()
    done = checked.run()
    assert {done[i].finish_reason for i in ids[2:]} == {"length"} and engine.pool.num_used == 0


def test_priorities_are_told_and_a_full_queue_is_refused():
    engine = tiny_engine(max_num_seqs=1, scheduling_policy="priority", max_num_waiting=3)
    checked = Checked(engine)
    ids = [engine.add_request(prompt(i, 4), GREEDY, priority=p) for i, p in enumerate((3, 0, -2))]
    with pytest.raises(QueueFull, match="queue full: 3"):
        engine.add_request(prompt(9, 4), GREEDY)
    for bad in (True, 1.5, "high", None, 1 << 30):
        with pytest.raises(ValueError, match="priority must be an integer"):
            engine.add_request(prompt(9, 4), GREEDY, priority=bad)
    checked.run()
    finished = [e.request_id for e in checked.events if isinstance(e, RequestFinished)]
    assert finished == ids[::-1] and [e.priority for e in checked.events if isinstance(e, RequestAdded)] == [3, 0, -2]


def test_who_runs_is_put_in_the_order_of_priorities_when_they_begin_to_count():
    engine = tiny_engine(max_num_seqs=2, num_kv_blocks=10)
    checked = Checked(engine)
    late, urgent = (engine.add_request(prompt(i, 16), GREEDY, priority=p) for i, p in enumerate((5, -5)))
    checked.step()
    engine.reconfigure(scheduling_policy="priority")
    done = checked.run()
    check_against_oracle([done[late], done[urgent]], [prompt(i, 16) for i in range(2)])
    assert {e.request_id for e in checked.events if isinstance(e, RequestPreempted)} == {late}
