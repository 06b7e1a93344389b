"""Finding KV that was computed before: full blocks under a hash chained over everything before them.

The hash of a block covers its parent's hash and its own tokens (and, at the root, a salt: whatever else changes the
KV). Equal hashes are not trusted: the tokens are compared on every hit, so a collision costs a miss, never a wrong
answer. The scheme is that of vLLM's automatic prefix caching; the hash is BLAKE2b, cut to 64 bits.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

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
    """What a lookup found: the whole blocks of the longest known prefix, and why it was not longer.

    ``partial_block``: a block that begins with the ``num_partial_tokens`` that follow the whole ones; None when there are none. It
    holds something else behind them, so it is copied and not shared. ``num_swapped_tokens``: all the tokens whose KV is
    there once what lies in host memory is back, the whole blocks included; 0 where nothing lies there.
    """

    block_ids: list[int] = field(default_factory=list)
    miss_reason: str = ""
    partial_block: int | None = None
    num_partial_tokens: int = 0
    num_swapped_tokens: int = 0

    def num_hit_tokens(self, block_size: int) -> int:
        """Tokens that need not be computed."""
        return self.num_swapped_tokens or len(self.block_ids) * block_size + self.num_partial_tokens


class PrefixIndex:
    """hash -> block, for the blocks that hold KV of a known prefix.

    What pool and scheduler ask of any index: ``match``, ``insert``, ``remove``, ``use``, ``lock``, ``unlock``, ``victim``. This one has
    no paths to protect: what is held is the pool's affair, and the pool's own order says what goes first. ``clock``: nanoseconds.
    """

    name = "hash"  # EngineConfig.prefix_index
    reads_hashes = True  # ``match`` wants the chained hashes of a prompt's blocks

    def __init__(self, block_size: int, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.block_size = block_size
        self._clock = clock
        self._uses: dict[int, tuple[int, int]] = {}  # block -> (how often it was used, when last)
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

    def remember(self, other: Any) -> None:
        """Take over what another index, of either kind, knows of evicted blocks and of salts."""
        self._evicted, self._roots = other._evicted, other._roots

    def insert(self, block: int, hash_: int, parent_hash: int, tokens: tuple[int, ...]) -> bool:
        """Remember a full block; False when its prefix is known already (or the block is)."""
        if len(tokens) != self.block_size:
            raise RuntimeError(f"only full blocks are cached: {len(tokens)} tokens in a block of {self.block_size}")
        if hash_ in self._by_hash or block in self._by_block:
            return False
        self._by_hash[hash_] = block
        self._by_block[block] = CachedBlock(hash_, parent_hash, tokens)
        self._uses[block] = (0, self._clock())
        self._evicted.pop(hash_, None)
        return True

    def remove(self, block: int) -> int:
        cached = self._by_block.pop(block)
        del self._by_hash[cached.block_hash], self._uses[block]
        self._evicted[cached.block_hash] = None
        if len(self._evicted) > REMEMBERED_EVICTIONS:
            self._evicted.popitem(last=False)
        return cached.block_hash

    def entries(self) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        """(block, hash, parent hash, tokens) of all that is cached."""
        for block, cached in self._by_block.items():
            yield block, cached.block_hash, cached.parent_hash, cached.tokens

    def uses(self, block: int) -> tuple[int, int]:
        """How often a cached block was used, and the clock when it last was (or came)."""
        return self._uses[block]

    def is_root(self, hash_: int) -> bool:
        """Whether prompts begin behind this parent hash; False where it is that of a block that was evicted."""
        return hash_ not in self._evicted

    def use(self, match: PrefixMatch) -> None:
        """A request goes on from what was matched."""
        now = self._clock() if match.block_ids else 0
        for block in match.block_ids:
            self._uses[block] = (self._uses[block][0] + 1, now)

    def lock(self, block_ids: Iterable[int]) -> None:
        """Somebody holds these."""

    def unlock(self, block_ids: Sequence[int]) -> None:
        """Nobody holds these any more."""

    def victim(self, lru: Iterable[int]) -> int:
        """The block to evict next: the first of the pool's own order (of the blocks that nobody holds). RuntimeError: none."""
        for block in lru:
            return block
        raise RuntimeError(f"nothing can be evicted: all {len(self)} cached blocks are held")

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
