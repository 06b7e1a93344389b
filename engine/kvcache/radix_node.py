"""The parts of the radix tree of ``engine.kvcache.radix``: its nodes, and tokens as bytes that compare fast."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.kvcache.prefix import PrefixMatch, block_hash

WIDTH = array("i").itemsize  # bytes of a token on an edge


def packed(tokens: Sequence[int]) -> bytes:
    try:
        return array("i", tokens).tobytes()
    except OverflowError:
        raise ValueError(f"token ids must be below 2**31, got {max(tokens, key=abs)}") from None


def unpacked(data: bytes | bytearray) -> list[int]:
    return array("i", bytes(data)).tolist()


def common(a: bytes | bytearray, b: bytes, at: int) -> int:
    """Bytes of whole tokens that ``a`` and ``b[at:]`` begin with alike."""
    length = min(len(a), len(b) - at)
    if b.startswith(a, at) or a[:length] == b[at : at + length]:
        return length
    differ = np.frombuffer(a, np.int32, length // WIDTH) != np.frombuffer(b, np.int32, length // WIDTH, at)
    return int(differ.argmax()) * WIDTH


@dataclass(slots=True)
class RadixMatch(PrefixMatch):
    """``num_tokens``: tokens that are found, whole blocks and part of the next one; at most all but the prompt's last."""

    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RadixNode:
    """One node of ``RadixIndex.tree``: a run of tokens that no path leaves."""

    node_id: int  # stays as it is while the node lives
    parent_id: int  # -1: the root of a salt, or of blocks whose parent is not cached
    depth: int  # tokens before it on its path
    num_tokens: int
    first_tokens: tuple[int, ...]
    blocks: tuple[int, ...]  # that end in it
    num_locked: int  # of them
    hits: int  # uses that reached into it
    last_used_ns: int
    reachable: bool  # False: its beginning is not cached (any more), so that no prompt finds it
    parent_hash: int  # of the first block of the tree that it is in; 0 without a salt


@dataclass(slots=True, eq=False)
class Node:
    node_id: int
    parent: "Node | None"
    offset: int  # tokens of its first block that stand in its ancestors
    tokens: bytearray
    last_used_ns: int
    hits: int = 0
    blocks: list[int] = field(default_factory=list)  # that end in it, in order
    children: dict[bytes, "Node"] = field(default_factory=dict)  # by first token
    top_hash: int = 0  # of a tree's root: the parent hash of the blocks below it

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // WIDTH


@dataclass(slots=True)
class Cached:
    node: Node
    block_hash: int
    parent_hash: int
    locks: int = 0
    used: int = 0  # larger: later
    hits: int = 0  # uses of the whole block


def walk(tops: dict[int, Node]) -> Iterator[tuple[Node, int, int]]:
    """(node, depth in tokens, parent hash of its tree), parents before children; the trees' own roots without tokens too."""
    for parent_hash, top in tops.items():
        stack = [(top, 0)]
        while stack:
            node, depth = stack.pop()
            yield node, depth, parent_hash
            stack += [(child, depth + node.num_tokens) for child in reversed(node.children.values())]


def check_node(node: Node, depth: int, size: int) -> None:
    """RuntimeError unless a node, ``depth`` tokens down its path, has the shape that its block size asks for."""
    where = f"node {node.node_id}"
    if node.parent is None:
        if node.tokens or node.blocks or not node.children:
            raise RuntimeError(f"{where} is a root: it has children and no tokens")
        return
    if not node.tokens or node.parent.children.get(bytes(node.tokens[:WIDTH])) is not node:
        raise RuntimeError(f"{where} is not where its parent looks for it")
    if node.offset != depth % size or len(node.blocks) != (node.offset + node.num_tokens) // size:
        raise RuntimeError(f"{where}: {len(node.blocks)} blocks, {node.num_tokens} tokens at depth {depth}")
    if not node.children and (depth + node.num_tokens) % size:
        raise RuntimeError(f"{where} ends a path inside a block")


def check_block(node: Node, index: int, cached: dict[int, Cached], top_hash: int, tokens: list[int]) -> None:
    """RuntimeError unless a node's ``index``-th block, of these tokens, follows the block before it."""
    block = node.blocks[index]
    entry = cached.get(block)
    if entry is None or entry.node is not node:
        raise RuntimeError(f"block {block} of node {node.node_id} is not in the index as such")
    parent = block_before(node, index)
    if entry.parent_hash != (top_hash if parent is None else cached[parent].block_hash):
        raise RuntimeError(f"block {block} of node {node.node_id} does not stand behind its parent")
    if block_hash(entry.parent_hash, tokens) != entry.block_hash:
        raise RuntimeError(f"block {block}: its tokens do not give its hash")


def tokens_of_blocks(node: Node) -> list[int]:
    """A node's tokens, and before them those of its first block that stand in its ancestors."""
    data, above, missing = bytes(node.tokens), node.parent, node.offset * WIDTH
    while missing > 0 and above is not None:
        part = above.tokens[-missing:]
        data, missing, above = bytes(part) + data, missing - len(part), above.parent
    return unpacked(data)


def block_before(node: Node, index: int) -> int | None:
    """The block before a node's ``index``-th; None for the first of its path."""
    if index:
        return node.blocks[index - 1]
    above = node.parent
    while above is not None and not above.blocks:
        above = above.parent
    return None if above is None else above.blocks[-1]
