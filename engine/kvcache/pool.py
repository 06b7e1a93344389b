"""The pool of physical KV blocks: who holds which, how many hold each, which can be found again by their prefix.

A block is in exactly one of three places: *held* (reference count > 0), *cached and free* (count 0, the prefix index
can still find it; which of those is evicted first is for the index to say) or *free*. The block tables themselves belong to the requests;
every method takes the request's id only to record who did it.
PagedAttention: arXiv 2309.06180, section 4.
"""

import heapq
from collections import OrderedDict

from engine.events.recorder import Recorder
from engine.events.types import BlockAllocated, BlockCached, BlockCopied, BlockEvicted, BlockFreed, BlockShared
from engine.kvcache.index import Index, converted
from engine.kvcache.prefix import PrefixIndex


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens. Running out is a RuntimeError: the scheduler asks ``num_free`` first."""

    def __init__(self, num_blocks: int, block_size: int, recorder: Recorder, index: Index | None = None) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs at least one block of one token, got {num_blocks} blocks of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.recorder = recorder
        self.index: Index = index if index is not None else PrefixIndex(block_size)
        self.ref_counts = [0] * num_blocks
        self.generations = [0] * num_blocks  # times each was given out to be filled anew: voids what else is kept of it
        self._free = set(range(num_blocks))  # free and not findable
        self._heap = list(range(num_blocks))  # the same, lowest id first; stale entries are skipped when popped
        self._in_heap = [True] * num_blocks
        self._lru: OrderedDict[int, None] = OrderedDict()  # cached and free, in the order in which they were given back

    # -- counting ---------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that can be had, evicting if need be."""
        return len(self._free) + len(self._lru)

    @property
    def num_cached_free(self) -> int:
        return len(self._lru)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def lru_order(self) -> list[int]:
        """Cached blocks that nobody holds, the longest given back first. The hash index evicts in this order; the radix index takes
        the ends of paths, of these the least recently used."""
        return list(self._lru)

    def num_reclaimed_by(self, block_ids: list[int]) -> int:
        """How many of these (about to be shared) are free now, so that sharing them makes ``num_free`` smaller."""
        return sum(1 for block in block_ids if self.ref_counts[block] == 0)

    # -- taking and giving back ----------------------------------------------------------------------------------------

    def allocate(self, request_id: str, first_index: int, count: int, after: int | None = None) -> list[int]:
        """Take ``count`` fresh blocks for logical blocks ``first_index``.. of a request; each gets reference count 1.

        The physical neighbour of ``after`` (and of each block taken) is preferred: attention reads a contiguous run
        without copying.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} are free")
        blocks = []
        for _ in range(count):
            after = self._take(after)
            self.ref_counts[after] = 1
            self.generations[after] += 1
            blocks.append(after)
        if self.recorder.on and blocks:
            self.recorder.emit(BlockAllocated, request_id=request_id, first_index=first_index, block_ids=blocks)
        return blocks

    def _take(self, after: int | None) -> int:
        if after is not None and after + 1 in self._free:
            self._free.remove(after + 1)
            return after + 1
        while self._heap:
            block = heapq.heappop(self._heap)
            self._in_heap[block] = False
            if block in self._free:
                self._free.remove(block)
                return block
        block = self.index.victim(self._lru)
        del self._lru[block]
        self._evict(block)
        return block

    def share(self, request_id: str, first_index: int, block_ids: list[int]) -> None:
        """Take another reference to blocks that are held or cached (a prefix hit, a forked sibling)."""
        for block in block_ids:
            if self.ref_counts[block] == 0:
                if block not in self._lru:
                    raise RuntimeError(f"block {block} is free and not cached: it cannot be shared")
                del self._lru[block]
                self.index.lock((block,))
            self.ref_counts[block] += 1
        if self.recorder.on and block_ids:
            counts = [self.ref_counts[block] for block in block_ids]
            self.recorder.emit(
                BlockShared, request_id=request_id, first_index=first_index, block_ids=list(block_ids), ref_counts=counts
            )

    def free(self, request_id: str, block_ids: list[int]) -> None:
        """Give back one reference to each block of a table. The end of a sequence is evicted before its beginning."""
        for block in reversed(block_ids):
            self._release(block)
        if self.recorder.on and block_ids:
            counts = [self.ref_counts[block] for block in block_ids]
            self.recorder.emit(BlockFreed, request_id=request_id, block_ids=list(block_ids), ref_counts=counts)

    def _release(self, block: int) -> None:
        if self.ref_counts[block] <= 0:
            raise RuntimeError(f"block {block} is given back more often than it was taken")
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            if block in self.index:
                self.index.unlock((block,))
                self._lru[block] = None
            else:
                self._add_free(block)

    def _add_free(self, block: int) -> None:
        self._free.add(block)
        if not self._in_heap[block]:
            heapq.heappush(self._heap, block)
            self._in_heap[block] = True

    def copy_on_write(self, request_id: str, index: int, src: int) -> int:
        """A block of one's own in place of a shared one; the caller copies the contents before it writes."""
        if self.ref_counts[src] < 2:
            raise RuntimeError(f"block {src} has {self.ref_counts[src]} holders: copy-on-write is for shared blocks")
        if not self.num_free:
            raise RuntimeError("no free block to copy into")
        dst = self._take(None)
        self.ref_counts[dst] = 1
        self.generations[dst] += 1
        self.ref_counts[src] -= 1
        if self.recorder.on:
            self.recorder.emit(
                BlockCopied, request_id=request_id, index=index, src=src, dst=dst, src_ref_count=self.ref_counts[src]
            )
        return dst

    def copy_part(self, request_id: str, index: int, src: int, num_tokens: int) -> int:
        """A block of one's own that begins as a cached one does, for the logical block ``index`` of a request. The caller copies the
        contents before anybody writes; it may be ``src`` itself, where that is the next to be evicted."""
        if src not in self.index:
            raise RuntimeError(f"block {src} is not cached: its content is not known")
        if not self.num_free:
            raise RuntimeError("no free block to copy into")
        dst = self._take(None)
        self.ref_counts[dst] = 1
        self.generations[dst] += 1
        if src in self._lru:
            self._lru.move_to_end(src)
        if self.recorder.on:
            count = self.ref_counts[src] if src != dst else 0
            self.recorder.emit(
                BlockCopied, request_id=request_id, index=index, src=src, dst=dst, src_ref_count=count, num_tokens=num_tokens
            )
        return dst

    # -- the prefix index ------------------------------------------------------------------------------------------------

    def cache(self, block: int, block_hash: int, parent_hash: int, tokens: tuple[int, ...]) -> None:
        """A held block is full: let its prefix be found. The first of two equal blocks stays the one that is found."""
        if self.ref_counts[block] < 1:
            raise RuntimeError(f"block {block} is not held: only held blocks can be cached")
        if not self.index.insert(block, block_hash, parent_hash, tokens):
            return
        self.index.lock((block,))
        if self.recorder.on:
            self.recorder.emit(BlockCached, block_id=block, block_hash=block_hash, parent_hash=parent_hash)

    def use_index(self, name: str) -> None:
        """Another index from now on ("hash" or "radix"): it finds what the old one found."""
        self.index = converted(self.index, name, self._lru)
        self.index.lock([block for block in self.index.blocks() if self.ref_counts[block]])

    def forget(self, block_ids: list[int]) -> None:
        """Take these out of the index (their content is not to be trusted)."""
        for block in block_ids:
            if block in self.index:
                self._evict(block)
                if block in self._lru:
                    del self._lru[block]
                    self._add_free(block)

    def forget_all(self) -> None:
        """Empty the prefix index (prefix caching was switched off)."""
        self.forget(list(self.index.blocks()))

    def _evict(self, block: int) -> None:
        block_hash = self.index.remove(block)
        if self.recorder.on:
            self.recorder.emit(BlockEvicted, block_id=block, block_hash=block_hash)

    # -- integrity -------------------------------------------------------------------------------------------------------

    def check_integrity(self, tables: dict[str, list[int]]) -> None:
        """RuntimeError unless the counts equal the references in ``tables`` and each block is in exactly one place."""
        counts = [0] * self.num_blocks
        for request_id, table in tables.items():
            if len(set(table)) != len(table):
                raise RuntimeError(f"the table of {request_id} names a block twice: {table}")
            for block in table:
                counts[block] += 1
        for block, (count, held) in enumerate(zip(counts, self.ref_counts, strict=True)):
            if count != held:
                raise RuntimeError(f"block {block}: reference count {held}, but {count} tables name it")
            places = (held > 0) + (block in self._free) + (block in self._lru)
            if places != 1:
                raise RuntimeError(
                    f"block {block} is in {places} places (held {held}, free {block in self._free}, cached {block in self._lru})"
                )
            if block in self._free and not self._in_heap[block]:
                raise RuntimeError(f"free block {block} cannot be found by allocate()")
            if block in self._free and block in self.index:
                raise RuntimeError(f"free block {block} is still in the prefix index")
            if block in self._lru and block not in self.index:
                raise RuntimeError(f"cached block {block} is not in the prefix index")
        self.index.check_integrity()
