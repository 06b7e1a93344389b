"""The same load under one scheduler and then under another: knobs, load, knobs, load, and the knobs back."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from explorer.batching.load_settings import Settings
from explorer.i18n import _, ngettext

PATIENCE_S = 20.0  # for knobs: a pool that changes waits for what runs
KNOBS = ("batching", "batching_timeout_ms", "max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "preemption_mode", "swap_space", "prefix_index", "max_num_waiting")  # fmt: skip


@dataclass(frozen=True)
class Side:
    """``letter``: "A" or "B"; ``knobs``: of the engine."""

    letter: str
    knobs: dict[str, Any]


class PairStage:
    """Advanced with the page. ``name``: of the pair that was run last: its loads are ``name`` + "A" and "B". ``said``: (kind, text)."""

    def __init__(self, view: Any, send: Callable[[Settings, str], str | None]) -> None:
        self.view, self._send = view, send
        self.said = ("", "")
        self.name = ""
        self._left: list[Side] = []
        self._settings = Settings()
        self._before: dict[str, Any] = {}
        self._state = ""  # "" | "knobs" | "load" | "restore"
        self._since = 0.0

    @property
    def busy(self) -> bool:
        return self._state != ""

    def run(self, a: dict[str, Any], b: dict[str, Any], settings: Settings) -> None:
        """Begin; what runs of the viewer's loads is stopped."""
        now = self.view.store.latest().knobs
        self._before = {name: now[name] for name in KNOBS if name in now}
        free = {"max_num_waiting": None}  # of the engine: the load has a limit of its own, which is the same for both
        self._left, self._settings = [Side("A", {**a, **free}), Side("B", {**b, **free})], settings
        self.name = f"load{self.view.session.loads.number()}"
        self.view.session.loads.stop(self._owner)
        self._begin_side()

    def stop(self) -> None:
        """End it, with the knobs as they were."""
        if self.busy:
            self.view.session.loads.stop(self._owner)
            self._restore("error", _("Stopped; the knobs are as they were."))

    @property
    def _owner(self) -> str:
        return str(self.view.clock.owner)

    def _begin_side(self) -> None:
        self._state, self._since = "knobs", time.monotonic()
        self.said = ("wait", _("Setting the knobs of {letter}…").format(letter=self._left[0].letter))
        self.view.session.reconfigure(self._owner, **self._left[0].knobs)

    def _restore(self, kind: str, text: str) -> None:
        self._state, self.said, self._left = "", (kind, text), []
        if self._before:
            self.view.session.reconfigure(self._owner, **self._before)

    def forget(self) -> None:
        """The engine is a new one."""
        if self.busy:
            self._state, self._left, self.said = "", [], ("error", _("The engine was started anew; run the two again."))

    def advance(self) -> None:
        """Go on as far as the engine has come."""
        if not self.busy:
            return
        load = self.view.session.loads.of(self._owner)
        if self.view.session.status not in ("running", "paused"):
            self._state, self._left, self.said = "", [], ("error", _("The engine has stopped."))
        elif self._state == "knobs":
            self._await_knobs(load)
        elif load is None or load.over:
            side = self._left.pop(0)
            if load is not None and load.failed:
                self._restore(
                    "error",
                    ngettext("{letter}: {n} request failed: {why}", "{letter}: {n} requests failed: {why}", load.failed).format(
                        letter=side.letter, n=load.failed, why=load.error
                    ),
                )
            elif self._left:
                self._begin_side()
            else:
                self._restore("", "")
        else:
            self.said = (
                "wait",
                _("{letter} runs: {done} of {total} requests have ended.").format(
                    letter=self._left[0].letter, done=load.finished + load.refused, total=load.total
                ),
            )

    def _await_knobs(self, load: Any) -> None:
        side, state = self._left[0], self.view.store.latest()
        there = not (set(side.knobs) & set(state.draining)) and all(state.knobs.get(n) == v for n, v in side.knobs.items())
        if there and (load is None or load.over):
            if self._send(self._settings, f"{self.name}{side.letter}") is None:
                self._restore("error", _("The load could not be started."))
            else:
                self._state = "load"
        elif time.monotonic() - self._since > PATIENCE_S:
            missing = [n for n, v in side.knobs.items() if state.knobs.get(n) != v] or [_("an idle engine")]
            self._restore(
                "error",
                _("The engine has not taken the knobs of {letter}: {names}.").format(
                    letter=side.letter, names=", ".join(missing)
                ),
            )
