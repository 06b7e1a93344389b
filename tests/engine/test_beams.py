"""Beam search in the engine: transformers' sequences and scores, blocks that are shared and split, groups that stay together."""

import pytest
import torch

from engine import SamplingParams
from engine.events.log import EventLog
from engine.events.types import (
    BeamsFinished,
    BeamsSelected,
    RequestBranched,
    TokenSampled,
)
from tests.engine.beam_search import END, assert_same_beams, beams, prompt, reference
from tests.engine.engines import Checked, tiny_engine, tiny_parts

INF = float("inf")


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(
    ("width", "n", "length_penalty"), [(2, 1, 1.0), (4, 4, 1.0), (3, 2, 0.0), (5, 5, 2.0), (4, 3, -1.5), (8, 4, 0.6)]
)
def test_the_beams_and_scores_of_transformers(width, n, length_penalty, early_stopping):
    params = beams(width, n=n, length_penalty=length_penalty, early_stopping=early_stopping, stop_token_ids=END, max_tokens=14)
    prompts = [prompt(seed, 3 + 4 * seed) for seed in range(4)]
    engine = tiny_engine(max_num_seqs=16)
    checked = Checked(engine)
    ids = [engine.add_request(p, params) for p in prompts]
    done = checked.run()
    for request_id, p in zip(ids, prompts, strict=True):
        assert_same_beams(done[request_id], reference(tuple(p), params))
    assert engine.pool.num_used == 0


def test_some_of_those_end_early_and_some_at_the_limit():
    """What the comparison above stands on: the searches differ in how they end."""
    reasons = set()
    for seed in range(4):
        output = tiny_engine().generate([prompt(seed, 3 + 4 * seed)], beams(4, stop_token_ids=END, max_tokens=14))[0]
        reasons |= {(o.finish_reason, len(o.token_ids) == 14) for o in output.outputs}
    assert {("stop", False), ("length", True)} <= reasons


@pytest.mark.parametrize("repetition", [0.8, 1.3])
def test_penalties_see_log_probabilities(repetition):
    params = beams(4, repetition_penalty=repetition, stop_token_ids=END, max_tokens=12)
    for seed in range(3):
        assert_same_beams(tiny_engine().generate([prompt(seed)], params)[0], reference(tuple(prompt(seed)), params))


def test_presence_and_frequency_by_hand():
    """One beam is a greedy walk over penalised log-probabilities."""
    ids, params = prompt(3), beams(1, presence_penalty=0.9, frequency_penalty=0.5, ignore_eos=True, max_tokens=12)
    output = tiny_engine().generate([ids], params)[0]
    _, made = tiny_parts()
    tokens, total = list(ids), 0.0
    for _ in range(12):
        x = torch.log_softmax(made.logits(tokens)[-1].double(), -1)
        out = tokens[len(ids) :]
        for t in set(out):
            x[t] -= 0.5 * out.count(t) + 0.9
        tokens.append(int(x.argmax()))
        total += float(x.max())
    assert output.token_ids == tokens[len(ids) :]
    assert output.outputs[0].cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_width_one_is_greedy():
    for seed in range(4):
        greedy = tiny_engine().generate([prompt(seed)], SamplingParams(temperature=0, max_tokens=15, stop_token_ids=END))[0]
        one = tiny_engine().generate([prompt(seed)], beams(1, max_tokens=15, stop_token_ids=END))[0]
        assert (one.token_ids, one.text, one.finish_reason, one.message) == (
            greedy.token_ids, greedy.text, greedy.finish_reason, greedy.message,
        )  # fmt: skip


def test_the_tree_in_the_events_is_the_one_that_was_searched():
    """From BeamsSelected alone: every beam's tokens, the sums, and the results."""
    engine = tiny_engine()
    checked = Checked(engine)
    params = beams(4, stop_token_ids=END, max_tokens=12)
    request_id = engine.add_request(prompt(2), params)
    output = checked.run()[request_id]
    tokens: dict[int, tuple[int, ...]] = {0: ()}
    sums = {0: 0.0}
    ended: dict[tuple[int, ...], float] = {}
    for e in checked.events:
        if not isinstance(e, BeamsSelected):
            continue
        assert len(e.candidates) == 4 * (2 + len(END)) and [c.sum_logprob for c in e.candidates] == sorted(
            (c.sum_logprob for c in e.candidates), reverse=True
        )
        after, new_sums = {}, {}
        for c in e.candidates:
            assert c.sum_logprob == pytest.approx(sums[c.source] + c.logprob, abs=1e-9)
            assert (c.beam >= 0) == (c.fate == "kept") and (c.score == c.score) == (c.fate == "ended")
            if c.fate == "kept":
                after[c.beam], new_sums[c.beam] = (*tokens[c.source], c.token_id), c.sum_logprob
            if c.fate == "ended":
                ended[(*tokens[c.source], c.token_id)] = c.score
        tokens, sums = after, new_sums
    best = sorted(ended.items(), key=lambda item: -item[1])[:4]
    assert [list(t) for t, _ in best] == [o.token_ids for o in output.outputs]
    assert [s for _, s in best] == [o.score for o in output.outputs]
    (end,) = [e for e in checked.events if isinstance(e, BeamsFinished)]
    assert [s.token_ids for s in end.sequences] == [o.token_ids for o in output.outputs]
    assert checked.state.requests[request_id].output_token_ids == output.token_ids
    assert checked.state.requests[f"{request_id}#1"].output_token_ids == output.outputs[1].token_ids


def test_a_saved_run_with_beams_and_a_branch_comes_back(tmp_path):
    """Every event through the file, and the state of any step from its keyframes."""
    engine = tiny_engine()
    with engine.record() as log:
        engine.watch("tokens", top=2)
        source = engine.generate([prompt(2)], beams(3, stop_token_ids=END, max_tokens=8))[0]
        branch = engine.branch(f"{source.request_id}#1", 9 + 2, 70)
        while engine.has_unfinished():
            engine.step()
    log.save(tmp_path / "run.cutaway")
    again = EventLog.load(tmp_path / "run.cutaway")
    before, after = log.since(0).events, again.since(0).events
    kinds = {type(e) for e in before}
    assert {BeamsSelected, BeamsFinished, RequestBranched} <= kinds
    assert repr(after) == repr(before)  # NaN is not equal to itself
    assert [o.token_ids for o in source.outputs] == [
        again.at(log.last_step).requests[f"{source.request_id}#{i}" if i else source.request_id].output_token_ids
        for i in range(3)
    ]
    view = again.at(log.last_step).requests[branch]
    assert (view.branched_from, view.branched_at, view.output_token_ids[2]) == (f"{source.request_id}#1", 11, 70)


def test_tokens_are_told_for_every_beam():
    engine = tiny_engine()
    checked = Checked(engine)
    engine.watch("tokens", top=3)
    request_id = engine.add_request(prompt(2), beams(3, repetition_penalty=1.2, ignore_eos=True, max_tokens=6, logprobs=2))
    output = checked.run()[request_id]
    _, made = tiny_parts()
    for o in output.outputs:
        for i, told in enumerate(o.logprobs):
            raw = torch.log_softmax(made.logits([*prompt(2), *o.token_ids[:i]])[-1].double(), -1)
            assert told.token_id == o.token_ids[i] and told.logprob == pytest.approx(float(raw[told.token_id]), abs=1e-3)
            assert [t for t, _ in told.top] == raw.topk(2).indices.tolist()
    seen = [e for e in checked.events if isinstance(e, TokenSampled)]
    assert {e.request_id for e in seen} == {request_id, f"{request_id}#1", f"{request_id}#2"}
    for e in seen:
        assert e.u is None and len(e.top) == 3 and all(c.removed_by == "" for c in e.top) and e.rank >= 1
        at = [c for c in e.top if c.token_id == e.token_id]
        assert not at or at[0].logprob == pytest.approx(e.logprob, abs=1e-6)


def test_text_comes_when_all_beams_agree_and_is_never_taken_back():
    for seed in range(5):
        engine = tiny_engine()
        params = beams(3, n=2, stop_token_ids=END, max_tokens=14)
        request_id = engine.add_request(prompt(seed), params)
        pieces: dict[int, str] = {0: "", 1: ""}
        tokens: dict[int, list[int]] = {0: [], 1: []}
        early = 0
        while engine.has_unfinished():
            for o in engine.step():
                assert o.request_id == request_id
                pieces[o.index] += o.new_text
                tokens[o.index] += o.new_token_ids
                early += o.finished is None
                output = o.request or None
        assert output is not None
        assert pieces == {i: o.text for i, o in enumerate(output.outputs)}
        assert tokens == {i: o.token_ids for i, o in enumerate(output.outputs)}
    assert "".join(tiny_engine().stream(prompt(1), params.changed(n=1))) == tiny_engine().generate([prompt(1)], params)[0].text


def test_stop_strings_end_beams():
    params = beams(3, ignore_eos=True, max_tokens=12)
    free = tiny_engine().generate([prompt(4)], params)[0]
    stop = free.outputs[1].text[2:4]
    output = tiny_engine().generate([prompt(4)], params.changed(stop=stop))[0]
    ended = [o for o in output.outputs if o.finish_reason == "stop"]
    assert ended and all(stop not in o.text and repr(stop) in o.message for o in ended)


def test_an_aborted_search_gives_what_it_has():
    engine = tiny_engine()
    checked = Checked(engine)
    request_id = engine.add_request(prompt(0), beams(3, ignore_eos=True, max_tokens=30))
    for _ in range(5):
        checked.step()
    assert engine.abort(request_id)
    checked.check()
    outputs = [o for o in engine.take_outputs() if o.finished is not None]
    assert [o.index for o in outputs] == [0, 1, 2] and outputs[-1].request is not None
    assert all(o.finished.finish_reason == "abort" and len(o.finished.token_ids) == 5 for o in outputs)
    scores = [o.finished.score for o in outputs]
    assert scores == sorted(scores, reverse=True) and engine.pool.num_used == 0
    waiting = engine.add_request(prompt(0), beams(3))
    engine.abort(waiting)
    assert not engine.has_unfinished() or engine.take_outputs()[-1].request.finish_reason == "abort"


def test_an_error_is_an_error_though_some_sequences_were_complete(monkeypatch):
    engine = tiny_engine()
    checked = Checked(engine)
    request_id = engine.add_request(prompt(1, 7), beams(4, stop_token_ids=END, max_tokens=14, early_stopping="never"))
    group = engine.siblings(request_id)[0].beams
    while not group.search.complete:
        checked.step()
    run = engine.runner.run
    monkeypatch.setattr(engine.runner, "run", lambda scheduled: run(scheduled) * float("nan"))
    output = checked.run()[request_id]
    assert {o.finish_reason for o in output.outputs} == {"error"} and all("NaN" in o.message for o in output.outputs)
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("value", [float("nan"), -INF])
def test_nothing_to_choose_from_ends_one_search_only(monkeypatch, value):
    engine = tiny_engine()
    checked = Checked(engine)
    bad, good = engine.add_request(prompt(0), beams(3, ignore_eos=True)), engine.add_request(prompt(1), beams(3, ignore_eos=True))
    run = engine.runner.run

    def broken(scheduled):
        logits = run(scheduled).clone()
        for row, s in enumerate([s for s in scheduled if s.sample]):
            if s.request.group_id == bad and s.request.num_tokens == 12:
                logits[row, 5 if value != value else slice(None)] = value
        return logits

    monkeypatch.setattr(engine.runner, "run", broken)
    done = checked.run()
    assert done[bad].finish_reason == "error" and ("NaN" if value != value else "-inf") in done[bad].message
    assert [o.finish_reason for o in done[good].outputs] == ["length"] * 3
    assert engine.pool.num_used == 0


def test_a_failing_forward_pass_ends_the_search(monkeypatch):
    engine = tiny_engine()
    checked = Checked(engine)
    request_id = engine.add_request(prompt(0), beams(3, ignore_eos=True))
    for _ in range(3):
        checked.step()
    with monkeypatch.context() as m:
        m.setattr(engine.runner, "run", lambda scheduled: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            engine.step()
    checked.check()
    (output,) = [o.request for o in engine.step() if o.request is not None]
    assert (output.request_id, output.finish_reason) == (request_id, "error") and engine.pool.num_used == 0


def test_a_width_above_the_vocabulary_takes_as_many_as_there_are():
    engine = tiny_engine(max_num_seqs=400, num_kv_blocks=1500)
    output = engine.generate([prompt(0, 4)], beams(330, n=64, ignore_eos=True, max_tokens=1))[0]
    _, made = tiny_parts()
    want = torch.log_softmax(made.logits(prompt(0, 4))[-1].double(), -1).topk(64)
    assert [o.cumulative_logprob for o in output.outputs] == pytest.approx(want.values.tolist(), abs=1e-4)
    events = Checked(engine, poison=False)
    engine.generate([prompt(0, 4)], beams(330, n=2, ignore_eos=True, max_tokens=3))
    first, second, _ = [e for e in events.events if isinstance(e, BeamsSelected)]
    assert [sum(c.beam >= 0 for c in e.candidates) for e in (first, second)] == [320, 330]
