"""The pool against a brute-force model, under random operations."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.events.recorder import Recorder
from engine.events.types import BlockEvicted, BlockFreed
from engine.kvcache.pool import BlockPool
from engine.kvcache.prefix import ROOT, block_hash


def make_pool(num_blocks: int = 8, block_size: int = 2) -> tuple[BlockPool, list]:
    events: list = []
    recorder = Recorder()
    recorder.attach(events.append)
    return BlockPool(num_blocks, block_size, recorder), events


def chain(tokens: list[int], size: int) -> list[tuple[int, int, tuple[int, ...]]]:
    out, parent = [], ROOT
    for i in range(0, len(tokens) - size + 1, size):
        block = tuple(tokens[i : i + size])
        out.append((block_hash(parent, block), parent, block))
        parent = out[-1][0]
    return out


def test_takes_lowest_first_and_prefers_the_physical_neighbour():
    pool, _ = make_pool()
    assert pool.allocate("a", 0, 2) == [0, 1]
    assert pool.allocate("b", 0, 1) == [2]
    assert pool.allocate("a", 2, 1, after=1) == [3]  # 2 is taken: the lowest free
    assert pool.allocate("b", 1, 1, after=5) == [6]
    assert pool.allocate("b", 2, 2, after=6) == [7, 4]


def test_eviction_takes_the_longest_unused_and_the_end_of_a_sequence_first():
    pool, events = make_pool(num_blocks=4)
    a, b = pool.allocate("a", 0, 2), pool.allocate("b", 0, 2)
    for table, tokens in ((a, [1, 2, 3, 4]), (b, [5, 6, 7, 8])):
        for block, (h, parent, t) in zip(table, chain(tokens, 2), strict=True):
            pool.cache(block, h, parent, t)
    pool.free("b", b)
    pool.free("a", a)
    assert pool.num_free == 4 and pool.num_cached_free == 4
    assert pool.allocate("c", 0, 3) == [b[1], b[0], a[1]]
    assert [e.block_id for e in events if isinstance(e, BlockEvicted)] == [b[1], b[0], a[1]]


def test_a_shared_block_comes_back_only_after_its_last_holder():
    pool, events = make_pool()
    (block,) = pool.allocate("a", 0, 1)
    pool.share("b", 0, [block])
    pool.free("a", [block])
    assert pool.num_used == 1
    pool.free("b", [block])
    assert pool.num_used == 0
    assert [e.ref_counts for e in events if isinstance(e, BlockFreed)] == [[1], [0]]


def test_misuse_is_an_error():
    pool, _ = make_pool(num_blocks=2)
    (block,) = pool.allocate("a", 0, 1)
    with pytest.raises(RuntimeError, match="copy-on-write"):
        pool.copy_on_write("a", 0, block)
    with pytest.raises(RuntimeError, match="2 blocks wanted, 1 of 2"):
        pool.allocate("a", 1, 2)
    pool.free("a", [block])
    with pytest.raises(RuntimeError, match="given back more often"):
        pool.free("a", [block])
    with pytest.raises(RuntimeError, match="cannot be shared"):
        pool.share("b", 0, [block])
    with pytest.raises(RuntimeError, match="not held"):
        pool.cache(block, 1, 0, (1, 2))
    with pytest.raises(ValueError, match="at least one block"):
        BlockPool(0, 16, Recorder())


@pytest.mark.parametrize("break_it", [
    lambda p: p.ref_counts.__setitem__(0, 2),
    lambda p: p._free.add(0),
    lambda p: p._free.discard(3),
    lambda p: p._in_heap.__setitem__(3, False),
    lambda p: p._lru.__setitem__(1, None),
    lambda p: p.index._by_hash.clear(),
])  # fmt: skip
def test_check_integrity_notices(break_it):
    pool, _ = make_pool(num_blocks=4)
    table = pool.allocate("a", 0, 2)
    (h, parent, tokens) = chain([1, 2], 2)[0]
    pool.cache(table[0], h, parent, tokens)
    pool.check_integrity({"a": table})
    break_it(pool)
    with pytest.raises(RuntimeError):
        pool.check_integrity({"a": table})


class PoolModel(RuleBasedStateMachine):
    """Sequences of tokens grow, fork, hit prefixes and end. The model keeps the content of every block by hand:
    whoever reads its table must find its own tokens, whatever the pool did."""

    SIZE = 2

    @initialize(num_blocks=st.integers(3, 9))
    def start(self, num_blocks):
        self.pool, self.events = make_pool(num_blocks, self.SIZE)
        self.content: dict[int, list[int]] = {b: [-1] * self.SIZE for b in range(num_blocks)}  # what was written where
        self.sequences: dict[str, tuple[list[int], list[int]]] = {}  # id -> (tokens, table)
        self.next_id = 0

    def _write(self, name: str, token: int) -> bool:
        tokens, table = self.sequences[name]
        index, offset = divmod(len(tokens), self.SIZE)
        if offset and self.pool.ref_counts[table[index]] > 1:
            if not self.pool.num_free:
                return False
            src = table[index]
            table[index] = self.pool.copy_on_write(name, index, src)
            self.content[table[index]] = list(self.content[src])
        elif not offset:
            if not self.pool.num_free:
                return False
            before = {b for _, t in self.sequences.values() for b in t}
            table += self.pool.allocate(name, index, 1, table[-1] if table else None)
            assert table[-1] not in before, "a held block was handed out"
        holders = sum(table[index] in t for _, t in self.sequences.values())
        assert holders == 1, "a shared block is about to be written"
        self.content[table[index]][offset] = token
        tokens.append(token)
        if len(tokens) % self.SIZE == 0:
            h, parent, t = chain(tokens, self.SIZE)[index]
            self.pool.cache(table[index], h, parent, t)
        return True

    @precondition(lambda self: len(self.sequences) < 6)
    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=7))
    def add(self, prompt):
        name = f"r{self.next_id}"
        self.next_id += 1
        match = self.pool.index.match(prompt, [h for h, _, _ in chain(prompt, self.SIZE)], ROOT)
        known = len(match.block_ids) * self.SIZE
        assert known < len(prompt)
        self.pool.share(name, 0, match.block_ids)
        self.sequences[name] = (prompt[:known], list(match.block_ids))
        for token in prompt[known:]:
            if not self._write(name, token):
                break

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def grow(self, data, token):
        self._write(data.draw(st.sampled_from(sorted(self.sequences))), token)

    @precondition(lambda self: 0 < len(self.sequences) < 6)
    @rule(data=st.data())
    def fork(self, data):
        tokens, table = self.sequences[data.draw(st.sampled_from(sorted(self.sequences)))]
        name = f"r{self.next_id}"
        self.next_id += 1
        self.pool.share(name, 0, table)
        self.sequences[name] = (list(tokens), list(table))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def end(self, data):
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        _, table = self.sequences.pop(name)
        self.pool.free(name, table)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def distrust(self, data):
        self.pool.forget(self.sequences[data.draw(st.sampled_from(sorted(self.sequences)))][1])

    @invariant()
    def everybody_finds_their_own(self):
        for tokens, table in getattr(self, "sequences", {}).values():
            found = [t for block in table for t in self.content[block]][: len(tokens)]
            assert found == tokens

    @invariant()
    def nothing_leaks(self):
        if hasattr(self, "pool"):
            self.pool.check_integrity({name: table for name, (_, table) in self.sequences.items()})
            held = {b for _, table in self.sequences.values() for b in table}
            assert self.pool.num_used == len(held)
            assert self.pool.num_free == self.pool.num_blocks - len(held)


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
