"""The same requests under another batch size, budget or policy, without running them: lengths and arrival times as recorded, time as a
``StepCost`` has it. What comes out is modelled.

"continuous" decides as ``engine.scheduler`` does: running requests first, then waiting ones in order, within token budget, batch size
and pool. "static" starts a batch of what is waiting as soon as the one before has wholly ended; "dynamic" first waits until
the batch is full or its first request has waited ``max_wait_s``. Both pad, as ``engine.batching`` does: prompts to the longest of the
batch, which nobody decodes before, and outputs until the last is done.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.load.cost import num_contexts
from engine.load.generate import Arrival
from engine.measures import Limits, Measures, RequestRecord, Steps, measure
from engine.waiting import PRIORITY_STEPS

POLICIES = ("continuous", "static", "dynamic")


@dataclass(frozen=True)
class Replayed:
    """A request's lengths. ``num_cached_tokens``: of its prompt, found in the prefix cache, so not computed."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    priority: int = 0
    request_id: str = ""

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1 or self.num_output_tokens < 1:
            raise ValueError(f"a request has tokens in and out, got {self.num_prompt_tokens} and {self.num_output_tokens}")
        if not 0 <= self.num_cached_tokens < self.num_prompt_tokens:
            raise ValueError(
                f"num_cached_tokens must be below the prompt's {self.num_prompt_tokens}, got {self.num_cached_tokens}"
            )


def from_records(records: Iterable[RequestRecord]) -> list[Replayed]:
    """Those that got tokens, as long as they became, from the first arrival on."""
    begun = [r for r in records if r.token_times_s and r.num_prompt_tokens]
    first = min((r.arrival_s for r in begun), default=0.0)
    return [
        Replayed(r.arrival_s - first, r.num_prompt_tokens, r.num_output_tokens, r.num_cached_tokens, r.priority, r.request_id)
        for r in begun
    ]


def from_load(load: Iterable[Arrival]) -> list[Replayed]:
    """Of a load that was never run; every output as long as it may be. ValueError for later turns, whose times are not known."""
    out = []
    for a in load:
        if a.time_s is None:
            raise ValueError("a later turn of a conversation comes when the one before has ended: run it, and replay the records")
        out.append(Replayed(a.time_s, len(a.token_ids), a.max_tokens, 0, a.priority, f"load-{a.index}"))
    return out


class Cell(NamedTuple):
    """What one slot did in one step."""

    slot: int
    request: int  # index
    phase: str  # "prefill" | "decode" | "padding"
    num_tokens: int


class ReplayedStep(NamedTuple):
    start_s: float
    end_s: float
    cells: tuple[Cell, ...]  # a slot that has none was idle
    num_waiting: int
    preempted: tuple[int, ...]  # indices of requests


@dataclass
class Timeline:
    """``steps`` in order, a record a request, and the measures of both."""

    steps: list[ReplayedStep]
    records: list[RequestRecord]
    columns: Steps

    def measures(self, limits: Limits | None = None) -> Measures:
        return measure(self.records, self.columns, limits)


@dataclass(slots=True, eq=False)
class _Live:
    index: int
    request: Replayed
    record: RequestRecord
    computed: int = 0
    blocks: int = 0
    slot: int = -1
    rank: tuple[float, int] = (0, 0)  # under "priority" as engine.waiting has it; order of arrival

    @property
    def num_tokens(self) -> int:
        return self.request.num_prompt_tokens + self.record.num_output_tokens

    @property
    def done(self) -> bool:
        return self.record.num_output_tokens == self.request.num_output_tokens


@dataclass(slots=True)
class _Plan:
    """One step before it has run."""

    runs: list[tuple[_Live, int]] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)


def replay(
    requests: Sequence[Replayed], step_cost: Callable[[float, float], float], policy: str = "continuous", *, max_num_seqs: int = 8,
    max_num_batched_tokens: int = 512, chunked: bool = True, max_wait_s: float = 0.1, scheduling_policy: str = "fcfs",
    num_kv_blocks: int | None = None, block_size: int = 16,
) -> Timeline:  # fmt: skip
    """What these requests would have been through. ``step_cost(tokens, contexts)``: seconds of a step (``engine.load.cost``).

    ``num_kv_blocks``: of the pool, for "continuous": who does not fit waits, who grows out of it preempts the latest, which
    is computed again from its first token (nothing of it is taken to be cached). None: the pool is never full. A request that
    can never fit is an "error" at once. ValueError for a value out of range.
    """
    for name, value, least in (
        ("max_num_seqs", max_num_seqs, 1),
        ("max_num_batched_tokens", max_num_batched_tokens, 1),
        ("block_size", block_size, 1),
    ):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {POLICIES}, got {policy!r}")
    if scheduling_policy not in ("fcfs", "priority"):
        raise ValueError(f'scheduling_policy must be "fcfs" or "priority", got {scheduling_policy!r}')
    sim = _Simulation(requests, step_cost, max_num_seqs, max_num_batched_tokens, chunked, scheduling_policy == "priority")
    if policy == "continuous":
        sim.num_blocks, sim.block_size = num_kv_blocks, block_size
        sim.run_continuous()
    else:
        sim.run_batches(max_wait_s if policy == "dynamic" else 0.0)
    return Timeline(sim.steps, sim.records, sim.columns)


class _Simulation:
    def __init__(
        self, requests: Sequence[Replayed], cost: Callable[[float, float], float], max_num_seqs: int, budget: int, chunked: bool,
        by_priority: bool,
    ) -> None:  # fmt: skip
        self.cost = cost
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.chunked = chunked
        self.by_priority = by_priority
        self.num_blocks: int | None = None
        self.block_size = 1
        self.records = [
            RequestRecord(
                r.request_id or str(i),
                r.arrival_s,
                r.num_prompt_tokens,
                num_cached_tokens=r.num_cached_tokens,
                priority=r.priority,
            )
            for i, r in enumerate(requests)
        ]
        all_ = [_Live(i, r, record) for i, (r, record) in enumerate(zip(requests, self.records, strict=True))]
        self.coming = sorted(all_, key=lambda live: (live.request.arrival_s, live.index), reverse=True)  # the next one last
        self.waiting: list[tuple[tuple[float, ...], _Live]] = []  # heap
        self.order = self.front = 0  # of who comes to the end of the queue, and back to its beginning
        self.running: list[_Live] = []
        self.free_slots = list(range(max_num_seqs))
        self.now = 0.0
        self.steps: list[ReplayedStep] = []
        self.columns = Steps()

    # -- who waits ----------------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        while self.coming and self.coming[-1].request.arrival_s <= self.now:
            live = self.coming.pop()
            if (
                self.num_blocks is not None
                and self._blocks_of(live.request.num_prompt_tokens + live.request.num_output_tokens - 1) > self.num_blocks
            ):
                live.record.outcome, live.record.finish_s = "error", live.request.arrival_s
                live.record.message = "it never fits in the KV pool"
                continue
            self.order += 1
            live.rank = live.request.priority * PRIORITY_STEPS + len(self.steps) if self.by_priority else 0, self.order
            self._wait(live, live.rank)

    def _wait(self, live: _Live, rank: tuple[float, int]) -> None:
        heapq.heappush(self.waiting, ((*rank, live.index), live))

    # -- continuous ---------------------------------------------------------------------------------------------------------

    def run_continuous(self) -> None:
        while self.coming or self.waiting or self.running:
            if not (self.waiting or self.running):
                self.now = max(self.now, self.coming[-1].request.arrival_s)
            self._arrive()
            if not (self.waiting or self.running):
                continue  # all that came can never fit
            plan, num_waiting = self._plan(), len(self.waiting)
            cells = [Cell(live.slot, live.index, "prefill" if self._prefills(live, n) else "decode", n) for live, n in plan.runs]
            self._pass(cells, sum(num_contexts(live.computed, n) for live, n in plan.runs), num_waiting, tuple(plan.preempted))
            for live, count in plan.runs:
                live.computed += count
                if live.computed == live.num_tokens:
                    self._token(live)

    def _prefills(self, live: _Live, count: int) -> bool:
        return count > 1 or live.computed < live.request.num_prompt_tokens

    def _plan(self) -> _Plan:
        plan, budget = _Plan(), self.budget
        for live in list(self.running):
            if budget <= 0 or live.slot < 0:
                break
            count = self._chunk(live.num_tokens - live.computed, budget)
            if count > budget and plan.runs:
                continue
            while self._missing(live, count) > self._free():
                victim = self.running[-1]
                self._preempt(victim, plan)
                if victim is live:
                    return plan
            self._run(live, count, plan)
            budget -= count
        if not plan.preempted:
            self._admit(plan, budget)
        return plan

    def _admit(self, plan: _Plan, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            live = self.waiting[0][1]
            hit = live.request.num_cached_tokens if not live.record.num_preemptions else 0
            count = self._chunk(live.num_tokens - hit, budget)
            if (count > budget and plan.runs) or self._blocks_of(live.num_tokens) > self._free():
                return
            heapq.heappop(self.waiting)
            at = bisect_right(self.running, live.rank, key=lambda other: other.rank) if self.by_priority else len(self.running)
            self.running.insert(at, live)
            live.computed, live.slot = hit, heapq.heappop(self.free_slots)
            if math.isnan(live.record.scheduled_s):
                live.record.scheduled_s = self.now
            self._run(live, count, plan)
            budget -= count

    def _chunk(self, count: int, budget: int) -> int:
        return min(count, budget) if self.chunked else count

    def _run(self, live: _Live, count: int, plan: _Plan) -> None:
        live.blocks += max(0, self._missing(live, count))
        plan.runs.append((live, count))

    def _preempt(self, live: _Live, plan: _Plan) -> None:
        self._leave(live)
        live.computed = 0
        live.record.num_preemptions += 1
        plan.preempted.append(live.index)
        plan.runs = [(other, n) for other, n in plan.runs if other is not live]
        self.front -= 1
        self._wait(live, live.rank if self.by_priority else (0, self.front))

    def _leave(self, live: _Live) -> None:
        self.running.remove(live)
        heapq.heappush(self.free_slots, live.slot)
        live.blocks, live.slot = 0, -1

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _missing(self, live: _Live, count: int) -> int:
        return self._blocks_of(live.computed + count) - live.blocks

    def _free(self) -> float:
        return math.inf if self.num_blocks is None else self.num_blocks - sum(live.blocks for live in self.running)

    def _token(self, live: _Live) -> None:
        live.record.token_times_s.append(self.now)
        if live.done:
            live.record.outcome, live.record.finish_s = "length", self.now
            self._leave(live)

    # -- static and dynamic -------------------------------------------------------------------------------------------------

    def run_batches(self, max_wait_s: float) -> None:
        while self.coming or self.waiting:
            self._gather(max_wait_s)
            batch = [heapq.heappop(self.waiting)[1] for _ in range(min(self.max_num_seqs, len(self.waiting)))]
            self._run_batch(batch)

    def _gather(self, max_wait_s: float) -> None:
        """Let time pass until a batch may start."""
        self._arrive()
        if not self.waiting:
            self.now = self.coming[-1].request.arrival_s
            self._arrive()
        until = min(live.request.arrival_s for _, live in self.waiting) + max_wait_s
        while len(self.waiting) < self.max_num_seqs and self.now < until:
            self.now = min(until, self.coming[-1].request.arrival_s) if self.coming else until
            self._arrive()

    def _run_batch(self, batch: list[_Live]) -> None:
        longest = max(live.request.num_prompt_tokens for live in batch)
        owed = [longest - live.request.num_prompt_tokens for live in batch]
        for slot, live in enumerate(batch):
            live.slot, live.record.scheduled_s, live.computed = slot, self.now, live.request.num_cached_tokens
        self.running = list(batch)
        while any(live.computed < live.request.num_prompt_tokens for live in batch):
            self._compute_prompts(batch, owed)
        while any(owed) and not all(live.done for live in batch):
            self._compute_prompts(batch, owed)
        while not all(live.done for live in batch):
            self._decode_together(batch)
        self.running = []

    def _compute_prompts(self, batch: list[_Live], owed: list[int]) -> None:
        """One step of the prompts in order, then of the padding behind them, as far as the budget goes."""
        budget, contexts = self.budget, 0.0
        cells: list[Cell] = []
        runs: list[tuple[_Live, int]] = []
        for live in batch:
            count = self._chunk(live.request.num_prompt_tokens - live.computed, budget)
            if count <= 0:
                continue
            if budget <= 0 or (count > budget and runs):
                break
            budget -= count
            runs.append((live, count))
            cells.append(Cell(live.slot, live.index, "prefill", count))
            contexts += num_contexts(live.computed, count)
        for live in batch:
            count = min(owed[live.slot], max(0, budget))
            if count:
                budget -= count
                owed[live.slot] -= count
                cells.append(Cell(live.slot, live.index, "padding", count))
                contexts += num_contexts(0, count)
        self._pass(cells, contexts, len(self.waiting), ())
        for live, count in runs:
            live.computed += count
            if live.computed == live.request.num_prompt_tokens:
                self._batch_token(live)

    def _decode_together(self, batch: list[_Live]) -> None:
        decoding = [live for live in batch if not live.done][: self.budget]
        padded = [live for live in batch if live.done][: self.budget - len(decoding)]
        cells = [Cell(live.slot, live.index, "decode", 1) for live in decoding]
        cells += [Cell(live.slot, live.index, "padding", 1) for live in padded]
        self._pass(cells, sum(num_contexts(live.num_tokens - 1, 1) for live in (*decoding, *padded)), len(self.waiting), ())
        for live in decoding:
            self._batch_token(live)

    def _batch_token(self, live: _Live) -> None:
        live.record.token_times_s.append(self.now)
        if live.done:
            live.record.outcome, live.record.finish_s = "length", self.now

    # -- time ---------------------------------------------------------------------------------------------------------------

    def _pass(self, cells: list[Cell], contexts: float, num_waiting: int, preempted: tuple[int, ...]) -> None:
        """One step runs."""
        tokens = {"prefill": 0, "decode": 0, "padding": 0}
        for cell in cells:
            tokens[cell.phase] += cell.num_tokens
        start, self.now = self.now, self.now + self.cost(sum(tokens.values()), contexts)
        self.steps.append(ReplayedStep(start, self.now, tuple(cells), num_waiting, preempted))
        used = math.nan if self.num_blocks is None else sum(live.blocks for live in self.running) / self.num_blocks
        self.columns.append(
            end_s=self.now, step_s=self.now - start, waiting=num_waiting, running=len(self.running), kv_usage=used,
            prefill_tokens=tokens["prefill"], decode_tokens=tokens["decode"], padding_tokens=tokens["padding"], token_budget=self.budget,
        )  # fmt: skip
        self._arrive()
