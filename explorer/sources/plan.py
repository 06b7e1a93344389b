"""What has to be done to repeat a run: the same requests and knobs, each at the step after which it came. From a log alone.

A ``Plan`` is plain data. ``explorer.sources.rerun`` carries it out with a fresh engine; ``Plan.changed`` is the same plan with one
thing changed.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from engine.config import DRAINING_KNOBS, EngineConfig
from engine.events.log import EventLog
from engine.events.types import (
    EngineStarted,
    KnobChanged,
    PoolResized,
    RequestAdded,
    RequestBranched,
    RequestFinished,
    Snapshot,
    TokenSampled,
)
from engine.request import SamplingParams, request_seed
from explorer.i18n import _, ngettext


@dataclass(frozen=True)
class Action:
    """``step``: it comes when that many steps of the run are done."""

    step: int


@dataclass(frozen=True)
class Add(Action):
    request_id: str
    owner: str
    prompt_token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None


@dataclass(frozen=True)
class Branch(Action):
    request_id: str  # of the branch
    owner: str
    source_id: str
    position: int
    token_id: int
    params: SamplingParams


@dataclass(frozen=True)
class Abort(Action):
    request_id: str
    message: str


@dataclass(frozen=True)
class Reconfigure(Action):
    name: str
    value: Any
    by: str


@dataclass(frozen=True)
class UpdateSampling(Action):
    request_id: str
    name: str
    value: Any
    by: str


@dataclass(frozen=True)
class Plan:
    """``config``: as the run's own was resolved. ``notes``: what of the run cannot be repeated, and why."""

    config: EngineConfig
    started: EngineStarted
    actions: list[Action]
    num_steps: int
    ends_open: bool = False  # the recording was cut while requests ran
    top: int = 5  # candidates to record with every token
    notes: list[str] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return sum(isinstance(a, Add | Branch) for a in self.actions)

    def changed(
        self, *, config: dict[str, Any] | None = None, sampling: dict[str, Any] | None = None, request_ids: set[str] | None = None
    ) -> "Plan":
        """The same plan with fields of the EngineConfig or of the requests' SamplingParams changed from the beginning on.

        A knob or parameter that is changed so stays: what the run itself did with it is left out. ``request_ids``: whose
        parameters change; None: everybody's. The config's ``seed`` gives every request another seed of its own. ValueError for a name that is neither, or a value that does not fit.
        """
        config, sampling = config or {}, sampling or {}
        actions: list[Action] = []
        for action in self.actions:
            mine = request_ids is None or getattr(action, "request_id", None) in request_ids
            if isinstance(action, Reconfigure) and action.name in config:
                continue
            if isinstance(action, UpdateSampling) and action.name in sampling and mine:
                continue
            if isinstance(action, Add) and "seed" in config:  # a branch has its source's
                seed = request_seed(config["seed"], action.request_id)
                action = replace(action, params=action.params.changed(seed=seed))
            if isinstance(action, Add | Branch) and sampling and mine:
                action = replace(action, params=action.params.changed(**sampling))
            actions.append(action)
        return replace(self, config=self.config.changed(**config), actions=actions)


def plan_of(log: EventLog) -> Plan:
    """The plan of a recorded run. ValueError for one that cannot be repeated at all, saying why.

    Exact for a run that was recorded from a fresh engine's first step on. What is not known (the beginning was dropped, requests
    ran already, prefixes were cached before) is said in the plan's notes, and the rest is repeated.
    """
    if log.started is None:
        raise ValueError(_("This log does not say what ran (it has no EngineStarted): it cannot be repeated."))
    reader = _Reader(log)
    for event in log:
        handler = reader.handlers.get(type(event))
        if handler is not None:
            handler(event)
    try:
        config = _config_of(log.started)
    except ValueError as error:
        raise ValueError(_("This run's configuration does not fit this version: {error}").format(error=error)) from None
    steps = log.last_step - reader.origin
    return Plan(config, log.started, reader.actions, steps, bool(reader.unfinished), max(reader.top, 2), reader.notes())


def _config_of(started: EngineStarted) -> EngineConfig:
    return EngineConfig(**started.config)


class _Reader:
    """Collects the actions: what came from outside, not what the engine made of it."""

    def __init__(self, log: EventLog) -> None:
        self.log = log
        self.origin = log.first_step
        self.actions: list[Action] = []
        self.top = 0
        self.running: list[str] = []  # requests of which the log does not hold the beginning
        self.unfinished: set[str] = set()
        self.warm = 0
        self._began = False
        self._draining: dict[str, Any] = {}  # knob -> value asked for
        self._resized_at = -1  # step of the last PoolResized
        self.handlers: dict[type, Any] = {
            EngineStarted: self._started,
            Snapshot: self._snapshot,
            RequestAdded: self._added,
            RequestBranched: self._branched,
            RequestFinished: self._finished,
            KnobChanged: self._knob,
            PoolResized: self._resized,
            TokenSampled: self._sampled,
        }
        if log.dropped:
            self._snapshot(log.at(log.first_step).snapshot())

    def notes(self) -> list[str]:
        said = []
        if self.log.dropped:
            said.append(
                ngettext(
                    "{n} event in front is no longer in the log: the repetition begins after it, with a fresh engine.",
                    "{n:,} events in front are no longer in the log: the repetition begins after them, with a fresh engine.",
                    self.log.dropped,
                ).format(n=self.log.dropped)
            )
        if self.running:
            names = ", ".join(self.running[:5]) + ("…" if len(self.running) > 5 else "")
            said.append(
                _("Running already when the log begins, and not repeated: {names}. The schedule differs from the start.").format(
                    names=names
                )
            )
        if self.warm:
            said.append(
                ngettext(
                    "{n} block of cached prefixes was there before the log begins. The repetition starts with none: prefix hits and schedule may differ, tokens should not.",
                    "{n:,} blocks of cached prefixes were there before the log begins. The repetition starts with none: prefix hits and schedule may differ, tokens should not.",
                    self.warm,
                ).format(n=self.warm)
            )
        return said

    def _step(self, event: Any) -> int:
        return max(0, event.step - self.origin)

    def _started(self, e: EngineStarted) -> None:
        self.origin = e.step

    def _snapshot(self, e: Snapshot) -> None:
        if self._began:
            return
        self._began = True
        self.origin = e.step
        self.running = [r.request_id for r in e.requests if r.status != "finished"]
        self.warm = len(e.cached)

    def _added(self, e: RequestAdded) -> None:
        self.unfinished.add(e.request_id)
        if e.parent_id is None:  # siblings come of themselves
            self.actions.append(
                Add(self._step(e), e.request_id, e.owner, list(e.prompt_token_ids), _params(e.sampling), e.cache_salt)
            )

    def _branched(self, e: RequestBranched) -> None:
        """It follows its RequestAdded: what was asked for is the branch."""
        added = self.actions.pop() if self.actions else None
        if not isinstance(added, Add) or added.request_id != e.request_id:
            raise ValueError(_("A branch ({name}) without its request: this log cannot be repeated.").format(name=e.request_id))
        # The engine adds what counts as output already to the limit.
        params = added.params.changed(max_tokens=max(1, added.params.max_tokens - len(e.output_token_ids)))
        self.actions.append(Branch(added.step, e.request_id, added.owner, e.source_id, e.position, e.token_id, params))

    def _finished(self, e: RequestFinished) -> None:
        self.unfinished.discard(e.request_id)
        # One abort ends all siblings: the first of them stands for it.
        request_id = e.request_id.split("#", 1)[0]
        action = Abort(self._step(e), request_id, e.message)
        if e.reason == "abort" and request_id not in self.running and action not in self.actions[-64:]:
            self.actions.append(action)

    def _knob(self, e: KnobChanged) -> None:
        if e.request_id is not None:
            group = e.request_id.split("#", 1)[0]
            update = UpdateSampling(self._step(e), group, e.name, e.new, e.by)
            if group not in self.running and update not in self.actions[-64:]:  # told once for each sibling
                self.actions.append(update)
            return
        if e.name in DRAINING_KNOBS and not e.draining:
            asked = self._draining.pop(e.name, None)
            if self._resized_at == e.step and asked is not None:
                return  # what was asked for before has come: the engine's doing
        if e.draining:
            self._draining[e.name] = e.new
        self.actions.append(Reconfigure(self._step(e), e.name, e.new, e.by))

    def _resized(self, e: PoolResized) -> None:
        self._resized_at = e.step

    def _sampled(self, e: TokenSampled) -> None:
        self.top = max(self.top, len(e.top))


def _params(facts: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams(**facts)
    except ValueError as error:
        raise ValueError(_("A request's parameters do not fit this version: {error}").format(error=error)) from None
