"""A bounded log of events that can be entered at any step.

New events stay as they are; every few thousand of them are sealed into a compressed chunk (``engine.events.codec``), and the
state at a chunk's beginning is kept as a keyframe. So a step is rebuilt from the keyframe before it and at most a few chunks. When the log
is full its oldest chunk goes, and the log says how much it dropped.

Memory stays under ``max_bytes`` for the chunks, plus ``KEYFRAME_BYTES`` for the keyframes (thinned out when they would pass
it), plus the unsealed tail and the few decoded chunks that are kept at hand, each of at most about ``SEAL_BYTES`` as objects
(or one event, if that is larger): with the defaults under 256 + 64 + 5 x 16 = 400 MiB.
"""

import os
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from engine.events import saved_log
from engine.events.chrome import write_chrome_trace
from engine.events.codec import SCHEMA, Chunk, Schema, collector_paused, encode_chunks
from engine.events.keyframe import Keyframe, weight
from engine.events.saved_state import StoredKeyframe
from engine.events.state import State
from engine.events.types import EngineStarted, Event

SEAL_EVENTS = 4096
SEAL_BYTES = 16 << 20
KEYFRAME_BYTES = 64 << 20
_DECODED = 4  # chunks kept as objects
_DECODED_RAW = 4 << 20  # bytes of those, encoded: an honest chunk has less, but for recorded logits; a hostile one is not kept


class Sealed(NamedTuple):
    chunk: Chunk
    first_index: int
    schema: Schema = SCHEMA  # that the chunk was written with


class EventsSince(NamedTuple):
    """What ``since`` answers. ``missed``: events after the reader's cursor that had been dropped before it came."""

    events: list[Event]
    cursor: int
    missed: int


class EventLog:
    """Events in the order they came, each with an index that never repeats. Callable as a recorder's sink; thread-safe.

    ``capacity``: events kept, to within a quarter (whole chunks are dropped). The log should begin with EngineStarted and a Snapshot, as ``Engine.record()`` makes it.
    """

    def __init__(self, capacity: int = 1_000_000, *, max_bytes: int = 256 << 20) -> None:
        for name, value in (("capacity", capacity), ("max_bytes", max_bytes)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        self.capacity = capacity
        self.max_bytes = max_bytes
        self._seal_events = max(1, min(SEAL_EVENTS, capacity // 4))
        self.facts: dict[str, Any] = {}  # what a loaded file says about the run
        self._lock = threading.RLock()
        self._next = 0  # index of the next event
        self._reset()

    def _reset(self) -> None:
        self._sealed: list[Sealed] = []
        self._keyframes: dict[int, Keyframe | StoredKeyframe] = {}  # index of a chunk's first event -> the state before it
        self._keyframe_every = 1  # chunks
        self._chunk_bytes = 0
        self._tail: list[Event] = []
        self._tail_index = self._next
        self._tail_bytes = 0
        self._tail_keyframe: Keyframe | StoredKeyframe = Keyframe(State())
        self._decoded: OrderedDict[tuple[int, bool], list[Event]] = OrderedDict()  # (first index, for a replay only) -> events
        self._step = 0
        self._started: EngineStarted | None = None
        self._dropped = 0
        self._chunks_sealed = 0

    # -- in ---------------------------------------------------------------------------------------------------------

    def append(self, event: Event) -> None:
        """Take one event. ValueError when its step lies before the last one's."""
        with self._lock:
            if event.step < self._step:
                raise ValueError(f"{type(event).__name__} of step {event.step} after step {self._step}: steps never go back")
            self._step = event.step
            if type(event) is EngineStarted:
                self._started = event
            self._tail.append(event)
            self._next += 1
            self._tail_bytes += weight(event)
            if len(self._tail) >= self._seal_events or self._tail_bytes >= SEAL_BYTES:
                self._seal()

    __call__ = append

    def extend(self, events: Iterable[Event]) -> None:
        with self._lock:
            for event in events:
                self.append(event)

    def clear(self) -> None:
        """Forget everything; indices go on counting, so readers' cursors stay right."""
        with self._lock:
            self._reset()

    def _seal(self) -> None:
        """The tail becomes a chunk (more, if it is very large), and its end a keyframe. ValueError if its events contradict each other."""
        events, index = self._tail, self._tail_index
        state, new = self._tail_keyframe.state(), []
        for chunk in encode_chunks(events):
            part = events[index - self._tail_index :][: chunk.num_events]
            new.append((chunk, index, Keyframe(state)))
            state.apply_all(part)
            index += chunk.num_events
        for chunk, at, keyframe in new:
            self._add_chunk(Sealed(chunk, at), keyframe)
        if len(new) == 1:
            self._decoded_put((self._tail_index, False), events)
        self._tail, self._tail_index, self._tail_bytes = [], index, 0
        self._tail_keyframe = Keyframe(state)
        self._drop()

    def _add_chunk(self, sealed: Sealed, keyframe: Keyframe | StoredKeyframe | None) -> None:
        """``keyframe``: the state before it; the first chunk must have one."""
        self._sealed.append(sealed)
        self._chunk_bytes += len(sealed.chunk.data)
        if keyframe is not None and (not self._keyframes or self._chunks_sealed % self._keyframe_every == 0):
            self._keyframes[sealed.first_index] = keyframe
        self._chunks_sealed += 1
        while sum(k.nbytes for k in self._keyframes.values()) > KEYFRAME_BYTES and len(self._keyframes) > 4:
            self._keyframe_every *= 2
            for i, key in enumerate(list(self._keyframes)):
                if i % 2:
                    del self._keyframes[key]

    def _drop(self) -> None:
        """Drop the oldest chunks beyond what may be kept."""
        while len(self._sealed) > 1 and (len(self) > self.capacity or self._chunk_bytes > self.max_bytes):
            oldest, following = self._sealed[0], self._sealed[1].first_index
            if following not in self._keyframes:
                state = self._keyframes[oldest.first_index].state()
                keyframe = Keyframe(state.apply_all(self._events_of(oldest, replay=True)))
                self._keyframes = {following: keyframe, **self._keyframes}
            self._keyframes.pop(oldest.first_index)
            self._decoded.pop((oldest.first_index, False), None)
            self._decoded.pop((oldest.first_index, True), None)
            del self._sealed[0]
            self._chunk_bytes -= len(oldest.chunk.data)
            self._dropped += oldest.chunk.num_events

    # -- what there is ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._next - self.first_index

    @property
    def first_index(self) -> int:
        """Index of the oldest event that is kept."""
        return self._sealed[0].first_index if self._sealed else self._tail_index

    @property
    def next_index(self) -> int:
        """Index that the next event will get."""
        return self._next

    @property
    def dropped(self) -> int:
        """Events that are no longer there."""
        return self._dropped

    @property
    def first_step(self) -> int:
        """The first step that can be rebuilt."""
        with self._lock:
            if self._sealed:
                return self._sealed[0].chunk.first_step
            return self._tail[0].step if self._tail else 0

    @property
    def last_step(self) -> int:
        return self._step

    @property
    def started(self) -> EngineStarted | None:
        """What ran, as the log's beginning tells it (also when the beginning was dropped)."""
        return self._started

    @property
    def nbytes(self) -> int:
        """Bytes of chunks and keyframes, and about those of the tail."""
        with self._lock:
            return self._chunk_bytes + sum(k.nbytes for k in self._keyframes.values()) + self._tail_bytes

    @property
    def raw_nbytes(self) -> int:
        """Bytes of all sealed chunks when decompressed: as objects the events take some times that."""
        with self._lock:
            return sum(s.chunk.raw_size for s in self._sealed)

    # -- out ------------------------------------------------------------------------------------------------------------

    def since(self, cursor: int, limit: int | None = None) -> EventsSince:
        """The events from index ``cursor`` on (at most ``limit``), the cursor for the next call, and how many are missing in front."""
        if cursor < 0 or (limit is not None and limit < 0):
            raise ValueError(f"cursor and limit must not be negative, got {cursor} and {limit}")
        with self._lock:
            start = min(max(cursor, self.first_index), self._next)
            stop = self._next if limit is None else min(self._next, start + limit)
            events = self._between(start, stop)
        return EventsSince(events, stop, max(0, start - cursor))

    def window(self, first_step: int, last_step: int) -> list[Event]:
        """The kept events with ``first_step <= step <= last_step``."""
        with self._lock:
            out: list[Event] = []
            for sealed in self._sealed:
                if sealed.chunk.last_step >= first_step and sealed.chunk.first_step <= last_step:
                    out += (e for e in self._events_of(sealed) if first_step <= e.step <= last_step)
            out += (e for e in self._tail if first_step <= e.step <= last_step)
            return out

    def __iter__(self) -> Iterator[Event]:
        """The kept events, a chunk at a time; what is appended meanwhile comes too."""
        cursor = self.first_index
        while True:
            events, cursor, _ = self.since(cursor, SEAL_EVENTS)
            if not events:
                return
            yield from events

    def at(self, step: int) -> State:
        """The state after the last event of ``step``. ValueError for a step that is not kept."""
        return self.state_at(step)[0]

    def state_at(self, step: int, before: tuple[State, int] | None = None) -> tuple[State, int]:
        """``at(step)`` and the index of the first event that it does not hold.

        ``before``: an earlier answer, to go on from when that is nearer than a keyframe; it is not changed.
        """
        with self._lock, collector_paused():
            if not self.first_step <= step <= self.last_step:
                raise ValueError(f"step {step} is not in the log: steps {self.first_step} to {self.last_step} are")
            index, keyframe = self._nearest(step)
            if before is not None and max(index, self.first_index) <= before[1] <= self._next and before[0].step <= step:
                state, index = before[0].copy(), before[1]
            else:
                state = keyframe.state()
            for events in self._chunks_from(index, replay=True):
                if events[-1].step <= step:
                    state.apply_all(events)
                    index += len(events)
                    continue
                count = bisect_right(events, step, key=_step_of)
                state.apply_all(events[:count])
                index += count
                break
            return state, index

    def _nearest(self, step: int) -> tuple[int, Keyframe | StoredKeyframe]:
        """The last keyframe that holds nothing after ``step``, and the index of the first event after it."""
        whole = bisect_right(self._sealed, step, key=_last_step_of)  # chunks that lie before the end of ``step``
        if whole < len(self._sealed):
            for sealed in reversed(self._sealed[: whole + 1]):
                if sealed.first_index in self._keyframes:
                    return sealed.first_index, self._keyframes[sealed.first_index]
        return self._tail_index, self._tail_keyframe

    def _chunks_from(self, index: int, replay: bool = False) -> Iterable[list[Event]]:
        i = bisect_right(self._sealed, index, key=_first_index_of) - 1
        for sealed in self._sealed[max(i, 0) :]:
            skip = max(0, index - sealed.first_index)
            if skip < sealed.chunk.num_events:
                events = self._events_of(sealed, replay)
                yield events[skip:] if skip else events
        tail = self._tail[max(0, index - self._tail_index) :]
        if tail:
            yield tail

    def _between(self, start: int, stop: int) -> list[Event]:
        out: list[Event] = []
        for events in self._chunks_from(start) if start < stop else ():
            out += events[: stop - start - len(out)]
            if len(out) == stop - start:
                break
        return out

    def _events_of(self, sealed: Sealed, replay: bool = False) -> list[Event]:
        """A chunk's events; with ``replay`` perhaps with those fields only that ``State`` wants."""
        for key in ((sealed.first_index, False), (sealed.first_index, True))[: 1 + replay]:
            if key in self._decoded:
                self._decoded.move_to_end(key)
                return self._decoded[key]
        events = saved_log.events_of(sealed, replay)
        if (
            sealed.chunk.raw_size <= SEAL_BYTES
        ):  # only a file from elsewhere has larger ones of many events: not several at a time
            self._decoded_put((sealed.first_index, replay), events)
        return events

    def _decoded_put(self, key: tuple[int, bool], events: list[Event]) -> None:
        self._decoded[key] = events
        while len(self._decoded) > _DECODED:
            self._decoded.popitem(last=False)

    # -- files ------------------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], facts: dict[str, Any] | None = None) -> None:
        """Write the log to a file that ``load`` reads. ``facts``: plain values to keep with it."""
        saved_log.save(self, path, facts or {})

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, capacity: int | None = None, max_bytes: int | None = None, check: bool = False
    ) -> "EventLog":
        """A saved log. CodecError (a ValueError) for a file that is not in order.

        Frames, checksums and sizes are checked now; events and keyframes when they are first read, where a CodecError may come
        from any method that reads them. ``check``: now, all of them (see ``check``). By default a log as long as the file is
        accepted; ``capacity`` and ``max_bytes`` make it keep the end only.
        """
        log = cls(1 << 26 if capacity is None else capacity, max_bytes=1 << 30 if max_bytes is None else max_bytes)
        with collector_paused():
            saved_log.load(log, path)
            if check:
                log.check()
        if capacity is None:
            log.capacity = max(1_000_000, len(log))
        return log

    def check(self) -> None:
        """Decode and replay everything that is kept, and compare each stored keyframe with what the events give. CodecError."""
        saved_log.check(self)

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what is kept as a Chrome trace, to be opened in Perfetto (ui.perfetto.dev, works offline)."""
        write_chrome_trace(path, self, self.started, self._start().snapshot())

    def _start(self) -> State:
        """The state before the first event that is kept."""
        with self._lock:
            return (self._keyframes[self.first_index] if self._sealed else self._tail_keyframe).state()


def _step_of(event: Event) -> int:
    return event.step


def _last_step_of(sealed: Sealed) -> int:
    return sealed.chunk.last_step


def _first_index_of(sealed: Sealed) -> int:
    return sealed.first_index
