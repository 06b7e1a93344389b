"""Sending measured requests to the running engine: in stages, each under knobs of its own, at the times that they were meant for.

What the tabs of this page model they can also have run; this is how. A thread of its own sends, so that arrival times are kept whatever the
screen does. Whoever asked is the owner of the requests; knobs that were moved are put back at the end.
"""

import html
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.request import SamplingParams
from explorer.i18n import _
from explorer.quantization.labels import said

_salts = itertools.count(1)
_at_work: "weakref.WeakSet[Sender]" = weakref.WeakSet()
_lock = threading.Lock()
BUSY = _("Another of these measurements is under way, and two would move each other's knobs: start this one when it has ended.")
_LOOK_S = 0.01
SETTLE_S = 0.15  # between stages: what was moved is moved, what ended has ended


@dataclass(frozen=True)
class Ask:
    """One request. ``time_s``: after the stage's beginning; ``after``: only once all requests before it in the stage have ended;
    ``once``: only once they have so many tokens each (or have ended)."""

    prompt: tuple[int, ...]
    params: SamplingParams
    time_s: float = 0.0
    after: bool = False
    once: int = 0


@dataclass(frozen=True)
class Stage:
    """``knobs`` are moved, then ``asks`` are sent. ``cold``: they find nothing in the prefix cache but what they leave to each other."""

    title: str
    knobs: dict[str, Any]
    asks: tuple[Ask, ...]
    cold: bool = True


def exactly(num_tokens: int, sampling: dict[str, Any] | None = None) -> SamplingParams:
    """Parameters of a request that gets so many tokens, sampled as ``sampling`` (of a RequestAdded) says; greedy without."""
    facts = {n: v for n, v in (sampling or {"temperature": 0.0}).items() if n in SamplingParams.__dataclass_fields__}
    facts |= {"n": 1, "max_tokens": num_tokens, "ignore_eos": True, "stop": ()}
    return SamplingParams(**{name: value for name, value in facts.items() if name not in ("beam_width", "early_stopping")})


class Sender:
    """One run of stages. Read ``busy`` and ``said`` at any time; ``stop`` ends it early."""

    def __init__(self, session: Any, owner: str, stages: Sequence[Stage], restore: dict[str, Any]) -> None:
        self.session, self.owner, self.stages, self.restore = session, owner, tuple(stages), restore
        self.ids: list[list[str]] = [[] for _stage in self.stages]  # what was sent in each
        self.said = _("Sending …")
        self.busy = True
        self.failed = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batching-rerun", daemon=True)

    def start(self) -> "Sender":
        """Not where another one moves the same engine's knobs: then it has failed at once."""
        with _lock:
            if any(other.busy and other.session is self.session for other in _at_work):
                self.busy, self.failed, self.said = False, True, BUSY
                return self
            _at_work.add(self)
        self._thread.start()
        return self

    def stop(self) -> None:
        """What was sent ends, the knobs go back."""
        self._stopping.set()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)

    @property
    def progress(self) -> float:
        """Of the requests, the share that has ended."""
        total = sum(len(stage.asks) for stage in self.stages)
        left = sum(self.session.owns(i, self.owner) for ids in self.ids for i in ids)
        return (sum(map(len, self.ids)) - left) / total if total else 1.0

    # -- in its thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        limit = self.session.store.latest().knobs.get("max_num_waiting")
        free = {} if limit is None else {"max_num_waiting": None}  # nobody is refused
        if free:
            self.restore = {**self.restore, "max_num_waiting": limit}
        try:
            for number, stage in enumerate(self.stages):
                self.said = stage.title
                if stage.knobs or free:
                    self.session.reconfigure(self.owner, **{**free, **stage.knobs})
                self._pause(SETTLE_S)
                if not self._send(number, stage) or not self._ended(self.ids[number]):
                    self.failed = True
                    break
            self.said = _("Stopped; the knobs are as they were.") if self.failed else ""
        finally:
            for request_id in [i for ids in self.ids for i in ids]:
                if self.session.owns(request_id, self.owner):
                    self.session.abort(request_id, self.owner)
            if self.restore and self._alive:
                self.session.reconfigure(self.owner, **self.restore)
            self.busy = False

    @property
    def _alive(self) -> bool:
        return self.session.status in ("running", "paused")

    def _send(self, number: int, stage: Stage) -> bool:
        more = {"cache_salt": f"batching-{next(_salts)}"} if stage.cold else {}
        begin = time.monotonic()
        for ask in stage.asks:
            if ask.after and not self._ended(self.ids[number]):
                return False
            if ask.once and not self._have(self.ids[number], ask.once):
                return False
            self._pause(begin + ask.time_s - time.monotonic())
            if self._stopping.is_set() or not self._alive:
                return False
            request_id = self.session.submit(list(ask.prompt), ask.params, self.owner, **more)
            if request_id is None:
                return False
            self.ids[number].append(request_id)
        return True

    def _ended(self, ids: Sequence[str]) -> bool:
        """Wait for them; False where that is in vain."""
        return self._wait(lambda: not any(self.session.owns(i, self.owner) for i in ids))

    def _have(self, ids: Sequence[str], tokens: int) -> bool:
        """Wait until they have so many tokens each, or have ended; False where that is in vain."""

        def there() -> bool:
            left = [i for i in ids if self.session.owns(i, self.owner)]
            if not left:
                return True
            requests = self.session.store.latest().requests
            return all(i in requests and requests[i].num_output_tokens >= tokens for i in left)

        return self._wait(there)

    def _wait(self, there: Callable[[], bool]) -> bool:
        while not there():
            if self._stopping.is_set() or not self._alive:
                return False
            self._pause(_LOOK_S)
        return not self._stopping.is_set()

    def _pause(self, seconds: float) -> None:
        if seconds > 0:
            self._stopping.wait(seconds)


def state_html(sender: Sender, done: str = "") -> str:
    """How far a sender is, or what became of it; ``done``: what to say once all was measured."""
    if sender.busy:
        width = 100 * sender.progress
        return said(f'{html.escape(sender.said)}<div class="qp-progress"><i style="width:{width:.0f}%"></i></div>', "wait")
    if sender.failed:
        return said(html.escape(sender.said), "error")
    return said(html.escape(done)) if done else ""
