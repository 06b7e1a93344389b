"""Scenes that a button stages with real requests: the knobs they need, the waves of requests, what to look at.

A ``Director`` plays one scene at a time. It is advanced with the newest state and only ever asks the session: knobs that the
scene needs are changed first (block and pool size wait until the running requests have drained), then wave after wave is sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine.events.state import State
from engine.hardware.memory import blocks_for
from engine.request import SamplingParams
from explorer.i18n import _, ngettext
from explorer.run.presets import QUESTIONS, SYSTEM_PROMPT

Prompt = str | list[dict[str, str]]  # plain text, or messages for the model's own chat template
Wave = list[tuple[Prompt, SamplingParams]]

TELL = (
    "Tell the story of a lighthouse keeper who finds a door in the rock, in many sentences.",
    "Describe a walk through a big city at night, street by street, in many sentences.",
    "Explain how bread is made, from the field to the table, in many sentences.",
    "Write down what a captain tells the crew before a long voyage, in many sentences.",
)
SMALL_POOL_TOKENS = 240  # room for all four beginnings of TELL, not for their ends
ROOMY_TOKENS = 1536  # room for a scene that is not about a lack of it
FORK_PROMPT = "Once upon a time, in a village under a mountain of glass, there lived a girl who"


@dataclass(frozen=True)
class Scene:
    key: str
    title: str
    what: str  # what the button does
    look: str  # what to look at once it runs
    knobs: Callable[[dict[str, Any]], dict[str, Any]]  # values now -> values it needs (those that differ are changed)
    waves: Callable[[], list[Wave]]  # a wave is sent when the first request of the wave before has its first token


def _at_least(now: dict[str, Any], name: str, value: int) -> dict[str, Any]:
    return {name: value} if (now.get(name) or 0) < value else {}


def _roomy(now: dict[str, Any]) -> dict[str, Any]:
    size = now.get("block_size") or 16
    return _at_least(now, "num_kv_blocks", blocks_for(ROOMY_TOKENS, size))


def _shared_knobs(now: dict[str, Any]) -> dict[str, Any]:
    return {"enable_prefix_caching": True} | _roomy(now) | _at_least(now, "max_num_seqs", 4)


def _shared_waves() -> list[Wave]:
    params = SamplingParams(temperature=0.8, max_tokens=48)
    asked: Wave = [
        ([{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}], params)
        for question in QUESTIONS[:6]
    ]
    return [asked[:1], asked[1:]]


def _small_knobs(now: dict[str, Any]) -> dict[str, Any]:
    size = now.get("block_size") or 16
    return {"num_kv_blocks": blocks_for(SMALL_POOL_TOKENS, size)} | _at_least(now, "max_num_seqs", len(TELL))


def _small_waves() -> list[Wave]:
    params = SamplingParams(temperature=0.8, max_tokens=110, ignore_eos=True)
    return [[([{"role": "user", "content": text}], params) for text in TELL]]


def _fork_knobs(now: dict[str, Any]) -> dict[str, Any]:
    return _roomy(now) | _at_least(now, "max_num_seqs", 4) | _at_least(now, "block_size", 8)


def _fork_waves() -> list[Wave]:
    return [[(FORK_PROMPT, SamplingParams(temperature=1.0, max_tokens=48, n=4))]]


SCENES: dict[str, Scene] = {
    scene.key: scene
    for scene in (
        Scene(
            "shared", _("Shared prefix"), _("Six requests under one system prompt of some 300 tokens."),
            _("The first request computes the prompt. The other five hit its blocks: the striped ones with a count are stored once "
              "and named by several tables. The look-ups below say how many tokens each was spared."),
            _shared_knobs, _shared_waves,
        ),
        Scene(
            "small", _("Pool too small"), _("Four long answers in a pool that has no room for them."),
            _("When no block is free, the latest request is preempted: it gives its blocks back, waits, and is computed again later, or "
              "comes back from host memory where preemption_mode is swap. Its text goes on where it was. Watch its row go from running to preempted and back."),
            _small_knobs, _small_waves,
        ),
        Scene(
            "fork", _("Copy-on-write"), _("One prompt, four continuations (n = 4) at temperature 1."),
            _("All four start from the same blocks (count 4). The first to write into the shared, partly filled last block gets a copy "
              "of its own; the full blocks of the prompt stay shared to the end."),
            _fork_knobs, _fork_waves,
        ),
    )
}  # fmt: skip


@dataclass
class Director:
    """Plays scenes through ``session``. ``said`` is what the page shows: (kind, text), kind "" | "wait" | "look" | "error"."""

    session: Any
    owner: Callable[[], str]  # under whose name the requests run
    scene: Scene | None = None
    said: tuple[str, str] = ("", "")
    changed: dict[str, Any] = field(default_factory=dict)  # knobs this page's scenes moved: name -> value before
    _wanted: dict[str, Any] = field(default_factory=dict)
    _waves: list[Wave] = field(default_factory=list)
    _lead: str | None = None  # the request whose first token lets the next wave go
    _first_wave: bool = True

    def start(self, key: str, state: State) -> None:
        """Stage a scene; ValueError for one that does not exist."""
        if key not in SCENES:
            raise ValueError(f"scene must be one of {', '.join(SCENES)}, got {key!r}")
        scene = SCENES[key]
        now = {**knobs_now(state), **state.draining}  # what is asked for already counts: the running requests only delay it
        wanted = {name: value for name, value in scene.knobs(now).items() if now.get(name) != value}
        self.scene, self._waves, self._lead, self._first_wave, self._wanted = scene, scene.waves(), None, True, wanted
        self.said = ("wait", _("Sending…"))
        if wanted:
            self._ask(lambda: self.session.reconfigure(self.owner(), **wanted))
            for name in wanted:
                self.changed.setdefault(name, now.get(name))
        self.advance(state)

    def restore(self) -> None:
        """Put the knobs back to what they were before the first scene."""
        back = {name: value for name, value in self.changed.items() if value is not None}
        self.scene, self._waves, self.changed = None, [], {}
        self.said = ("", "")
        if back:
            self._ask(lambda: self.session.reconfigure(self.owner(), **back))

    def forget(self) -> None:
        """The engine is a new one: nothing waits for it, and its knobs are its own."""
        self.scene, self._waves, self.changed, self.said = None, [], {}, ("", "")

    def advance(self, state: State) -> None:
        """Go on as far as the state allows; costs nothing when no scene waits."""
        if not self._waves or self.scene is None:
            return
        now = knobs_now(state)
        missing = [name for name, value in self._wanted.items() if now.get(name) != value]
        if missing:
            knobs = ", ".join(f"{name} = {self._wanted[name]}" for name in missing)
            self.said = ("wait", _waiting(knobs, sum(view.status == "running" for view in state.live)))
            return
        if not self._first_wave and not self._lead_has_begun(state):
            return
        self._send(self._waves.pop(0))

    def _lead_has_begun(self, state: State) -> bool:
        lead = state.requests.get(self._lead or "")
        return lead is not None and (lead.num_output_tokens > 0 or lead.status == "finished")

    def _send(self, wave: Wave) -> None:
        self._first_wave = False
        ids: list[Any] = []
        for prompt, params in wave:
            send = self.session.submit if isinstance(prompt, str) else self.session.chat
            if not self._ask(lambda send=send, p=prompt, s=params: ids.append(send(p, s, self.owner()))):  # type: ignore[misc]
                return
        if None in ids:  # the session has told this viewer why
            self.scene, self._waves, self.said = None, [], ("", "")
            return
        self._lead = ids[0]
        assert self.scene is not None
        self.said = (
            ("look", self.scene.look)
            if not self._waves
            else ("wait", _("The first one computes the prompt, then the others follow…"))
        )

    def _ask(self, action: Callable[[], Any]) -> bool:
        """Ask the session; what it refuses ends the scene and is shown."""
        try:
            action()
        except (ValueError, RuntimeError, OSError) as error:
            self.scene, self._waves = None, []
            self.said = ("error", str(error))
            return False
        return True


def _waiting(knobs: str, running: int) -> str:
    if not running:
        return _("Waiting for {knobs}…").format(knobs=knobs)
    text = ngettext(
        "Waiting for {knobs}: the pool is rebuilt when the running request has finished (draining).",
        "Waiting for {knobs}: the pool is rebuilt when the {n} running requests have finished (draining).",
        running,
    )
    return text.format(knobs=knobs, n=running)


def knobs_now(state: State) -> dict[str, Any]:
    """The values the engine has now: what it started with, and what was changed since."""
    config = state.engine.config if state.engine is not None else {}
    return {**config, **state.knobs, "num_kv_blocks": state.num_blocks, "block_size": state.block_size}
