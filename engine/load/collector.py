"""From events, live or saved, to the records that ``engine.measures`` reads."""

import math
from collections import deque
from collections.abc import Iterable

from engine.events.types import (
    Event,
    PoolResized,
    PrefixLookup,
    RequestAdded,
    RequestBranched,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    Run,
    Snapshot,
    StepDone,
)
from engine.measures import Limits, Measures, RequestRecord, Steps, measure

PADDING = "padding"  # Run.phase of what a static batch computes for nobody


class Collector:
    """Takes every event in its order (``feed``) and keeps what measures need, bounded: the last ``capacity`` finished requests.

    Times are seconds since the first event. Tokens come at the ends of their steps. The siblings of n > 1 are records of their
    own that arrive with their request; a beam search is one record, with a token each time its beams gain one. Requests that
    were under way before the first event are left out (``num_unknown``): when their tokens came is not known.
    """

    def __init__(self, capacity: int = 100_000) -> None:
        self.steps = Steps()
        self.num_unknown = 0
        self.finished: deque[RequestRecord] = deque(maxlen=capacity)
        self._live: dict[str, RequestRecord] = {}
        self._ending: dict[
            str, tuple[RequestRecord, int]
        ] = {}  # finished in a step whose StepDone is to come; tokens it has in all
        self._given: dict[str, int] = {}  # output that a branch began with
        self._forked: list[tuple[str, str]] = []  # (sibling, parent) in this step, so with a token of it
        self._beams: dict[str, str] = {}  # beam -> the request that it is of
        self._num_blocks = 0
        self._origin_ns: int | None = None

    def seconds(self, time_ns: int) -> float:
        """An event's time on the records' clock."""
        if self._origin_ns is None:
            self._origin_ns = time_ns
        return (time_ns - self._origin_ns) / 1e9

    @property
    def records(self) -> list[RequestRecord]:
        """Finished ones, then those under way."""
        return [*self.finished, *self._live.values()]

    def measures(self, limits: Limits | None = None, *, unfinished: bool = True) -> Measures:
        return measure(self.records, self.steps, limits, unfinished=unfinished)

    def feed(self, events: Iterable[Event]) -> "Collector":
        for event in events:
            now = self.seconds(event.time_ns)
            if isinstance(event, StepDone):
                self._step(event, now)
            elif isinstance(event, RequestAdded):
                self._added(event, now)
            elif isinstance(event, RequestFinished):
                self._finished(event, now)
            elif isinstance(event, RequestForked):
                self._forked.append((event.request_id, event.parent_id))
            elif isinstance(event, RequestBranched):
                self._given[event.request_id] = len(event.output_token_ids)
            elif isinstance(event, RequestPreempted) and event.request_id in self._live:
                self._live[event.request_id].num_preemptions += 1
            elif isinstance(event, PrefixLookup) and event.request_id in self._live and not event.recompute:
                self._live[event.request_id].num_cached_tokens = event.num_hit_tokens
            elif isinstance(event, Snapshot):
                self._num_blocks = event.num_blocks
                self.num_unknown += sum(r.request_id not in self._live for r in event.requests)
            elif isinstance(event, PoolResized):
                self._num_blocks = event.num_blocks
        return self

    def _added(self, event: RequestAdded, now: float) -> None:
        parent = self._live.get(event.parent_id or "")
        if event.sampling.get("beam_width") is not None and event.parent_id is not None:
            self._beams[event.request_id] = self._beams.get(event.parent_id, event.parent_id)
            return
        record = RequestRecord(event.request_id, now, len(event.prompt_token_ids))
        if parent is not None:  # the prompt counts once
            record.arrival_s, record.num_prompt_tokens = parent.arrival_s, 0
        self._live[event.request_id] = record

    def _finished(self, event: RequestFinished, now: float) -> None:
        self._beams.pop(event.request_id, None)
        record = self._live.pop(event.request_id, None)
        if record is None:
            return
        record.finish_s, record.outcome, record.message = now, event.reason, event.message
        self._ending[event.request_id] = record, event.num_output_tokens - self._given.pop(event.request_id, 0)
        self.finished.append(record)

    def _find(self, request_id: str) -> RequestRecord | None:
        """Of a request that is under way, or has ended in this step."""
        live = self._live.get(request_id)
        return live if live is not None or request_id not in self._ending else self._ending[request_id][0]

    def _step(self, event: StepDone, now: float) -> None:
        begin = now - event.step_ms / 1e3
        gained: dict[str, int] = {}
        for run in event.runs:
            if run.is_padding:
                continue
            request_id = self._beams.get(run.request_id, run.request_id)
            record = self._find(request_id)
            if record is not None and math.isnan(record.scheduled_s):
                record.scheduled_s = begin
            if run.sampled:
                gained[request_id] = 1 + run.num_accepted
        for request_id, parent_id in self._forked:
            gained.setdefault(request_id, 1)
            sibling, parent = self._find(request_id), self._find(parent_id)
            if sibling is not None and parent is not None:
                sibling.scheduled_s = parent.scheduled_s
        for request_id, count in gained.items():
            if request_id in self._live:
                self._live[request_id].token_times_s.extend([now] * count)
            elif request_id in self._ending:
                record, total = self._ending[request_id]
                record.token_times_s.extend([now] * max(0, min(count, total - record.num_output_tokens)))
                record.finish_s = max(record.finish_s, now) if record.completed else record.finish_s
        self._forked.clear()
        self._ending.clear()
        add_step(self.steps, event, self._num_blocks, now, event.step_ms / 1e3)


def add_step(steps: Steps, event: StepDone, num_blocks: int, end_s: float, step_s: float) -> None:
    """A step's row. ``num_blocks``: of the pool, 0 where that is not known."""
    tokens = step_tokens(event.runs)
    steps.append(
        end_s=end_s, step_s=step_s, waiting=event.num_waiting, running=event.num_running,
        kv_usage=event.used_blocks / num_blocks if num_blocks else math.nan, prefill_tokens=tokens["prefill"],
        decode_tokens=tokens["decode"], padding_tokens=tokens[PADDING], token_budget=event.token_budget,
    )  # fmt: skip


def step_tokens(runs: Iterable[Run]) -> dict[str, int]:
    """Tokens that a step computed, by phase: "prefill", "decode", "padding"."""
    tokens = {"prefill": 0, "decode": 0, PADDING: 0}
    for run in runs:
        tokens[run.phase] += run.num_tokens
    return tokens
