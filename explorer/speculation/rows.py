"""From events to what the Speculation page draws: one ``Track`` a request with its ``Round``s, one ``StepRow`` a step. Pure.

A round is one draft of one request and what the target made of it. ``SpeculationRows`` is fed every event once and in order.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, NamedTuple

from engine.events.types import (
    DraftProposed,
    DraftVerified,
    EngineStarted,
    Event,
    KnobChanged,
    RequestAdded,
    RequestFinished,
    Snapshot,
    StepDone,
    TokenSampled,
)

MAX_TRACKS = 96  # the newest requests
MAX_ROUNDS = 600  # rounds of one request that can be looked at, the newest
MAX_NODES = 256  # of one draft: far more than any engine proposes
MAX_TOKENS = 4000  # tokens of one request, the newest
MAX_STEPS = 5000  # the newest
MAX_TALLIES = 10_000


class Token(NamedTuple):
    position: int
    step: int
    text: str


class StepRow(NamedTuple):
    """One step in which nobody computed a prompt: nothing but decodes and drafts that were verified."""

    step: int
    batch: int  # requests
    asked: int  # of them, those that a drafter was asked for
    drafting: int  # and those that it had something for
    nodes: int  # tokens proposed, of all
    depth: float  # mean length of a draft (of a tree: its depth); 0: nothing was proposed
    kept: int  # tokens gained, of all
    draft_ms: float
    verify_ms: float  # the step without drafting and without what recording for the screen took
    method: str  # "" with nobody asked
    setting: "Setting"
    temperature: float  # of the requests; NaN: not the same for all


class Tally(NamedTuple):
    """One round in numbers, kept for longer than the round itself."""

    step: int
    method: str
    rule: str
    temperature: float
    depth: int  # of the deepest node that was proposed
    nodes: int
    accepted: int
    kept: int


AFTER_LOOKUP = "+lookup"  # behind the name of a drafter that is asked where the text itself has nothing to offer


def told_method(facts: dict[str, Any]) -> str:
    """The drafter, and whether the text is looked up first: what is counted apart."""
    return str(facts.get("method", "")) + (AFTER_LOOKUP if facts.get("prompt_lookup") else "")


class Setting(NamedTuple):
    """What the engine speculates with."""

    method: str  # ``told_method``; "": it does not
    k: int | str  # num_speculative_tokens; "auto"
    acceptance: str = ""
    tree: tuple[int, ...] = ()  # nodes at each depth; (): a chain
    trained_exit: bool = True  # of layer skipping

    @classmethod
    def of(cls, facts: dict[str, Any] | None) -> "Setting":
        if not facts:
            return NOTHING
        k = facts.get("num_speculative_tokens", 4)
        acceptance, tree = str(facts.get("acceptance", "")), tuple(facts.get("tree") or ())
        return cls(told_method(facts), k, acceptance, tree, bool(facts.get("trained_exit", True)))

    @property
    def on(self) -> bool:
        return bool(self.method) and self.k != 0


NOTHING = Setting("", 0)


@dataclass(frozen=True, slots=True)
class Round:
    proposed: DraftProposed
    verified: DraftVerified
    temperature: float
    setting: Setting

    @property
    def step(self) -> int:
        return self.verified.step

    @property
    def position(self) -> int:
        """Of the first token that was proposed."""
        return self.verified.position

    @property
    def depths(self) -> list[int]:
        return depths_of(self.proposed)

    def covers(self, position: int) -> bool:
        """Whether a token at ``position`` came out of it."""
        return self.position <= position < self.position + max(1, self.verified.num_kept)

    @property
    def is_chain(self) -> bool:
        return all(node.parent == i - 1 for i, node in enumerate(self.proposed.nodes))


@dataclass
class Timing:
    """How long a request's tokens took, of those that were decoded while nobody computed a prompt."""

    tokens: int = 0
    ms: float = 0.0
    batch: float = 0.0  # mean, weighted by time
    settings: set[Setting] = field(default_factory=set)

    def add(self, tokens: int, ms: float, batch: int, setting: Setting) -> None:
        self.batch = (self.batch * self.ms + batch * ms) / (self.ms + ms) if self.ms + ms else float(batch)
        self.tokens, self.ms = self.tokens + tokens, self.ms + ms
        self.settings.add(setting)


@dataclass
class Track:
    """One request, as far as the events tell it."""

    request_id: str
    ordinal: int
    owner: str
    prompt_token_ids: list[int]
    prompt_text: str
    sampling: dict[str, Any]
    arrived_step: int
    setting: Setting = NOTHING  # what the engine speculated with when it came
    tokens: dict[int, Token] = field(default_factory=dict)  # position -> Token
    rounds: list[Round] = field(default_factory=list)  # by step
    timing: Timing = field(default_factory=Timing)
    asked_temperature: float = 1.0
    changed_sampling: bool = False  # somebody moved a parameter while it ran
    finished_step: int | None = None
    reason: str = ""

    @property
    def group_id(self) -> str:
        """The id that commands take: the siblings of n > 1 belong together."""
        return self.request_id.split("#", 1)[0]

    @property
    def temperature(self) -> float:
        return float(self.sampling.get("temperature", 1.0))

    def until(self, step: int) -> tuple[list[Token], list[Round]]:
        """What was there after ``step``."""
        tokens = [t for t in self.tokens.values() if t.step <= step]
        return sorted(tokens), [r for r in self.rounds if r.step <= step]


class SpeculationRows:
    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.tracks: dict[str, Track] = {}
        self.steps: deque[StepRow] = deque(maxlen=MAX_STEPS)
        self.tallies: deque[Tally] = deque(maxlen=MAX_TALLIES)
        self.facts: dict[str, Any] | None = None  # the engine's ``speculative``
        self.changed: set[str] = set()  # tracks with something new
        self.new_steps = False
        self.restarted = True
        self._ordinal = 0
        self._proposed: dict[str, DraftProposed] = {}  # of the step that is under way
        self._verified: dict[str, DraftVerified] = {}

    @property
    def setting(self) -> Setting:
        return Setting.of(self.facts)

    def taken(self) -> None:
        """The screen has been sent what was new."""
        self.changed, self.restarted, self.new_steps = set(), False, False

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            handler = _HANDLERS.get(type(event))
            if handler is not None:
                handler(self, event)

    def begin_late(self, store: Any) -> None:
        """The ring buffer has dropped what came before: go on from the first state that is still known."""
        started = store.started
        known = [store.at(store.first_step).snapshot(finished=True)]
        self.feed([started, *known] if started is not None else known)

    # -- one handler a kind ------------------------------------------------------------------------------------------------

    def _open(self, **facts: Any) -> Track:
        track = Track(ordinal=self._ordinal, setting=self.setting, **facts)
        self._ordinal += 1
        track.asked_temperature = track.temperature
        self.tracks.pop(track.request_id, None)
        self.tracks[track.request_id] = track
        self.changed.add(track.request_id)
        ended = [t.request_id for t in self.tracks.values() if t.finished_step is not None]
        for request_id in ended[: max(0, len(self.tracks) - MAX_TRACKS)]:
            del self.tracks[request_id]
        return track

    def _started(self, e: EngineStarted) -> None:
        self.clear()
        self.facts = facts_of(e.config.get("speculative"))

    def _snapshot(self, e: Snapshot) -> None:
        if "speculative" in e.knobs:
            self.facts = facts_of(e.knobs["speculative"])
        for r in e.requests:
            if r.request_id not in self.tracks:
                track = self._open(
                    request_id=r.request_id, owner=r.owner, prompt_token_ids=r.prompt_token_ids, prompt_text=r.prompt_text,
                    sampling=r.sampling, arrived_step=e.step,
                )  # fmt: skip
                track.changed_sampling = True  # not seen from its beginning: its time is compared with nobody's
                track.finished_step = e.step if r.status == "finished" else None

    def _added(self, e: RequestAdded) -> None:
        self._open(
            request_id=e.request_id, owner=e.owner, prompt_token_ids=e.prompt_token_ids, prompt_text=e.prompt_text,
            sampling=e.sampling, arrived_step=e.step,
        )  # fmt: skip

    def _finished(self, e: RequestFinished) -> None:
        track = self.tracks.get(e.request_id)
        if track is not None:
            track.finished_step, track.reason = e.step, e.reason
            self.changed.add(e.request_id)

    def _knob(self, e: KnobChanged) -> None:
        if e.request_id is None:
            if e.name == "speculative" and not e.draining:
                self.facts = facts_of(e.new)
                self.new_steps = True
            return
        track = self.tracks.get(e.request_id)
        if track is not None:
            track.sampling = {**track.sampling, e.name: e.new}
            track.changed_sampling = True

    def _token(self, e: TokenSampled) -> None:
        track = self.tracks.get(e.request_id)
        if track is not None:
            self._keep(track, Token(e.position, e.step, e.text))

    def _keep(self, track: Track, token: Token) -> None:
        track.tokens[token.position] = token
        while len(track.tokens) > MAX_TOKENS:
            del track.tokens[next(iter(track.tokens))]
        self.changed.add(track.request_id)

    def _draft(self, e: DraftProposed) -> None:
        self._proposed[e.request_id] = e

    def _method(self, proposed: DraftProposed) -> str:
        return self.setting.method if self.setting.method == proposed.method + AFTER_LOOKUP else proposed.method

    def _verdict(self, e: DraftVerified) -> None:
        track, proposed = self.tracks.get(e.request_id), self._proposed.get(e.request_id)
        self._verified[e.request_id] = e
        if track is None or proposed is None or not proposed.nodes:
            return
        _check(proposed, e)
        made = Round(proposed, e, track.temperature, self.setting)
        track.rounds.append(made)
        del track.rounds[:-MAX_ROUNDS]
        self.tallies.append(
            Tally(
                e.step,
                self._method(proposed),
                e.rule,
                track.temperature,
                max(made.depths),
                len(proposed.nodes),
                len(e.path),
                e.num_kept,
            )
        )
        texts = [*(proposed.nodes[i].text for i in e.path), *([e.text] if e.token_id >= 0 else [])]
        for i, text in enumerate(texts[: e.num_kept]):
            if e.position + i not in track.tokens:
                self._keep(track, Token(e.position + i, e.step, text))

    def _temperature(self, e: StepDone) -> float:
        found = {self.tracks[run.request_id].temperature for run in e.runs if run.request_id in self.tracks}
        return found.pop() if len(found) == 1 else math.nan

    def _step(self, e: StepDone) -> None:
        proposed, self._proposed = self._proposed, {}
        verified, self._verified = self._verified, {}
        if not e.runs or any(run.phase == "prefill" for run in e.runs):
            return
        drafts = [p for p in proposed.values() if p.nodes]
        gained = {run.request_id: int(run.sampled) for run in e.runs}
        gained.update({request_id: v.num_kept for request_id, v in verified.items() if request_id in gained})
        ms = max(0.0, e.step_ms - e.record_ms)
        depths = [max(depths_of(p)) for p in drafts if p.request_id in verified]
        self.steps.append(
            StepRow(
                e.step, len(e.runs), len(proposed), len(drafts), sum(len(p.nodes) for p in drafts),
                sum(depths) / len(depths) if depths else 0.0, sum(gained.values()), e.draft_ms, max(0.0, ms - e.draft_ms),
                next((self._method(p) for p in proposed.values()), ""), self.setting, self._temperature(e),
            )
        )  # fmt: skip
        self.new_steps = True
        for request_id, count in gained.items():
            track = self.tracks.get(request_id)
            if track is not None:
                track.timing.add(count, ms, len(e.runs), self.setting)


_HANDLERS: dict[type, Any] = {
    EngineStarted: SpeculationRows._started,
    Snapshot: SpeculationRows._snapshot,
    RequestAdded: SpeculationRows._added,
    RequestFinished: SpeculationRows._finished,
    KnobChanged: SpeculationRows._knob,
    TokenSampled: SpeculationRows._token,
    DraftProposed: SpeculationRows._draft,
    DraftVerified: SpeculationRows._verdict,
    StepDone: SpeculationRows._step,
}


def depths_of(proposed: DraftProposed) -> list[int]:
    """Of each node, from 1."""
    out: list[int] = []
    for node in proposed.nodes:
        out.append(1 if node.parent < 0 else out[node.parent] + 1)
    return out


def _check(proposed: DraftProposed, verified: DraftVerified) -> None:
    """ValueError for a draft of a saved run that contradicts itself."""
    n = len(proposed.nodes)
    ordered = all(-1 <= node.parent < i for i, node in enumerate(proposed.nodes))
    if n > MAX_NODES or len(verified.nodes) != n or not ordered or not all(0 <= i < n for i in verified.path):
        raise ValueError(f"the draft of request {verified.request_id!r} at position {verified.position} contradicts itself")


def facts_of(value: Any) -> dict[str, Any] | None:
    """An engine's ``speculative`` as plain values: a log has it as a dict, an engine of this process perhaps as its own object."""
    if isinstance(value, dict):
        return value
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else None
