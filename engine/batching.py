"""Static and dynamic batching: a batch that starts together and ends together, with the padding that this costs.

"static" starts a batch of what waits as soon as the one before has wholly ended; "dynamic" first waits until it is full or its first
request has waited ``batching_timeout_ms`` (as Triton Inference Server's dynamic batcher does). Then

1. the prompts of all members are computed, and each shorter one is padded to the longest: that many tokens are computed for nobody;
2. only when all are there do they decode, side by side;
3. a member that has ended keeps its place and its KV blocks, and one token a step is computed in its place, for nobody, until the
   last member has ended. Only then are the blocks given back and the next batch begins.

Padding is really computed, over blocks that it holds for that step alone. It never takes a block from a request: where none is free
it is left out. When the pool runs out, ended members give their blocks back before anybody is preempted.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.request import Request
from engine.runner import Scheduled

if TYPE_CHECKING:
    from engine.scheduler import Schedule, Scheduler


@dataclass(eq=False)
class Batch:
    """One batch while it runs."""

    members: set[str]  # group ids
    roots: dict[str, Request] = field(default_factory=dict)  # of each group the request that came first
    owed: dict[str, int] = field(default_factory=dict)  # group id -> tokens of prompt padding that are still to be computed
    to_compute: set[str] = field(default_factory=set)  # members whose prompt is not computed yet
    ended: list[Request] = field(default_factory=list)  # members that hold their place and their blocks

    @property
    def begins(self) -> bool:
        """Prompts, or their padding, are still to be computed: nobody decodes yet."""
        return bool(self.to_compute or self.owed)


@dataclass(eq=False)
class Padding:
    """What the runner computes for nobody: tokens behind whatever its blocks hold."""

    request_id: str  # whose place it fills
    block_ids: list[int]
    start: int
    num_tokens: int
    num_fresh: int  # the last of ``block_ids``, which are its own

    @property
    def token_ids(self) -> list[int]:
        return [0] * (self.start + self.num_tokens)


class Batcher:
    """Keeps the batch of one scheduler. Under "continuous" there is none, and every question is answered so that nothing changes."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self.scheduler = scheduler
        self.batch: Batch | None = None
        self._policy = "continuous"

    @property
    def policy(self) -> str:
        return self._policy

    @policy.setter
    def policy(self, policy: str) -> None:
        """To "continuous" the batch is dissolved; from it, those that run become one, without padding for their prompts."""
        self._policy = policy
        if policy == "continuous":
            self.end()
        elif self.batch is None and self.scheduler.running:
            self.batch = Batch({request.group_id for request in self.scheduler.running})

    @property
    def ended(self) -> list[Request]:
        """Finished requests that still hold blocks."""
        return [] if self.batch is None else self.batch.ended

    def ready_in_s(self) -> float:
        """Seconds until there is something to run; 0: now."""
        waiting, scheduler = self.scheduler.waiting, self.scheduler
        if self._policy != "dynamic" or self.batch is not None or not waiting or len(waiting) >= scheduler.max_num_seqs:
            return 0.0
        first_ns = min(request.arrived_ns for request in waiting)
        return max(0.0, scheduler.batching_timeout_ms / 1e3 - (time.monotonic_ns() - first_ns) / 1e9)

    def begin_step(self) -> None:
        """A new batch where one is due; who of the present one is computed."""
        s = self.scheduler
        if self._policy == "continuous":
            return
        if self.batch is None:
            if not s.waiting or s.draining:
                return
            chosen = choose(s.waiting, s.max_num_seqs, s.pool.num_blocks, s.pool.block_size)
            for request in reversed(chosen):  # whoever arrives from now on comes after them
                s.waiting.remove(request)
                s.waiting.appendleft(request, front=True)
            longest = max(request.num_tokens for request in chosen)
            roots = {request.group_id: request for request in chosen}
            owed = {r.group_id: longest - r.num_tokens for r in chosen if r.num_tokens < longest}
            self.batch = Batch(set(roots), roots, owed, set(roots))
        self.batch.to_compute -= {request.group_id for request in s.running if _decodes(request)}

    def holds_back(self, unit: list[Request]) -> bool:
        """Whether these have their prompt computed and wait for the others'."""
        if self.batch is None or not self.batch.begins:
            return False
        return all(_decodes(request) for request in unit)

    def admits(self, request: Request) -> bool:
        return self.batch is None or request.group_id in self.batch.members

    def give_up_waiting(self) -> bool:
        """Nothing can run while members are waited for that cannot be admitted, or have no place since another has forked: the batch
        goes on without the first, and before the prompts of the second are computed. False: nobody is waited for."""
        if self.batch is None or not self.batch.begins:
            return False
        left = {request.group_id for request in self.scheduler.running}
        self.batch.members &= left
        self.batch.to_compute = set()
        self.batch.owed = {}
        if not self.batch.members:
            self.end()
        return True

    # -- ends ---------------------------------------------------------------------------------------------------------------

    def keeps(self, request: Request) -> bool:
        """A running request has ended: whether its place and its blocks stay taken."""
        if self.batch is None or request.group_id not in self.batch.members:
            return False
        self.batch.ended.append(request)
        return True

    def left(self, request: Request) -> None:
        """A request has left the queues; with the last member of it the batch ends."""
        if self.batch is None or request.group_id not in self.batch.members:
            return
        s = self.scheduler
        self.batch.to_compute.discard(request.group_id)
        if not s.running and not (s.waiting and s.waiting[0].group_id in self.batch.members):  # members wait before all others
            self.end()

    def end(self) -> None:
        """All places are free again."""
        while self.give_back():
            pass
        self.batch = None

    def give_back(self) -> bool:
        """An ended member's blocks, the latest's first. False where none holds any."""
        if self.batch is None or not self.batch.ended:
            return False
        request = self.batch.ended.pop()
        self.scheduler.pool.free(request.request_id, request.block_ids)
        request.block_ids = []
        return True

    # -- padding ------------------------------------------------------------------------------------------------------------

    def pad(self, schedule: "Schedule", budget: int) -> int:
        """Fill the places that have nothing to compute, as far as the budget and free blocks go. Returns the budget left."""
        if self.batch is None:
            return budget
        for name, owed in list(self.batch.owed.items()):
            count = min(owed, budget, self.scheduler.pool.num_free * self.scheduler.pool.block_size)
            if count > 0:
                self._pad(schedule, self.batch.roots[name], [], count)
                budget -= count
                self.batch.owed[name] -= count
            if self.batch.owed[name] == 0:
                del self.batch.owed[name]
        if schedule.runs and not self.batch.begins:
            for request in self.batch.ended:
                if budget > 0 and self.scheduler.pool.num_free:
                    self._pad(schedule, request, request.block_ids, 1)
                    budget -= 1
        return budget

    def _pad(self, schedule: "Schedule", request: Request, behind: list[int], count: int) -> None:
        """Padding in the place of a request, which sees the blocks ``behind``; its own are told as the end of the request's table."""
        pool = self.scheduler.pool
        num_fresh = -(-count // pool.block_size)
        table = request.block_ids
        fresh = pool.allocate(request.request_id, len(table), num_fresh, table[-1] if table else None)
        padding = Padding(request.request_id, [*behind, *fresh], len(behind) * pool.block_size, count, num_fresh)
        schedule.padding.append(Scheduled(padding, padding.start, count, False, is_padding=True))

    def end_padding(self, schedule: "Schedule") -> None:
        """The step is over: what padding held is free again."""
        for run in schedule.padding:
            self.scheduler.pool.free(run.request.request_id, run.request.block_ids[-run.request.num_fresh :])


def _decodes(request: Request) -> bool:
    """Its prompt is computed, and its first token there."""
    return request.num_tokens > request.num_prompt_tokens and request.num_tokens - request.num_computed_tokens <= 1


def choose(waiting: Iterable[Request], max_num_seqs: int, num_blocks: int, block_size: int) -> list[Request]:
    """The first that wait: as many as there are places for, and as their tokens and one more each have room for in the pool."""
    chosen: list[Request] = []
    for request in waiting:
        num_blocks -= -(-(request.num_tokens + 1) // block_size)
        if chosen and (len(chosen) >= max_num_seqs or num_blocks < 0):
            break
        chosen.append(request)
    return chosen
