"""What may be changed of a running engine: at once, after draining, or not at all; and the sampling of a running request."""

import dataclasses
import weakref

import pytest

from engine import SamplingParams
from engine.events.types import (
    KnobChanged,
    PoolResized,
)
from engine.loading import make_kv_cache
from tests.engine.engines import Checked, tiny_engine
from tests.engine.equal_tokens import assert_equal_tokens
from tests.engine.greedy import GREEDY, check_against_oracle, oracle, prompt


def test_the_old_pool_is_given_back_before_the_new_one_is_made(monkeypatch):
    engine = tiny_engine(swap_space=0.001)
    old, alive = weakref.ref(engine.kv), []

    def made(*args):
        alive.append(old() is not None)
        return make_kv_cache(*args)

    monkeypatch.setattr("engine.engine.make_kv_cache", made)
    engine.reconfigure(num_kv_blocks=32)
    assert alive == [False] and engine.scheduler.swap is not None
    checked = Checked(engine)
    last = engine.add_request(prompt(0, 6), GREEDY)
    check_against_oracle([checked.run()[last]], [prompt(0, 6)])


def test_reconfigure_now_and_after_draining():
    engine = tiny_engine()
    checked = Checked(engine)
    first = engine.add_request(prompt(0, 6), GREEDY)
    checked.step()
    engine.reconfigure(max_num_seqs=2, by="teacher")
    engine.reconfigure(block_size=8, num_kv_blocks=9)
    late = engine.add_request(prompt(1, 6), GREEDY)
    assert engine.pool.block_size == 4, "the pool waits for the running request"
    done = {}
    while first not in done:
        done |= {o.request_id: o.request for o in checked.step() if o.request is not None}
        assert all(r.request_id == first for r in engine.scheduler.running)
    done |= checked.run()
    assert (engine.pool.block_size, engine.pool.num_blocks) == (8, 9) and engine.kv.num_blocks == 9
    check_against_oracle([done[first], done[late]], [prompt(0, 6), prompt(1, 6)])
    knobs = [(e.name, e.old, e.new, e.by, e.draining) for e in checked.events if isinstance(e, KnobChanged)]
    assert knobs == [
        ("max_num_seqs", 8, 2, "teacher", False), ("block_size", 4, 8, "", True), ("num_kv_blocks", 64, 9, "", True),
        ("block_size", 4, 8, "", False), ("num_kv_blocks", 64, 9, "", False),
    ]  # fmt: skip
    assert [e.num_blocks for e in checked.events if isinstance(e, PoolResized)] == [9]


@pytest.mark.parametrize("by_abort", [False, True])
def test_the_pool_is_rebuilt_as_soon_as_the_last_request_has_left(by_abort):
    engine = tiny_engine()
    checked = Checked(engine)
    request_id = engine.add_request(prompt(0, 6), GREEDY)
    checked.step()
    engine.reconfigure(num_kv_blocks=9)
    if by_abort:
        engine.abort(request_id)
    else:
        checked.run()
    checked.check()
    assert engine.pool.num_blocks == 9 and not engine.scheduler.draining


def test_waiting_requests_that_no_longer_fit_are_told():
    engine = tiny_engine(max_num_seqs=1)
    checked = Checked(engine)
    running, waiting = engine.add_request(prompt(0, 4), GREEDY), engine.add_request(prompt(1, 40), GREEDY)
    checked.step()
    engine.reconfigure(num_kv_blocks=6)
    done = checked.run()
    assert done[running].finish_reason == "length"
    assert done[waiting].finish_reason == "error" and "24 tokens" in done[waiting].message


def test_waiting_requests_that_no_longer_fit_are_told_when_nothing_runs():
    engine = tiny_engine()
    request_id = engine.add_request(prompt(0, 40), GREEDY)
    engine.reconfigure(num_kv_blocks=6)
    assert engine.has_unfinished()
    (output,) = engine.step()
    assert (output.request_id, output.request.finish_reason) == (request_id, "error")
    assert not engine.has_unfinished()


def test_a_pool_must_fit_with_everything_that_waits_for_draining(monkeypatch):
    engine = tiny_engine()
    engine.add_request(prompt(0, 6), GREEDY)
    engine.step()
    one = engine.kv.bytes_per_block // 4
    monkeypatch.setattr("engine.loading.psutil.virtual_memory", lambda: type("Memory", (), {"available": 100_000 * one}))
    engine.reconfigure(block_size=1000)
    with pytest.raises(ValueError, match="memory"):
        engine.reconfigure(num_kv_blocks=200)
    engine.reconfigure(num_kv_blocks=10)


def test_a_pool_that_cannot_be_made_leaves_the_old_one(monkeypatch):
    engine = tiny_engine()
    checked = Checked(engine)
    first = engine.add_request(prompt(0, 6), GREEDY)
    checked.step()
    engine.reconfigure(num_kv_blocks=32)
    second = engine.add_request(prompt(1, 6), GREEDY)

    def make(parts, config):
        if config.num_kv_blocks == 32:
            raise RuntimeError("out of memory")
        return make_kv_cache(parts, config)

    monkeypatch.setattr("engine.engine.make_kv_cache", make)
    done = checked.run()
    check_against_oracle([done[first], done[second]], [prompt(0, 6), prompt(1, 6)])
    assert engine.config.num_kv_blocks == engine.kv.num_blocks == 64 and not engine.scheduler.draining
    assert checked.state.knobs["num_kv_blocks"] == 64 and not checked.state.draining


@pytest.mark.parametrize(("knobs", "message"), [
    ({"nonsense": 1}, "unknown EngineConfig field"), ({"max_num_seqs": 0}, "max_num_seqs"), ({"dtype": "float16"}, "cannot be changed"),
    ({"num_kv_blocks": None}, "must be a number"), ({"quantization": "int5"}, "quantization is one of"), ({"num_kv_blocks": 1 << 24}, "memory"),
])  # fmt: skip
def test_bad_knobs_change_nothing(knobs, message):
    engine = tiny_engine()
    before = engine.config
    with pytest.raises(ValueError, match=message):
        engine.reconfigure(max_num_batched_tokens=99, **knobs) if "nonsense" not in knobs else engine.reconfigure(**knobs)
    assert engine.config == before and engine.scheduler.max_num_batched_tokens == before.max_num_batched_tokens


def test_update_sampling_from_the_next_token_on():
    engine = tiny_engine()
    checked = Checked(engine)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ids = prompt(4, 6)
    request_id = engine.add_request(ids, params)
    for _ in range(5):
        checked.step()
    engine.update_sampling(request_id, temperature=100.0, by="me")
    output = checked.run()[request_id]
    want, margins = oracle(tuple(ids), 20)
    assert_equal_tokens(output.token_ids[:5], want[:5], margins)
    assert output.token_ids[5:] != want[5:]
    assert [(e.name, e.old, e.new, e.by, e.request_id) for e in checked.events if isinstance(e, KnobChanged)] == [
        ("temperature", 0, 100.0, "me", request_id)
    ]
    for changes, message in (({"temperature": -1}, "temperature"), ({"nope": 1}, "unknown"), ({"n": 2}, "cannot be changed")):
        other = engine.add_request(ids, params)
        with pytest.raises(ValueError, match=message):
            engine.update_sampling(other, **changes)
        engine.abort(other)
    with pytest.raises(ValueError, match="no unfinished request"):
        engine.update_sampling("gone", temperature=1)


CHANGES = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5,
    "frequency_penalty": 0.25, "seed": 99, "max_tokens": 9, "stop_token_ids": (5, 6), "ignore_eos": False,
}  # fmt: skip


def test_every_parameter_that_may_change_is_logged_and_counts():
    """All but those of which the request is made: how many sequences, where text stops, what is returned, the search."""
    fixed = {"n", "stop", "logprobs", "beam_width", "length_penalty", "early_stopping"}
    assert set(CHANGES) | fixed == {f.name for f in dataclasses.fields(SamplingParams)}
    params = SamplingParams(seed=1, max_tokens=14, ignore_eos=True)
    for name, value in CHANGES.items():
        engine = tiny_engine()
        checked = Checked(engine)
        request_id = engine.add_request(prompt(4, 6), params)
        for _ in range(3):
            checked.step()
        engine.update_sampling(request_id, by="me", **{name: value})
        output = checked.run()[request_id]
        (event,) = [e for e in checked.events if isinstance(e, KnobChanged)]
        assert (event.name, event.old, event.new, event.by, event.request_id) == (
            name,
            getattr(params, name),
            value,
            "me",
            request_id,
        )
        assert checked.state.requests[request_id].sampling[name] == value
        # From the fourth token on it is the request that had this from the start, with the first three given.
        alone = tiny_engine()
        twin = alone.add_request(prompt(4, 6), params)
        three = [alone.step()[0].new_token_ids[0] for _ in range(3)]
        alone.abort(twin)
        alone.take_outputs()
        branch = alone.branch(twin, 6 + 2, three[2], params.changed(**{name: value}))
        want = {}
        while alone.has_unfinished():
            want |= {o.request_id: o.request for o in alone.step() if o.request is not None}
        n = min(len(output.token_ids), len(want[branch].token_ids))
        assert n > 3 and output.token_ids[:n] == want[branch].token_ids[:n], name
    for name in fixed:
        with pytest.raises(ValueError, match=f"{name} cannot be changed while a request runs"):
            engine.update_sampling(engine.add_request(prompt(1, 4), params), **{name: None})
    with pytest.raises(ValueError, match="seed must be a number here"):
        engine.update_sampling(engine.add_request(prompt(1, 4), params), seed=None)


def test_switching_the_prefix_cache_off_forgets_and_on_learns_again():
    engine = tiny_engine()
    ids = prompt(0, 13)
    assert engine.generate([ids], GREEDY)[0].num_cached_tokens == 0
    assert engine.generate([ids], GREEDY)[0].num_cached_tokens == 12
    engine.reconfigure(enable_prefix_caching=False)
    engine.check_integrity()
    assert engine.generate([ids], GREEDY)[0].num_cached_tokens == 0
    engine.reconfigure(enable_prefix_caching=True)
    assert engine.generate([ids], GREEDY)[0].num_cached_tokens == 0
    out = engine.generate([ids], GREEDY)
    assert out[0].num_cached_tokens == 12
    check_against_oracle(out, [ids])
