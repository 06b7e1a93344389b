"""Finding KV that was computed before, token by token: a radix tree over the tokens of the cached prefixes.

An edge carries a run of tokens and may part anywhere, also inside a block, so a lookup knows to the token how far a prompt is known.
KV is shared in whole blocks all the same: what was found of the block after the last whole one is reported with a block that
holds it, from which a copy is filled. RadixAttention: arXiv 2312.07104, section 3 (there a block holds one token).

Held by construction, and checked by ``check_integrity``: along each path every full block of tokens has a block, and a path ends where
a block ends. A block whose parent is gone stays, with what follows it, in a tree of its own under the parent's hash, and comes
back with the parent. So whole blocks are found exactly when ``engine.kvcache.prefix`` finds them.
"""

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from engine.kvcache.prefix import REMEMBERED_EVICTIONS, REMEMBERED_SALTS, PrefixMatch, block_hash
from engine.kvcache.radix_node import (
    WIDTH,
    Cached,
    Node,
    RadixMatch,
    RadixNode,
    check_block,
    check_node,
    common,
    packed,
    tokens_of_blocks,
    unpacked,
    walk,
)


class RadixIndex:
    """Prefix -> block, with the methods of ``PrefixIndex`` (same hashes, same reasons), and what a tree adds to them.

    ``lock`` protects blocks, and with each the path that leads to it: only the ends of paths are evicted, the least recently
    used first (``victim``). ``clock`` gives the nanoseconds that nodes carry.
    """

    name = "radix"  # EngineConfig.prefix_index
    reads_hashes = False

    def __init__(self, block_size: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.block_size = block_size
        self._clock = clock
        self._by_hash: dict[int, int] = {}
        self._blocks: dict[int, Cached] = {}
        self._tops: dict[int, Node] = {}  # parent hash -> a node without tokens, above all first blocks with that parent
        self._evicted: OrderedDict[int, None] = OrderedDict()
        self._roots: OrderedDict[int, None] = OrderedDict()  # salts seen lately
        self._heap: list[tuple[int, int]] = []  # (used, block) of blocks that could go, and stale entries
        self._num_locked = 0
        self._next_id = 0
        self._tick = 0

    def __contains__(self, block: int) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def blocks(self) -> Iterable[int]:
        return self._blocks.keys()

    def hashes(self) -> dict[int, int]:
        """block -> hash."""
        return {block: cached.block_hash for block, cached in self._blocks.items()}

    def remember(self, other: Any) -> None:
        """Take over what another index, of either kind, knows of evicted blocks and of salts."""
        self._evicted, self._roots = other._evicted, other._roots

    def entries(self) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        """(block, hash, parent hash, tokens) of all that is cached, parents first."""
        size = self.block_size
        for node, _, _ in walk(self._tops):
            tokens = tokens_of_blocks(node) if node.blocks else []
            for i, block in enumerate(node.blocks):
                cached = self._blocks[block]
                yield block, cached.block_hash, cached.parent_hash, tuple(tokens[i * size : (i + 1) * size])

    # -- looking up --------------------------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], hashes: Sequence[int] = (), root: int = 0) -> RadixMatch:
        """The longest cached prefix of ``token_ids``. Changes nothing: what comes to be used is told to ``use``.

        ``hashes``, which the hash index needs, are not read. At least one token is left to compute, since its logits are wanted: a prompt of exactly k cached
        blocks hits k - 1, and all but one token of the next.
        """
        self._roots[root] = None
        if len(self._roots) > REMEMBERED_SALTS:
            self._roots.popitem(last=False)
        size = self.block_size
        match = RadixMatch()
        most = (len(token_ids) - 1) // size
        top = self._tops.get(root)
        if top is not None and len(token_ids) > 1:
            self._descend(top, packed(token_ids[: len(token_ids) - 1]), match)
        whole = len(match.block_ids)
        if most == 0:
            match.miss_reason = "shorter than a block"
        elif whole < most:
            parent = self._blocks[match.block_ids[-1]].block_hash if whole else root
            match.miss_reason = self._why_missing(parent, token_ids[whole * size : (whole + 1) * size], whole, root)
        return match

    def _descend(self, top: Node, data: bytes, match: RadixMatch) -> None:
        """Fill ``match`` with what ``data`` has in common with the tree."""
        size, at = self.block_size, 0
        node, found = top, 0
        while at < len(data) and (child := node.children.get(data[at : at + WIDTH])) is not None:
            node, found = child, common(child.tokens, data, at)
            at += found
            match.block_ids += node.blocks if found == len(node.tokens) else node.blocks[: (node.offset + found // WIDTH) // size]
            if found < len(node.tokens):
                break
        match.num_tokens = at // WIDTH
        match.num_partial_tokens = match.num_tokens % size
        if match.num_partial_tokens:
            match.partial_block = self._block_beyond(node, found // WIDTH)

    def _block_beyond(self, node: Node, tokens: int) -> int:
        """A block that holds the token before ``tokens`` of a node and does not end there: of several the one used last."""
        index = (node.offset + tokens) // self.block_size
        while index >= len(node.blocks):
            index -= len(node.blocks)
            node = max(node.children.values(), key=lambda child: child.last_used_ns)
        return node.blocks[index]

    def _why_missing(self, parent: int, tokens: Sequence[int], index: int, root: int) -> str:
        if block_hash(parent, tokens) in self._evicted:
            return "evicted"
        if index == 0 and any(block_hash(other, tokens) in self._by_hash for other in self._roots if other != root):
            return "different salt"
        return "no such prefix"

    # -- in and out --------------------------------------------------------------------------------------------------------

    def insert(self, block: int, hash_: int, parent_hash: int, tokens: Sequence[int]) -> bool:
        """Remember a full block; False when its prefix is known already (or the block is)."""
        if len(tokens) != self.block_size:
            raise RuntimeError(f"only full blocks are cached: {len(tokens)} tokens in a block of {self.block_size}")
        if hash_ in self._by_hash or block in self._blocks:
            return False
        node, at, data = *self._end_of(parent_hash), packed(tokens)
        while data:  # what of it is there already: the beginning of a block that parts from this one later
            if at == len(node.tokens):
                child = node.children.get(data[:WIDTH])
                if child is None:
                    break
                node, at = child, 0
            found = common(node.tokens[at : at + len(data)], data, 0)
            at, data = at + found, data[found:]
            if at < len(node.tokens):
                break
        if not data:
            raise RuntimeError(f"block {block} comes with hash {hash_:016x}, but its tokens are cached under another one")
        if at < len(node.tokens):
            node = self._split(node, at)
        node = self._grow(node, data)
        node.blocks.append(block)
        self._blocks[block] = Cached(node, hash_, parent_hash)
        self._by_hash[hash_] = block
        self._evicted.pop(hash_, None)
        orphans = self._tops.pop(hash_, None)
        if orphans is not None:
            self._adopt(node, orphans.children)
        self._touch(block)
        return True

    def _end_of(self, hash_: int) -> tuple[Node, int]:
        """The node and the byte in it behind the block of this hash; a new tree where there is no such block."""
        block = self._by_hash.get(hash_)
        if block is not None:
            node = self._blocks[block].node
            return node, self._end_in(node, node.blocks.index(block))
        top = self._tops.get(hash_)
        if top is None:
            top = self._new_top(hash_)
        return top, 0

    def _end_in(self, node: Node, index: int) -> int:
        """Byte of a node's tokens at which its ``index``-th block ends."""
        return ((index + 1) * self.block_size - node.offset) * WIDTH

    def _new_node(self, parent: Node | None, offset: int, tokens: bytes | bytearray) -> Node:
        self._next_id += 1
        return Node(self._next_id - 1, parent, offset, bytearray(tokens), self._clock())

    def _new_top(self, hash_: int) -> Node:
        top = self._tops[hash_] = self._new_node(None, 0, b"")
        top.top_hash = hash_
        return top

    def _grow(self, node: Node, data: bytes) -> Node:
        """Tokens behind the end of a node: it gets longer where nothing follows it and it has not been used, else a child."""
        if node.parent is not None and not node.children and not node.hits:
            node.tokens += data
            return node
        child = self._new_node(node, (node.offset + node.num_tokens) % self.block_size, data)
        node.children[data[:WIDTH]] = child
        return child

    def _split(self, node: Node, at: int) -> Node:
        """Part a node at a byte between two tokens; returns the new upper half."""
        assert node.parent is not None
        upper = self._new_node(node.parent, node.offset, node.tokens[:at])
        upper.hits, upper.last_used_ns = node.hits, node.last_used_ns
        node.parent.children[bytes(upper.tokens[:WIDTH])] = upper
        in_upper = (node.offset + at // WIDTH) // self.block_size
        upper.blocks, node.blocks = node.blocks[:in_upper], node.blocks[in_upper:]
        for block in upper.blocks:
            self._blocks[block].node = upper
        node.offset = (node.offset + at // WIDTH) % self.block_size
        node.tokens = node.tokens[at:]
        self._adopt(upper, {bytes(node.tokens[:WIDTH]): node})
        uses = [*(self._blocks[block].hits for block in node.blocks), *(child.hits for child in node.children.values())]
        node.hits = max(uses, default=node.hits)  # some may have ended above
        return upper

    def _adopt(self, node: Node, children: dict[bytes, Node]) -> None:
        node.children = children
        for child in children.values():
            child.parent = node

    def remove(self, block: int) -> int:
        """Forget a block; what follows it is kept, and found again once its prefix is. Returns its hash. KeyError when it is not cached."""
        cached = self._blocks[block]
        node = cached.node
        end = self._end_in(node, node.blocks.index(block))
        if end < len(node.tokens):
            node = self._split(node, end)
        if node.children:
            self._adopt(self._new_top(cached.block_hash), node.children)
            node.children = {}
        node.blocks.pop()
        self._trim(node)
        del self._blocks[block], self._by_hash[cached.block_hash]
        self._num_locked -= cached.locks > 0
        self._evicted[cached.block_hash] = None
        if len(self._evicted) > REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)
        parent = self._by_hash.get(cached.parent_hash)
        if parent is not None:
            self._offer(parent)
        return cached.block_hash

    def _trim(self, node: Node) -> None:
        """A path that lost its last block ends where the one before it does."""
        while not node.children:
            kept = (len(node.blocks) * self.block_size - node.offset) * WIDTH
            if kept > 0:
                del node.tokens[kept:]
                return
            if node.parent is None:
                del self._tops[node.top_hash]
                return
            del node.parent.children[bytes(node.tokens[:WIDTH])]
            node = node.parent
        if len(node.children) == 1 and node.parent is not None:
            (child,) = node.children.values()
            if child.hits == node.hits:
                self._merge(node, child)

    def _merge(self, node: Node, child: Node) -> None:
        """Where nothing parts any more and both were used alike, one node does."""
        for block in child.blocks:
            self._blocks[block].node = node
        node.blocks += child.blocks
        node.tokens += child.tokens
        node.last_used_ns = max(node.last_used_ns, child.last_used_ns)
        self._adopt(node, child.children)

    # -- use, locks, eviction ----------------------------------------------------------------------------------------------

    def use(self, match: PrefixMatch) -> None:
        """A request goes on from what was matched: a hit for each node on the way, and for the blocks a new time of last use."""
        blocks = [*match.block_ids, *(() if match.partial_block is None else (match.partial_block,))]
        if not blocks:
            return
        now, node = self._clock(), self._blocks[blocks[-1]].node
        if match.partial_block is not None:
            node = self._reached(match.partial_block, match.num_partial_tokens)
        while node.parent is not None:
            node.hits, node.last_used_ns, node = node.hits + 1, now, node.parent
        for block in match.block_ids:
            self._blocks[block].hits += 1
        for block in reversed(blocks):  # the end gets the earlier time: it goes first
            self._touch(block)

    def _reached(self, block: int, tokens: int) -> Node:
        """The node in which the first ``tokens`` of a block end."""
        node = self._blocks[block].node
        start = node.blocks.index(block) * self.block_size - node.offset  # of the block, from the node's first token
        while start + tokens <= 0 and node.parent is not None:
            node = node.parent
            start += node.num_tokens
        return node

    def lock(self, block_ids: Iterable[int]) -> None:
        """Somebody holds these: neither they nor what leads to them is evicted. Counted. KeyError for a block that is not cached."""
        for block in block_ids:
            cached = self._blocks[block]
            self._num_locked += cached.locks == 0
            cached.locks += 1

    def unlock(self, block_ids: Sequence[int]) -> None:
        """Undo one ``lock``; counts as a use, the end of the path the earliest. RuntimeError where there is no lock."""
        for block in reversed(block_ids):
            cached = self._blocks[block]
            if cached.locks < 1:
                raise RuntimeError(f"block {block} is unlocked more often than it was locked")
            cached.locks -= 1
            if cached.locks == 0:
                self._num_locked -= 1
                self._touch(block)

    @property
    def num_unlocked(self) -> int:
        return len(self._blocks) - self._num_locked

    def victim(self, lru: Iterable[int] = ()) -> int:
        """The block to evict next: of the unlocked ends of paths the least recently used. Not removed yet.

        Where every unlocked block has a locked one behind it (two requests computed the same beginning, and only the second goes
        on), it is the least recently used unlocked one. RuntimeError when all are locked. ``lru``, the pool's own order, is
        what the hash index goes by; it is not read.
        """
        while self._heap:
            used, block = self._heap[0]
            if self._could_go(block, used):
                return block
            heapq.heappop(self._heap)
        unlocked = [(cached.used, block) for block, cached in self._blocks.items() if not cached.locks]
        if not unlocked:
            raise RuntimeError(f"nothing can be evicted: all {len(self._blocks)} cached blocks are locked")
        return min(unlocked)[1]

    def _could_go(self, block: int, used: int) -> bool:
        cached = self._blocks.get(block)
        return cached is not None and cached.used == used and not cached.locks and self._is_leaf(block, cached.node)

    def _is_leaf(self, block: int, node: Node) -> bool:
        return node.blocks[-1] == block and not node.children

    def _touch(self, block: int) -> None:
        self._tick += 1
        self._blocks[block].used = self._tick
        self._offer(block)

    def _offer(self, block: int) -> None:
        """Let ``victim`` look at a block whose lock, use or children have changed."""
        cached = self._blocks[block]
        if cached.locks or not self._is_leaf(block, cached.node):
            return
        heapq.heappush(self._heap, (cached.used, block))
        if len(self._heap) > 64 + 2 * len(self._blocks):
            self._heap = [(used, b) for used, b in set(self._heap) if self._could_go(b, used)]
            heapq.heapify(self._heap)

    # -- looking at it -----------------------------------------------------------------------------------------------------

    def tree(self, num_tokens: int = 8) -> list[RadixNode]:
        """Every node, parents before children, as a screen shows it; ``num_tokens``: how many of each one's tokens to tell."""
        nodes = []
        for node, depth, parent_hash in walk(self._tops):
            if node.parent is None:
                continue
            above = node.parent.node_id if node.parent.parent is not None else -1
            locked = sum(self._blocks[block].locks > 0 for block in node.blocks)
            first = tuple(unpacked(node.tokens[: num_tokens * WIDTH]))
            nodes.append(
                RadixNode(node.node_id, above, depth, node.num_tokens, first, tuple(node.blocks), locked, node.hits,
                          node.last_used_ns, parent_hash not in self._evicted, parent_hash)
            )  # fmt: skip
        return nodes

    def check_integrity(self) -> None:
        """RuntimeError unless tree, blocks and hashes agree, block for block and token for token."""
        if len(self._by_hash) != len(self._blocks):
            raise RuntimeError(f"{len(self._by_hash)} hashes for {len(self._blocks)} cached blocks")
        if self._num_locked != sum(cached.locks > 0 for cached in self._blocks.values()):
            raise RuntimeError(f"{self._num_locked} blocks are counted as locked")
        for block, cached in self._blocks.items():
            if self._by_hash.get(cached.block_hash) != block:
                raise RuntimeError(f"block {block} is cached under {cached.block_hash:016x}, which finds another block")
        seen, size = 0, self.block_size
        for node, depth, parent_hash in walk(self._tops):
            if parent_hash in self._by_hash:
                raise RuntimeError(f"node {node.node_id} lies apart from block {self._by_hash[parent_hash]}, which it follows")
            check_node(node, depth, size)
            tokens = tokens_of_blocks(node) if node.blocks else []
            for i in range(len(node.blocks)):
                check_block(node, i, self._blocks, parent_hash, tokens[i * size : (i + 1) * size])
            seen += len(node.blocks)
        if seen != len(self._blocks):
            raise RuntimeError(f"{seen} blocks in the tree, {len(self._blocks)} in the index")
