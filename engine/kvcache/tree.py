"""What a prefix index holds, as a tree that a screen can show: of the radix index its nodes, of the hash index chains of blocks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.events.batching import PrefixTreeNode
from engine.kvcache.index import Index
from engine.kvcache.prefix import PrefixIndex

MAX_HOLDERS = 16


@dataclass(slots=True)
class _Run:
    """A node under construction. ``tokens``: the first ones of it."""

    node_id: int
    parent_id: int
    depth: int
    num_tokens: int
    tokens: list[int]
    blocks: list[int]
    hits: int
    last_used_ns: int
    reachable: bool
    root_hash: int
    children: list[int] = field(default_factory=list)


def prefix_tree(
    index: Index, tables: Mapping[str, Sequence[int]], decode: Callable[[list[int]], str], *, num_nodes: int, num_tokens: int
) -> tuple[list[PrefixTreeNode], int]:
    """At most ``num_nodes`` of an index's nodes, the most used with all above them, each with its first ``num_tokens`` tokens; and how
    many there are. ``tables``: the block table of each request that holds blocks."""
    runs = _chains(index, num_tokens) if isinstance(index, PrefixIndex) else _nodes(index, num_tokens)
    holders: dict[int, list[str]] = {}
    for request_id, table in tables.items():
        for block in table:
            holders.setdefault(block, []).append(request_id)
    return [_told(run, holders, decode) for run in _most_used(runs, num_nodes)], len(runs)


def _nodes(index: Any, num_tokens: int) -> list[_Run]:
    return [
        _Run(n.node_id, n.parent_id, n.depth, n.num_tokens, list(n.first_tokens), list(n.blocks), n.hits, n.last_used_ns,
             n.reachable, n.parent_hash)
        for n in index.tree(num_tokens)
    ]  # fmt: skip


def _chains(index: PrefixIndex, num_tokens: int) -> list[_Run]:
    """A run ends where more or fewer than one block follows, or one that was used another number of times."""
    size = index.block_size
    block_of, hash_of, tokens_of = {}, {}, {}
    followers: dict[int, list[int]] = {}  # hash -> the blocks whose parent it is
    for block, hash_, parent_hash, tokens in index.entries():
        block_of[hash_], hash_of[block], tokens_of[block] = block, hash_, tokens
        followers.setdefault(parent_hash, []).append(block)
    runs: list[_Run] = []
    roots = [hash_ for hash_ in followers if hash_ not in block_of]
    todo = [(block, -1, 0, root) for root in reversed(roots) for block in reversed(followers[root])]
    while todo:
        block, parent_id, depth, root = todo.pop()
        hits, used = index.uses(block)
        run = _Run(block, parent_id, depth, 0, [], [], hits, used, index.is_root(root), root)
        while True:
            run.blocks.append(block)
            run.last_used_ns = max(run.last_used_ns, index.uses(block)[1])
            run.tokens += tokens_of[block][: num_tokens - len(run.tokens)]
            after = followers.get(hash_of[block], [])
            if len(after) != 1 or index.uses(after[0])[0] != hits:
                break
            block = after[0]
        run.num_tokens = size * len(run.blocks)
        runs.append(run)
        todo += [(child, run.node_id, depth + run.num_tokens, root) for child in reversed(after)]
    return runs


def _most_used(runs: list[_Run], count: int) -> Iterable[_Run]:
    """In their order, parents before children."""
    if len(runs) <= count:
        return runs
    by_id = {run.node_id: run for run in runs}
    kept: set[int] = set()
    for run in sorted(runs, key=lambda run: (run.hits, run.last_used_ns), reverse=True):
        path, node_id = [], run.node_id
        while node_id != -1 and node_id not in kept:
            path.append(node_id)
            node_id = by_id[node_id].parent_id
        if len(kept) + len(path) <= count:
            kept.update(path)
        if len(kept) == count:
            break
    return [run for run in runs if run.node_id in kept]


def _told(run: _Run, holders: Mapping[int, list[str]], decode: Callable[[list[int]], str]) -> PrefixTreeNode:
    names = dict.fromkeys(name for block in run.blocks for name in holders.get(block, ()))
    return PrefixTreeNode(
        node_id=run.node_id, parent_id=run.parent_id, depth=run.depth, num_tokens=run.num_tokens, token_ids=run.tokens,
        text=decode(run.tokens), block_ids=run.blocks, hits=run.hits, last_used_ns=run.last_used_ns,
        num_held=sum(block in holders for block in run.blocks), holders=list(names)[:MAX_HOLDERS], reachable=run.reachable,
        root_hash=run.root_hash,
    )  # fmt: skip
