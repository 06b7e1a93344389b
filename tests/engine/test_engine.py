"""The whole engine on a tiny random model: equal tokens in any mix, events that replay to the truth, nothing lost."""

import os
import signal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.events.types import (
    BlockCopied,
    RequestPreempted,
)
from tests.engine.engines import Checked, tiny_engine, tiny_parts
from tests.engine.equal_tokens import assert_equal_tokens
from tests.engine.greedy import GREEDY, check_against_oracle, oracle, prompt

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

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with monkeypatch.context() as m:
            m.setattr(engine.runner, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    checked.check()
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
