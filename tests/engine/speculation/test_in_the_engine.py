"""Speculation inside the whole engine: the text of plain decoding, whatever is drafted, and nothing lost."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.events.types import DraftProposed, DraftVerified, RequestPreempted, StepDone, TokenSampled
from engine.speculation.config import SpeculativeConfig
from tests.engine.engines import Checked, tiny_engine
from tests.engine.speculation.guesses import Guesses, use
from tests.engine.test_engine import prompt

PARAMS = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
PROMPTS = [prompt(i, n, shared=min(n - 1, 9)) for i, n in enumerate((1, 3, 4, 5, 11, 17, 23, 8))]
KINDS = {
    "greedy": PARAMS,
    "drawn": PARAMS.changed(temperature=1.0, seed=11),
    "nucleus and penalties": PARAMS.changed(temperature=0.8, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.4, seed=5),
}
VOCAB = 320


def answers(params, **config):
    """What plain decoding gives."""
    engine = tiny_engine(**config)
    outputs = engine.generate(PROMPTS, params)
    return {tuple(p): o.token_ids for p, o in zip(PROMPTS, outputs, strict=True)}


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("k", "blocks", "batch", "budget"), [(1, 64, 8, 512), (4, 64, 1, 512), (8, 64, 8, 512), (3, 14, 8, 512), (5, 64, 3, 17)]
)
def test_the_text_is_that_of_plain_decoding(monkeypatch, kind, tree, k, blocks, batch, budget):
    truth = answers(KINDS[kind])
    guesses = Guesses(truth, VOCAB, tree=tree)
    use(monkeypatch, guesses)
    engine = tiny_engine(
        num_kv_blocks=blocks, max_num_seqs=batch, max_num_batched_tokens=budget,
        speculative=SpeculativeConfig("ngram", num_speculative_tokens=k),
    )  # fmt: skip
    checked = Checked(engine)
    ids = [engine.add_request(p, KINDS[kind]) for p in PROMPTS]
    done = checked.run()
    for request_id, ids_of_prompt in zip(ids, PROMPTS, strict=True):
        assert done[request_id].token_ids == truth[tuple(ids_of_prompt)]
    assert engine.pool.num_used == 0
    if blocks == 14:
        assert any(isinstance(e, RequestPreempted) for e in checked.events)
    steps = [e for e in checked.events if isinstance(e, StepDone)]
    accepted = sum(run.num_accepted for e in steps for run in e.runs)
    metrics = engine.metrics()
    assert accepted == metrics["vllm:spec_decode_num_accepted_tokens"] > 0
    assert sum(metrics["vllm:spec_decode_num_accepted_tokens_per_pos"]) == accepted
    assert metrics["vllm:spec_decode_num_draft_tokens"] == sum(run.num_drafts for e in steps for run in e.runs)
    assert sorted(set(guesses.forgotten)) == sorted(ids)


def test_what_the_events_say_adds_up(monkeypatch):
    truth = answers(PARAMS)
    use(monkeypatch, Guesses(truth, VOCAB, tree=True))
    engine = tiny_engine(speculative={"method": "ngram", "num_speculative_tokens": 5})
    checked = Checked(engine)
    engine.watch("tokens", top=3)
    for p in PROMPTS:
        engine.add_request(p, PARAMS)
    checked.run()
    proposed = {(e.step, e.request_id): e for e in checked.events if isinstance(e, DraftProposed)}
    verified = {(e.step, e.request_id): e for e in checked.events if isinstance(e, DraftVerified)}
    tokens: dict = {}
    for e in checked.events:
        if isinstance(e, TokenSampled):
            tokens.setdefault((e.step, e.request_id), []).append(e)
    assert verified.keys() == {key for key, e in proposed.items() if e.nodes}
    for key, e in verified.items():
        draft, gained = proposed[key], tokens[key]
        assert len(e.nodes) == len(draft.nodes) and e.position == draft.position == gained[0].position
        assert e.num_kept == len(gained) <= len(e.path) + 1
        path = [draft.nodes[node].token_id for node in e.path]
        assert [t.token_id for t in gained] == [*path, e.token_id][: len(gained)]
        for before, node in zip([-1, *e.path], e.path, strict=False):
            assert draft.nodes[node].parent == before and e.nodes[node].outcome == "accepted"
        assert sum(n.outcome == "accepted" for n in e.nodes) == len(e.path)
        assert e.rule == "draw" and e.own in ("corrected", "bonus")
        end = e.path[-1] if e.path else -1
        assert (e.own == "bonus") == all(n.parent != end for n in draft.nodes)


@pytest.mark.parametrize("stop", ["eos", "stop", "max_tokens", "length"])
def test_what_ends_a_request_inside_a_draft(monkeypatch, stop):
    truth = answers(PARAMS)
    first = truth[tuple(PROMPTS[4])]
    params = {
        "eos": PARAMS.changed(stop_token_ids=(first[3],)),
        "stop": PARAMS.changed(stop=(tiny_engine().tokenizer.decode(first[3:5]),)),
        "max_tokens": PARAMS.changed(max_tokens=5),
        "length": PARAMS,
    }[stop]
    config = {"max_model_len": 16} if stop == "length" else {}
    plain = tiny_engine(**config).generate([PROMPTS[4]], params)[0]
    use(monkeypatch, Guesses(truth, VOCAB, wrong=0))
    engine = tiny_engine(**config, speculative=SpeculativeConfig("ngram", num_speculative_tokens=8))
    checked = Checked(engine)
    request_id = engine.add_request(PROMPTS[4], params)
    out = checked.run()[request_id]
    assert (out.token_ids, out.text, out.finish_reason, out.message) == (
        plain.token_ids, plain.text, plain.finish_reason, plain.message,
    )  # fmt: skip
    assert engine.pool.num_used == 0


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_lives(monkeypatch, data):
    """Requests come, fork, are aborted; drafting is switched on and off; the pool is small. The text is that of plain decoding."""
    draw = data.draw
    params = draw(st.sampled_from(list(KINDS.values())))
    truth = answers(params)
    use(monkeypatch, Guesses(truth, VOCAB, wrong=draw(st.sampled_from([0.0, 0.3, 0.9])), tree=draw(st.booleans())))
    engine = tiny_engine(
        block_size=draw(st.sampled_from([1, 3, 4])), num_kv_blocks=draw(st.integers(40, 60)),
        max_num_seqs=draw(st.integers(1, 4)), max_num_batched_tokens=draw(st.integers(1, 24)),
    )  # fmt: skip
    checked = Checked(engine)
    asked, aborted, done = {}, set(), {}
    for _ in range(draw(st.integers(3, 14))):
        action = draw(st.sampled_from(["add", "add", "fork", "step", "step", "step", "abort", "knob", "drafter", "pool"]))
        if action in ("add", "fork") and len(asked) < 8:
            ids = draw(st.sampled_from(PROMPTS))
            asked[engine.add_request(ids, params.changed(n=3) if action == "fork" else params)] = ids
        elif action == "step":
            done |= {o.request_id: o.request for o in checked.step() if o.request is not None}
        elif action == "abort" and asked:
            victim = draw(st.sampled_from(sorted(asked)))
            if engine.abort(victim):
                aborted.add(victim)
            checked.check()
        elif action == "knob":
            engine.reconfigure(
                max_num_seqs=draw(st.integers(1, 5)), max_num_batched_tokens=draw(st.integers(1, 24)),
                enable_prefix_caching=draw(st.booleans()),
            )  # fmt: skip
        elif action == "drafter":
            k = draw(st.sampled_from([None, 0, 1, 4, 8]))
            engine.reconfigure(speculative=None if k is None else {"method": "ngram", "num_speculative_tokens": k})
        elif action == "pool":
            engine.reconfigure(block_size=draw(st.sampled_from([2, 4])), num_kv_blocks=draw(st.integers(40, 60)))
    done |= checked.run()
    assert set(done) == set(asked)
    for request_id, ids in asked.items():
        if request_id not in aborted:
            assert done[request_id].outputs[0].token_ids == truth[tuple(ids)]
            assert all(len(o.token_ids) == 14 for o in done[request_id].outputs)
    assert engine.pool.num_used == 0
