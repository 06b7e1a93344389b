"""Who runs in the next step, and for how many tokens.

The scheduler thinks in token counts only: a prefill chunk, a decode and the recomputation after a preemption are all
"n tokens of one request, from position start". Running requests come first, then the waiting ones in order of
arrival, until the token budget, the batch size or the pool is used up (Sarathi-Serve's stall-free batching,
arXiv 2403.02310, as vLLM does it).
"""

from collections import deque
from dataclasses import dataclass, field

from engine.events.recorder import Recorder
from engine.events.types import PrefixLookup, RequestPreempted
from engine.kvcache.pool import BlockPool
from engine.kvcache.prefix import PrefixMatch, block_hash
from engine.request import Request
from engine.runner import Scheduled


@dataclass
class Schedule:
    """What one step runs. ``copies``: blocks to copy before the forward pass, (source, destination)."""

    runs: list[Scheduled] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """``max_num_seqs``, ``max_num_batched_tokens`` and the two switches may be changed between steps."""

    def __init__(
        self, pool: BlockPool, recorder: Recorder, *, max_num_seqs: int, max_num_batched_tokens: int,
        enable_prefix_caching: bool = True, enable_chunked_prefill: bool = True,
    ) -> None:  # fmt: skip
        self.pool = pool
        self.recorder = recorder
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.enable_chunked_prefill = enable_chunked_prefill
        self.draining = False  # admit nobody: the pool is about to be rebuilt
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def fork(self, parent: Request, child: Request) -> None:
        """A sibling that goes on from the parent's KV: it shares every block, the partly filled last one too."""
        child.status = "running"
        child.block_ids = list(parent.block_ids)
        child.block_hashes = list(parent.block_hashes)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_tokens = parent.num_cached_tokens
        self.pool.share(child.request_id, 0, child.block_ids)
        siblings = [i for i, r in enumerate(self.running) if r.group_id == parent.group_id]
        self.running.insert(siblings[-1] + 1, child)

    def finish(self, request: Request) -> None:
        """The request leaves, wherever it is; its blocks go back."""
        if request.status == "running":
            self.running.remove(request)
        elif request.status in ("waiting", "preempted"):
            self.waiting.remove(request)
        else:
            raise RuntimeError(f"{request!r} cannot finish twice")
        self.pool.free(request.request_id, request.block_ids)
        request.block_ids = []
        request.status = "finished"

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        schedule = Schedule()
        budget, preempted = self._schedule_running(schedule, self.max_num_batched_tokens)
        if not preempted and not self.draining:
            self._admit_waiting(schedule, budget)
        return schedule

    def _schedule_running(self, schedule: Schedule, budget: int) -> tuple[int, bool]:
        preempted = False
        i = 0
        # A batch size lowered while more were running: the later ones keep their blocks and wait for a place.
        while i < min(len(self.running), self.max_num_seqs) and budget > 0:
            request = self.running[i]
            count = request.num_tokens - request.num_computed_tokens
            if count > budget and not self.enable_chunked_prefill and schedule.runs:
                i += 1
                continue
            count = self._chunk(count, budget)
            while not self._has_room(request, count):
                victim = self.running[-1]
                self._preempt(victim, request)
                preempted = True
                if victim is request:
                    break
            if request.status != "running":
                break
            self._grow(request, count, schedule)
            self._append(schedule, request, count)
            budget -= count
            i += 1
        return budget, preempted

    def _admit_waiting(self, schedule: Schedule, budget: int) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            request = self.waiting[0]
            match = self._look_up(request)
            hit = len(match.block_ids) * self.pool.block_size
            count = request.num_tokens - hit
            if count > budget and not self.enable_chunked_prefill and schedule.runs:
                return  # whole prompts only: it waits for a step of its own
            count = self._chunk(count, budget)
            # The whole request must fit, not just its first chunk: else it would be preempted half way, again and again.
            blocks = self._num_blocks(request.num_tokens) - len(match.block_ids)
            if blocks > self.pool.num_free - self.pool.num_reclaimed_by(match.block_ids):
                return
            self._admit(request, match, hit)
            self._grow(request, count, schedule)
            self._append(schedule, request, count)
            budget -= count

    def _chunk(self, count: int, budget: int) -> int:
        """How many of ``count`` tokens fit. Without chunked prefill a prompt longer than the budget runs alone, whole."""
        return min(count, budget) if self.enable_chunked_prefill else count

    def _append(self, schedule: Schedule, request: Request, count: int) -> None:
        start = request.num_computed_tokens
        schedule.runs.append(Scheduled(request, start, count, start + count == request.num_tokens))

    # -- blocks ---------------------------------------------------------------------------------------------------------

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _shared_block_to_write(self, request: Request) -> int | None:
        """Logical index of a block that others hold too and that the next token would be written into."""
        index, offset = divmod(request.num_computed_tokens, self.pool.block_size)
        if offset and self.pool.ref_counts[request.block_ids[index]] > 1:
            return index
        return None

    def _has_room(self, request: Request, count: int) -> bool:
        needed = self._num_blocks(request.num_computed_tokens + count) - len(request.block_ids)
        needed += self._shared_block_to_write(request) is not None
        return needed <= self.pool.num_free

    def _grow(self, request: Request, count: int, schedule: Schedule) -> None:
        """Blocks for the next ``count`` tokens, and a copy of a shared block that would be written."""
        index = self._shared_block_to_write(request)
        if index is not None:
            src = request.block_ids[index]
            request.block_ids[index] = self.pool.copy_on_write(request.request_id, index, src)
            schedule.copies.append((src, request.block_ids[index]))
        have = len(request.block_ids)
        needed = self._num_blocks(request.num_computed_tokens + count) - have
        if needed > 0:
            after = request.block_ids[-1] if have else None
            request.block_ids += self.pool.allocate(request.request_id, have, needed, after)

    def _preempt(self, victim: Request, wanting: Request) -> None:
        """The latest to come gives its blocks back and is computed again later, its output kept."""
        if self.recorder.on:
            self.recorder.emit(
                RequestPreempted,
                request_id=victim.request_id,
                num_computed_tokens=victim.num_computed_tokens,
                for_request_id=wanting.request_id,
            )
        self.running.remove(victim)
        self.pool.free(victim.request_id, victim.block_ids)
        victim.block_ids = []
        victim.num_computed_tokens = 0
        victim.status = "preempted"
        self.waiting.appendleft(victim)

    # -- the prefix cache -------------------------------------------------------------------------------------------------

    def extend_hashes(self, request: Request) -> None:
        """Chained hashes for all full blocks of the request's tokens."""
        size = self.pool.block_size
        for i in range(len(request.block_hashes), request.num_tokens // size):
            parent = request.block_hashes[-1] if i else request.cache_root
            request.block_hashes.append(block_hash(parent, request.token_ids[i * size : (i + 1) * size]))

    def _look_up(self, request: Request) -> PrefixMatch:
        if not self.enable_prefix_caching:
            return PrefixMatch(miss_reason="disabled")
        self.extend_hashes(request)
        return self.pool.index.match(request.token_ids, request.block_hashes, request.cache_root)

    def _admit(self, request: Request, match: PrefixMatch, hit: int) -> None:
        recompute = request.status == "preempted"
        self.waiting.popleft()
        self.running.append(request)
        request.status = "running"
        if self.recorder.on:
            self.recorder.emit(
                PrefixLookup, request_id=request.request_id, num_tokens=request.num_tokens, num_hit_tokens=hit,
                block_ids=list(match.block_ids), miss_reason=match.miss_reason, recompute=recompute,
            )  # fmt: skip
        self.pool.share(request.request_id, 0, match.block_ids)
        request.block_ids = list(match.block_ids)
        request.num_computed_tokens = hit
        if not recompute:
            request.num_cached_tokens = hit

    def cache_full_blocks(self, request: Request, old_computed: int) -> None:
        """Let the blocks that became full since ``old_computed`` be found by their prefix."""
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
