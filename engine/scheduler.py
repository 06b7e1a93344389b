"""Who runs in the next step, and for how many tokens.

The scheduler thinks in token counts only: a prefill chunk, a decode, the recomputation after a preemption and a draft to
verify are all "n tokens of one request, from position start". Running requests come first, then the waiting ones in order of
arrival, until the token budget, the batch size or the pool is used up (Sarathi-Serve's stall-free batching,
arXiv 2403.02310, as vLLM does it).
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from engine.batching import Batcher
from engine.events.recorder import Recorder
from engine.events.types import PrefixLookup, RequestPreempted
from engine.kvcache.pool import BlockPool
from engine.kvcache.prefix import PrefixMatch
from engine.kvcache.swap import Return, SwapSpace
from engine.request import QueueFull, Request
from engine.reuse import Reuse
from engine.runner import Scheduled
from engine.waiting import Waiting, rank

if TYPE_CHECKING:
    from engine.speculation.speculator import Speculator


@dataclass
class Schedule:
    """What one step runs. ``copies``: blocks to copy before the forward pass, (source, destination)."""

    runs: list[Scheduled] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    part_copies: list[tuple[int, int]] = field(default_factory=list)  # of blocks of which only the beginning is the copier's own
    returns: list[Return] = field(default_factory=list)  # from host memory, after all copies
    padding: list[Scheduled] = field(default_factory=list)  # computed for nobody, see engine.batching


class Scheduler(Reuse):
    """All but the pool and the recorder may be changed between steps. The names are those of EngineConfig."""

    def __init__(
        self, pool: BlockPool, recorder: Recorder, *, max_num_seqs: int, max_num_batched_tokens: int,
        enable_prefix_caching: bool = True, enable_chunked_prefill: bool = True, batching: str = "continuous",
        batching_timeout_ms: float = 50.0, scheduling_policy: str = "fcfs", watermark: float = 0.0, max_num_waiting: int | None = None,
        preemption_mode: str = "recompute", swap: SwapSpace | None = None, partial_hits: bool = True,
    ) -> None:  # fmt: skip
        Reuse.__init__(self, pool, swap, partial_hits)
        self.recorder = recorder
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_prefix_caching = enable_prefix_caching
        self.enable_chunked_prefill = enable_chunked_prefill
        self.speculator: Speculator | None = None
        self.draining = False  # admit nobody: the pool is about to be rebuilt
        self.watermark = watermark
        self.max_num_waiting = max_num_waiting
        self.batching_timeout_ms = batching_timeout_ms
        self.waiting = Waiting(scheduling_policy)
        self.running: list[Request] = []  # under "priority" the most urgent first, else in the order in which they were admitted
        self.batcher = Batcher(self)
        self.batcher.policy = batching
        self.preemption_mode = preemption_mode

    @property
    def batching(self) -> str:
        return self.batcher.policy

    @batching.setter
    def batching(self, policy: str) -> None:
        self.batcher.policy = policy

    @property
    def scheduling_policy(self) -> str:
        return self.waiting.policy

    @scheduling_policy.setter
    def scheduling_policy(self, policy: str) -> None:
        self.waiting.policy = policy
        if policy == "priority":
            self.running.sort(key=rank)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def check_queue(self) -> None:
        """QueueFull when nobody more may wait."""
        if self.max_num_waiting is not None and len(self.waiting) >= self.max_num_waiting:
            raise QueueFull(f"queue full: {len(self.waiting):,} requests wait, max_num_waiting is {self.max_num_waiting:,}")

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
        """The request leaves, wherever it is; its blocks go back (in a static batch: when the batch ends)."""
        keeps = False
        if request.status == "running":
            self.running.remove(request)
            keeps = self.batcher.keeps(request)
        elif request.status in ("waiting", "preempted"):
            self.waiting.remove(request)
        else:
            raise RuntimeError(f"{request!r} cannot finish twice")
        if not keeps:
            self.pool.free(request.request_id, request.block_ids)
            request.block_ids = []
        request.status = "finished"
        self._forget_kept(request)
        self.batcher.left(request)

    def take_over(self, source: Request, beam: Request) -> None:
        """A beam that nothing goes on from takes the place behind another one: it gives its own blocks back and shares the other's."""
        same = 0
        while same < len(beam.block_ids) and beam.block_ids[same] == source.block_ids[same]:
            same += 1
        self.pool.free(beam.request_id, beam.block_ids[same:])
        self.pool.share(beam.request_id, same, source.block_ids[same:])
        beam.block_ids = list(source.block_ids)
        beam.block_hashes = list(source.block_hashes)
        beam.num_computed_tokens = source.num_computed_tokens

    # -- one step ------------------------------------------------------------------------------------------------------

    def schedule(self) -> Schedule:
        self.waiting.step += 1
        self.batcher.begin_step()
        schedule = self._schedule()
        while not (schedule.runs or schedule.padding) and self.batcher.give_up_waiting():
            schedule = self._schedule()
        return schedule

    def _schedule(self) -> Schedule:
        schedule = Schedule()
        budget, preempted = self._schedule_running(schedule, self.max_num_batched_tokens)
        if not preempted:
            budget = self._admit_waiting(schedule, budget)
            budget = self.batcher.pad(schedule, budget)
            self._reserve_drafts(schedule, budget)
        return schedule

    def _schedule_running(self, schedule: Schedule, budget: int) -> tuple[int, bool]:
        preempted = False
        i = held_back = 0
        while i < len(self.running) and budget > 0:
            unit = self._unit(self.running[i])
            if self.batcher.holds_back(unit):
                i, held_back = i + len(unit), held_back + len(unit)
                continue
            # A batch size lowered while more were running: the later ones keep their blocks and wait for a place.
            if i > held_back and i - held_back + len(unit) > self.max_num_seqs:
                break
            counts = self._counts(unit, budget)
            if not any(counts) or (sum(counts) > budget and schedule.runs):
                i += len(unit)
                continue
            while not self._has_room(unit, counts):
                if self.batcher.give_back():
                    continue
                victim = self.running[-1]
                self._preempt(victim, unit[0])
                preempted = True
                if victim in unit:
                    return budget, preempted
            for request, count in zip(unit, counts, strict=True):
                if count:
                    self._grow(request, count, schedule)
                    self._append(schedule, request, count)
            budget -= sum(counts)
            i += len(unit)
        return budget, preempted

    def _admit_waiting(self, schedule: Schedule, budget: int) -> int:
        while self.waiting and budget > 0:
            request = self.waiting[0]
            if not self.batcher.admits(request):
                break
            leader = self._leader(request)
            if leader is None and (self.draining or len(self.running) >= self.max_num_seqs):
                break
            if leader is not None and leader.num_tokens - leader.num_computed_tokens > 1:
                break  # what it wants to share is not computed yet
            match = self._look_up(request) if leader is None else self._shared_with(leader, request)
            hit = match.num_hit_tokens(self.pool.block_size)
            count = self._chunk(request.num_tokens - self._held(request) - hit, budget)
            if count > budget and schedule.runs:
                break  # whole prompts only: it waits for a step of its own
            # The whole request must fit, not just its first chunk: else it would be preempted half way, again and again.
            blocks = self._blocks_to_admit(request, leader) - len(match.block_ids) + self._kept_free()
            if blocks > self.pool.num_free - self.pool.num_reclaimed_by(match.block_ids):
                if self.batcher.give_back():
                    continue
                break
            self._admit(request, match, hit, schedule)
            self._grow(request, count, schedule)
            self._append(schedule, request, count)
            budget -= count
        return budget

    def _chunk(self, count: int, budget: int) -> int:
        """How many of ``count`` tokens fit. Without chunked prefill a prompt longer than the budget runs alone, whole."""
        return min(count, budget) if self.enable_chunked_prefill else count

    def _kept_free(self) -> int:
        """Blocks that admission leaves for those who run to grow into; nobody is kept waiting for them while none does."""
        return int(self.watermark * self.pool.num_blocks) if self.running else 0

    def _append(self, schedule: Schedule, request: Request, count: int) -> None:
        start = request.num_computed_tokens
        schedule.runs.append(Scheduled(request, start, count, start + count == request.num_tokens))

    # -- drafts ------------------------------------------------------------------------------------------------------------

    def _reserve_drafts(self, schedule: Schedule, budget: int) -> None:
        """Room behind the last token of those who decode, from what budget and pool have left: nobody is held up by a guess."""
        if self.speculator is None:
            return
        for i, run in enumerate(schedule.runs):
            if budget <= 0:
                return
            if not run.sample or run.num_tokens != 1:
                continue
            held = len(run.request.block_ids)
            room = (held + self.pool.num_free) * self.pool.block_size - run.request.num_tokens
            count = min(self.speculator.num_wanted(run.request), budget, room)
            if count > 0:
                self._grow(run.request, 1 + count, schedule)
                schedule.runs[i] = replace(run, num_drafts=count)
                budget -= count

    def roll_back(self, request: Request) -> None:
        """Blocks behind the last one that holds a computed token go back: what was proposed there was rejected, or never came."""
        kept = self._num_blocks(request.num_computed_tokens)
        if kept < len(request.block_ids):
            self.pool.free(request.request_id, request.block_ids[kept:])
            del request.block_ids[kept:]

    # -- the beams of a request --------------------------------------------------------------------------------------------
    # Their next tokens are chosen together, so their last ones run in the same step, or not at all. They are preempted together,
    # and come back one by one: the first computes what it had, the others share the blocks of its that are theirs too.

    def _unit(self, request: Request) -> list[Request]:
        """Who is scheduled together with a running request: the beams of its group that are running; they stand side by side."""
        return [request] if request.beams is None else [r for r in self.running if r.beams is request.beams]

    def _held(self, request: Request) -> int:
        """How many tokens are not for now: a beam's last one waits for the other beams."""
        return 1 if request.beams is not None and len(request.beams.live) > 1 else 0

    def _counts(self, unit: list[Request], budget: int) -> list[int]:
        """Tokens of each request of a unit for this step."""
        beams = unit[0].beams
        left = [r.num_tokens - r.num_computed_tokens for r in unit]
        if beams is not None and len(unit) == len(beams.live) and max(left) == 1:
            return left  # all of them, or the step is not for this unit
        counts = []
        for request, count in zip(unit, left, strict=True):
            counts.append(self._chunk(count - self._held(request), budget))
            budget = max(0, budget - counts[-1])
        return counts

    def _leader(self, request: Request) -> Request | None:
        """A beam of the waiting request's group that has come back already."""
        if request.beams is None:
            return None
        return next((r for r in request.beams.live if r.status == "running"), None)

    def _shared_with(self, leader: Request, beam: Request) -> PrefixMatch:
        """The full blocks that a beam has in common with one whose KV is computed; the prefix cache may be off, or have lost them."""
        same, most = 0, beam.num_tokens - 1 - self._held(beam)  # at least one token is left to compute
        while same < most and leader.token_ids[same] == beam.token_ids[same]:
            same += 1
        self.extend_hashes(beam)
        return PrefixMatch(leader.block_ids[: same // self.pool.block_size], "" if same == most else "no such prefix")

    def _blocks_to_admit(self, request: Request, leader: Request | None) -> int:
        if request.beams is None or leader is not None:
            return self._num_blocks(request.num_tokens)
        return self.most_blocks(request.num_prompt_tokens, request.num_tokens + 1, request.beams.width)

    def most_blocks(self, num_prompt_tokens: int, num_tokens: int, width: int = 1) -> int:
        """Blocks that a request of ``num_tokens`` holds at most: its beams share the prompt's full blocks, all else each has alone."""
        shared = num_prompt_tokens // self.pool.block_size if width > 1 else 0
        return shared + width * (self._num_blocks(num_tokens) - shared)

    def most_tokens(self, num_prompt_tokens: int, width: int = 1) -> int:
        """Tokens, prompt included, that each of ``width`` beams can have when the request is alone in the pool."""
        shared = num_prompt_tokens // self.pool.block_size if width > 1 else 0
        return (shared + (self.pool.num_blocks - shared) // width) * self.pool.block_size

    # -- blocks ---------------------------------------------------------------------------------------------------------

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _shared_block_to_write(self, request: Request) -> int | None:
        """Logical index of a block that others hold too and that the next token would be written into."""
        index, offset = divmod(request.num_computed_tokens, self.pool.block_size)
        if offset and self.pool.ref_counts[request.block_ids[index]] > 1:
            return index
        return None

    def _has_room(self, unit: list[Request], counts: list[int]) -> bool:
        needed = 0
        writers: Counter[int] = Counter()  # of shared blocks
        for request, count in zip(unit, counts, strict=True):
            needed += self._num_blocks(request.num_computed_tokens + count) - len(request.block_ids)
            index = self._shared_block_to_write(request) if count else None
            if index is not None:
                writers[request.block_ids[index]] += 1
        # Each gets a copy; the last holder of a block writes into it as it is.
        needed += sum(n - (n == self.pool.ref_counts[block]) for block, n in writers.items())
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

    def _preempt(self, victim: Request, wanting: Request | None) -> None:
        """The latest to come (all beams of it) gives its blocks back, its output kept. It is computed again later, or what is computed
        goes to host memory. ``wanting`` None: it is of no use any more."""
        for request in reversed(self._unit(victim)):
            swapping = self.preemption_mode == "swap"
            why = "" if not swapping else self._swap_out(request) if wanting is not None else "the weights changed"
            swapped = swapping and not why
            if self.recorder.on:
                self.recorder.emit(
                    RequestPreempted,
                    request_id=request.request_id,
                    num_computed_tokens=request.num_computed_tokens,
                    for_request_id="" if wanting is None else wanting.request_id,
                    mode="swap" if swapped else "recompute",
                    why=why,
                )
            if swapped and self.swap is not None:
                self.swap.record_out(request)
            self.running.remove(request)
            self.pool.free(request.request_id, request.block_ids)
            request.block_ids = []
            request.num_computed_tokens = 0
            request.status = "preempted"
            if self.speculator is not None:
                self.speculator.forget(request.request_id)
            self.waiting.appendleft(request, front=self.batcher.batch is not None)

    def preempt_all(self) -> list[str]:
        """All running requests give their blocks back and are computed again: their KV is no longer what the model would store.
        Returns their ids."""
        ids = [request.request_id for request in self.running]
        while self.running:
            self._preempt(self.running[-1], None)
        if self.swap is not None:
            self.swap.drop_all("weights changed")
        while self.batcher.give_back():
            pass
        return ids

    # -- the prefix cache -------------------------------------------------------------------------------------------------

    def _admit(self, request: Request, match: PrefixMatch, hit: int, schedule: Schedule) -> None:
        recompute = request.status == "preempted"
        self.waiting.popleft()
        self._enter(request)
        request.status = "running"
        if self.recorder.on:
            self.recorder.emit(
                PrefixLookup, request_id=request.request_id, num_tokens=request.num_tokens, num_hit_tokens=hit,
                block_ids=list(match.block_ids), miss_reason=match.miss_reason, recompute=recompute,
                num_partial_tokens=match.num_partial_tokens, num_swapped_tokens=match.num_swapped_tokens, index=self.prefix_index,
            )  # fmt: skip
        self._take_over_kv(request, match, schedule)
        request.num_computed_tokens = hit
        if not recompute:
            request.num_cached_tokens = hit
            self._count(request, hit)

    def _enter(self, request: Request) -> None:
        """Into the batch: last, or under "priority" before all that are less urgent, so that those are preempted first."""
        at = len(self.running)
        if self.scheduling_policy == "priority":
            while at and rank(self.running[at - 1]) > rank(request):
                at -= 1
        self.running.insert(at, request)
