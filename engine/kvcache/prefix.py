"""Finding KV that was computed before: full blocks under a hash chained over everything before them.

The hash of a block covers its parent's hash and its own tokens (and, at the root, a salt: whatever else changes the
KV). Equal hashes are not trusted: the tokens are compared on every hit, so a collision costs a miss, never a wrong
answer. The scheme is that of vLLM's automatic prefix caching; the hash is BLAKE2b, cut to 64 bits.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

ROOT = 0  # parent hash of a first block without a salt
REMEMBERED_EVICTIONS = 65536  # hashes kept to tell "evicted" from "never seen"
REMEMBERED_SALTS = 16


def salt_root(salt: str | None) -> int:
    """The parent hash of first blocks under a salt: blocks of different salts never meet."""
    return ROOT if salt is None else _digest(0, salt.encode())


def block_hash(parent_hash: int, tokens: Iterable[int]) -> int:
    """64-bit hash of one full block, given the hash of all before it. Never 0."""
    return _digest(parent_hash, array("q", tokens).tobytes())


def _digest(parent_hash: int, data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8, key=parent_hash.to_bytes(8, "little")).digest(), "little") or 1


@dataclass(frozen=True, slots=True)
class CachedBlock:
    block_hash: int
    parent_hash: int
    tokens: tuple[int, ...]


@dataclass(slots=True)
class PrefixMatch:
    """What a lookup found: the blocks of the longest known prefix, and why it was not longer."""

    block_ids: list[int] = field(default_factory=list)
    miss_reason: str = ""


class PrefixIndex:
    """hash -> block, for the blocks that hold KV of a known prefix. Knows nothing of reference counts."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._by_hash: dict[int, int] = {}
        self._by_block: dict[int, CachedBlock] = {}
        self._evicted: OrderedDict[int, None] = OrderedDict()
        self._roots: OrderedDict[int, None] = OrderedDict()  # salts seen lately

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

    def blocks(self) -> Iterable[int]:
        return self._by_block.keys()

    def hashes(self) -> dict[int, int]:
        """block -> hash."""
        return {block: cached.block_hash for block, cached in self._by_block.items()}

    def insert(self, block: int, hash_: int, parent_hash: int, tokens: tuple[int, ...]) -> bool:
        """Remember a full block; False when its prefix is known already (or the block is)."""
        if len(tokens) != self.block_size:
            raise RuntimeError(f"only full blocks are cached: {len(tokens)} tokens in a block of {self.block_size}")
        if hash_ in self._by_hash or block in self._by_block:
            return False
        self._by_hash[hash_] = block
        self._by_block[block] = CachedBlock(hash_, parent_hash, tokens)
        self._evicted.pop(hash_, None)
        return True

    def remove(self, block: int) -> int:
        cached = self._by_block.pop(block)
        del self._by_hash[cached.block_hash]
        self._evicted[cached.block_hash] = None
        if len(self._evicted) > REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)
        return cached.block_hash

    def match(self, token_ids: list[int], hashes: list[int], root: int) -> PrefixMatch:
        """The longest cached prefix of ``token_ids`` in full blocks, given the chained hashes of its full blocks.

        At least one token is left to compute, since its logits are wanted: a prompt of exactly k blocks hits k - 1.
        """
        self._roots[root] = None
        if len(self._roots) > REMEMBERED_SALTS:
            self._roots.popitem(last=False)
        size = self.block_size
        most = (len(token_ids) - 1) // size
        match = PrefixMatch()
        if most == 0:
            match.miss_reason = "shorter than a block"
            return match
        parent = root
        for i in range(most):
            block = self._by_hash.get(hashes[i])
            if block is None:
                match.miss_reason = self._why_missing(hashes[i], token_ids, i, root)
                break
            cached = self._by_block[block]
            if cached.parent_hash != parent or cached.tokens != tuple(token_ids[i * size : (i + 1) * size]):
                match.miss_reason = "hash collision"
                break
            match.block_ids.append(block)
            parent = hashes[i]
        return match

    def _why_missing(self, hash_: int, token_ids: list[int], i: int, root: int) -> str:
        if hash_ in self._evicted:
            return "evicted"
        if i == 0:
            first = token_ids[: self.block_size]
            if any(block_hash(other, first) in self._by_hash for other in self._roots if other != root):
                return "different salt"
        return "no such prefix"

    def check_integrity(self) -> None:
        if len(self._by_hash) != len(self._by_block):
            raise RuntimeError(f"{len(self._by_hash)} hashes for {len(self._by_block)} cached blocks")
        for block, cached in self._by_block.items():
            if self._by_hash.get(cached.block_hash) != block:
                raise RuntimeError(f"block {block} is cached under {cached.block_hash:016x}, which finds another block")
            if block_hash(cached.parent_hash, cached.tokens) != cached.block_hash:
                raise RuntimeError(f"block {block}: its tokens do not give its hash")
