"""Loads on the session's engine: requests that arrive over time, beside whatever else everybody sends.

A session owns one ``Loads``. Its thread calls ``pump`` (what is due is sent) and ``take`` (what came of it); pages ask for ``start``,
``set_rate`` and ``stop`` in the name of a viewer and read ``of(viewer)``. The requests belong to the viewer who started them.
"""

import itertools
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from engine.load.agenda import Agenda
from engine.load.generate import Conversation, Load, conversations
from engine.load.process import ProcessLoad
from engine.messages import Rejected

KEPT = 100  # loads of which it is known how many requests were refused
MAX_REQUESTS = 5_000  # of one load: whoever wants more uses the command line


@dataclass(frozen=True)
class LoadState:
    """What a page shows of a load. ``waiting``: sent, and without a token. ``refused``: found the queue full. ``rate``: of arrivals now, a second."""

    name: str
    total: int | None
    sent: int
    finished: int
    waiting: int
    refused: int
    failed: int
    rate: float
    seconds: float
    over: bool
    stopping: bool
    error: str


class Paced(Agenda):
    """An agenda whose arrivals come ``rate`` times as fast as the load has them; the rate may change at any moment."""

    def __init__(self, load: Iterable[Conversation], rate: float) -> None:
        self.rate = rate
        self._at = (0.0, 0.0)  # a moment of the load's own time, and when that is here
        super().__init__(self._timed(load))

    def _timed(self, load: Iterable[Conversation]) -> Iterator[Conversation]:
        for conversation in load:
            theirs, ours = self._at
            ours += (conversation.time_s - theirs) / self.rate
            self._at = conversation.time_s, ours
            yield _at(conversation, ours)

    def set_rate(self, rate: float, now_s: float) -> None:
        """What is left of the wait for the next arrival, and all after it, goes at the new rate. ValueError for none that is a rate."""
        if not 0 < rate < math.inf:
            raise ValueError(f"rate must be a number of arrivals a second > 0, got {rate!r}")
        ahead = self._ahead
        if ahead is not None and ahead.time_s > now_s:
            ours = now_s + (ahead.time_s - now_s) * self.rate / rate
            self._at = self._at[0], ours
            self._ahead = _at(ahead, ours)
        self.rate = rate


def _at(conversation: Conversation, time_s: float) -> Conversation:
    first, *rest = conversation.turns
    return Conversation((replace(first, time_s=time_s), *rest))


class _Running:
    def __init__(self, driver: ProcessLoad, agenda: Paced, total: int | None) -> None:
        self.driver, self.agenda, self.total = driver, agenda, total
        self.stopping = False
        self.seconds = 0.0
        self.over = False

    def state(self) -> LoadState:
        results = self.driver.results
        finished = len(results.finished)
        return LoadState(
            self.driver.name, self.total, finished + len(results.live), finished, results.num_waiting, results.num_refused,
            sum(r.outcome == "error" for r in results.finished), self.agenda.rate, self.driver.now() if not self.over else self.seconds,
            self.over, self.stopping, results.first_error,
        )  # fmt: skip


class Loads:
    """Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._loads: dict[str, _Running] = {}  # viewer -> the load that was started last
        self._refused: dict[str, int] = {}  # of loads that are over, the last ones
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """For the name of a load: every one once."""
        return next(self._numbers)

    def start(
        self, process: Any, owner: str, load: Load, *, rate: float, name: str | None = None, max_waiting: int | None = None,
    ) -> str:  # fmt: skip
        """Begin to send; returns the load's name. ``load``: with arrivals of one a second, which ``rate`` makes faster or slower. Prefixes are
        shared within the load only. ValueError while another load of this viewer runs, and for one that is too long."""
        if load.num_requests is None or load.num_requests > MAX_REQUESTS:
            raise ValueError(f"num_requests of a load from a page must be at most {MAX_REQUESTS:,}, got {load.num_requests}")
        if not 0 < rate < math.inf:
            raise ValueError(f"rate must be a number of arrivals a second > 0, got {rate!r}")
        name = name if name is not None else f"load{self.number()}"
        with self._lock:
            now = self._loads.get(owner)
            if now is not None and not now.over:
                raise ValueError("a load of yours is running: stop it first")
            agenda = Paced(conversations(load), rate)
            driver = ProcessLoad(process, (), max_waiting=max_waiting, owner=owner, name=name, cache_salt=name)
            driver.agenda = agenda
            self._loads[owner] = _Running(driver, agenda, load.num_requests)
        return name

    def set_rate(self, owner: str, rate: float) -> None:
        with self._lock:
            load = self._loads.get(owner)
            if load is not None and not load.over:
                load.agenda.set_rate(rate, load.driver.now())

    def stop(self, owner: str) -> None:
        """Send nothing more and abort what runs."""
        with self._lock:
            load = self._loads.get(owner)
            if load is not None and not load.over and not load.stopping:
                load.stopping = True
                load.driver.stop()

    def of(self, owner: str) -> LoadState | None:
        """The viewer's load, also one that is over."""
        with self._lock:
            load = self._loads.get(owner)
            return load.state() if load is not None else None

    def refused(self, name: str) -> int:
        """How many of this load's requests found the queue full: no event tells of them."""
        with self._lock:
            running = (load for load in self._loads.values() if load.driver.name == name)
            return next((load.driver.results.num_refused for load in running), self._refused.get(name, 0))

    def leave(self, owner: str) -> None:
        """The viewer is gone; whoever ends its requests is somebody else."""
        with self._lock:
            load = self._loads.pop(owner, None)
            if load is not None:
                load.agenda.stop()

    # -- the session's thread ----------------------------------------------------------------------------------------------

    def pump(self) -> float:
        """Send what is due; seconds until something is due next (infinity: nothing is known of)."""
        soonest = math.inf
        with self._lock:
            for load in self._loads.values():
                if load.over:
                    continue
                try:
                    soonest = min(soonest, load.driver.pump())
                except RuntimeError as error:  # the engine is gone, or takes no commands: no more is sent
                    load.agenda.stop()
                    load.driver.results.first_error = load.driver.results.first_error or str(error)
                if load.driver.done:
                    load.over, load.seconds = True, load.driver.now()
                    self._refused[load.driver.name] = load.driver.results.num_refused
                    while len(self._refused) > KEPT:
                        del self._refused[next(iter(self._refused))]
        return soonest

    def take(self, message: Any) -> bool:
        """Any message of the engine. Whether it concerns a load alone, so that nobody else needs to be told."""
        mine = False
        with self._lock:
            for load in self._loads.values():
                if not load.over:
                    mine = mine or (isinstance(message, Rejected) and message.request_id in load.driver.results.live)
                    load.driver.take(message)
        return mine
