"""Medusa against the module that is trained, and its trees against all paths written out."""

import itertools
import math
import random

import pytest

from engine.request import Request
from engine.speculation.base import Draft
from engine.speculation.medusa import MedusaDrafter
from engine.speculation.tree import best_nodes, tree_depth
from tests.engine.speculation.drafting import GREEDY, Bench, Oracle


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle("medusa")


def test_chains_while_drafts_are_accepted_and_rejected(oracle):
    bench = Bench("medusa")
    requests = [bench.request(f"r{i}", bench.tokens(n)) for i, n in enumerate((2, 9, 40))]
    for request in requests:
        bench.prefill(request, chunk=7)
    for step in range(4):
        drafts = bench.propose(requests, [2, 5, 1])
        for request, draft, count in zip(requests, drafts, (2, 3, 1)):  # there are three heads
            assert len(draft) == count and draft.is_chain and draft.q is None
            oracle.check(request.token_ids, draft)
        kept = [min((step + i) % 4, len(d)) for i, d in enumerate(drafts)]
        bench.decide(requests, drafts, [range(n) for n in kept], bench.tokens(3))


def test_trees(oracle):
    bench = Bench("medusa", tree=(4, 3, 2))
    request = bench.request("r", bench.tokens(14))
    bench.prefill(request)
    for count, kept in ((9, 2), (4, 0), (6, 1)):
        (draft,) = bench.propose([request], count)
        assert len(draft) == count and max(draft.depths()) <= {9: 3, 4: 1, 6: 2}[count]
        oracle.check(request.token_ids, draft)
        path: list[int] = []
        while len(path) < kept and (children := draft.children(path[-1] if path else -1)):
            path.append(children[-1])
        bench.decide([request], [draft], [path], [5])


def test_the_best_nodes_are_the_best_of_all():
    rng = random.Random(0)
    for _ in range(50):
        widths = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
        probs = [sorted((rng.random() for _ in range(5)), reverse=True) for _ in widths]
        ids = [[10 * d + i for i in range(5)] for d in range(len(widths))]
        count = rng.randint(1, 12)
        draft = best_nodes(ids, probs, widths, count)
        paths: dict[tuple[int, ...], float] = {}
        for depth in range(1, len(widths) + 1):
            for path in itertools.product(*(range(w) for w in widths[:depth])):
                paths[path] = math.prod(probs[d][i] for d, i in enumerate(path))
        best = sorted(paths.values(), reverse=True)[:count]
        got = []
        for node in range(len(draft)):
            product, at = 1.0, node
            while at >= 0:
                product *= draft.probs[at]
                at = draft.parents[at]
            got.append(product)
        assert got == pytest.approx(best)
        assert len({(p, t) for p, t in zip(draft.parents, draft.token_ids)}) == len(draft) == len(best)


def test_how_deep_a_tree_goes():
    assert [tree_depth((4, 3, 2), count) for count in (1, 4, 5, 7, 8, 9, 20)] == [1, 1, 2, 2, 3, 3, 3]
    assert tree_depth(None, 5) == 5


def test_without_a_feature_there_is_no_draft(oracle):
    bench = Bench("medusa")
    request = bench.request("r", bench.tokens(9))
    bench.prefill(request)
    bench.fresh()
    (draft,) = bench.propose([request], 3)
    assert len(draft) == 0 and not draft.failure
    bench.decide([request], [draft], [[]], [6])
    oracle.check(request.token_ids, bench.propose([request], 3)[0])
    bench.drafter.forget("r")
    assert len(bench.propose([request], 3)[0]) == 0
    assert len(bench.propose([bench.request("one", [5])], 3)[0]) == 0  # nothing is computed before its only token


def test_a_sibling_begins_from_the_prompt_that_it_shares(oracle):
    bench = Bench("medusa")
    first = bench.request("a", bench.tokens(9))
    bench.prefill(first)
    bench.room(first, 9)
    bench.decide([first], [Draft([], [])], [[]], [7])  # the end of the prompt, and its first token
    sibling = Request("a#1", first.token_ids[:9], GREEDY, 7, parent_id="a", group_id="a", sample_index=1)
    sibling.token_ids.append(44)
    sibling.num_computed_tokens = 9
    oracle.check(sibling.token_ids, bench.propose([sibling], 3)[0])


def test_nan_harms_the_one_alone_and_wrong_trees_are_refused(oracle):
    bench = Bench("medusa")
    requests = [bench.request(f"r{i}", bench.tokens(6)) for i in range(2)]
    for request in requests:
        bench.prefill(request)
    assert isinstance(bench.drafter, MedusaDrafter)
    bench.drafter._last["r0"].feature.fill_(math.nan)
    drafts = bench.propose(requests, 2)
    assert drafts[0].failure == "no draft: the logits contain NaN" and len(drafts[0]) == 0
    oracle.check(requests[1].token_ids, drafts[1])
    with pytest.raises(ValueError, match="tree must be at most 3 deep"):
        Bench("medusa", tree=(2, 2, 2, 2))
