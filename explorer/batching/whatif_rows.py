"""What was recorded of loads, and the same requests replayed with another batch size, budget or policy. Pure.

A load is what ran under one setting of the scheduler without a long pause or another cache salt. Its requests' lengths and arrival times, and the measured cost of
its steps, are what ``engine.load.replay`` needs; what comes out of that is modelled.
"""

import math
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from engine.events.types import (
    EngineStarted,
    Event,
    KnobChanged,
    PoolResized,
    RequestAdded,
    RequestFinished,
    Snapshot,
    StepDone,
)
from engine.load.collector import PADDING, Collector, add_step
from engine.load.cost import StepCost, fit_step_cost
from engine.load.replay import Cell, Replayed, ReplayedStep, Timeline, from_records, replay
from engine.measures import Limits, Measures, RequestRecord, Steps, measure
from explorer.i18n import _, ngettext
from explorer.theme import number

MOST_REQUESTS = 128  # of a load, the newest: what can be replayed while a knob is moved
MOST_TOKENS = 5000  # of their answers together, for the same reason
MOST_STEPS = 4000  # of a load
KEPT_LOADS = 24
PAUSE_S = 4.0  # without a request, after which a new load begins
OUTLIER = 3.0  # steps that took so many times what was fitted had another cause (a first compilation, a busy machine)
KNOBS = (
    "batching", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "scheduling_policy", "num_kv_blocks", "block_size",
    "preemption_mode", "enable_prefix_caching", "batching_timeout_ms",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """Of the scheduler, in the engine's names."""

    batching: str = "continuous"
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    num_kv_blocks: int | None = None
    block_size: int = 16
    preemption_mode: str = "recompute"
    enable_prefix_caching: bool = True
    batching_timeout_ms: float = 50.0

    @classmethod
    def of(cls, knobs: dict[str, Any]) -> "Setting":
        """From an engine's knobs, those that are there."""
        return cls(**{name: knobs[name] for name in KNOBS if knobs.get(name) is not None})

    @property
    def label(self) -> str:
        """ "continuous, batch 8, budget 512, chunked"."""
        names = {"continuous": _("continuous"), "static": _("static"), "dynamic": _("dynamic")}
        chunk = _("chunked") if self.enable_chunked_prefill else _("not chunked")
        return _("{policy}, batch {n}, budget {budget:,}, {chunk}").format(
            policy=names.get(self.batching, self.batching), n=self.max_num_seqs, budget=self.max_num_batched_tokens, chunk=chunk
        )  # fmt: skip

    def knobs(self, other: "Setting") -> dict[str, Any]:
        """What has to be moved to come here from ``other``; of what a what-if changes."""
        moved = ("batching", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill")
        return {name: getattr(self, name) for name in moved if getattr(self, name) != getattr(other, name)}

    def changed(self, **changes: Any) -> "Setting":
        return replace(self, **changes)


@dataclass
class Load:
    """What ran under ``setting``. ``mixed``: the setting changed while its requests ran."""

    setting: Setting
    number: int
    ids: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_REQUESTS))
    steps: deque[StepDone] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    num_requests: int = 0
    mixed: bool = False


@dataclass(frozen=True)
class Asked:
    """A request as it was sent."""

    prompt_token_ids: tuple[int, ...]
    sampling: dict[str, Any]
    owner: str
    priority: int = 0


class History:
    """Takes the events of a run in order, and keeps its loads, the newest ``KEPT_LOADS``."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.collector = Collector(2 * KEPT_LOADS * MOST_REQUESTS)
        self.loads: deque[Load] = deque(maxlen=KEPT_LOADS)
        self.asked: dict[str, Asked] = {}
        self.knobs: dict[str, Any] = {}
        self.num_blocks = 0
        self.max_model_len = 0
        self._live: set[str] = set()
        self._idle_ns = 0  # since when nothing runs
        self._number = 0
        self._moved = True
        self._salt: str | None = None  # of the newest load's first request

    def feed(self, events: Iterable[Event]) -> bool:
        """Whether any of them matters here."""
        took = False
        for event in events:
            if isinstance(event, EngineStarted):
                self.clear()
                self.knobs = dict(event.config)
                self.max_model_len = int(event.config.get("max_model_len") or 0)
            elif isinstance(event, Snapshot):
                self.knobs |= event.knobs
                self.num_blocks = event.num_blocks
                self.knobs |= {"num_kv_blocks": event.num_blocks, "block_size": event.block_size}
                self._live |= {r.request_id for r in event.requests}
            elif isinstance(event, PoolResized):
                self.num_blocks = event.num_blocks
            elif isinstance(event, KnobChanged):
                self._knob(event)
            elif isinstance(event, RequestAdded):
                self._added(event)
            elif isinstance(event, StepDone):
                if self.loads:
                    self.loads[-1].steps.append(event)
            elif isinstance(event, RequestFinished):
                self._live.discard(event.request_id)
                self._idle_ns = event.time_ns
            self.collector.feed((event,))
            took = True
        return took

    def _knob(self, event: KnobChanged) -> None:
        if event.draining or event.request_id is not None:
            return
        self.knobs[event.name] = event.new
        if event.name in KNOBS:
            self._moved = True
            if self.loads and self._live:
                self.loads[-1].mixed = True

    def _added(self, event: RequestAdded) -> None:
        if event.parent_id is not None:
            return
        paused = event.time_ns - self._idle_ns > PAUSE_S * 1e9 or event.cache_salt != self._salt
        if self._moved or (paused and not self._live) or not self.loads:
            self._number += 1
            self.loads.append(Load(Setting.of(self.knobs), self._number))
            self._moved, self._salt = False, event.cache_salt
        load = self.loads[-1]
        load.ids.append(event.request_id)
        load.num_requests += 1
        self._live.add(event.request_id)
        priority = getattr(event, "priority", 0) or 0
        self.asked[event.request_id] = Asked(tuple(event.prompt_token_ids), dict(event.sampling), event.owner, priority)
        while len(self.asked) > KEPT_LOADS * MOST_REQUESTS:
            del self.asked[next(iter(self.asked))]

    # -- what is known of a load --------------------------------------------------------------------------------------------

    @property
    def setting(self) -> Setting:
        """As it is now."""
        return Setting.of(self.knobs)

    def records(self, load: Load) -> list[RequestRecord]:
        """Of its requests that have ended with tokens, in order of arrival; the newest, within MOST_REQUESTS and MOST_TOKENS."""
        known = {r.request_id: r for r in self.collector.finished}
        found: list[RequestRecord] = []
        tokens = 0
        for request_id in reversed(load.ids):
            r = known.get(request_id)
            if r is None or not (r.completed and r.num_prompt_tokens and r.num_output_tokens):
                continue
            tokens += r.num_output_tokens
            if found and tokens > MOST_TOKENS:
                break
            found.append(r)
        return found[::-1]

    def complete(self, load: Load) -> bool:
        """Whether nothing of it still runs."""
        return not any(i in self._live for i in load.ids)

    def key(self, load: Load) -> tuple[Any, ...]:
        """Equal for loads of the same requests: prompts and numbers of tokens."""
        return tuple(sorted((hash(self.asked[r.request_id].prompt_token_ids), r.num_output_tokens) for r in self.records(load)))

    def usable(self) -> list[Load]:
        """Loads that have ended requests and steps, oldest first."""
        return [load for load in self.loads if load.steps and self.records(load)]

    def same(self, load: Load) -> list[Load]:
        """Other loads of the same requests, which nobody disturbed; the newest of each setting, oldest first."""
        key = self.key(load)
        found: dict[Setting, Load] = {}
        for other in self.usable():
            if other is not load and not other.mixed and self.complete(other) and self.key(other) == key:
                found.pop(other.setting, None)
                found[other.setting] = other
        return list(found.values())

    def measures(self, load: Load, limits: Limits | None = None) -> Measures:
        """As it was measured."""
        return measure(self.records(load), self.columns(load), limits)

    def columns(self, load: Load) -> Steps:
        steps = Steps()
        for event in load.steps:
            end = self.collector.seconds(event.time_ns)
            add_step(steps, event, self.num_blocks, end, event.step_ms / 1e3)
        return steps


# ------------------------------------------------------------------------------------------------------------ what it costs


@dataclass(frozen=True)
class Fitted:
    """``cost`` with the time between steps in it; ``left_out`` steps had another cause than their tokens."""

    cost: StepCost
    between_s: float
    left_out: int


def fitted(steps: Sequence[StepDone]) -> Fitted:
    """The cost of these steps, in order. ValueError where none computed anything."""
    cost = fit_step_cost(steps)
    ordinary = [s for s in steps if not s.runs or s.step_ms / 1e3 <= OUTLIER * cost(*work_of(s))]
    left_out = len(steps) - len(ordinary)
    if left_out and any(s.runs for s in ordinary):
        cost = fit_step_cost(ordinary)
    gaps = [
        (b.time_ns - a.time_ns) / 1e9 - b.step_ms / 1e3 for a, b in zip(steps, list(steps)[1:])
        if a.runs and b.runs and b.step == a.step + 1
    ]  # fmt: skip
    # A request that leaves nobody behind makes an idle gap, which is not between steps: the median does not see it.
    between = max(0.0, median(gaps)) if gaps else 0.0
    return Fitted(replace(cost, base_s=cost.base_s + between), between, left_out)


def work_of(step: StepDone) -> tuple[float, float]:
    """(tokens, pairs of a token and one that it attends to) that a step computed."""
    from engine.load.cost import num_contexts

    return float(sum(run.num_tokens for run in step.runs)), sum(num_contexts(run.start, run.num_tokens) for run in step.runs)


def requests_of(records: Sequence[RequestRecord], cached: bool) -> list[Replayed]:
    """``cached``: whether what the prefix cache gave is given again."""
    found = from_records(records)
    return found if cached else [replace(r, num_cached_tokens=0) for r in found]


def replayed(requests: Sequence[Replayed], setting: Setting, cost: StepCost) -> Timeline:
    """The requests under a setting. What they found in the prefix cache they find again."""
    return replay(
        requests, cost, setting.batching, max_num_seqs=setting.max_num_seqs, max_num_batched_tokens=setting.max_num_batched_tokens,
        chunked=setting.enable_chunked_prefill, max_wait_s=setting.batching_timeout_ms / 1e3, scheduling_policy=setting.scheduling_policy,
        num_kv_blocks=setting.num_kv_blocks, block_size=setting.block_size,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- the Gantt

PHASES = ("prefill", "decode", "padding", "preempted")
GANTT = ("left", "right", "slot", "phase", "name", "tokens", "steps", "ms", "request")


def measured_steps(
    steps: Sequence[StepDone], first_ns: int, only: Container[str] | None = None
) -> tuple[list[ReplayedStep], list[str]]:
    """(steps as a replay has them, seconds since ``first_ns``; names of the requests that the cells have the indices of).

    ``only``: requests to take; None: all. A step that ran none of them is left out. Each request has the lowest slot that was free when it first ran, until it no longer runs.
    """
    wanted = [[run for run in step.runs if only is None or run.request_id in only] for step in steps]
    last: dict[str, int] = {}
    for i, runs in enumerate(wanted):
        last |= {run.request_id: i for run in runs}
    slots: dict[str, int] = {}
    index: dict[str, int] = {}
    out = []
    for i, step in enumerate(steps):
        cells = []
        for run in wanted[i]:
            if run.request_id not in slots:
                taken = set(slots.values())
                slots[run.request_id] = next(n for n in range(len(taken) + 1) if n not in taken)
            at = index.setdefault(run.request_id, len(index))
            cells.append(Cell(slots[run.request_id], at, run.phase, run.num_tokens))
        end = (step.time_ns - first_ns) / 1e9
        if cells or not step.runs:
            out.append(ReplayedStep(end - step.step_ms / 1e3, end, tuple(cells), step.num_waiting, ()))
        for request_id in [r for r in slots if last[r] == i]:
            del slots[request_id]
    return out, list(index)


def gantt(steps: Sequence[ReplayedStep], names: Sequence[str]) -> dict[str, list[Any]]:
    """Bars: what each slot did and for how long; neighbouring steps of the same kind are one bar. ``left`` and ``right`` in seconds.

    Where a slot computed a prompt and its padding in one step, each has the share of the step that its tokens have.
    """
    columns: dict[str, list[Any]] = {name: [] for name in GANTT}
    open_: dict[int, tuple[int, str, int]] = {}  # slot -> (request, phase, row)
    for step in steps:
        total: dict[int, int] = {}
        for cell in step.cells:
            total[cell.slot] = total.get(cell.slot, 0) + cell.num_tokens
        done = dict.fromkeys(total, 0)
        length = step.end_s - step.start_s
        for cell in step.cells:
            of = total[cell.slot] or 1
            left = step.start_s + length * done[cell.slot] / of
            done[cell.slot] += cell.num_tokens
            right = step.start_s + length * done[cell.slot] / of
            before = open_.get(cell.slot)
            if before is not None and before[:2] == (cell.request, cell.phase):
                row = before[2]
                columns["right"][row] = right
                columns["tokens"][row] += cell.num_tokens
                columns["steps"][row] += 1
                continue
            open_[cell.slot] = (cell.request, cell.phase, len(columns["left"]))
            values = (left, right, cell.slot, cell.phase, names[cell.request], cell.num_tokens, 1, 0.0, cell.request)
            for name, value in zip(GANTT, values, strict=True):
                columns[name].append(value)
        for slot in [s for s in open_ if s not in total]:
            del open_[slot]
    columns["ms"] = [1e3 * (b - a) for a, b in zip(columns["left"], columns["right"])]
    return columns


def slots_of(bars: dict[str, list[Any]]) -> int:
    return 1 + max(bars["slot"], default=0)


def idle_share(steps: Sequence[ReplayedStep], slots: int) -> float:
    """Of slots and time in steps, the share in which a slot ran nothing."""
    time = sum(s.end_s - s.start_s for s in steps)
    used = sum(len({c.slot for c in s.cells}) * (s.end_s - s.start_s) for s in steps)
    return 1 - used / (slots * time) if time and slots else math.nan


def padding_share(steps: Sequence[ReplayedStep]) -> float:
    """Of the computed tokens."""
    tokens = sum(c.num_tokens for s in steps for c in s.cells)
    return sum(c.num_tokens for s in steps for c in s.cells if c.phase == PADDING) / tokens if tokens else math.nan


def duration(seconds: float) -> str:
    """ "4.93 ms", "1.96 µs"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return number(seconds / size, unit)
    return number(seconds / 1e-9, "ns")


def signed(share: float) -> str:
    """0.123 as "+12 %", without "-0 %"."""
    percent = round(100 * share)
    return f"{percent:+d} %" if percent else "±0 %"


def load_title(load: Load, records: Sequence[RequestRecord]) -> str:
    """ "3. 12 requests, continuous, batch 8, budget 512, chunked"."""
    many = ngettext("{n} request", "{n} requests", len(records)).format(n=len(records))
    return f"{load.number}. {many}: {load.setting.label}"
