"""Lookahead on a made-up target: what the window finds out is what the target says, and no token of the text depends on it."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from engine.sampling.sampler import Sampler, SampleRow
from engine.speculation.base import Draft, Wanted
from engine.speculation.config import SpeculativeConfig
from engine.speculation.lookahead import LookaheadDrafter, NgramPool
from engine.speculation.verify import Asked, verify

VOCAB = 40
GREEDY = SamplingParams(temperature=0)


def drafter(window=4, n=4):
    return LookaheadDrafter(SpeculativeConfig("lookahead", lookahead_window=window, lookahead_ngram=n))


def request(tokens, seed=3):
    return SimpleNamespace(request_id="r", token_ids=list(tokens), seed=seed)


def by_last(path):
    """A target that looks at the last token alone: a cycle through all."""
    return (path[-1] + 7) % VOCAB


def by_three(path):
    return (path[-1] * 5 + path[-2] * 3 + path[-3] + 1) % VOCAB


def paths(tokens, draft: Draft):
    """What each node of a draft sees, itself last; first of all the text."""
    out = [list(tokens)]
    for token, parent in zip(draft.token_ids, draft.parents, strict=True):
        out.append([*out[1 + parent], token])
    return out


def step(d, r, target, count=6, window=None):
    """One step of the engine: what is gained."""
    draft = d.propose([Wanted(r, count, d.num_window if window is None else window)])[0]
    assert draft.num_proposed <= count and all(parent < i for i, parent in enumerate(draft.parents))
    said = [target(path) for path in paths(r.token_ids, draft)]
    logits = torch.nn.functional.one_hot(torch.tensor(said), VOCAB).float()
    got = verify([Asked(draft, SampleRow(GREEDY, 0, 0, len(r.token_ids)), 0)], logits, Sampler(VOCAB))[0]
    r.token_ids += [s.token_id for s in got.sampled]
    if draft.num_window:
        d.observe_window(r, said[len(said) - draft.num_read :])
    return draft, got


def plain(tokens, target, count):
    tokens = list(tokens)
    while len(tokens) < count:
        tokens.append(target(tokens))
    return tokens


@pytest.mark.parametrize("target", [by_last, by_three])
@pytest.mark.parametrize("window, n", [(4, 4), (1, 3), (6, 2), (1, 2), (3, 5)])
def test_the_text_is_that_of_plain_decoding(target, window, n):
    d, r = drafter(window, n), request([1, 2, 3])
    for i in range(25):
        step(d, r, target, count=1 + i % 7, window=0 if i % 5 == 4 else None)  # now and then there is no room for the window
    assert r.token_ids == plain([1, 2, 3], target, len(r.token_ids))


def test_the_window_is_the_papers():
    """Each node sees level 0 up to its own column, then its own column; its depth is column + level."""
    d, r = drafter(window=4, n=4), request([1, 2, 3])
    draft = d.propose([Wanted(r, 3, d.num_window)])[0]
    assert draft.num_window == d.num_window == 4 * 3 - 1 and draft.num_read == 4
    levels = d._states["r"].levels
    assert [len(level) for level in levels] == [4, 4, 4] and levels[0][0] == 3
    seen = paths(r.token_ids, draft)[1 + draft.num_proposed :]
    want = [(0, j) for j in range(1, 4)] + [(level, j) for level in (1, 2) for j in range(4)]
    for path, (level, j) in zip(seen, want, strict=True):
        assert path == [1, 2, *levels[0][: j + 1], *(levels[r][j] for r in range(1, level + 1))]
    assert draft.depths()[draft.num_proposed :] == [level + j for level, j in want]


def test_what_the_window_finds_out_is_true():
    """Of a target that looks at the last token alone, the n-grams of the window are what it would write, once the first guesses
    have left. (Column 0 begins with what was written, which need not be what its later levels were made for.)"""
    d, r = drafter(window=5, n=4), request([1])
    for i in range(20):
        draft = d.propose([Wanted(r, 1, d.num_window)])[0]
        said = [by_last(path) for path in paths(r.token_ids, draft)]
        r.token_ids.append(said[0])
        state = d._states["r"]
        columns = list(zip(*state.levels, said[-draft.num_read :], strict=True))
        d.observe_window(r, said[-draft.num_read :])
        assert all(column[1:] in state.pool._tails[column[0]] for column in columns)
        if i >= 4:
            assert all(by_last([a]) == b for column in [columns[0][1:], *columns[1:]] for a, b in pairwise(column))


def test_it_runs_ahead_of_text_that_was_never_written():
    """A cycle through 40 tokens, and some of them as guesses: what follows those is in the pool before the text comes by."""
    prompt = [(1 + 7 * i) % VOCAB for i in (30, 24, 18, 12, 6, 0)]
    d, r, s = drafter(window=8, n=4), request(prompt), request(prompt)
    with_window = [len(step(d, r, by_last)[1].sampled) for _ in range(14)]
    alone = drafter(window=8, n=4)
    without = [len(step(alone, s, by_last, window=0)[1].sampled) for _ in range(14)]
    assert without == [1] * 14, "of what was written nothing helps"
    assert sum(with_window) >= 20


def test_only_what_begins_with_the_last_token_is_proposed():
    d, r = drafter(), request([5, 6, 7, 8, 9, 5])
    draft = d.propose([Wanted(r, 3)])[0]
    assert (draft.token_ids, draft.parents, draft.num_window) == ([6, 7, 8], [-1, 0, 1], 0)
    assert d.propose([Wanted(request([5, 6, 7, 8, 9, 4]), 3)])[0].token_ids == []


def test_candidates_share_their_beginnings_and_the_first_is_carried_on():
    pool = NgramPool(3, 4)
    pool.read([1, 2, 3, 1, 2, 4, 9, 1, 5, 6, 0, 7])
    draft = pool.candidates(1, 8)
    assert (draft.token_ids[:5], draft.parents[:5]) == ([5, 6, 2, 4, 3], [-1, 0, -1, 2, 2])
    assert (draft.token_ids[5:], draft.parents[5:]) == ([0, 7], [1, 5]) and draft.found_at == 7
    for count in range(8):
        assert pool.candidates(1, count).token_ids == draft.token_ids[:count]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(2, 4), st.integers(1, 3), st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_the_pool_holds_the_latest(tokens, n, most, count):
    whole, grown = NgramPool(n, most), NgramPool(n, most)
    whole.read(tokens)
    for end in range(1, len(tokens) + 1):
        grown.read(tokens[:end])
    assert whole._tails == grown._tails
    for token, tails in whole._tails.items():
        later = [tuple(tokens[i + 1 : i + n]) for i in range(len(tokens) - n, -1, -1) if tokens[i] == token]
        assert list(tails)[::-1] == list(dict.fromkeys(later))[:most]
        draft = whole.candidates(token, count)
        assert len(draft) <= count
        written = {tuple(tokens[i : i + 2]) for i in range(len(tokens) - 1)}
        for node, parent in enumerate(draft.parents):
            before = token if parent < 0 else draft.token_ids[parent]
            assert (before, draft.token_ids[node]) in written


def test_the_same_seed_makes_the_same_guesses():
    one, two, other = (drafter().propose([Wanted(request(range(30), seed), 2, 11)])[0] for seed in (3, 3, 4))
    assert one == two and one != other


def test_forgotten_and_begun_again():
    d, r = drafter(), request([1, 2, 3])
    for _ in range(5):
        step(d, r, by_last)
    d.forget("r")
    d.forget("unknown")
    d.observe_window(r, [0])  # nothing is known of it any more
    fresh = request([1, 2])
    draft, _ = step(d, fresh, by_last)
    assert draft.num_proposed == 0 and d._states["r"].pool.seen == 2


def test_a_window_of_the_wrong_size_is_a_fault():
    d, r = drafter(), request([1, 2, 3])
    d.propose([Wanted(r, 2, d.num_window)])
    with pytest.raises(RuntimeError, match="4 columns, 3 tokens"):
        d.observe_window(r, [1, 2, 3])
