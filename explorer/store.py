"""The store: what every view reads. Events come in from a session or a file, states at any step come out.

Nothing here touches an engine.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from engine.events.log import EventLog, EventsSince
from engine.events.state import State
from engine.events.types import EngineStarted, Event
from explorer.sources.sense import check_engine, check_sampling

_CACHED_STATES = 8


class EventStore:
    """An EventLog for many readers, with states at hand. Thread-safe: one thread appends while views read.

    A view keeps a cursor: ``events, cursor, missed = store.since(cursor)``. When an engine starts anew, the store starts a new ``run``: the
    old events are gone, the cursor goes on counting, and a view that sees another ``run`` clears what it drew.
    """

    def __init__(self, capacity: int = 1_000_000, *, log: EventLog | None = None) -> None:
        self.log = log if log is not None else EventLog(capacity)
        self.replayed = False  # whether this is a saved run
        self._run = 0
        self._lock = threading.RLock()
        self._states: OrderedDict[int, tuple[State, int]] = OrderedDict()  # step -> the state and the index it goes up to

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "EventStore":
        """A saved run. ValueError for a file that is not in order, and for values that no engine has (as far as its end tells)."""
        store = cls(log=EventLog.load(path))
        store.replayed = True
        try:
            check_engine(store.started)
            check_sampling((r.request_id, r.sampling) for r in store.latest().requests.values())
        except ValueError as error:
            text = str(error)
            raise ValueError(text if text.startswith(os.fspath(path)) else f"{os.fspath(path)}: {text}") from None
        return store

    def append(self, events: Iterable[Event]) -> None:
        """Take events in, in order. An EngineStarted after others begins a new run."""
        with self._lock:
            for event in events:
                if isinstance(event, EngineStarted) and len(self.log):
                    self.clear()
                self.log.append(event)

    def clear(self) -> None:
        """Forget everything; the next event begins a new run."""
        with self._lock:
            self.log.clear()
            self._states.clear()
            self._run += 1

    @property
    def run(self) -> int:
        """Counts up when the events before are gone because an engine started anew."""
        return self._run

    @property
    def started(self) -> EngineStarted | None:
        """What is running (model, config, device); None before the first engine."""
        return self.log.started

    @property
    def first_step(self) -> int:
        """The first step that ``at`` can show."""
        return self.log.first_step

    @property
    def last_step(self) -> int:
        return self.log.last_step

    @property
    def dropped(self) -> int:
        """Events of this run that the ring buffer no longer holds."""
        return self.log.dropped

    @property
    def facts(self) -> dict[str, Any]:
        """What a loaded file says about its run."""
        return self.log.facts

    def __len__(self) -> int:
        return len(self.log)

    def since(self, cursor: int, limit: int | None = None) -> EventsSince:
        """Events from ``cursor`` on, the next cursor, and how many in front were dropped. The first cursor is 0."""
        return self.log.since(cursor, limit)

    def window(self, first_step: int, last_step: int) -> list[Event]:
        """The kept events of these steps, both included."""
        return self.log.window(first_step, last_step)

    def at(self, step: int) -> State:
        """The state after ``step``. Do not change it: views share it. ValueError for a step that is not kept.

        Near a step that was asked for lately it costs only what lies between.
        """
        with self._lock:
            before = None
            for known, (state, index) in self._states.items():
                if known <= step and (before is None or index > before[1]):
                    before = (state, index)
            if before is not None and before[0].step == step and before[1] == self.log.next_index:
                return before[0]
            state, index = self.log.state_at(step, before)
            self._states[step] = (state, index)
            self._states.move_to_end(step)
            while len(self._states) > _CACHED_STATES:
                self._states.popitem(last=False)
            return state

    def latest(self) -> State:
        """The state after the last event."""
        return self.at(self.last_step)

    def save(self, path: str | os.PathLike[str], facts: dict[str, Any] | None = None) -> None:
        self.log.save(path, facts)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        self.log.to_chrome_trace(path)
