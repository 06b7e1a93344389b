"""The part of Engine that is watched: its log, what costs extra to observe, and what it tells a late watcher."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from engine import reporting
from engine.events.log import EventLog
from engine.events.types import EngineStarted, Snapshot
from engine.timing import cache_timings


class Watching:
    """``self`` is an Engine."""

    @contextlib.contextmanager
    def record(self: Any, capacity: int = 1_000_000) -> Iterator[EventLog]:
        """Every event of the block, in a log that starts with what is running and a snapshot."""
        log = EventLog(capacity=capacity)
        log.append(self.started_event())
        log.append(self.snapshot())
        self.recorder.attach(log.append)
        try:
            yield log
        finally:
            self.recorder.detach(log.append)

    def watch(self: Any, kind: str, request_id: str | None = None, *, top: int = 20, positions: int = 512) -> None:
        """Turn on a costly observation: ``watch("tokens", top=k)`` (how each token was chosen, with k candidates) or
        ``watch("logits", request_id)`` (its full logits in 16 bits, for the next ``positions`` tokens). Recorded only while a log is attached."""
        if kind == "tokens":
            if not isinstance(top, int) or not 0 <= top <= 1000:
                raise ValueError(f"top must be an integer in [0, 1000], got {top!r}")
            self.recorder.tokens_top = top
        elif kind == "logits":
            if request_id is None or not any(
                r.request_id == request_id for group in self._requests.values() for r in group
            ):  # "id#1": a sibling
                raise ValueError(f"no unfinished request {request_id!r} to watch")
            if not isinstance(positions, int) or not 1 <= positions <= 4096:
                raise ValueError(f"positions must be an integer in [1, 4096], got {positions!r}")
            self.recorder.watched_logits[request_id] = positions
        elif kind == "weights":
            self.studies.watch_weights(True)
        else:
            raise ValueError(f"unknown observation {kind!r}; known: 'tokens', 'logits', 'weights'")

    def unwatch(self: Any, kind: str, request_id: str | None = None) -> None:
        if kind == "tokens":
            self.recorder.tokens_top = None
        elif kind == "logits":
            self.recorder.watched_logits.pop(request_id or "", None)
        elif kind == "weights":
            self.studies.watch_weights(False)
        else:
            raise ValueError(f"unknown observation {kind!r}; known: 'tokens', 'logits', 'weights'")

    def measure_cache(self: Any, lengths: Sequence[int]) -> tuple[list[float], list[float]]:
        """Milliseconds of one step at each context length: with the KV cache (one token computed), and without (all of them).

        Really run, on free blocks of the pool between two steps; recorded as CacheTimed. ValueError for a length that does not fit.
        """
        return cache_timings(self, list(lengths))

    def started_event(self: Any) -> EngineStarted:
        """What is running: model, device, configuration."""
        return reporting.started(self)

    def snapshot(self: Any) -> Snapshot:
        """The whole visible state, as a late watcher needs it."""
        return reporting.snapshot(self)
