"""The radix index: against the longest common prefix by hand, and against the hash index on the same operations."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kvcache.prefix import ROOT, PrefixIndex, PrefixMatch, block_hash, salt_root
from engine.kvcache.radix import RadixIndex
from tests.engine.kvcache.test_prefix import SIZE, fill, hashes, look_up

PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=22)


def fill_radix(index: RadixIndex, tokens: list[int], first_block: int = 0, root: int = ROOT) -> list[int]:
    """Insert what is new of a prompt's full blocks; the blocks of its path."""
    fill(index, tokens, root, first_block)
    return index.match([*tokens, -1], root=root).block_ids


def longest(known: list[list[int]], wanted: list[int]) -> int:
    """Tokens that ``wanted``, without its last, has in common with the full blocks of any of ``known``."""
    best = 0
    for tokens in known:
        full = tokens[: len(tokens) // SIZE * SIZE]
        common = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(full, wanted[:-1]))
        best = max(best, sum(1 for _ in common))
    return best


@given(st.lists(PROMPT, max_size=12), PROMPT)
def test_token_exact_hits_against_brute_force(known: list[list[int]], wanted: list[int]) -> None:
    index, content = RadixIndex(SIZE), {}
    for n, tokens in enumerate(known):
        fill(index, tokens, first_block=100 * n)
        for i in range(len(tokens) // SIZE):
            content[100 * n + i] = tokens[i * SIZE : (i + 1) * SIZE]
    index.check_integrity()
    match, want = index.match(wanted), longest(known, wanted)
    assert match.num_tokens == want
    assert len(match.block_ids) == want // SIZE and match.num_partial_tokens == want % SIZE
    found = [token for block in match.block_ids for token in content[block]]
    if match.partial_block is not None:
        found += content[match.partial_block][: match.num_partial_tokens]
    assert found == wanted[:want]
    assert (match.partial_block is None) == (want % SIZE == 0)


def test_a_prompt_that_is_wholly_cached_leaves_one_token() -> None:
    index = RadixIndex(SIZE)
    fill(index, list(range(8)))
    match = index.match(list(range(8)))
    assert (match.block_ids, match.num_tokens, match.partial_block, match.num_partial_tokens) == ([0], 7, 1, 3)
    assert index.match([0]).num_tokens == 0 and index.match([0]).miss_reason == "shorter than a block"


def test_reasons() -> None:
    index = RadixIndex(SIZE)
    index.match([1], root=salt_root("a"))
    fill(index, list(range(8)), salt_root("a"))
    fill(index, list(range(20, 28)), first_block=10)
    assert index.match(list(range(9))).miss_reason == "different salt"
    assert index.match([20, 21, 22, 23, 9, 9, 9, 9, 9]).miss_reason == "no such prefix"
    index.remove(11)
    assert index.match(list(range(20, 30))).miss_reason == "evicted"
    assert index.match([20, 21, 22]).miss_reason == "shorter than a block"
    assert index.match(list(range(20, 25))).miss_reason == ""


def test_a_block_part_is_served_by_the_path_used_last() -> None:
    index = RadixIndex(SIZE, clock=itertools.count().__next__)
    fill(index, [1, 2, 3, 4])
    fill(index, [1, 2, 5, 6], first_block=1)
    for wanted in (0, 1, 0):
        index.use(PrefixMatch([wanted]))
        assert index.match([1, 2, 9, 9, 9]).partial_block == wanted


def test_partial_and_strange_blocks_are_refused() -> None:
    index = RadixIndex(SIZE)
    with pytest.raises(RuntimeError, match="only full blocks"):
        index.insert(0, 1, 0, (1, 2, 3))
    assert index.insert(0, 1, 0, (1, 2, 3, 4))
    assert not index.insert(0, 2, 0, (5, 6, 7, 8)) and not index.insert(1, 1, 0, (5, 6, 7, 8))
    with pytest.raises(RuntimeError, match="under another"):
        index.insert(1, 3, 0, (1, 2, 3, 4))
    with pytest.raises(ValueError, match="below 2"):
        index.insert(1, 3, 0, (1, 2, 3, 1 << 31))
    with pytest.raises(RuntimeError, match="do not give its hash"):
        index.check_integrity()


# -- the same operations as the hash index ---------------------------------------------------------------------------------


@settings(max_examples=150)
@given(st.data())
def test_whole_blocks_as_the_hash_index_finds_them(data: st.DataObject) -> None:
    """Blocks come in any order, parents after their children too, and go in any order, from the middle of a path too."""
    prompts = data.draw(st.lists(PROMPT, min_size=1, max_size=6))
    roots = [ROOT, salt_root("a")]
    plain, radix, block = PrefixIndex(SIZE), RadixIndex(SIZE), 0
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(("insert", "insert", "remove", "match", "use")))
        tokens, root = data.draw(st.sampled_from(prompts)), data.draw(st.sampled_from(roots))
        chain = hashes(tokens, root)
        if action == "insert" and chain:
            i = data.draw(st.integers(0, len(chain) - 1))
            args = (block, chain[i], chain[i - 1] if i else root, tuple(tokens[i * SIZE : (i + 1) * SIZE]))
            assert radix.insert(*args) == plain.insert(*args)
            block += 1
        elif action == "remove" and len(plain):
            victim = data.draw(st.sampled_from(sorted(plain.blocks())))
            assert radix.remove(victim) == plain.remove(victim)
        elif action == "use":
            radix.use(PrefixMatch(radix.match(tokens, root=root).block_ids))
        want, got = look_up(plain, tokens, root), look_up(radix, tokens, root)
        assert (got.block_ids, got.miss_reason) == (want.block_ids, want.miss_reason)
        assert radix.hashes() == plain.hashes() and len(radix) == len(plain)
        radix.check_integrity()
    for victim in list(plain.blocks()):
        radix.remove(victim)
        radix.check_integrity()
    assert not radix.tree() and not radix._tops


def test_what_follows_an_evicted_block_comes_back_with_it() -> None:
    index, tokens = RadixIndex(SIZE), list(range(13))
    fill(index, tokens)
    hash_ = index.remove(1)
    assert index.match(tokens).block_ids == [0] and 2 in index
    assert [(node.blocks, node.reachable) for node in index.tree()] == [((0,), True), ((2,), False)]
    index.insert(7, hash_, hashes(tokens)[0], tuple(tokens[4:8]))
    assert index.match(tokens).block_ids == [0, 7, 2]
    assert all(node.reachable for node in index.tree())


# -- locks and eviction ----------------------------------------------------------------------------------------------------


class Model:
    """Who may go, by hand: unlocked, nothing cached behind it, the longest unused first."""

    def __init__(self) -> None:
        self.parents: dict[int, int | None] = {}
        self.locks: dict[int, int] = {}
        self.order: list[int] = []

    def touch(self, block: int) -> None:
        if block in self.order:
            self.order.remove(block)
        self.order.append(block)

    def victim(self) -> int | None:
        unlocked = [b for b in self.order if not self.locks[b]]
        leaves = [b for b in unlocked if b not in self.parents.values()]
        return next(iter(leaves or unlocked), None)


@settings(max_examples=150)
@given(st.data())
def test_the_least_recently_used_end_of_a_path_goes_first(data: st.DataObject) -> None:
    index, model, block, held = RadixIndex(SIZE), Model(), 0, []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(("add", "add", "lock", "unlock", "use", "evict")))
        tokens = data.draw(PROMPT)
        path = index.match([*tokens, 9]).block_ids
        if action == "add":
            chain = hashes(tokens)
            for i in range(len(path), len(chain)):
                index.insert(block, chain[i], chain[i - 1] if i else ROOT, tuple(tokens[i * SIZE : (i + 1) * SIZE]))
                model.parents[block], model.locks[block] = (path[-1] if path else None), 0
                model.touch(block)
                path.append(block)
                block += 1
        elif action == "use":
            index.use(PrefixMatch(path))
            for b in reversed(path):
                model.touch(b)
        elif action == "lock":
            index.lock(path)
            held.append(path)
            for b in path:
                model.locks[b] += 1
        elif action == "unlock" and held:
            path = held.pop(data.draw(st.integers(0, len(held) - 1)))
            index.unlock(path)
            for b in reversed(path):
                model.locks[b] -= 1
                if not model.locks[b]:
                    model.touch(b)
        elif action == "evict" and model.victim() is not None:
            victim = model.victim()
            assert index.victim() == victim
            index.remove(victim)
            del model.parents[victim], model.locks[victim]
            model.order.remove(victim)
        index.check_integrity()
        assert index.num_unlocked == sum(not n for n in model.locks.values())
        for locked in held:  # nobody's path was broken
            assert all(b in index for b in locked)
    if model.victim() is None and len(index):
        with pytest.raises(RuntimeError, match=r"all .* locked"):
            index.victim()


def test_a_lock_on_the_end_protects_the_way_to_it() -> None:
    index = RadixIndex(SIZE)
    fill(index, [*range(12)])
    fill(index, [0, 1, 2, 3, 50, 51, 52, 53], first_block=10)
    index.lock([2])
    assert index.victim() == 11
    index.remove(11)
    assert index.victim() == 0  # nothing but the locked end is left of a path: the oldest of what nobody holds
    index.lock([0, 1])
    with pytest.raises(RuntimeError, match="locked"):
        index.victim()
    index.unlock([0, 1])
    with pytest.raises(RuntimeError, match="more often"):
        index.unlock([1])


def test_evicting_many_stays_cheap() -> None:
    """The queue of candidates does not grow with use."""
    index = RadixIndex(SIZE)
    for n in range(50):
        fill(index, [n, *range(11)], first_block=10 * n)
    paths = [index.match([n, *range(12)]).block_ids for n in range(50)]
    for _ in range(20):
        for path in paths:
            index.lock(path)
            index.unlock(path)
    assert len(index._heap) <= 64 + 2 * len(index) + 1
    gone = []
    while len(index):
        gone.append(index.victim())
        index.remove(gone[-1])
    assert gone == [block for path in paths for block in reversed(path)]


# -- what a screen sees ----------------------------------------------------------------------------------------------------


def test_the_tree_tells_nodes_hits_and_use() -> None:
    index = RadixIndex(SIZE, clock=itertools.count(1).__next__)
    path = fill_radix(index, list(range(12)))
    index.lock(path[:1])
    index.use(PrefixMatch(path))
    fill(index, [0, 1, 2, 3, 4, 5, 60, 61], first_block=7)
    index.use(PrefixMatch(index.match([0, 1, 2, 3, 4, 5, 60, 61, 9]).block_ids))
    upper, long, short = index.tree(num_tokens=2)
    assert (upper.parent_id, upper.depth, upper.num_tokens, upper.blocks) == (-1, 0, 6, (0,))
    assert (upper.first_tokens, upper.num_locked, upper.hits) == ((0, 1), 1, 2)
    assert (long.parent_id, long.depth, long.num_tokens, long.blocks, long.hits) == (upper.node_id, 6, 6, (1, 2), 1)
    assert (short.parent_id, short.depth, short.num_tokens, short.blocks, short.hits) == (upper.node_id, 6, 2, (8,), 1)
    assert long.last_used_ns < short.last_used_ns == upper.last_used_ns
    index.remove(8)
    assert [node.blocks for node in index.tree()] == [(0,), (1, 2)]  # used differently: they stay two
    index.remove(2)
    index.remove(1)
    (node,) = index.tree()
    assert (node.node_id, node.num_tokens, node.blocks) == (upper.node_id, 4, (0,))


def test_lookups_that_come_to_nothing_are_no_hits() -> None:
    """A waiting request is looked up at every step until there is room for it."""
    index = RadixIndex(SIZE)
    fill(index, list(range(8)))
    for _ in range(5):
        index.match(list(range(9)))
    assert [node.hits for node in index.tree()] == [0]


@given(st.lists(PROMPT, min_size=1, max_size=10))
def test_the_tree_is_compressed_and_whole(known: list[list[int]]) -> None:
    index = RadixIndex(SIZE)
    for n, tokens in enumerate(known):
        fill(index, tokens, first_block=100 * n)
    nodes = {node.node_id: node for node in index.tree()}
    assert sorted(b for node in nodes.values() for b in node.blocks) == sorted(index.blocks())
    for node in nodes.values():
        children = [child for child in nodes.values() if child.parent_id == node.node_id]
        assert len(children) != 1
        assert all(child.depth == node.depth + node.num_tokens for child in children)


def test_deep_conversations_need_no_recursion() -> None:
    index, tokens, parent = RadixIndex(1), [], ROOT
    for i in range(3000):
        tokens.append(i % 7)
        hash_ = block_hash(parent, (i % 7,))
        index.insert(i, hash_, parent, (i % 7,))
        index.use(PrefixMatch([i]))
        parent = hash_
    assert len(index.tree()) == 3000
    index.check_integrity()
    assert index.match([*tokens, 1]).block_ids == list(range(3000))
