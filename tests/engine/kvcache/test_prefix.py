"""The prefix index: what is found, and the stated reason when it is not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kvcache.prefix import ROOT, PrefixIndex, block_hash, salt_root

SIZE = 4


def hashes(tokens: list[int], root: int = ROOT) -> list[int]:
    out: list[int] = []
    for i in range(len(tokens) // SIZE):
        out.append(block_hash(out[-1] if out else root, tokens[i * SIZE : (i + 1) * SIZE]))
    return out


def fill(index: PrefixIndex, tokens: list[int], root: int = ROOT, first_block: int = 0) -> None:
    chain = hashes(tokens, root)
    for i, h in enumerate(chain):
        index.insert(first_block + i, h, chain[i - 1] if i else root, tuple(tokens[i * SIZE : (i + 1) * SIZE]))


def look_up(index: PrefixIndex, tokens: list[int], root: int = ROOT):
    return index.match(tokens, hashes(tokens, root), root)


def test_longest_prefix_and_one_token_left_to_compute():
    index = PrefixIndex(SIZE)
    tokens = list(range(12))
    fill(index, tokens)
    assert look_up(index, [*tokens, 99]).block_ids == [0, 1, 2]
    exact = look_up(index, tokens)
    assert (exact.block_ids, exact.miss_reason) == ([0, 1], "")
    other = look_up(index, [*range(8), 50, 51, 52, 53, 54])
    assert (other.block_ids, other.miss_reason) == ([0, 1], "no such prefix")


def test_equal_tokens_after_another_beginning_are_not_a_hit():
    index = PrefixIndex(SIZE)
    fill(index, [1, 1, 1, 1, 2, 2, 2, 2])
    assert look_up(index, [9, 9, 9, 9, 2, 2, 2, 2, 5]).block_ids == []
    assert look_up(index, [2, 2, 2, 2, 5]).block_ids == []


def test_reasons():
    index = PrefixIndex(SIZE)
    fill(index, list(range(8)))
    assert look_up(index, [0, 1, 2, 3]).miss_reason == "shorter than a block"
    assert look_up(index, [7] * 9).miss_reason == "no such prefix"
    index.remove(0)
    assert look_up(index, list(range(9))).miss_reason == "evicted"


def test_salts_never_meet_and_say_so():
    index = PrefixIndex(SIZE)
    tokens = list(range(9))
    look_up(index, tokens, salt_root("a"))
    fill(index, tokens, salt_root("a"))
    assert look_up(index, tokens, salt_root("a")).block_ids == [0, 1]
    other = look_up(index, tokens, salt_root("b"))
    assert (other.block_ids, other.miss_reason) == ([], "different salt")
    assert look_up(index, tokens).block_ids == []


def test_a_collision_is_a_miss_never_a_wrong_block():
    index = PrefixIndex(SIZE)
    tokens = list(range(8))
    index.insert(0, hashes(tokens)[0], ROOT, (9, 9, 9, 9))  # as if another block had the same hash
    match = look_up(index, tokens)
    assert (match.block_ids, match.miss_reason) == ([], "hash collision")


def test_partial_blocks_are_refused():
    with pytest.raises(RuntimeError, match="only full blocks"):
        PrefixIndex(SIZE).insert(0, 1, 0, (1, 2, 3))


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=8),
    st.lists(st.integers(0, 2), min_size=1, max_size=20),
)
def test_against_brute_force(known, wanted):
    index = PrefixIndex(SIZE)
    block = 0
    for tokens in known:
        fill(index, tokens, first_block=block)
        block += len(tokens) // SIZE
    longest = 0
    for tokens in known:
        full = tokens[: len(tokens) // SIZE * SIZE]
        common = next((i for i, (a, b) in enumerate(zip(full, wanted)) if a != b), min(len(full), len(wanted)))
        longest = max(longest, common // SIZE)
    assert len(look_up(index, wanted).block_ids) == min(longest, (len(wanted) - 1) // SIZE)
    index.check_integrity()
