"""A run as a comparison needs it: what was asked, which token came when, who ran in which step. From events alone."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from engine.events.log import EventLog
from engine.events.state import UNSEEN
from engine.events.types import (
    BeamsFinished,
    EngineStarted,
    Event,
    KnobChanged,
    RequestAdded,
    RequestBranched,
    RequestFinished,
    RequestPreempted,
    Snapshot,
    StepDone,
    TokenSampled,
)

MAX_MISSING = 1 << 24  # tokens that nobody watched, of all requests: a file that claims more is refused


@dataclass
class Trace:
    """One request (one of the siblings of n > 1) from its arrival to its end, or to the end of the log."""

    request_id: str
    ordinal: int  # 0, 1, ... in order of arrival
    owner: str
    prompt_token_ids: list[int]
    prompt_text: str
    sampling: dict[str, Any]  # as it arrived; see ``sampling_at``
    arrived_step: int
    parent_id: str | None = None
    sample_index: int = 0
    from_the_start: bool = True  # False: it was running already when the log began
    token_ids: list[int] = field(default_factory=list)  # UNSEEN where nobody watched
    token_steps: list[int] = field(default_factory=list)  # the step of each; -1 where nobody watched
    num_output_tokens: int = 0
    changes: list[tuple[int, str, Any]] = field(default_factory=list)  # (from which output token on, parameter, value)
    num_preemptions: int = 0
    finish_reason: str | None = None  # None: the log ends before it
    message: str = ""

    def sampling_at(self, index: int) -> dict[str, Any]:
        """The parameters with which output token ``index`` was chosen."""
        return {**self.sampling, **{name: value for at, name, value in self.changes if at <= index}}

    @property
    def group_id(self) -> str:
        """The id under which it was asked for: the siblings of n > 1 share it."""
        return self.request_id.split("#", 1)[0]


@dataclass
class Transcript:
    """``steps[i]`` and ``schedule[i]``: each step there was, and a hash of who ran in it, for how many tokens and from which
    position. ``first_step``: the step after which the log begins; steps of two runs are compared counted from there."""

    started: EngineStarted | None = None
    first_step: int = 0
    traces: list[Trace] = field(default_factory=list)  # in order of arrival
    steps: list[int] = field(default_factory=list)
    schedule: list[int] = field(default_factory=list)
    knob_changes: list[KnobChanged] = field(default_factory=list)  # of the engine, not of one request
    warm_blocks: int = 0  # blocks that the prefix cache could find already when the log began
    dropped: int = 0  # events that the log no longer holds in front

    @classmethod
    def of(cls, log: EventLog) -> "Transcript":
        """Reads every event once (some ten seconds a million). CodecError where a saved run turns out to be damaged."""
        reader = _Reader(cls(started=log.started, dropped=log.dropped, first_step=log.first_step))
        if log.dropped:
            reader.snapshot(log.at(log.first_step).snapshot())
        reader.feed(log)
        return reader.made

    @property
    def tokens_watched(self) -> bool:
        """Whether the log holds every output token's id."""
        return all(UNSEEN not in t.token_ids and len(t.token_ids) == t.num_output_tokens for t in self.traces)


class _Reader:
    """Builds a Transcript from events in order."""

    def __init__(self, made: Transcript) -> None:
        self.made = made
        self.open: dict[str, Trace] = {}  # id -> its newest trace; ids are used again
        self.missing = 0
        self.handlers: dict[type, Any] = {
            EngineStarted: self.engine_started,
            Snapshot: self.snapshot,
            RequestAdded: self.added,
            RequestPreempted: self.preempted,
            RequestFinished: self.finished,
            RequestBranched: self.branched,
            TokenSampled: self.sampled,
            BeamsFinished: self.beams_finished,
            StepDone: self.step_done,
            KnobChanged: self.knob_changed,
        }

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            handler = self.handlers.get(type(event))
            if handler is not None:
                handler(event)

    def engine_started(self, e: EngineStarted) -> None:
        self.made.started, self.made.first_step = e, e.step

    def snapshot(self, e: Snapshot) -> None:
        """The state at the beginning; one that comes later (events were lost) tells of requests that are new here."""
        if not self.made.steps:
            self.made.warm_blocks = len(e.cached)
        for r in e.requests:
            if r.request_id in self.open and self.open[r.request_id].finish_reason is None:
                continue
            trace = self._new(
                r.request_id, r.owner, r.prompt_token_ids, r.prompt_text, r.sampling, e.step, r.parent_id, r.sample_index
            )
            trace.from_the_start = False
            trace.token_ids, trace.num_output_tokens = list(r.output_token_ids), len(r.output_token_ids)
            trace.token_steps = [-1] * len(trace.token_ids)

    def added(self, e: RequestAdded) -> None:
        self._new(e.request_id, e.owner, e.prompt_token_ids, e.prompt_text, e.sampling, e.step, e.parent_id, e.sample_index)

    def _new(self, request_id: str, *facts: Any) -> Trace:
        trace = Trace(request_id, len(self.made.traces), *facts)
        self.made.traces.append(trace)
        self.open[request_id] = trace
        return trace

    def branched(self, e: RequestBranched) -> None:
        trace = self.open.get(e.request_id)
        if trace is not None:
            trace.token_ids, trace.token_steps = list(e.output_token_ids), [-1] * len(e.output_token_ids)
            trace.num_output_tokens = len(e.output_token_ids)

    def beams_finished(self, e: BeamsFinished) -> None:
        """A beam's tokens are only its own at the end: until then beams take over each other's."""
        for i, sequence in enumerate(e.sequences):
            trace = self.open.get(f"{e.request_id}#{i}" if i else e.request_id)
            if trace is not None:
                trace.token_ids, trace.token_steps = list(sequence.token_ids), [-1] * len(sequence.token_ids)
                trace.num_output_tokens = len(sequence.token_ids)

    def preempted(self, e: RequestPreempted) -> None:
        if e.request_id in self.open:
            self.open[e.request_id].num_preemptions += 1

    def finished(self, e: RequestFinished) -> None:
        trace = self.open.get(e.request_id)
        if trace is not None:
            trace.finish_reason, trace.message = e.reason, e.message
            trace.num_output_tokens = max(trace.num_output_tokens, e.num_output_tokens)

    def sampled(self, e: TokenSampled) -> None:
        trace = self.open.get(e.request_id)
        if trace is None:
            return
        missing = e.index - len(trace.token_ids)
        if missing > 0:  # nobody watched
            self.missing += missing
            if self.missing > MAX_MISSING:
                raise ValueError(f"token {e.index} of request {e.request_id!r}, where {missing} before it are not known")
            trace.token_ids += [UNSEEN] * missing
            trace.token_steps += [-1] * missing
        trace.token_ids[e.index :] = [e.token_id]
        trace.token_steps[e.index :] = [e.step]
        trace.num_output_tokens = max(trace.num_output_tokens, e.index + 1)

    def step_done(self, e: StepDone) -> None:
        self.made.steps.append(e.step)
        self.made.schedule.append(hash(tuple(e.runs)))
        for run in e.runs:
            trace = self.open.get(run.request_id)
            if run.sampled and trace is not None:
                count = run.end + 1 - len(trace.prompt_token_ids)
                trace.num_output_tokens = max(trace.num_output_tokens, count)

    def knob_changed(self, e: KnobChanged) -> None:
        if e.request_id is None:
            self.made.knob_changes.append(e)
        elif e.request_id in self.open:
            trace = self.open[e.request_id]
            trace.changes.append((trace.num_output_tokens, e.name, e.new))
