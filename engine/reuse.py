"""The part of the scheduler that knows what of a request's KV need not be computed: the prefix cache, and host memory."""

from typing import TYPE_CHECKING

from engine.kvcache.pool import BlockPool
from engine.kvcache.prefix import PrefixMatch, block_hash
from engine.kvcache.swap import GIB, SwapSpace
from engine.request import Request
from engine.waiting import Waiting

if TYPE_CHECKING:
    from engine.scheduler import Schedule
    from engine.speculation.speculator import Speculator


class Reuse:
    """``partial_hits``: whether a prefix may end inside a block, where the index finds it so (``KVCache.any_offset``)."""

    enable_prefix_caching: bool
    preemption_mode: str
    waiting: Waiting
    speculator: "Speculator | None"

    def __init__(self, pool: BlockPool, swap: SwapSpace | None, partial_hits: bool) -> None:
        self.pool = pool
        self.swap = swap
        self.partial_hits = partial_hits
        self.num_lookups = self.num_asked_tokens = self.num_hit_tokens = 0  # of first admissions
        self._returned: set[str] = set()  # requests that came back from host memory in this step

    # -- knobs, under the names of EngineConfig ----------------------------------------------------------------------------

    @property
    def prefix_index(self) -> str:
        return self.pool.index.name

    @prefix_index.setter
    def prefix_index(self, name: str) -> None:
        if name != self.pool.index.name:
            self.pool.use_index(name)

    @property
    def swap_space(self) -> float:
        """GiB."""
        return 0.0 if self.swap is None else self.swap.budget_bytes / GIB

    @swap_space.setter
    def swap_space(self, gib: float) -> None:
        if self.swap is not None:
            self.swap.set_budget(gib)

    # -- the prefix cache --------------------------------------------------------------------------------------------------

    def extend_hashes(self, request: Request) -> None:
        """Chained hashes for all full blocks of the request's tokens."""
        size = self.pool.block_size
        for i in range(len(request.block_hashes), request.num_tokens // size):
            parent = request.block_hashes[-1] if i else request.cache_root
            request.block_hashes.append(block_hash(parent, request.token_ids[i * size : (i + 1) * size]))

    def _held(self, request: Request) -> int:
        raise NotImplementedError

    def _look_up(self, request: Request) -> PrefixMatch:
        """What is there of a request's KV. Of a swapped one what lies in host memory, unless the prefix cache has as much."""
        swapped = request.num_swapped_tokens
        if not self.enable_prefix_caching:
            return PrefixMatch(miss_reason="disabled", num_swapped_tokens=swapped)
        if self.pool.index.reads_hashes:
            self.extend_hashes(request)
        tokens = request.token_ids[: request.num_tokens - self._held(request)]
        match = self.pool.index.match(tokens, request.block_hashes, request.cache_root)
        if not self.partial_hits or (self.speculator is not None and self.speculator.needs_features):
            match.partial_block, match.num_partial_tokens = None, 0
        if match.num_hit_tokens(self.pool.block_size) < swapped:
            return PrefixMatch(match.block_ids, match.miss_reason, num_swapped_tokens=swapped)
        covered = len(match.block_ids) if self.speculator is None else self.speculator.covers(match.block_ids)
        if covered < len(match.block_ids):
            self.pool.forget(match.block_ids[covered:])  # so that the ones computed in their place can be found instead
            return PrefixMatch(match.block_ids[:covered], "not in the drafter's cache")
        return match

    def _take_over_kv(self, request: Request, match: PrefixMatch, schedule: "Schedule") -> None:
        """The block table that an admitted request begins with: what was found whole is shared, a part is copied, the rest returns."""
        if all(block in self.pool.index for block in match.block_ids):  # not so where beams share what is not cached
            self.pool.index.use(match)
        self.pool.share(request.request_id, 0, match.block_ids)
        request.block_ids = list(match.block_ids)
        if match.partial_block is not None:
            src = match.partial_block
            dst = self.pool.copy_part(request.request_id, len(request.block_ids), src, match.num_partial_tokens)
            request.block_ids.append(dst)
            if src != dst:
                schedule.part_copies.append((src, dst))
        if request.num_swapped_tokens:
            self._swap_in(request, match, schedule)

    def _count(self, request: Request, hit: int) -> None:
        self.num_lookups += 1
        self.num_asked_tokens += request.num_tokens
        self.num_hit_tokens += hit

    def cache_full_blocks(self, request: Request, old_computed: int) -> None:
        """Let the blocks that became full since ``old_computed`` be found by their prefix."""
        if request.request_id in self._returned:  # what came back from host memory can be found again, too
            self._returned.remove(request.request_id)
            old_computed = 0
        if not self.enable_prefix_caching:
            return
        size = self.pool.block_size
        first, last = old_computed // size, request.num_computed_tokens // size
        if first == last:
            return
        self.extend_hashes(request)
        for i in range(first, last):
            parent = request.block_hashes[i - 1] if i else request.cache_root
            tokens = tuple(request.token_ids[i * size : (i + 1) * size])
            self.pool.cache(request.block_ids[i], request.block_hashes[i], parent, tokens)

    # -- host memory ---------------------------------------------------------------------------------------------------------

    def _swap_out(self, request: Request) -> str:
        """Copy a request's KV to host memory. Returns what kept it from that; "": nothing."""
        return "there is no host memory to swap to" if self.swap is None else self.swap.swap_out(request)

    def _swap_in(self, request: Request, match: PrefixMatch, schedule: "Schedule") -> None:
        """What lies in host memory goes behind the blocks that were found; or they are as good, and it is given up."""
        assert self.swap is not None
        if not match.num_swapped_tokens:
            self.swap.drop(request, "found by prefix")
            return
        have = len(request.block_ids)
        after = request.block_ids[-1] if have else None
        num_blocks = -(-match.num_swapped_tokens // self.pool.block_size)
        fresh = self.pool.allocate(request.request_id, have, num_blocks - have, after)
        request.block_ids += fresh
        schedule.returns.append(self.swap.take(request, have, fresh))
        self._returned.add(request.request_id)

    def bring_back(self, schedule: "Schedule") -> None:
        """Copy what a step needs from host memory; after its other copies, which may read what is written over here."""
        for returning in schedule.returns:
            assert self.swap is not None
            self.swap.bring_back(returning)

    def check_kept(self) -> None:
        """RuntimeError unless host memory holds what the waiting requests say."""
        if self._returned:
            raise RuntimeError(f"{sorted(self._returned)} came back from host memory and were not computed on")
        if self.swap is not None:
            self.swap.check_integrity(list(self.waiting))

    def _forget_kept(self, request: Request) -> None:
        """A request has left."""
        self._returned.discard(request.request_id)
        if self.swap is not None:
            self.swap.drop(request, "finished")
