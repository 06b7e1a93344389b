"""Prompt lookup against a search through the whole sequence."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.base import Wanted
from engine.speculation.config import SpeculativeConfig
from engine.speculation.ngram import NgramDrafter


def searched(tokens, longest, shortest):
    """The position behind the latest earlier occurrence of the longest suffix, by looking everywhere."""
    for n in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n < len(tokens) and tokens[end - n : end] == tokens[len(tokens) - n :]:
                return end
    return None


def drafter(longest=4, shortest=2):
    return NgramDrafter(SpeculativeConfig("ngram", prompt_lookup_max=longest, prompt_lookup_min=shortest))


def propose(d, tokens, count=4, name="r"):
    return d.propose([Wanted(SimpleNamespace(request_id=name, token_ids=tokens), count)])[0]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(1, 5), max_size=20),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 8),
)
@settings(max_examples=200, deadline=None)
def test_against_a_search(tokens, steps, longest, shortest, count):
    """As a request grows by a few tokens a step; and the answer does not depend on how it came to be."""
    shortest = min(shortest, longest)
    d, end = drafter(longest, shortest), 1
    for step in [0, *steps]:
        end = min(end + step, len(tokens))
        now = tokens[:end]
        got, at = propose(d, now, count), searched(now, longest, shortest)
        assert got.found_at == at
        if at is None:
            assert len(got) == 0
        else:
            repeated = list(now)
            while len(repeated) < len(now) + count:
                repeated.append(repeated[at + len(repeated) - len(now)])
            assert got.token_ids == repeated[len(now) :] and got.is_chain
        assert got == propose(drafter(longest, shortest), now, count)
        assert got.q is None and got.probs == []


def test_the_longest_match_comes_before_a_later_shorter_one():
    #         0  1  2  3  4  5  6  7  8  9 10 11
    tokens = [1, 2, 3, 7, 9, 2, 3, 8, 5, 1, 2, 3]
    assert (propose(drafter(), tokens, 2).token_ids, propose(drafter(), tokens, 2).found_at) == ([7, 9], 3)
    assert propose(drafter(longest=2), tokens, 2).token_ids == [8, 5]


def test_a_loop_shorter_than_k_fills_it():
    assert propose(drafter(), [5, 1, 2, 1, 2], 5).token_ids == [1, 2, 1, 2, 1]


def test_nothing_is_found_and_nothing_is_proposed():
    for tokens in ([1], [1, 2], [1, 2, 3, 4]):
        assert (propose(drafter(), tokens).token_ids, propose(drafter(), tokens).found_at) == ([], None)


def test_a_repeated_single_token():
    assert propose(drafter(shortest=1), [4, 4], 3).token_ids == [4, 4, 4]


def test_requests_do_not_see_each_other_and_are_forgotten():
    d = drafter()
    one, two = [1, 2, 3, 1, 2], [1, 2, 9, 1, 2]
    both = [Wanted(SimpleNamespace(request_id=str(i), token_ids=t), 1) for i, t in enumerate((one, two))]
    assert [x.token_ids for x in d.propose(both)] == [[3], [9]]
    d.forget("0")
    d.forget("unknown")
    assert list(d._indexes) == ["1"]


@pytest.mark.parametrize("tokens", [[7, 8, 7, 8], [1, 2, 3, 9, 1, 2], [1, 2]], ids=str)
def test_another_sequence_under_the_same_name_is_read_anew(tokens):
    """A request whose tokens were replaced, and nobody said so."""
    d = drafter()
    propose(d, [1, 2, 3, 1, 2])
    assert propose(d, tokens).found_at == searched(tokens, 4, 2)
