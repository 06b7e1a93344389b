"""Equal tokens whatever finds a prefix and whatever becomes of the KV of those who are preempted; and what the events say of it."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine.events.batching import BlockSwapped
from engine.events.types import BlockCopied, PrefixLookup, RequestPreempted, StepDone
from engine.kvcache.swap import Return
from engine.scheduler import Schedule
from engine.speculation.config import SpeculativeConfig
from tests.engine.engines import Checked, tiny_engine, tiny_parts
from tests.engine.equal_tokens import assert_equal_tokens
from tests.engine.greedy import GREEDY, check_against_oracle, oracle, prompt
from tests.engine.speculation.test_model_drafters import config

SWAP = {"preemption_mode": "swap", "swap_space": 1.0}
# Beginnings that part inside a block of 4, and one that is another's whole.
PROMPTS = [
    prompt(0, 19, shared=10), prompt(1, 23, shared=10), prompt(2, 30, shared=17), prompt(3, 9), prompt(4, 26, shared=17),
    prompt(0, 25, shared=10), prompt(5, 3),
]  # fmt: skip


def swaps(checked: Checked, direction: str) -> list[BlockSwapped]:
    return [e for e in checked.events if isinstance(e, BlockSwapped) and e.direction == direction]


def lookups(checked: Checked) -> list[PrefixLookup]:
    return [e for e in checked.events if isinstance(e, PrefixLookup)]


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("index", ["hash", "radix"])
@pytest.mark.parametrize(("mode", "caching"), [("recompute", True), ("swap", True), ("swap", False)])
def test_equal_tokens_in_a_small_pool(index, mode, caching, chunk):
    engine = tiny_engine(
        num_kv_blocks=22, max_num_batched_tokens=chunk, prefix_index=index, preemption_mode=mode, swap_space=1, max_num_seqs=6,
        enable_prefix_caching=caching,
    )  # fmt: skip
    checked = Checked(engine)
    ids = [engine.add_request(p, GREEDY) for p in PROMPTS]
    done = checked.run()
    check_against_oracle([done[i] for i in ids], PROMPTS)
    preempted = [e for e in checked.events if isinstance(e, RequestPreempted)]
    assert preempted, "the pool was meant to be too small"
    out = swaps(checked, "out")
    assert {(e.mode, e.why) for e in preempted} <= {(mode, ""), ("recompute", "nothing is computed yet")}
    assert [e.request_id for e in out] == [e.request_id for e in preempted if e.mode == "swap"]
    assert bool(out) == (mode == "swap")
    back = swaps(checked, "in") + swaps(checked, "dropped")
    assert sorted(e.request_id for e in back) == sorted(e.request_id for e in out), "what went out came back, or was found"
    assert all(e.num_bytes > 0 and e.budget_bytes == 1 << 30 for e in out)
    if back:
        assert min(e.used_bytes for e in back) == 0
    assert not len(engine.scheduler.swap) and engine.pool.num_used == 0
    # What is swapped back is not computed again.
    for e in lookups(checked):
        assert e.index == index and e.num_hit_tokens >= e.num_swapped_tokens
        if e.num_swapped_tokens:
            last = next(o for o in reversed(out) if o.request_id == e.request_id and o.time_ns < e.time_ns)
            assert e.recompute and e.num_hit_tokens == last.num_tokens


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("index", ["hash", "radix"])
def test_equal_tokens_in_few_bits(index, kv_dtype):
    """The same, on what is rounded: against one at a time, with nothing shared and nobody preempted."""
    alone = tiny_engine(kv_cache_dtype=kv_dtype, max_num_seqs=1, enable_prefix_caching=False, block_size=8)
    want = [o.token_ids for o in alone.generate(PROMPTS, GREEDY)]
    for chunk, batch in ((9, 6), (64, 4)):
        engine = tiny_engine(
            kv_cache_dtype=kv_dtype, num_kv_blocks=12, block_size=8, max_num_batched_tokens=chunk, max_num_seqs=batch,
            prefix_index=index, **SWAP,
        )  # fmt: skip
        checked = Checked(engine)
        ids = [engine.add_request(p, GREEDY) for p in PROMPTS]
        done = checked.run()
        assert [done[i].token_ids for i in ids] == want
        assert swaps(checked, "out")
        partial = [e for e in lookups(checked) if e.num_partial_tokens]
        assert bool(partial) == (index == "radix" and kv_dtype != "int4")
        if kv_dtype == "int4":
            engine.kv.tail.check_integrity()


@pytest.mark.parametrize("speculative", [
    {"method": "ngram", "num_speculative_tokens": 4}, {"method": "lookahead"}, {"method": "layer_skip", "trained_exit": False},
    config("eagle", num_speculative_tokens=3), config("eagle", num_speculative_tokens=3, tree=(2, 2)),
    config("medusa", num_speculative_tokens=3), config("draft_model", num_speculative_tokens=3),
])  # fmt: skip
@pytest.mark.parametrize("index", ["hash", "radix"])
def test_equal_tokens_with_drafts(index, speculative):
    engine = tiny_engine(num_kv_blocks=20, prefix_index=index, max_num_seqs=5, speculative=speculative, **SWAP)
    checked = Checked(engine)
    ids = [engine.add_request(p, GREEDY) for p in PROMPTS]
    done = checked.run()
    check_against_oracle([done[i] for i in ids], PROMPTS)
    assert swaps(checked, "out")


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_draft_model_catches_up_on_what_was_swapped_or_copied_in_part(index):
    """The model drafts for itself: whatever is missing or stale in the drafter's own KV would show as a rejection."""
    parts, _ = tiny_parts()
    own = SpeculativeConfig("draft_model", model=str(parts.path), num_speculative_tokens=3)
    engine = tiny_engine(num_kv_blocks=20, prefix_index=index, max_num_batched_tokens=19, speculative=own, **SWAP)
    checked = Checked(engine)
    for some in (PROMPTS, PROMPTS[3:6]):
        for p in some:
            engine.add_request(p, GREEDY)
        checked.run()
    runs = [run for e in checked.events if isinstance(e, StepDone) for run in e.runs if run.num_drafts]
    assert len(runs) > 15 and all(run.num_accepted == run.num_drafts for run in runs)
    assert swaps(checked, "in") and any(e.num_partial_tokens for e in lookups(checked)) == (index == "radix")


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_siblings_are_swapped_and_beams_are_computed_again(index):
    wide = tiny_engine()
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=9, ignore_eos=True)
    beams = SamplingParams(beam_width=3, n=3, max_tokens=9, ignore_eos=True)
    for asked, most in ((params, 19), (beams, 20)):
        want = [[o.token_ids for o in r.outputs] for r in wide.generate(PROMPTS[:3], asked)]
        engine = tiny_engine(num_kv_blocks=most, prefix_index=index, **SWAP)
        checked = Checked(engine)
        ids = [engine.add_request(p, asked) for p in PROMPTS[:3]]
        done = checked.run()
        assert [[o.token_ids for o in done[i].outputs] for i in ids] == want
        preempted = [e for e in checked.events if isinstance(e, RequestPreempted)]
        assert preempted
        if asked is beams:
            assert all(e.mode == "recompute" and e.why for e in preempted) and any("beams" in e.why for e in preempted)
        else:
            assert any(e.mode == "swap" for e in preempted)


def test_a_partial_hit_is_copied_and_the_source_stays_as_it_was():
    engine = tiny_engine(prefix_index="radix")
    checked = Checked(engine)
    first, second = prompt(0, 20, shared=10), prompt(1, 18, shared=10)
    a = engine.add_request(first, GREEDY)
    done = checked.run()
    b = engine.add_request(second, GREEDY)
    done |= checked.run()
    again = engine.add_request(first, GREEDY)
    done |= checked.run()
    check_against_oracle([done[i] for i in (a, b, again)], [first, second, first])
    miss, hit, whole = lookups(checked)
    assert (miss.num_hit_tokens, miss.miss_reason) == (0, "no such prefix")
    assert (hit.num_hit_tokens, len(hit.block_ids), hit.num_partial_tokens, hit.miss_reason) == (10, 2, 2, "no such prefix")
    assert (whole.num_hit_tokens, len(whole.block_ids), whole.num_partial_tokens, whole.miss_reason) == (19, 4, 3, "")
    copied = [e for e in checked.events if isinstance(e, BlockCopied)]
    assert [(e.request_id, e.index, e.num_tokens) for e in copied] == [(b, 2, 2), (again, 4, 3)]
    assert done[b].num_cached_tokens == 10 and done[again].num_cached_tokens == 19
    nodes = {node.first_tokens: node.hits for node in engine.pool.index.tree(100)}
    # The last request ended inside the last block, which parts where its answer does not; both used the first ten tokens.
    assert nodes[tuple(first[:10])] == 2


def test_what_a_partial_hit_is_copied_from_may_be_evicted_for_the_copy():
    """A pool in which the only block to be had is the one that is copied: it becomes the copy."""
    engine = tiny_engine(prefix_index="radix", num_kv_blocks=4)
    checked = Checked(engine)
    first = prompt(0, 9, shared=6)
    one = SamplingParams(temperature=0, max_tokens=1)
    engine.add_request(first, one)
    checked.run()
    second = prompt(1, 14, shared=6)
    b = engine.add_request(second, one)
    done = checked.run()
    want, margins = oracle(tuple(second), 1)
    assert_equal_tokens(done[b].token_ids, want, margins)
    (copied,) = [e for e in checked.events if isinstance(e, BlockCopied)]
    assert copied.num_tokens == 2


# -- the budget, aborts, other weights -------------------------------------------------------------------------------------------


def crowded(**config):
    """An engine with a pool that is too small for its requests, stepped until somebody is preempted."""
    engine = tiny_engine(num_kv_blocks=22, max_num_seqs=6, **config)
    checked = Checked(engine)
    ids = [engine.add_request(p, GREEDY) for p in PROMPTS]
    while not any(isinstance(e, RequestPreempted) for e in checked.events):
        checked.step()
    return engine, checked, ids


def test_a_budget_that_runs_out_falls_back_to_recompute():
    budget = 9 * tiny_engine().kv.bytes_per_block
    _, checked, ids = crowded(preemption_mode="swap", swap_space=budget / 2**30)
    done = checked.run()
    check_against_oracle([done[i] for i in ids], PROMPTS)
    preempted = [e for e in checked.events if isinstance(e, RequestPreempted)]
    assert {e.mode for e in preempted} == {"swap", "recompute"}
    told = [e.why for e in preempted if e.mode == "recompute"]
    assert any("swap_space is used up" in why for why in told)
    assert all(e.used_bytes <= e.budget_bytes == budget for e in checked.events if isinstance(e, BlockSwapped))


def test_without_any_budget_everything_is_computed_again():
    _, checked, ids = crowded(preemption_mode="swap")
    done = checked.run()
    check_against_oracle([done[i] for i in ids], PROMPTS)
    assert all(e.mode == "recompute" and e.why for e in checked.events if isinstance(e, RequestPreempted))


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_an_abort_while_swapped_out_frees_the_memory(index):
    engine, checked, ids = crowded(prefix_index=index, **SWAP)
    (gone,) = [r.request_id for r in engine.scheduler.waiting if r.num_swapped_tokens][:1]
    view = checked.state.requests[gone]
    assert view.status == "preempted" and view.num_swapped_tokens > 0 and not view.block_ids
    assert engine.snapshot().requests[-1].num_swapped_tokens or engine.scheduler.swap.used_bytes
    before = engine.scheduler.swap.used_bytes
    engine.abort(gone)
    checked.check()
    assert engine.scheduler.swap.used_bytes < before and checked.state.requests[gone].num_swapped_tokens == 0
    assert swaps(checked, "dropped")[-1].reason == "finished"
    done = checked.run()
    left = [i for i in ids if i != gone]
    check_against_oracle([done[i] for i in left], [PROMPTS[ids.index(i)] for i in left])


def test_other_weights_find_nothing_in_host_memory():
    engine, checked, ids = crowded(**SWAP)
    assert len(engine.scheduler.swap)
    engine.reconfigure(quantization="int8")
    checked.check()
    assert not len(engine.scheduler.swap) and swaps(checked, "dropped")[-1].reason == "weights changed"
    assert any(
        e.mode == "recompute" and e.why == "the weights changed" for e in checked.events if isinstance(e, RequestPreempted)
    )
    assert not any(r.num_swapped_tokens for r in engine.scheduler.waiting)
    mark = len(checked.events)
    done = checked.run()
    back = [e for e in checked.events[mark:] if isinstance(e, PrefixLookup) and e.request_id in ids]
    assert back and len(done) == len(ids)
    engine.reconfigure(quantization=None)  # the parts are shared with other tests


def test_the_knobs_move_while_it_runs():
    engine, checked, ids = crowded(preemption_mode="recompute", swap_space=1)
    engine.reconfigure(preemption_mode="swap", prefix_index="radix", by="me")
    checked.check()
    assert engine.pool.index.name == "radix"
    for _ in range(200):
        checked.step()
        if len(engine.scheduler.swap):
            break
    else:
        raise AssertionError("nobody was swapped out")
    engine.reconfigure(swap_space=0, prefix_index="hash")
    checked.check()
    assert swaps(checked, "dropped")[-1].reason == "budget lowered" and engine.scheduler.swap.used_bytes == 0
    done = checked.run()
    check_against_oracle([done[i] for i in ids], PROMPTS)
    assert checked.state.knobs["prefix_index"] == "hash" and checked.state.knobs["preemption_mode"] == "swap"


def test_a_pool_that_is_rebuilt_forgets_what_was_swapped_out():
    engine, checked, ids = crowded(**SWAP)
    engine.reconfigure(num_kv_blocks=30)
    done = checked.run()
    check_against_oracle([done[i] for i in ids], PROMPTS)
    assert engine.pool.num_blocks == 30


# -- random lives ------------------------------------------------------------------------------------------------------------------


@settings(max_examples=14, deadline=None)
@given(st.data())
def test_random_lives(data):
    kv_dtype = data.draw(st.sampled_from(("auto", "auto", "int8", "int4")))
    engine = tiny_engine(
        num_kv_blocks=data.draw(st.integers(12, 24)), max_num_batched_tokens=data.draw(st.sampled_from((5, 16, 64))),
        prefix_index=data.draw(st.sampled_from(("hash", "radix"))), preemption_mode=data.draw(st.sampled_from(("swap", "recompute"))),
        swap_space=data.draw(st.sampled_from((0, 1e-5, 1))), max_num_seqs=data.draw(st.integers(1, 6)),
        enable_prefix_caching=data.draw(st.booleans()), kv_cache_dtype=kv_dtype,
    )  # fmt: skip
    checked = Checked(engine)
    asked, done = {}, {}
    for _ in range(data.draw(st.integers(5, 30))):
        action = data.draw(st.sampled_from(("add", "add", "step", "step", "step", "abort", "knob")))
        if action == "add":
            ids = prompt(data.draw(st.integers(0, 3)), data.draw(st.integers(1, 30)), shared=data.draw(st.integers(0, 10)))
            asked[engine.add_request(ids, GREEDY)] = ids
        elif action == "abort" and asked:
            gone = data.draw(st.sampled_from(sorted(asked)))
            if engine.abort(gone):
                del asked[gone]
        elif action == "knob":
            name, values = data.draw(st.sampled_from((
                ("prefix_index", ("hash", "radix")), ("preemption_mode", ("recompute", "swap")), ("swap_space", (0, 1)),
                ("enable_prefix_caching", (True, False)), ("num_kv_blocks", (14, 20)),
            )))  # fmt: skip
            engine.reconfigure(**{name: data.draw(st.sampled_from(values))})
        else:
            done |= {o.request_id: o.request for o in checked.step() if o.request is not None}
        checked.check()
    done |= checked.run()
    done = {i: o for i, o in done.items() if i in asked and o.finish_reason == "length"}
    if kv_dtype == "auto":
        check_against_oracle(list(done.values()), [asked[i] for i in done])
    assert engine.pool.num_used == 0 and engine.scheduler.swap.used_bytes == 0


# -- hits against the longest prefix, by hand -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(3, 4), min_size=1, max_size=22), min_size=1, max_size=7), st.sampled_from(("hash", "radix")))
def test_hits_are_the_longest_known_prefix(prompts, index):
    """One request after another in a pool that evicts nothing: what each finds, by brute force over all that came before."""
    engine = tiny_engine(prefix_index=index, num_kv_blocks=128)
    checked = Checked(engine, poison=False)
    known, size = [], engine.pool.block_size
    for ids in prompts:
        request_id = engine.add_request(ids, SamplingParams(temperature=0, max_tokens=1))
        checked.run()
        lookup = lookups(checked)[-1]
        best = max((len(list(itertools.takewhile(lambda p: p[0] == p[1], zip(old, ids[:-1])))) for old in known), default=0)
        assert lookup.request_id == request_id
        assert lookup.num_hit_tokens == (best if index == "radix" else best // size * size)
        assert len(lookup.block_ids) == best // size
        assert (lookup.miss_reason == "") == (best // size == (len(ids) - 1) // size > 0)
        known.append(ids[: len(ids) // size * size])


# -- what is written where, and when -----------------------------------------------------------------------------------------------


def test_copies_read_before_anything_is_written_over():
    """In one step two blocks are each other's source, a third is copied from and then filled from host memory."""
    engine = tiny_engine(num_kv_blocks=8)
    for block in range(8):
        engine.kv.fill_blocks([block], float(block))
    kept = engine.kv.to_host([6, 7])
    schedule = Schedule(copies=[(0, 1), (2, 4)], part_copies=[(1, 0)], returns=[Return("r", kept, 0, [2, 3], 8)])
    engine._copy_blocks(schedule)
    assert [float(engine.kv.tensor[0, block].mean()) for block in range(8)] == [1, 0, 6, 7, 2, 5, 6, 7]
    with pytest.raises(ValueError, match="2 blocks were kept"):
        engine.kv.from_host(kept, 1, [4, 5])


def test_what_came_back_from_host_memory_can_be_found_again():
    engine, checked, ids = crowded(**SWAP)
    swapped = next(r for r in engine.scheduler.waiting if r.num_swapped_tokens)
    engine.pool.forget_all()  # as if all of it had been evicted
    count = swapped.num_swapped_tokens
    while swapped.status != "running":
        checked.step()
    back = next(e for e in lookups(checked) if e.num_swapped_tokens and e.request_id == swapped.request_id)
    assert back.num_swapped_tokens == count == back.num_hit_tokens
    if swapped.status == "running":
        size = engine.pool.block_size
        assert all(block in engine.pool.index for block in swapped.block_ids[: count // size])
    done = checked.run()
    check_against_oracle([done[i] for i in ids if i in done], [p for i, p in zip(ids, PROMPTS) if i in done])


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_request_that_finds_as_much_by_its_prefix_does_without_its_host_memory(index):
    """Somebody else has computed the same tokens, and more, by the time it returns: what is found is shared in any case."""
    engine, checked, ids = crowded(prefix_index=index, **SWAP)
    swapped = next(r for r in engine.scheduler.waiting if r.num_swapped_tokens)
    tokens = list(swapped.token_ids)
    for request_id in ids:
        if request_id != swapped.request_id:
            engine.abort(request_id)
    # At the front of the queue, so that it runs first: the pool has room for both then.
    engine.scheduler.max_num_seqs = 1
    engine.add_request([*tokens, 9, 9, 9, 9], SamplingParams(temperature=0, max_tokens=1), request_id="same")
    same = engine.scheduler.waiting[1]
    engine.scheduler.waiting.remove(same)
    engine.scheduler.waiting.appendleft(same)
    checked.step()
    assert same.status == "finished" and swapped.num_swapped_tokens
    done = checked.run()
    last = lookups(checked)[-1]
    assert last.request_id == swapped.request_id and last.num_hit_tokens == len(tokens) - 1 == 10 and len(last.block_ids) == 2
    if index == "radix":
        assert last.num_swapped_tokens == 0 and last.num_partial_tokens == 2
        assert swaps(checked, "dropped")[-1].reason == "found by prefix" and not swaps(checked, "in")
    else:  # which finds whole blocks: what they lack is copied from host memory
        assert last.num_swapped_tokens == 10 and [len(e.block_ids) for e in swaps(checked, "in")] == [1]
    want, margins = oracle(tuple(PROMPTS[ids.index(swapped.request_id)]))
    assert_equal_tokens(done[swapped.request_id].token_ids, want, margins)
