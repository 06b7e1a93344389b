"""The whole engine on a tiny random model: equal tokens in any mix, events that replay to the truth, nothing lost."""

import dataclasses
import functools
import os
import random
import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.events.types import (
    BlockCopied,
    KnobChanged,
    LogitsRecorded,
    PoolResized,
    RequestFinished,
    RequestPreempted,
    StepDone,
    TokenSampled,
)
from engine.loading import make_kv_cache
from tests.engine.engines import Checked, tiny_engine, tiny_parts
from tests.engine.equal_tokens import assert_equal_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompt(seed: int, length: int, *, shared: int = 0) -> list[int]:
    """Token ids; the first ``shared`` are the same for every seed."""
    common = random.Random(0)
    own = random.Random(seed + 1)
    return [common.randrange(3, 256) for _ in range(shared)] + [own.randrange(3, 256) for _ in range(length - shared)]


@functools.cache
def oracle(token_ids: tuple[int, ...], count: int = 12) -> tuple[list[int], list[float]]:
    """(greedy continuation, margins) by transformers, computed from scratch for each token."""
    _, made = tiny_parts()
    ids, margins = list(token_ids), []
    for _ in range(count):
        top = made.logits(ids)[-1].topk(2)
        ids.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
    return ids[len(token_ids) :], margins


def check_against_oracle(outputs, prompts, count=12):
    for output, ids in zip(outputs, prompts, strict=True):
        want, margins = oracle(tuple(ids), count)
        assert_equal_tokens(output.token_ids, want, margins, output.request_id)


BLOCK = 4
PROMPTS = [prompt(i, n, shared=min(n - 1, 9)) for i, n in enumerate((1, 3, 4, 5, 11, 17, 23))]


@pytest.mark.parametrize("chunk", [1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 512])
@pytest.mark.parametrize(("caching", "num_blocks", "batch"), [(False, 64, 8), (True, 64, 3), (True, 12, 8), (False, 12, 8)])
def test_any_mix_gives_the_tokens_of_transformers(chunk, caching, num_blocks, batch):
    engine = tiny_engine(
        block_size=BLOCK,
        max_num_batched_tokens=chunk,
        enable_prefix_caching=caching,
        num_kv_blocks=num_blocks,
        max_num_seqs=batch,
    )
    checked = Checked(engine)
    ids = [engine.add_request(p, GREEDY) for p in PROMPTS]
    done = checked.run()
    check_against_oracle([done[i] for i in ids], PROMPTS)
    assert all(o.finish_reason == "length" for o in done.values())
    if num_blocks == 12 and chunk == 512:
        assert any(isinstance(e, RequestPreempted) for e in checked.events), "the pool was meant to be too small"
    assert engine.pool.num_used == 0


@settings(max_examples=25)
@given(data=st.data())
def test_random_lives(data):
    """Requests come, share, fork, are aborted; knobs move; the pool is small. Whoever was left alone has the right tokens."""
    draw = data.draw
    engine = tiny_engine(
        block_size=draw(st.sampled_from([1, 3, 4])), num_kv_blocks=draw(st.integers(40, 60)),
        max_num_seqs=draw(st.integers(1, 4)), max_num_batched_tokens=draw(st.integers(1, 24)),
    )  # fmt: skip
    checked = Checked(engine)
    asked, aborted, done = {}, set(), {}
    for _ in range(draw(st.integers(3, 14))):
        action = draw(st.sampled_from(["add", "add", "fork", "step", "step", "step", "abort", "knob", "pool"]))
        if action in ("add", "fork") and len(asked) < 8:
            ids = prompt(draw(st.integers(0, 5)), draw(st.integers(1, 20)), shared=0)
            params = GREEDY.changed(n=3) if action == "fork" else GREEDY
            asked[engine.add_request(ids, params)] = ids
        elif action == "step":
            done |= {o.request_id: o.request for o in checked.step() if o.request is not None}
        elif action == "abort" and asked:
            victim = draw(st.sampled_from(sorted(asked)))
            if engine.abort(victim):
                aborted.add(victim)
            checked.check()
        elif action == "knob":
            engine.reconfigure(
                max_num_seqs=draw(st.integers(1, 5)),
                max_num_batched_tokens=draw(st.integers(1, 24)),
                enable_prefix_caching=draw(st.booleans()),
            )
        elif action == "pool":
            engine.reconfigure(block_size=draw(st.sampled_from([2, 4])), num_kv_blocks=draw(st.integers(40, 60)))
    done |= checked.run()
    assert set(done) == set(asked)
    for request_id, ids in asked.items():
        output = done[request_id]
        if request_id in aborted:
            assert output.finish_reason == "abort"
            continue
        for sibling in output.outputs:
            want, margins = oracle(tuple(ids))
            assert_equal_tokens(sibling.token_ids, want, margins, request_id)
            assert sibling.finish_reason == "length"
    assert engine.pool.num_used == 0


def test_n_samples_share_the_prompt_and_copy_on_write():
    engine = tiny_engine()
    checked = Checked(engine)
    request_id = engine.add_request(prompt(1, 10), SamplingParams(temperature=1.5, seed=5, n=4, max_tokens=9, ignore_eos=True))
    checked.step()
    assert [engine.pool.ref_counts[b] for b in range(3)] == [4, 4, 4]
    checked.step()
    copies = [e for e in checked.events if isinstance(e, BlockCopied)]
    assert [(c.src, c.index) for c in copies] == [(2, 2)] * 3
    output = checked.run()[request_id]
    texts = {tuple(o.token_ids) for o in output.outputs}
    assert len(texts) > 1 and all(len(t) == 9 for t in texts)
    alone = [
        tiny_engine(max_num_seqs=1).generate(
            [prompt(1, 10)], SamplingParams(temperature=1.5, seed=5, n=4, max_tokens=9, ignore_eos=True)
        )[0]
    ]
    assert [o.token_ids for o in alone[0].outputs] == [o.token_ids for o in output.outputs]


def test_same_seed_same_tokens_whatever_else_runs():
    params = [SamplingParams(temperature=1.0, seed=i, max_tokens=20, ignore_eos=True) for i in range(6)]
    prompts = [prompt(i, 4 + i) for i in range(6)]
    alone = [tiny_engine().generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
    together = tiny_engine(max_num_batched_tokens=7, max_num_seqs=5).generate(prompts, params)
    assert [o.token_ids for o in together] == alone
    assert len({tuple(t) for t in alone}) == 6


def test_an_unseeded_request_gets_a_recorded_seed():
    engine = tiny_engine()
    checked = Checked(engine)
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
    request_id = engine.add_request(prompt(0, 5), params)
    output = checked.run()[request_id]
    seed = checked.state.requests[request_id].sampling["seed"]
    again = tiny_engine().generate([prompt(0, 5)], params.changed(seed=seed))[0]
    assert again.token_ids == output.token_ids


def test_logprobs_are_those_of_the_raw_distribution():
    ids = prompt(3, 9)
    output = tiny_engine().generate(
        [ids], SamplingParams(temperature=0.7, top_k=5, seed=1, max_tokens=6, logprobs=3, ignore_eos=True)
    )[0]
    _, made = tiny_parts()
    for i, token in enumerate(output.logprobs):
        want = torch.log_softmax(made.logits([*ids, *output.token_ids[:i]])[-1].double(), -1)
        assert token.token_id == output.token_ids[i]
        assert token.logprob == pytest.approx(float(want[token.token_id]), abs=1e-3)
        assert [t for t, _ in token.top] == want.topk(3).indices.tolist()


def test_penalties_see_prompt_and_output_of_their_own_sequence():
    ids = prompt(5, 7)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, repetition_penalty=1.7, frequency_penalty=0.4)
    outputs = tiny_engine().generate([ids, prompt(6, 5)], params)
    _, made = tiny_parts()
    want, margins = list(ids), []
    for _ in range(10):
        logits = made.logits(want)[-1].double()
        for token in set(want):
            logits[token] = logits[token] / 1.7 if logits[token] > 0 else logits[token] * 1.7
        for token in want[len(ids) :]:
            logits[token] -= 0.4
        top = logits.topk(2)
        want.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
    assert_equal_tokens(outputs[0].token_ids, want[len(ids) :], margins)


def test_stop_strings_ids_and_eos():
    engine = tiny_engine()
    ids = prompt(2, 6)
    free = engine.generate([ids], GREEDY)[0]
    assert free.finish_reason == "length" and len(free.token_ids) == 12
    stop = engine.tokenizer.decode(free.token_ids)[3:5]
    stopped = engine.generate([ids], GREEDY.changed(stop=stop))[0]
    assert stopped.finish_reason == "stop" and repr(stop) in stopped.message
    assert stopped.text == free.text[: free.text.index(stop)]
    by_id = engine.generate([ids], GREEDY.changed(stop_token_ids=(free.token_ids[4],)))[0]
    first = free.token_ids.index(free.token_ids[4])
    assert by_id.finish_reason == "stop" and by_id.token_ids == free.token_ids[: first + 1]
    pieces = list(engine.stream(ids, GREEDY))
    assert "".join(pieces) == free.text and len(pieces) > 1


def test_streams_in_parallel_lose_nothing():
    engine = tiny_engine()
    prompts = [prompt(i, 5) for i in range(3)]
    want = [engine.generate([p], GREEDY)[0].text for p in prompts]
    added = engine.add_request(prompts[0], GREEDY)  # someone else's, collected with step()
    a, b = engine.stream(prompts[1], GREEDY), engine.stream(prompts[2], GREEDY)
    got = ["", "", ""]
    for piece in a:
        got[1] += piece
        got[2] += next(b, "")
    got[2] += "".join(b)
    while engine.has_unfinished():
        got[0] += "".join(o.new_text for o in engine.step() if o.request_id == added)
    assert got == want


def test_leaving_a_stream_aborts_its_request():
    engine = tiny_engine()
    for _ in engine.stream(prompt(0, 5), GREEDY):
        break
    assert not engine.has_unfinished() and engine.pool.num_used == 0
    engine.check_integrity()


def test_a_stream_that_is_never_read_leaves_nothing():
    engine = tiny_engine()
    pieces = engine.stream(prompt(0, 4), GREEDY)
    assert engine.has_unfinished()
    del pieces
    assert not engine.has_unfinished() and not engine.take_outputs()


def test_nan_logits_end_one_request_only(monkeypatch):
    engine = tiny_engine()
    checked = Checked(engine)
    prompts = [prompt(i, 9, shared=8) for i in range(3)]
    ids = [engine.add_request(p, GREEDY) for p in prompts]
    run = engine.runner.run

    def broken(scheduled):
        logits = run(scheduled).clone()
        for row, s in enumerate([s for s in scheduled if s.sample]):
            if s.request.request_id == ids[1] and s.request.num_tokens == 12:
                logits[row, 5] = float("nan")
        return logits

    monkeypatch.setattr(engine.runner, "run", broken)
    done = checked.run()
    assert done[ids[1]].finish_reason == "error" and "NaN" in done[ids[1]].message
    assert len(done[ids[1]].token_ids) == 3
    check_against_oracle([done[ids[0]], done[ids[2]]], [prompts[0], prompts[2]])
    assert engine.pool.num_used == 0


def test_ctrl_c_waits_for_the_end_of_the_step(monkeypatch):
    engine = tiny_engine()
    checked = Checked(engine)
    request_id = engine.add_request(prompt(0, 5), GREEDY)
    run = engine.runner.run

    def interrupted(scheduled):
        os.kill(os.getpid(), signal.SIGINT)
        return run(scheduled)

    with monkeypatch.context() as m:
        m.setattr(engine.runner, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    checked.check()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    tokens = []
    while engine.has_unfinished():
        tokens += [t for o in checked.step() for t in o.new_token_ids]
    want, margins = oracle(tuple(prompt(0, 5)))
    assert_equal_tokens(tokens, want, margins, request_id)


def test_a_failing_forward_pass_leaves_a_whole_engine(monkeypatch):
    engine = tiny_engine()
    checked = Checked(engine)
    request_id = engine.add_request(prompt(0, 5), GREEDY)
    with monkeypatch.context() as m:
        m.setattr(engine.runner, "run", lambda scheduled: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            engine.step()
    checked.check()
    (output,) = [o.request for o in engine.step() if o.request is not None]
    assert (output.request_id, output.finish_reason) == (request_id, "error") and "no room" in output.message
    check_against_oracle(engine.generate([prompt(0, 5)], GREEDY), [prompt(0, 5)])


@pytest.mark.parametrize(("bad", "message"), [
    ("", "empty"), ([], "empty"), ([-1], "token ids"), ([320], "token ids"), ([True], "token ids"), ([1.5], "token ids"),
    (None, "text or a list"), (7, "text or a list"), (list(range(3, 131)), "128 tokens; max_model_len allows 128"), ("a" * 2_000_000, "characters"),
])  # fmt: skip
def test_bad_prompts_are_refused_and_nobody_else_notices(bad, message):
    engine = tiny_engine()
    with pytest.raises(ValueError, match=message):
        engine.generate([prompt(0, 4), bad], GREEDY)
    assert not engine.has_unfinished()
    check_against_oracle(engine.generate([prompt(0, 4)], GREEDY), [prompt(0, 4)])


def test_a_prompt_longer_than_the_pool():
    engine = tiny_engine(num_kv_blocks=4, block_size=4)
    with pytest.raises(ValueError, match="16 tokens; the KV pool allows 16"):
        engine.add_request(prompt(0, 16), GREEDY)
    output = engine.generate([prompt(0, 10)], GREEDY)[0]
    assert output.finish_reason == "length" and output.message == "the KV pool is full" and len(output.token_ids) == 6
    check_against_oracle([output], [prompt(0, 10)], 6)


def test_max_model_len_ends_a_request():
    output = tiny_engine(max_model_len=20).generate([prompt(0, 15)], GREEDY)[0]
    assert output.finish_reason == "length" and output.message == "max_model_len" and len(output.token_ids) == 5


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
    ({"num_kv_blocks": None}, "must be a number"), ({"quantization": "int8"}, "not built yet"), ({"num_kv_blocks": 1 << 24}, "memory"),
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


def test_salted_requests_share_only_among_themselves():
    engine = tiny_engine()

    def cached(salt):
        request_id = engine.add_request(prompt(0, 13), GREEDY, cache_salt=salt)
        while True:
            for output in engine.step():
                if output.request is not None and output.request_id == request_id:
                    return output.request.num_cached_tokens

    assert [cached("a"), cached("b"), cached(None), cached("a"), cached("b")] == [0, 0, 0, 12, 12]


def test_abort_owner_and_abort_twice():
    engine = tiny_engine(max_num_seqs=2)
    checked = Checked(engine)
    for owner in ("anna", "ben", "anna"):
        engine.add_request(prompt(0, 9), GREEDY, owner=owner)
    checked.step()
    assert engine.abort_owner("anna") == 2
    checked.check()
    assert not engine.abort("req-0")
    done = checked.run()
    assert {k: v.finish_reason for k, v in done.items()} == {"req-0": "abort", "req-2": "abort", "req-1": "length"}


def test_nobody_watching_records_nothing_and_late_watchers_see_all():
    engine = tiny_engine()
    engine.add_request(prompt(0, 9), GREEDY)
    engine.step()
    engine.step()
    checked = Checked(engine)  # attaches late
    checked.check()
    checked.run()
    steps = [e.step for e in checked.events if isinstance(e, StepDone)]
    assert steps == list(range(3, 13))
    assert [e.request_id for e in checked.events if isinstance(e, RequestFinished)] == ["req-0"]


def test_record_gives_a_log_of_the_block():
    engine = tiny_engine()
    with engine.record() as log:
        engine.watch("tokens", top=2)
        engine.generate([prompt(0, 5)], GREEDY)
    engine.generate([prompt(1, 5)], GREEDY)
    tokens = log.since(0).events
    sampled = [e for e in tokens if isinstance(e, TokenSampled)]
    assert [e.index for e in sampled] == list(range(12)) and all(len(e.top) == 2 for e in sampled)


def test_watch_names_what_it_knows():
    engine = tiny_engine()
    with pytest.raises(ValueError, match="unknown observation 'tiles'"):
        engine.watch("tiles")
    with pytest.raises(ValueError, match="no unfinished request"):
        engine.watch("logits", "nobody")


def test_the_logits_of_a_sibling_can_be_watched_until_it_ends():
    engine = tiny_engine()
    checked = Checked(engine)
    request_id = engine.add_request(prompt(0, 5), SamplingParams(n=2, seed=1, max_tokens=6, ignore_eos=True))
    checked.step()
    engine.watch("logits", f"{request_id}#1", positions=50)
    engine.committer.finish(engine.siblings(request_id)[0], "length")
    with pytest.raises(ValueError, match="unfinished"):
        engine.watch("logits", request_id)
    checked.run()
    seen = [e.request_id for e in checked.events if isinstance(e, LogitsRecorded)]
    assert seen == [f"{request_id}#1"] * 5 and not engine.recorder.watched_logits


def test_a_logit_of_plus_infinity_is_recorded_as_its_limit(monkeypatch):
    engine = tiny_engine()
    run = engine.runner.run
    infinite = torch.zeros(engine.model_config.vocab_size)
    infinite[[7, 11]] = torch.inf
    monkeypatch.setattr(engine.runner, "run", lambda scheduled: run(scheduled) + infinite)
    checked = Checked(engine)
    engine.watch("logits", engine.add_request(prompt(0, 5), SamplingParams(seed=1, max_tokens=1)))
    checked.run()
    (recorded,) = [e for e in checked.events if isinstance(e, LogitsRecorded)]
    logits = np.frombuffer(recorded.logits, "<f2").astype(np.float32) + recorded.max_logit
    assert np.flatnonzero(logits > -np.inf).tolist() == [7, 11] and logits[7] == logits[11] == 0


def test_duplicate_and_reserved_ids():
    engine = tiny_engine()
    engine.add_request(prompt(0, 4), GREEDY, request_id="mine")
    for bad in ("mine", "", "a#1"):
        with pytest.raises(ValueError, match="request_id"):
            engine.add_request(prompt(0, 4), GREEDY, request_id=bad)
    for wrong in ({"request_id": 5}, {"owner": None}, {"cache_salt": 3}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            engine.add_request(prompt(0, 4), GREEDY, **wrong)
    engine.add_request(prompt(0, 4), GREEDY, request_id="req-0")
    assert engine.add_request(prompt(0, 4), GREEDY) == "req-1"  # an id of one's own choice is passed over
    engine.close()
    engine.close()


def test_a_closed_engine_says_so_and_takes_nothing_in():
    engine = tiny_engine()
    (done,) = engine.generate([prompt(0, 4)], GREEDY)
    engine.close()
    for ask in (engine.add_request, engine.generate, engine.stream, lambda p: engine.branch(done.request_id, 2, 5)):
        with pytest.raises(ValueError, match="was closed"):
            ask(prompt(0, 4))
    assert not engine.has_unfinished() and engine.step() == []


def test_measured_cache_times_leave_no_trace():
    engine = tiny_engine()
    checked = Checked(engine)
    engine.add_request(prompt(0, 9), GREEDY)
    checked.step()
    with_cache, without = engine.measure_cache([4, 16, 64])
    assert len(with_cache) == len(without) == 3 and all(t > 0 for t in with_cache + without)
    checked.check()
    done = checked.run()
    check_against_oracle([done["req-0"]], [prompt(0, 9)])
    with pytest.raises(ValueError, match="lengths"):
        engine.measure_cache([0])
    with pytest.raises(ValueError, match="lengths"):
        engine.measure_cache([129])
