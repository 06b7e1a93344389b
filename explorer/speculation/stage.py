"""Plays acts through the session, one after the other: scenes, and the same requests again with another K.

It is advanced with what the view has read and only ever asks the session. Knobs are waited for, since a request that runs with
others than the screen says would be measured wrongly; an engine that does not take them within ``PATIENCE_S`` ends the play.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from explorer.i18n import _
from explorer.speculation.rows import Setting, SpeculationRows, facts_of
from explorer.speculation.scenes import Act

PATIENCE_S = 30.0  # for a knob: a drafter may have to be loaded


@dataclass
class Stage:
    """``said`` is what the page shows: (kind, text), kind "" | "wait" | "look" | "error"."""

    session: Any
    owner: Callable[[], str]
    rows: SpeculationRows
    said: tuple[str, str] = ("", "")
    first: str | None = None  # the newest request that was sent: what to look at
    changed: dict[str, Any] = field(default_factory=dict)  # knobs that were moved: name -> value before
    _acts: list[Act] = field(default_factory=list)
    _look: str = ""
    _restore: bool = False
    _pending: Act | None = None  # its knobs were asked for
    _asked_at: float = 0.0
    _running: list[str] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return bool(self._acts or self._pending or self._running) or self.said[0] == "wait"

    def play(self, acts: list[Act], knobs: dict[str, Any], look: str = "", restore: bool = False) -> None:
        """``restore``: put the knobs back at the end; otherwise a button does. ``knobs``: the engine's, now."""
        self._acts, self._look, self._restore, self._pending, self._running = list(acts), look, restore, None, []
        self.said = ("wait", _("Sending…"))
        self.advance(knobs)

    def forget(self) -> None:
        """The engine is a new one: nothing waits for it, and its knobs are its own."""
        self._acts, self._pending, self._running, self.changed, self.said = [], None, [], {}, ("", "")

    def restore(self) -> None:
        """Put the knobs back to what they were."""
        back, self.changed = self.changed, {}
        self._acts, self._pending, self._running, self.said = [], None, [], ("", "")
        if back:
            self._ask(lambda: self.session.reconfigure(self.owner(), **back))

    def advance(self, knobs: dict[str, Any]) -> None:
        """Go on as far as the engine has come; costs nothing when nothing is played."""
        self._running = [i for i in self._running if not self._ended(i)]
        if self._running or not (self._acts or self._pending):
            if not self._running and self.said[0] == "wait":
                self._over()
            return
        if self._pending is None:
            self._pending = self._acts.pop(0)
            self._turn(self._pending.knobs, knobs)
        if self._pending is None:  # refused
            return
        missing = [name for name, value in self._pending.knobs.items() if not _is(name, knobs.get(name), value)]
        if not missing:
            act, self._pending = self._pending, None
            self._send(act)
        elif time.monotonic() - self._asked_at > PATIENCE_S:
            self._give_up(
                _("The engine did not take {knobs}. Its reason stands above, if it gave one.").format(knobs=", ".join(missing))
            )

    def _ended(self, request_id: str) -> bool:
        track = self.rows.tracks.get(request_id)
        return track is not None and track.finished_step is not None

    def _turn(self, wanted: dict[str, Any], now: dict[str, Any]) -> None:
        moving = {name: value for name, value in wanted.items() if not _is(name, now.get(name), value)}
        for name in moving:
            self.changed.setdefault(name, now.get(name))
        self._asked_at = time.monotonic()
        if moving:
            self._ask(lambda: self.session.reconfigure(self.owner(), **moving))

    def _send(self, act: Act) -> None:
        ids: list[Any] = []
        for prompt, params in act.asks:
            if not self._ask(lambda p=prompt, s=params: ids.append(self.session.submit(p, s, self.owner()))):  # type: ignore[misc]
                return
        if None in ids:  # the session has told this viewer why
            self._give_up("")
            return
        self._running = list(ids)
        if ids and act.follow:
            self.first = ids[0]
        if act.words:
            self.said = ("wait", act.words)

    def _over(self) -> None:
        if self._restore:
            self.restore()
        self.said = ("look", self._look) if self._look else ("", "")

    def _give_up(self, why: str) -> None:
        self._acts, self._pending, self._running = [], None, []
        self.said = ("error", why) if why else ("", "")

    def _ask(self, action: Callable[[], Any]) -> bool:
        """Ask the session; what it refuses ends the play and is shown."""
        try:
            action()
        except (ValueError, RuntimeError, OSError) as error:
            self._give_up(str(error))
            return False
        return True


def _is(name: str, now: Any, wanted: Any) -> bool:
    """Whether the engine has a value: of ``speculative`` what decides the drafts, with the engine's defaults filled in."""
    if name != "speculative":
        return bool(now == wanted)
    return _filled(facts_of(now)) == _filled(facts_of(wanted))


def _filled(facts: dict[str, Any] | None) -> Setting:
    return Setting.of({"acceptance": "rejection", **facts} if facts else None)
