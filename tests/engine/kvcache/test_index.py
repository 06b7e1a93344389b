"""Both prefix indexes behind the pool: the same cached blocks, evictions by their own order, one index made into the other; and as a tree."""

import itertools
import queue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import SamplingParams
from engine import messages as m
from engine.events.batching import BlockSwapped, PrefixTree
from engine.events.log import EventLog
from engine.events.types import BlockEvicted
from engine.kvcache.index import converted, make_index
from engine.kvcache.prefix import ROOT, PrefixMatch, salt_root
from engine.kvcache.tree import prefix_tree
from engine.worker import Mailbox, Worker
from tests.engine.engines import Checked, tiny_engine
from tests.engine.greedy import GREEDY, prompt
from tests.engine.kvcache.test_prefix import SIZE, fill, hashes

PROMPT = st.lists(st.integers(0, 1), min_size=1, max_size=22)
INDEXES = ("hash", "radix")


def found(index, tokens, root=ROOT):
    return index.match(tokens, hashes(tokens, root), root)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"one of \('hash', 'radix'\), got 'trie'"):
        make_index("trie", SIZE)


@settings(max_examples=60)
@given(st.lists(st.tuples(PROMPT, st.booleans()), min_size=1, max_size=8), st.lists(PROMPT, max_size=6), st.data())
def test_one_index_becomes_the_other(known, asked, data):
    """It finds the same, gives the same reasons, and evicts what nobody holds in the order that it was given."""
    names = data.draw(st.permutations(INDEXES))
    old, roots = make_index(names[0], SIZE), (ROOT, salt_root("a"))
    for n, (tokens, salted) in enumerate(known):
        fill(old, tokens, roots[salted], first_block=100 * n)
    for block in data.draw(st.lists(st.sampled_from(sorted(old.blocks())), unique=True)) if len(old) else ():
        old.remove(block)
    lru = data.draw(st.permutations(sorted(old.blocks())))
    new = converted(old, names[1], lru)
    new.check_integrity()
    assert new.hashes() == old.hashes() and sorted(new.entries()) == sorted(old.entries())
    for tokens, root in itertools.product([*asked, *(t for t, _ in known)], roots):
        a, b = found(old, tokens, root), found(new, tokens, root)
        assert (a.block_ids, a.miss_reason) == (b.block_ids, b.miss_reason)
    if names[1] == "hash" and len(new):
        assert new.victim(lru) == lru[0]


def test_the_hash_index_evicts_in_the_pools_order_and_the_radix_index_from_the_ends():
    """A path is given back whole, its beginning last; then its beginning is used again, and it is the ends that go all the same."""
    for name, want in (("hash", [0, 2, 1]), ("radix", [2, 1, 0])):
        index = make_index(name, SIZE)
        fill(index, list(range(12)))
        index.lock([0, 1, 2])
        index.unlock([2])
        index.unlock([1])
        index.unlock([0])
        lru, gone = [0, 2, 1], []
        while lru:
            gone.append(index.victim(lru))
            lru.remove(gone[-1])
            index.remove(gone[-1])
        assert gone == want
    for name in INDEXES:
        with pytest.raises(RuntimeError, match="nothing can be evicted"):
            make_index(name, SIZE).victim([])


@pytest.mark.parametrize("name", INDEXES)
def test_nothing_that_is_held_is_evicted(name):
    engine = tiny_engine(prefix_index=name, num_kv_blocks=18, max_num_seqs=3)
    checked = Checked(engine)
    held_when_evicted = []

    def look(event):
        if isinstance(event, BlockEvicted):
            held_when_evicted.append(engine.pool.ref_counts[event.block_id])

    engine.recorder.attach(look)
    for seed in range(9):
        engine.add_request(prompt(seed, 14 + seed, shared=9 if seed % 2 else 0), GREEDY)
    checked.run()
    assert len(held_when_evicted) > 5 and not any(held_when_evicted)


# -- as a tree -----------------------------------------------------------------------------------------------------------------


def spelled(nodes):
    """Every path of the tree: the tokens from its beginning to each node's end."""
    by_id = {node.node_id: node for node in nodes}
    paths = []
    for node in nodes:
        tokens, at = list(node.token_ids), node
        assert len(tokens) == node.num_tokens
        while at.parent_id != -1:
            at = by_id[at.parent_id]
            tokens = at.token_ids + tokens
        assert len(tokens) == node.depth + node.num_tokens
        paths.append((node.root_hash, tuple(tokens)))
    return paths


@settings(max_examples=60)
@given(st.lists(st.tuples(PROMPT, st.booleans(), st.booleans()), max_size=8), st.sampled_from(INDEXES))
def test_the_tree_spells_what_is_cached(known, name):
    index, roots, longest = make_index(name, SIZE), (ROOT, salt_root("a")), set()
    for n, (tokens, salted, used) in enumerate(known):
        fill(index, tokens, roots[salted], first_block=100 * n)
        if used:
            index.use(found(index, [*tokens, 9], roots[salted]))
        if full := tuple(tokens[: len(tokens) // SIZE * SIZE]):
            longest.add((roots[salted], full))
    nodes, count = prefix_tree(index, {}, str, num_nodes=1000, num_tokens=100)
    assert count == len(nodes)
    paths = spelled(nodes)
    assert all(any(root == r and full[: len(p)] == p for r, full in longest) for root, p in paths)
    assert longest <= {(root, p[:i]) for root, p in paths for i in range(len(p) + 1)}
    assert sorted(b for node in nodes for b in node.block_ids) == sorted(index.blocks())
    parents = {node.node_id for node in nodes}
    assert all(node.parent_id in parents | {-1} and node.reachable for node in nodes)
    # Fewer than there are: as many, closed under "parent of", and the most used is among them.
    for most in range(1, count):
        some, told = prefix_tree(index, {}, str, num_nodes=most, num_tokens=100)
        assert told == count and 0 < len(some) <= most
        ids = {node.node_id for node in some}
        assert all(node.parent_id in ids | {-1} for node in some)


@pytest.mark.parametrize("name", INDEXES)
def test_the_study_tells_hits_holders_and_what_is_out_of_reach(name):
    engine = tiny_engine(prefix_index=name)
    checked = Checked(engine)
    one = SamplingParams(temperature=0, max_tokens=1)
    first, second = prompt(0, 17, shared=12), prompt(1, 18, shared=12)
    for ids in (first, second, first):
        engine.add_request(ids, one)
        checked.run()
    running = engine.add_request(second, GREEDY)
    checked.step()
    seen = engine.observe_prefix(num_tokens=5, wait=False)
    assert [type(e) for e in checked.events].count(PrefixTree) == 1 and checked.events[-1].nodes == seen.nodes
    assert (seen.index, seen.enabled, seen.num_lookups, seen.num_asked_tokens) == (name, True, 4, 17 + 18 + 17 + 18)
    assert seen.num_hit_tokens == 12 + 16 + 16 and seen.num_cached_blocks == 5 and seen.num_nodes == len(seen.nodes)
    (top,) = [node for node in seen.nodes if node.parent_id == -1]
    assert (top.num_tokens, top.hits, top.num_held, top.holders) == (12, 3, 3, [running])
    assert top.token_ids == first[:5] and top.text == engine.tokenizer.decode(first[:5])
    ends = {tuple(node.token_ids): node for node in seen.nodes if node.parent_id == top.node_id}
    assert {k[:1] for k in ends} == {(first[12],), (second[12],)} and all(node.hits == 1 for node in ends.values())
    by_holder = {tuple(node.holders) for node in ends.values()}
    assert by_holder == {(), (running,)}
    engine.pool.forget([top.block_ids[0]])  # the beginning is gone: the rest cannot be found
    after = engine.observe_prefix()
    assert after.nodes and not any(node.reachable for node in after.nodes)
    for wrong in ({"num_nodes": 0}, {"num_tokens": True}, {"num_nodes": 1 << 20}):
        with pytest.raises(ValueError, match="must be an integer in"):
            engine.observe_prefix(**wrong)


def test_a_match_that_found_nothing_counts_no_use():
    for name in INDEXES:
        index = make_index(name, SIZE)
        fill(index, [1, 2, 3, 4])
        index.use(PrefixMatch())
        nodes, _ = prefix_tree(index, {}, str, num_nodes=9, num_tokens=9)
        assert [node.hits for node in nodes] == [0]


def test_it_is_asked_for_by_name_from_another_process_and_kept_in_a_file(tmp_path):
    engine = tiny_engine(prefix_index="radix", num_kv_blocks=20, preemption_mode="swap", swap_space=1)
    commands: queue.SimpleQueue = queue.SimpleQueue()
    outbox = Mailbox()
    worker = Worker(engine, outbox, commands)
    worker.observe(True)
    with engine.record() as log:
        engine.generate([prompt(seed, 20, shared=6) for seed in range(5)], GREEDY)
        for command in (m.Study("observe_prefix", {"num_nodes": 3}), m.Study("observe_prefix", {"num_nodes": -1}), m.Stop()):
            commands.put(command)
        worker.run()
    sent = outbox.take(1)
    (refused,) = [message for message in sent if isinstance(message, m.Rejected)]
    assert refused.command == "Study" and "num_nodes must be" in refused.error
    (tree,) = [e for batch in sent if isinstance(batch, m.Events) for e in batch.events if isinstance(e, PrefixTree)]
    assert 0 < len(tree.nodes) <= 3 < tree.num_nodes
    m.decode_batch(m.encode(m.Batch(sent)))
    log.save(tmp_path / "run.cutaway")
    kept = list(EventLog.load(tmp_path / "run.cutaway"))
    assert [e for e in kept if isinstance(e, PrefixTree)] == [tree]
    assert any(isinstance(e, BlockSwapped) for e in kept)
