"""The one recorder of an engine: who changes a thing emits what it changed; sinks come and go.

With nobody watching, ``on`` is False and an event costs the caller one branch (``if recorder.on: ...``).
"""

import time
from collections.abc import Callable
from typing import Any

from engine.events.types import Event

Sink = Callable[[Event], None]


class Recorder:
    """Hands events to its sinks. ``step`` is the number of the step under way (or of the last one, between steps)."""

    __slots__ = ("_sinks", "on", "record_ns", "step", "tokens_top", "watched_logits")

    def __init__(self) -> None:
        self.on = False
        self.step = 0
        self.record_ns = 0  # time spent in here since the last StepDone
        self.tokens_top: int | None = None  # watch("tokens", top=k): None is off
        self.watched_logits: dict[str, int] = {}  # watch("logits", request_id): request id -> positions still to keep
        self._sinks: list[Sink] = []

    def attach(self, sink: Sink) -> None:
        self._sinks.append(sink)
        self.on = True

    def detach(self, sink: Sink) -> None:
        self._sinks.remove(sink)
        self.on = bool(self._sinks)

    def now(self) -> int:
        """The time that an event would carry."""
        return time.monotonic_ns()

    def emit(self, kind: type[Event], **fields: Any) -> None:
        """Build the event and deliver it. Callers check ``on`` first."""
        start = time.monotonic_ns()
        event = kind(step=self.step, time_ns=start, **fields)
        for sink in self._sinks:
            sink(event)
        self.record_ns += time.monotonic_ns() - start
