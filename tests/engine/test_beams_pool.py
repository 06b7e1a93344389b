"""Beams in the pool: blocks shared and split, groups that run, wait, are preempted and come back together, and never too many."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.events.types import BlockCopied, BlockShared, RequestPreempted, StepDone
from tests.engine.beam_search import END, assert_same_beams, beams, prompt, reference
from tests.engine.engines import Checked, tiny_engine


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(
    ("chunk", "block_size", "num_blocks", "seqs"),
    [(512, 4, 64, 8), (5, 4, 64, 6), (3, 1, 120, 8), (512, 3, 30, 6), (8, 4, 22, 6)],
)
def test_any_mix_and_any_pool_give_the_same_beams(caching, chunk, block_size, num_blocks, seqs):
    """In small chunks, beside other requests, preempted and computed again, with and without the prefix cache."""
    params = beams(3, stop_token_ids=END, max_tokens=12)
    engine = tiny_engine(
        max_num_batched_tokens=chunk, block_size=block_size, num_kv_blocks=num_blocks, max_num_seqs=seqs,
        enable_prefix_caching=caching,
    )  # fmt: skip
    checked = Checked(engine)
    greedy = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    alone = [tiny_engine().generate([prompt(9 + i, 7)], greedy)[0].token_ids for i in range(3)]
    asked, others = [], []
    for i in range(3):
        others.append(engine.add_request(prompt(9 + i, 7), greedy))
        asked.append(engine.add_request(prompt(i, 6 + 5 * i), params))
    done = checked.run()
    for i, request_id in enumerate(asked):
        assert_same_beams(done[request_id], reference(tuple(prompt(i, 6 + 5 * i)), params))
    assert [done[r].token_ids for r in others] == alone
    assert engine.pool.num_used == 0
    if num_blocks <= 30:
        assert any(isinstance(e, RequestPreempted) and "#" in e.request_id for e in checked.events), "meant to preempt beams"


def test_beams_run_and_are_preempted_together():
    engine = tiny_engine(num_kv_blocks=30, block_size=3, max_num_seqs=6, enable_prefix_caching=False)
    checked = Checked(engine)
    greedy = SamplingParams(temperature=0, max_tokens=25, ignore_eos=True)
    for i in range(3):
        engine.add_request(prompt(9 + i, 7), greedy)
        engine.add_request(prompt(i, 6 + 5 * i), beams(3, ignore_eos=True, max_tokens=12))
    checked.run()
    gone: dict[tuple[int, str], int] = {}
    for e in checked.events:
        group = getattr(e, "request_id", "").split("#")[0]
        if isinstance(e, RequestPreempted) and group in ("req-1", "req-3", "req-5"):
            gone[e.step, group] = gone.get((e.step, group), 0) + 1
        if isinstance(e, StepDone):
            sampled: dict[str, int] = {}
            for r in e.runs:
                if r.sampled and r.request_id.split("#")[0] in ("req-1", "req-3", "req-5") and r.start > 20:
                    sampled[r.request_id.split("#")[0]] = sampled.get(r.request_id.split("#")[0], 0) + 1
            assert set(sampled.values()) <= {3}, "a beam ran without the others"
    assert 3 in gone.values() and set(gone.values()) <= {1, 3}  # 1: its prompt, before there were beams


def test_beams_share_the_prompt_and_split_on_write():
    engine = tiny_engine()
    checked = Checked(engine)
    engine.add_request(prompt(1, 10), beams(4, ignore_eos=True, max_tokens=9))
    checked.step()
    assert [engine.pool.ref_counts[b] for b in range(3)] == [4, 4, 4]
    checked.step()
    assert [(c.src, c.index) for c in checked.events if isinstance(c, BlockCopied)] == [(2, 2)] * 3
    assert [engine.pool.ref_counts[b] for b in range(2)] == [4, 4]
    checked.run()
    later = [e for e in checked.events if isinstance(e, BlockShared) and e.first_index >= 2]
    assert later, "a beam that took another one's place shares its blocks"


@pytest.mark.parametrize(("config", "length", "width", "message"), [
    ({"max_num_seqs": 4}, 8, 5, r"at most max_num_seqs \(4\), got 5"),
    ({"max_num_batched_tokens": 3}, 8, 4, r"at most max_num_batched_tokens \(3\), got 4"),
    ({"num_kv_blocks": 8, "block_size": 4}, 22, 4, "4 beams of a prompt of 22 tokens need 9 blocks, the KV pool has 8"),
])  # fmt: skip
def test_a_width_above_what_the_engine_can_hold(config, length, width, message):
    with pytest.raises(ValueError, match=message):
        tiny_engine(**config).add_request(prompt(0, length), beams(width))


@pytest.mark.parametrize(("num_blocks", "count"), [(13, 6), (9, 2)])
def test_the_pool_bounds_the_length(num_blocks, count):
    """22 tokens in 5 full blocks and half a one: with 8 blocks more 4 beams can go on to 28 tokens, with 4 to 24, to the last block."""
    engine = tiny_engine(num_kv_blocks=num_blocks, block_size=4, max_num_seqs=4)
    checked = Checked(engine)
    request_id = engine.add_request(prompt(0, 22), beams(4, ignore_eos=True, max_tokens=50))
    output = checked.run()[request_id]
    assert {(o.finish_reason, o.message, len(o.token_ids)) for o in output.outputs} == {("length", "the KV pool is full", count)}
    assert_same_beams(output, reference(tuple(prompt(0, 22)), beams(4, ignore_eos=True, max_tokens=count)))
    assert not any(isinstance(e, RequestPreempted) for e in checked.events)


def test_knobs_lowered_below_the_width_do_not_stop_a_search():
    engine = tiny_engine()
    checked = Checked(engine)
    params = beams(4, ignore_eos=True, max_tokens=8)
    request_id = engine.add_request(prompt(0), params)
    checked.step()
    engine.reconfigure(max_num_seqs=2, max_num_batched_tokens=3)
    assert_same_beams(checked.run()[request_id], reference(tuple(prompt(0)), params))


def test_a_pool_rebuilt_under_a_preempted_search():
    engine = tiny_engine(num_kv_blocks=26, block_size=3, max_num_seqs=6)
    checked = Checked(engine)
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    others = [engine.add_request(prompt(9 + i, 7), greedy) for i in range(2)]
    params = beams(3, ignore_eos=True, max_tokens=12)
    asked = engine.add_request(prompt(0, 20), params)
    while not any(isinstance(e, RequestPreempted) for e in checked.events):
        checked.step()
    engine.reconfigure(num_kv_blocks=60, block_size=4)
    done = checked.run()
    assert engine.pool.num_blocks == 60 and set(done) == {asked, *others}
    assert_same_beams(done[asked], reference(tuple(prompt(0, 20)), params))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_lives_with_beams(data):
    """Beams beside others, aborted, preempted, knobs moving: what is left alone has transformers' beams, and no block is lost."""
    draw = data.draw
    engine = tiny_engine(
        block_size=draw(st.sampled_from([1, 3, 4])), num_kv_blocks=draw(st.integers(45, 70)), max_num_seqs=draw(st.integers(3, 6)),
        max_num_batched_tokens=draw(st.integers(3, 24)), enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=draw(st.booleans()),
    )  # fmt: skip
    checked = Checked(engine)
    params = beams(3, stop_token_ids=END, max_tokens=8)
    asked, aborted, done = {}, set(), {}
    for _ in range(draw(st.integers(3, 14))):
        action = draw(st.sampled_from(["beams", "beams", "greedy", "step", "step", "step", "abort", "knob", "pool"]))
        if action in ("beams", "greedy") and len(asked) < 7:
            ids = prompt(draw(st.integers(0, 4)), draw(st.sampled_from([3, 8, 13])))
            wanted = params if action == "beams" else SamplingParams(temperature=0, max_tokens=8)
            asked[engine.add_request(ids, wanted)] = (ids, wanted)
        elif action == "step":
            done |= {o.request_id: o.request for o in checked.step() if o.request is not None}
        elif action == "abort" and asked:
            victim = draw(st.sampled_from(sorted(asked)))
            if engine.abort(victim):
                aborted.add(victim)
            checked.check()
        elif action == "knob":
            engine.reconfigure(max_num_seqs=draw(st.integers(3, 6)), max_num_batched_tokens=draw(st.integers(3, 24)))
        elif action == "pool":
            engine.reconfigure(block_size=draw(st.sampled_from([2, 4])), num_kv_blocks=draw(st.integers(45, 70)))
    done |= checked.run()
    assert set(done) == set(asked)
    for request_id, (ids, wanted) in asked.items():
        if request_id not in aborted and wanted is params:
            assert_same_beams(done[request_id], reference(tuple(ids), params))
    assert engine.pool.num_used == 0
