"""EAGLE against the module that is trained, computed anew from all tokens each time."""

import math

import pytest
import torch

from engine.request import SamplingParams
from engine.sampling.rng import STREAM_DRAFT, STREAM_TOKEN, uniform
from engine.speculation.draw import walk
from engine.speculation.eagle import EagleDrafter
from tests.engine.speculation.drafting import Bench, Oracle

HOT = SamplingParams(temperature=0.8, max_tokens=1000)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle("eagle")


def test_chains_while_drafts_are_accepted_and_rejected(oracle):
    bench = Bench("eagle")
    requests = [bench.request(f"r{i}", bench.tokens(n)) for i, n in enumerate((1, 2, 9, 40))]
    for request in requests:
        bench.prefill(request, chunk=7)
    for step in range(5):
        drafts = bench.propose(requests, [4, 1, 5, 3])
        for request, draft, count in zip(requests, drafts, (4, 1, 5, 3)):
            assert len(draft) == count and draft.is_chain and draft.q is None
            oracle.check(request.token_ids, draft)
        kept = [min((step + i) % 5, len(d)) for i, d in enumerate(drafts)]
        bench.decide(requests, drafts, [range(n) for n in kept], bench.tokens(4))


@pytest.mark.parametrize("params", [SamplingParams(temperature=0, max_tokens=99), HOT])
@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_trees(oracle, params, acceptance):
    bench = Bench("eagle", tree=(3, 4, 2), acceptance=acceptance)
    requests = [bench.request(f"r{i}", bench.tokens(n), params) for i, n in enumerate((5, 18))]
    for request in requests:
        bench.prefill(request)
    for path in ((0,), ()):
        drafts = bench.propose(requests, [9, 6])
        for request, draft, count in zip(requests, drafts, (9, 6)):
            depths = draft.depths()
            assert [depths.count(d) for d in (1, 2, 3)] == [3, *((4, 2) if count == 9 else (3, 0))]
            assert len({(parent, token) for parent, token in zip(draft.parents, draft.token_ids)}) == count
            assert (draft.q is not None) == (params is HOT and acceptance == "rejection")
            oracle.check(request.token_ids, draft, params.temperature)
            if params is not HOT:  # the likeliest children, the likeliest first
                best = oracle.logits(request.token_ids, []).topk(3).indices
                assert draft.token_ids[:3] == oracle.ids[best].tolist()
        bench.decide(requests, drafts, [path, path], bench.tokens(2))


@pytest.mark.parametrize("acceptance", ["rejection", "coupled"])
def test_a_drawn_chain_is_drawn_from_its_own_distribution(oracle, acceptance):
    bench = Bench("eagle", acceptance=acceptance)
    request = bench.request("r", bench.tokens(11), HOT)
    bench.prefill(request)
    (draft,) = bench.propose([request], 5)
    oracle.check(request.token_ids, draft, 0.8)
    assert (draft.q is None) == (acceptance == "coupled")
    stream = STREAM_TOKEN if acceptance == "coupled" else STREAM_DRAFT
    for i, token in enumerate(draft.token_ids):
        probs = (oracle.logits(request.token_ids, draft.token_ids[:i]).double() / 0.8).softmax(-1)
        u = uniform(7, 0, request.num_tokens + i, stream)
        assert int(oracle.ids[walk(probs[None], [u])[0]]) == token
    assert bench.propose([request], 5)[0].token_ids == draft.token_ids  # and again the same


def test_penalties_count_for_the_drafter_too(oracle):
    bench = Bench("eagle")
    request = bench.request("r", bench.tokens(11), SamplingParams(temperature=0, max_tokens=99, presence_penalty=2.0))
    bench.prefill(request)
    bench.decide([request], [bench.propose([request], 1)[0]], [[0]], [int(oracle.ids[5])])
    (draft,) = bench.propose([request], 1)
    logits = oracle.logits(request.token_ids, [])
    logits[torch.isin(oracle.ids, torch.tensor(request.output_token_ids))] -= 2.0
    assert draft.token_ids == [int(oracle.ids[logits.argmax()])]


def test_a_prefix_is_taken_over_as_far_as_the_drafter_knows_it(oracle):
    bench = Bench("eagle")
    first = bench.request("a", bench.tokens(50))
    bench.prefill(first)  # long enough for its entries to be made at once
    assert bench.drafter.covers(first.block_ids) == 12
    second = bench.request("b", first.token_ids[:21] + bench.tokens(9))
    second.block_ids = list(first.block_ids[:5])
    bench.pool.share("b", 0, second.block_ids)
    second.num_computed_tokens = 20
    bench.prefill(second)
    (draft,) = bench.propose([second], 3)
    oracle.check(second.token_ids, draft)
    bench.release(first)  # its blocks go to somebody else: what was kept of them is void
    other = bench.request("c", bench.tokens(10))
    bench.room(other, 10)
    assert bench.drafter.covers(other.block_ids) == 0
    bench.fresh()
    assert bench.drafter.covers(second.block_ids) == 0


def test_siblings_share_blocks_until_they_write(oracle):
    bench = Bench("eagle")
    first = bench.request("a", bench.tokens(10))
    bench.prefill(first)
    second = bench.request("a#1", list(first.token_ids))
    second.block_ids, second.num_computed_tokens = list(first.block_ids), first.num_computed_tokens
    bench.pool.share("a#1", 0, second.block_ids)
    last = len(first.block_ids) - 1
    src, dst = first.block_ids[last], bench.pool.copy_on_write("a", last, first.block_ids[last])
    first.block_ids[last] = dst
    bench.kv.copy_blocks([src], [dst])
    bench.drafter.copy_blocks([src], [dst])
    for kept in ((0, 3), (2, 1)):
        drafts = bench.propose([first, second], 3)
        for request, draft in zip((first, second), drafts):
            oracle.check(request.token_ids, draft)
        bench.decide([first, second], drafts, [range(n) for n in kept], [5, 9])
    bench.release(first)
    oracle.check(second.token_ids, bench.propose([second], 3)[0])


def test_a_request_that_ran_before_the_drafter_came(oracle):
    bench = Bench("eagle")
    request = bench.request("r", bench.tokens(23))
    bench.prefill(request)
    bench.fresh()
    assert len(bench.propose([request], 3)[0]) == 0  # no feature yet
    for step in range(5):  # every slot behind its beginning holds NaN: a stray look would be a failure
        (draft,) = bench.propose([request], 3)
        assert len(draft) == (3 if step else 0) and not draft.failure
        assert all(0 < p <= 1 for p in draft.probs)
        bench.decide([request], [draft], [range(min(step, len(draft)))], [7])
    drafter = bench.drafter
    assert isinstance(drafter, EagleDrafter)
    assert drafter.covers(request.block_ids) == 0  # nobody shall take these entries for whole ones
    bench.release(request)
    bench.prefill(request)
    oracle.check(request.token_ids, bench.propose([request], 3)[0])


def test_nan_harms_the_one_alone(oracle):
    bench = Bench("eagle")
    requests = [bench.request(f"r{i}", bench.tokens(9)) for i in range(3)]
    for request in requests:
        bench.prefill(request)
    assert isinstance(bench.drafter, EagleDrafter)
    slot = requests[1].block_ids[1] * 4 + 3  # position 7: the feature that the draft begins with
    bench.drafter.features[slot] = math.nan
    drafts = bench.propose(requests, 3)
    assert drafts[1].failure == "no draft: the logits contain NaN" and len(drafts[1]) == 0
    for i in (0, 2):
        oracle.check(requests[i].token_ids, drafts[i])
    bench = Bench("eagle", tree=(2, 2))
    bench.prefill(request := bench.request("r", bench.tokens(9)))
    assert isinstance(bench.drafter, EagleDrafter)
    bench.drafter.features[request.block_ids[1] * 4 + 3] = math.nan
    (draft,) = bench.propose([request], 4)
    assert draft.failure and len(draft) == 0
