"""From events to what the Run page draws: pure bookkeeping, bounded, no engine and no screen.

A ``RunRows`` is fed every event once and in order. What it keeps:
- ``requests``: one ``RequestRow`` for each of the newest MAX_REQUESTS requests;
- ``bars``: what each request did in each of the newest MAX_STEPS steps (the Gantt);
- ``series``: the gauges' points for those steps.
Each has a mark of what changed since it was last asked, so that a screen can be sent the difference.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.events.types import (
    BeamsFinished,
    BeamsSelected,
    EngineStarted,
    Event,
    PoolResized,
    RequestAdded,
    RequestBranched,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    Snapshot,
    StepDone,
    TokenSampled,
)

MAX_REQUESTS = 64
MAX_TOKENS = 1500  # of one request, the newest
MAX_STEPS = 4000
RATE_WINDOW_MS = 1000.0  # tokens/s is taken over the newest steps that last this long together


class Token(NamedTuple):
    """One chip. ``position`` counts from the first prompt token; ``logprob`` in nats; ``ms`` since the request's token before."""

    token_id: int
    text: str
    logprob: float
    position: int
    step: int
    ms: float
    rank: int


class Bar(NamedTuple):
    """What one request did in one step. ``start``, ``num_tokens``: the positions computed (0 tokens while it waited)."""

    ordinal: int
    request_id: str
    owner: str
    step: int
    phase: str  # "waiting" | "prefill" | "decode" | "preempted"
    start: int
    num_tokens: int
    step_ms: float


@dataclass
class RequestRow:
    ordinal: int  # 0, 1, ... in order of arrival
    request_id: str
    owner: str
    prompt: str
    num_prompt_tokens: int
    arrived_step: int
    parent_id: str | None = None
    sample_index: int = 0
    before: int = 0  # output tokens that came before anybody watched
    tokens: deque[Token] = field(default_factory=lambda: deque(maxlen=MAX_TOKENS))
    finished_step: int | None = None
    reason: str = ""
    message: str = ""
    preempted: bool = False  # and not yet back

    @property
    def group_id(self) -> str:
        """The id that abort and update_sampling take: the siblings of n > 1 belong together."""
        return self.request_id.split("#", 1)[0]


SERIES = ("tokens_per_second", "step_ms", "batch", "kv_use", "watching")


class RunRows:
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.requests: dict[str, RequestRow] = {}
        self.bars: deque[tuple[int, list[Bar]]] = deque(maxlen=MAX_STEPS)  # (step, its bars)
        self.series: dict[str, deque[tuple[int, float]]] = {name: deque(maxlen=MAX_STEPS) for name in SERIES}
        self.num_blocks = 0
        self.changed: set[str] = set()  # requests with something new, but for their tokens
        self.new_tokens: dict[str, list[Token]] = {}
        self.retold: set[str] = set()  # requests whose tokens are no longer those that were told before
        self.new_bars: list[Bar] = []
        self.new_points: dict[str, list[tuple[int, float]]] = {name: [] for name in SERIES}
        self.dropped: list[str] = []  # requests forgotten
        self.restarted = True  # everything before is void
        self._ordinal = 0
        self._searches: dict[str, dict[int, Token]] = {}  # of running beam searches, every token by the output up to it
        self._recent: deque[tuple[float, int]] = deque()  # (ms, tokens) of the newest steps
        self._recent_ms = 0.0

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            handler = _HANDLERS.get(type(event))
            if handler is not None:
                handler(self, event)

    def taken(self) -> None:
        """The screen has been sent what was new."""
        self.changed, self.new_tokens, self.new_bars, self.dropped, self.retold = set(), {}, [], [], set()
        self.new_points = {name: [] for name in SERIES}
        self.restarted = False

    def steps_between(self, first: int, last: int) -> Iterator[Bar]:
        """The bars of the steps first..last (both included), oldest first."""
        for step, bars in self.bars:
            if first <= step <= last:
                yield from bars

    def points_until(self, name: str, step: int, count: int) -> list[tuple[int, float]]:
        """The newest ``count`` points of a series up to ``step``."""
        return [p for p in self.series[name] if p[0] <= step][-count:]

    # -- one handler a kind --------------------------------------------------------------------------------------------

    def _add(self, **facts: Any) -> RequestRow:
        row = RequestRow(ordinal=self._ordinal, **facts)
        self._ordinal += 1
        self.requests.pop(row.request_id, None)
        self.requests[row.request_id] = row
        self.changed.add(row.request_id)
        finished = [r.request_id for r in self.requests.values() if r.finished_step is not None]
        # Only finished ones make room: whatever runs stays on the screen.
        for request_id in finished[: max(0, len(self.requests) - MAX_REQUESTS)]:
            del self.requests[request_id]
            self.new_tokens.pop(request_id, None)
            self.changed.discard(request_id)
            self.dropped.append(request_id)
        return row

    def _started(self, e: EngineStarted) -> None:
        self.clear()
        self.num_blocks = e.config.get("num_kv_blocks") or 0

    def _snapshot(self, e: Snapshot) -> None:
        self.num_blocks = e.num_blocks
        there = set()
        for r in e.requests:
            there.add(r.request_id)
            row = self.requests.get(r.request_id) or self._add(
                request_id=r.request_id, owner=r.owner, prompt=r.prompt_text, num_prompt_tokens=len(r.prompt_token_ids),
                arrived_step=e.step, parent_id=r.parent_id, sample_index=r.sample_index,
                before=len(r.output_token_ids),
            )  # fmt: skip
            row.preempted = r.status == "preempted"
        for row in self.requests.values():
            if row.finished_step is None and row.request_id not in there:
                self._end(row, e.step, "", "")  # it ended while events were dropped

    def _added(self, e: RequestAdded) -> None:
        self._add(
            request_id=e.request_id, owner=e.owner, prompt=e.prompt_text, num_prompt_tokens=len(e.prompt_token_ids),
            arrived_step=e.step, parent_id=e.parent_id, sample_index=e.sample_index,
        )  # fmt: skip

    def _forked(self, e: RequestForked) -> None:
        self.changed.add(e.request_id)

    def _preempted(self, e: RequestPreempted) -> None:
        row = self.requests.get(e.request_id)
        if row is not None:
            row.preempted = True
            self.changed.add(e.request_id)

    def _finished(self, e: RequestFinished) -> None:
        row = self.requests.get(e.request_id)
        if row is not None:
            self._end(row, e.step, e.reason, e.message)

    def _end(self, row: RequestRow, step: int, reason: str, message: str) -> None:
        row.finished_step, row.reason, row.message = step, reason, message
        self.changed.add(row.request_id)

    def _token(self, e: TokenSampled) -> None:
        row = self.requests.get(e.request_id)
        if row is None:
            return
        token = Token(e.token_id, e.text, e.logprob, e.position, e.step, e.step_ms, e.rank)
        if not row.tokens:
            row.before = e.index
        row.tokens.append(token)
        search = self._searches.get(row.group_id)
        if search is not None and not row.before:
            search[hash(tuple(t.token_id for t in row.tokens))] = token
        self.new_tokens.setdefault(e.request_id, []).append(token)

    def _retell(self, row: RequestRow, tokens: Iterable[Token], before: int) -> None:
        row.tokens, row.before = deque(tokens, maxlen=MAX_TOKENS), before
        self.retold.add(row.request_id)

    def _branched(self, e: RequestBranched) -> None:
        row, source = self.requests.get(e.request_id), self.requests.get(e.source_id)
        if row is not None:
            known = _by_beginning(source.tokens) if source is not None and not source.before else {}
            self._retell(row, _chips(e.output_token_ids, e.output_texts, row.num_prompt_tokens, e.step, known), 0)

    def _beams(self, e: BeamsSelected) -> None:
        """A beam that took another one's place has its tokens; those of this step come as TokenSampled."""
        self._searches.setdefault(e.request_id, {})
        rows = {row.sample_index: row for row in self.requests.values() if row.group_id == e.request_id}
        before = {index: (list(row.tokens), row.before) for index, row in rows.items()}
        for c in e.candidates:
            if c.beam >= 0 and c.beam != c.source and c.beam in rows and c.source in before:
                self._retell(rows[c.beam], *before[c.source])

    def _beams_finished(self, e: BeamsFinished) -> None:
        known = self._searches.pop(e.request_id, {})
        for index, sequence in enumerate(e.sequences):
            row = self.requests.get(f"{e.request_id}#{index}" if index else e.request_id)
            if row is not None:
                self._retell(row, _chips(sequence.token_ids, sequence.texts, row.num_prompt_tokens, e.step, known), 0)

    def _step(self, e: StepDone) -> None:
        ran = {run.request_id: run for run in e.runs if not run.is_padding}
        bars = []
        for row in self.requests.values():
            run = ran.get(row.request_id)
            if run is not None:
                row.preempted = False
                phase, start, num_tokens = run.phase, run.start, run.num_tokens
            elif row.finished_step is None:
                phase, start, num_tokens = "preempted" if row.preempted else "waiting", 0, 0
            else:
                continue
            bars.append(Bar(row.ordinal, row.request_id, row.owner, e.step, phase, start, num_tokens, e.step_ms))
            self.changed.add(row.request_id)
        self.bars.append((e.step, bars))
        self.new_bars += bars
        self._points(e)

    def _points(self, e: StepDone) -> None:
        sampled = sum(run.sampled for run in e.runs)
        self._recent.append((e.step_ms, sampled))
        self._recent_ms += e.step_ms
        while len(self._recent) > 1 and self._recent_ms - self._recent[0][0] >= RATE_WINDOW_MS:
            self._recent_ms -= self._recent.popleft()[0]
        tokens = sum(n for _, n in self._recent)
        values = {
            "tokens_per_second": 1000 * tokens / self._recent_ms if self._recent_ms > 0 else 0.0,
            "step_ms": e.step_ms,
            "batch": float(sum(not run.is_padding for run in e.runs)),
            "kv_use": 100 * e.used_blocks / self.num_blocks if self.num_blocks else 0.0,
            "watching": 100 * e.record_ms / e.step_ms if e.step_ms > 0 else 0.0,
        }
        for name, value in values.items():
            self.series[name].append((e.step, value))
            self.new_points[name].append((e.step, value))

    def _resized(self, e: PoolResized) -> None:
        self.num_blocks = e.num_blocks


def _chips(token_ids: list[int], texts: list[str], start: int, step: int, known: dict[int, Token]) -> list[Token]:
    """These output tokens, with what is ``known`` of them, by the hash of the output up to each."""
    return [
        known.get(hash(tuple(token_ids[: i + 1]))) or Token(token_id, text, math.nan, start + i, step, 0.0, 0)
        for i, (token_id, text) in enumerate(zip(token_ids, texts, strict=False))
    ]


def _by_beginning(tokens: Iterable[Token]) -> dict[int, Token]:
    """Each token by the hash of the output up to it."""
    token_ids: list[int] = []
    known = {}
    for token in tokens:
        token_ids.append(token.token_id)
        known[hash(tuple(token_ids))] = token
    return known


_HANDLERS: dict[type, Any] = {
    EngineStarted: RunRows._started,
    Snapshot: RunRows._snapshot,
    RequestAdded: RunRows._added,
    RequestForked: RunRows._forked,
    RequestPreempted: RunRows._preempted,
    RequestFinished: RunRows._finished,
    TokenSampled: RunRows._token,
    RequestBranched: RunRows._branched,
    BeamsSelected: RunRows._beams,
    BeamsFinished: RunRows._beams_finished,
    StepDone: RunRows._step,
    PoolResized: RunRows._resized,
}
