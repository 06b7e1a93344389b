"""From events to the schedule: who held which slot in which step and what for, the queue, the loads that were run. Pure.

A slot is a place in the batch. The engine has no numbers for them, so they are given here: a request takes the lowest free slot in the
step that runs it first and keeps it until it has left the batch.
"""

import heapq
import math
import re
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from engine.events.batching import BlockSwapped
from engine.events.types import (
    EngineStarted,
    Event,
    KnobChanged,
    PoolResized,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    Snapshot,
    StepDone,
)
from engine.load.collector import Collector
from engine.measures import Limits, Measures, RequestRecord, Steps, measure

# What a slot can do in a step; the number goes to the screen. "stalled": its request runs, but budget or batch size left no token for it.
# "preempted", "swapped": the slot is empty because the pool took its request's place away.
PHASES = ("prefill", "decode", "padding", "preempted", "swapped", "stalled")
PREFILL, DECODE, PADDING, PREEMPTED, SWAPPED, STALLED = range(len(PHASES))
CELL = struct.Struct("<4I")  # slot | phase << 16, request, tokens, first position
KEPT_STEPS = 20_000
KEPT_LOADS = 40
KEPT_NAMES = 100_000
MARKED_KNOBS = ("batching", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "preemption_mode", "prefix_index",
                "enable_prefix_caching", "scheduling_policy", "num_kv_blocks", "block_size")  # fmt: skip
LOAD_ID = re.compile(r"(load\d*[AB]?)-\d+")  # a request of a load: the load's name, and which one


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step. ``cells``: CELL after CELL. Times are seconds since the first event."""

    step: int
    start_s: float
    end_s: float
    cells: bytes
    waiting: int
    running: int
    budget: int
    max_num_seqs: int
    prefill_tokens: int
    decode_tokens: int
    padding_tokens: int
    used_blocks: int
    kv_usage: float  # share of the pool's blocks that requests hold; NaN where the pool's size is not known

    @property
    def num_cells(self) -> int:
        return len(self.cells) // CELL.size

    @property
    def num_tokens(self) -> int:
        return self.prefill_tokens + self.decode_tokens + self.padding_tokens

    def each(self) -> list[tuple[int, int, int, int, int]]:
        """(slot, phase, request, tokens, first position) of every cell."""
        return [(word & 0xFFFF, word >> 16, request, n, first) for word, request, n, first in CELL.iter_unpack(self.cells)]


@dataclass
class LoadRun:
    """Requests of one load. ``knobs``: the engine's when the first of them came. ``last_step``: the last that ran one of them, so far."""

    name: str
    begin_s: float
    knobs: dict[str, Any]
    first_step: int
    last_step: int = 0
    num_sent: int = 0
    num_ended: int = 0
    others: int = 0  # steps that also ran somebody else's requests
    changed: list[str] = field(default_factory=list)  # knobs that moved meanwhile

    @property
    def over(self) -> bool:
        return self.num_sent > 0 and self.num_ended == self.num_sent


class BatchRows:
    """Fed with events, oldest first. ``new_steps`` came since ``taken()``; ``restarted``: everything before is gone."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.started: EngineStarted | None = None
        self.collector = Collector()
        self.steps: deque[StepRow] = deque(maxlen=KEPT_STEPS)
        self.names: dict[int, str] = {}  # of the last requests, by their number here
        self.knobs: dict[str, Any] = {}
        self.marks: deque[tuple[int, str]] = deque(maxlen=200)  # (step, what changed after it)
        self.loads: dict[str, LoadRun] = {}
        self.num_blocks = 0
        self.new_steps: list[StepRow] = []
        self.new_marks: list[tuple[int, str]] = []
        self.changed = self.restarted = True
        self._numbers: dict[str, int] = {}
        self._count = 0
        self._slots: dict[str, int] = {}  # request in the batch -> its slot
        self._ended: dict[str, None] = {}  # the last requests that ended
        self._preemptions: dict[str, list[float]] = {}  # request -> when
        self._prefilled = False  # whether the last step computed prompts
        self._put_back: dict[str, tuple[int, int]] = {}  # preempted request -> (the slot it had, why)
        self._free: list[int] = []  # heap of slots below ``_high`` that nobody has
        self._high = 0

    def taken(self) -> None:
        self.new_steps, self.new_marks = [], []
        self.changed = self.restarted = False

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, EngineStarted):
                self.forget()
                self.started = event
            self.collector.feed((event,))
            handler = self._HANDLERS.get(type(event))
            if handler is not None:
                handler(self, event)
                self.changed = True

    # -- events ----------------------------------------------------------------------------------------------------------------

    def _snapshot(self, event: Snapshot) -> None:
        self.num_blocks = event.num_blocks
        self.knobs = dict(event.knobs)

    def _resized(self, event: PoolResized) -> None:
        self.num_blocks = event.num_blocks
        self.knobs |= {"num_kv_blocks": event.num_blocks, "block_size": event.block_size}

    def _knob(self, event: KnobChanged) -> None:
        if event.request_id is not None or event.draining:
            return
        self.knobs[event.name] = event.new
        if event.name in MARKED_KNOBS and event.old != event.new:
            self.marks.append((event.step, f"{event.name} = {event.new}"))
            self.new_marks.append(self.marks[-1])
            for load in self.loads.values():
                if not load.over:
                    load.changed.append(event.name)

    def _added(self, event: RequestAdded) -> None:
        self._number(event.request_id)
        found = LOAD_ID.fullmatch(event.request_id)
        if found is None:
            return
        load = self.loads.get(found[1])
        if load is None:
            begin = self.collector.seconds(event.time_ns)
            load = self.loads[found[1]] = LoadRun(found[1], begin, dict(self.knobs), event.step + 1, event.step)
            while len(self.loads) > KEPT_LOADS:
                del self.loads[next(iter(self.loads))]
        load.num_sent += 1

    def _finished(self, event: RequestFinished) -> None:
        self._ended[event.request_id] = None
        while len(self._ended) > 4096:
            del self._ended[next(iter(self._ended))]
        self._put_back.pop(event.request_id, None)
        load = self._load_of(event.request_id)
        if load is not None:
            load.num_ended += 1

    def _preempted(self, event: RequestPreempted) -> None:
        self._preemptions.setdefault(event.request_id, []).append(self.collector.seconds(event.time_ns))
        slot = self._slots.pop(event.request_id, None)
        if slot is None:
            return
        heapq.heappush(self._free, slot)
        self._put_back[event.request_id] = (slot, PREEMPTED)

    def _swapped(self, event: BlockSwapped) -> None:
        """Out: it follows the RequestPreempted. Dropped: what was copied is gone, so it will be computed again."""
        if event.direction in ("out", "dropped") and event.request_id in self._put_back:
            slot, _why = self._put_back[event.request_id]
            self._put_back[event.request_id] = (slot, SWAPPED if event.direction == "out" else PREEMPTED)

    def _step(self, event: StepDone) -> None:
        running = {run.request_id for run in event.runs}
        self._give_back(running, event.max_num_seqs)
        cells = [
            CELL.pack(self._slot(r.request_id) | PHASES.index(r.phase) << 16, self._number(r.request_id), r.num_tokens, max(0, r.start))
            for r in event.runs
        ]  # fmt: skip
        cells += [
            CELL.pack(slot | STALLED << 16, self._number(request_id), 0, 0)
            for request_id, slot in self._slots.items()
            if request_id not in running and request_id not in self._ended
        ]
        taken = set(self._slots.values())
        cells += [
            CELL.pack(slot | why << 16, self._number(request_id), 0, 0)
            for request_id, (slot, why) in self._put_back.items()
            if slot not in taken
        ]
        end = self.collector.seconds(event.time_ns)
        prefill, decode, padding = (sum(r.num_tokens for r in event.runs if r.phase == phase) for phase in PHASES[:3])
        row = StepRow(
            event.step, end - event.step_ms / 1e3, end, b"".join(cells), event.num_waiting, event.num_running, event.token_budget,
            event.max_num_seqs, prefill, decode, padding, event.used_blocks,
            event.used_blocks / self.num_blocks if self.num_blocks else math.nan,
        )  # fmt: skip
        self.steps.append(row)
        self.new_steps.append(row)
        self._prefilled = prefill > 0
        self._count_loads(event.step, running)

    def _count_loads(self, step: int, running: set[str]) -> None:
        here = {load.name: load for load in map(self._load_of, running) if load is not None}
        for load in here.values():
            load.last_step = step
            load.others += len(here) > 1 or any(self._load_of(r) is None for r in running)

    _HANDLERS: ClassVar[Any] = {
        Snapshot: _snapshot, PoolResized: _resized, KnobChanged: _knob, RequestAdded: _added, RequestFinished: _finished,
        RequestPreempted: _preempted, BlockSwapped: _swapped, StepDone: _step,
    }  # fmt: skip

    def _give_back(self, running: set[str], max_num_seqs: int) -> None:
        """Slots of those that have left. A member of a static batch that has ended keeps its slot until the last one has, also in steps that
        compute nothing in its place; and one that ends with its first token does so while the others' prompts are still computed."""
        gone = [request_id for request_id in self._slots if request_id in self._ended and request_id not in running]
        if self.knobs.get("batching", "continuous") != "continuous":
            over = all(request_id in self._ended for request_id in self._slots) and not self._prefilled
            if not over and len(self._slots.keys() | running) <= max_num_seqs:
                return
        for request_id in gone:
            heapq.heappush(self._free, self._slots.pop(request_id))

    # -- slots -----------------------------------------------------------------------------------------------------------------

    def _number(self, request_id: str) -> int:
        number = self._numbers.get(request_id)
        if number is None:
            number = self._numbers[request_id] = self._count
            self.names[number] = request_id
            self._count += 1
            if len(self.names) > KEPT_NAMES:
                oldest = next(iter(self.names))
                gone = self.names.pop(oldest)
                self._numbers.pop(gone, None)
                self._preemptions.pop(gone, None)
        return number

    def number_of(self, request_id: str | None) -> int:
        """-1 for one that was not seen."""
        return self._numbers.get(request_id or "", -1)

    def _slot(self, request_id: str) -> int:
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._slots[request_id] = self._take_slot(*self._put_back.pop(request_id, (-1, 0)))
        return slot

    def _take_slot(self, before: int, _why: int) -> int:
        """Its own of before where that is free, else the lowest that is."""
        if before in self._free:
            self._free.remove(before)
            heapq.heapify(self._free)
            return before
        if self._free:
            return heapq.heappop(self._free)
        self._high += 1
        return self._high - 1

    def _load_of(self, request_id: str) -> LoadRun | None:
        found = LOAD_ID.fullmatch(request_id)
        return self.loads.get(found[1]) if found is not None else None

    # -- what is asked for -----------------------------------------------------------------------------------------------------

    def between(self, first: int, last: int) -> list[StepRow]:
        """The kept steps ``first`` to ``last``, both included."""
        steps = self.steps
        low, high = bisect_left(steps, first, key=_step_of), bisect_right(steps, last, key=_step_of)
        return [steps[i] for i in range(low, high)] if high - low < len(steps) // 2 else list(steps)[low:high]

    def at(self, step: int) -> StepRow | None:
        """The last kept step up to ``step``."""
        index = bisect_right(self.steps, step, key=_step_of)
        return self.steps[index - 1] if index else None

    def records(self, load: str | None = None, until_s: float = math.inf) -> list[RequestRecord]:
        """Those of a load (None: all), as they were at ``until_s``."""
        return [
            cut(record, until_s, self._preemptions.get(record.request_id, ()))
            for record in self.collector.records
            if record.arrival_s <= until_s and (load is None or record.request_id.startswith(f"{load}-"))
        ]

    def measures(
        self, load: str | None = None, step: int | None = None, limits: Limits | None = None, refused: int = 0
    ) -> Measures:
        """Of a load (None: of everything that is kept), up to the end of ``step`` (None: the newest). ``refused``: requests that
        found the queue full, of which no event tells."""
        last = self.at(step) if step is not None else None
        until = last.end_s if last is not None else math.inf
        run = self.loads.get(load) if load is not None else None
        low = run.first_step if run is not None else 0
        high = min(run.last_step if run is not None else 1 << 62, last.step if last is not None else 1 << 62)
        return measure(self.records(load, until), as_steps(self.between(low, high)), limits, refused=refused, unfinished=True)


def _step_of(row: StepRow) -> int:
    return row.step


def cut(record: RequestRecord, until_s: float, preempted_s: Sequence[float] = ()) -> RequestRecord:
    """The record as it was then. ``preempted_s``: when it was preempted."""
    times = record.token_times_s
    if preempted_s and preempted_s[-1] > until_s:
        record = replace(record, num_preemptions=bisect_right(preempted_s, until_s))
    if record.finish_s <= until_s or (math.isnan(record.finish_s) and (not times or times[-1] <= until_s)):
        return record
    kept: array[float] = times[: bisect_right(times, until_s)]
    return replace(record, token_times_s=kept, finish_s=math.nan, outcome="unfinished", message="")


def as_steps(rows: Sequence[StepRow]) -> Steps:
    """What ``engine.measures`` reads."""
    steps = Steps()
    for r in rows:
        steps.append(
            end_s=r.end_s, step_s=r.end_s - r.start_s, waiting=r.waiting, running=r.running, kv_usage=r.kv_usage,
            prefill_tokens=r.prefill_tokens, decode_tokens=r.decode_tokens, padding_tokens=r.padding_tokens, token_budget=r.budget,
        )  # fmt: skip
    return steps
