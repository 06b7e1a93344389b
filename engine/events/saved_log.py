"""A log's way into a file and back. ``EventLog`` is the way in; this is its other half, and knows its parts.

What is saved: the chunks as they are, a keyframe every ``KEYFRAME_CHUNKS`` of them (fewer where keyframes are large: they
never take more than about a third of the file), and one at the end. So opening reads and checks bytes and decodes a single state.

Memory of an opened run: the bytes of its file, and the few decoded chunks that a log keeps at hand (``engine.events.log``). A chunk of a hostile
file, at the limit of 32 MiB decompressed, takes up to some 500 MiB as objects for as long as it is looked at; it is not kept.
"""

import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from engine.events.codec import REPLAY_SCHEMA, SCHEMA, Chunk, Schema, decode_chunk, encode_chunks, replay_schema
from engine.events.columns import CodecError
from engine.events.keyframe import Keyframe
from engine.events.runfile import Header, read_file, schema_is_current, write_file
from engine.events.saved_state import SIGNATURE, StoredKeyframe, encode_state, save_state
from engine.events.state import State
from engine.events.types import Event

if TYPE_CHECKING:
    from engine.events.log import EventLog, Sealed

KEYFRAME_CHUNKS = 1


def events_of(sealed: "Sealed", replay: bool = False) -> list[Event]:
    """A chunk's events; with ``replay`` perhaps with those fields only that ``State`` wants."""
    light = REPLAY_SCHEMA if sealed.schema is SCHEMA else replay_schema(sealed.schema) if replay else []
    events = decode_chunk(sealed.chunk, light if replay else sealed.schema)
    check_steps(events, sealed.chunk)
    return events


def check_steps(events: list[Event], chunk: Chunk) -> None:
    """The steps of a chunk never go back, and are those that its frame announced."""
    steps = [event.step for event in events]
    if any(a > b for a, b in pairwise(steps)):
        raise CodecError("steps go back")
    if steps and (steps[0], steps[-1]) != (chunk.first_step, chunk.last_step):
        raise CodecError(
            f"events of steps {steps[0]} to {steps[-1]} where {chunk.first_step} to {chunk.last_step} were announced"
        )


# -- out --------------------------------------------------------------------------------------------------------------------


def save(log: "EventLog", path: str | os.PathLike[str], facts: dict[str, Any]) -> None:
    with log._lock:
        sealed, keyframes, tail = list(log._sealed), dict(log._keyframes), list(log._tail)
        before_tail = log._tail_keyframe
        facts = {**log.facts, **facts, "first_index": log.first_index, "dropped": log._dropped}
        state = log._start()
    frames = _frames(sealed, keyframes, tail, before_tail, _start_chunk(state))
    write_file(path, frames, facts=facts, keyframe=SIGNATURE)


def _start_chunk(state: State) -> Chunk | None:
    """The state before the first event, as events."""
    if not (state.num_blocks or state.requests or state.engine is not None):
        return None
    head: list[Event] = [state.engine] if state.engine is not None else []
    (start,) = encode_chunks([*head, state.snapshot(finished=True)])
    return start


def _frames(
    sealed: list["Sealed"], keyframes: dict[int, Any], tail: list[Event], before_tail: Any, start: Chunk | None
) -> Iterator[tuple[str, Chunk]]:
    if start is not None:
        yield "S", start
    events_bytes = keyframe_bytes = since = 0
    for each in sealed:
        keyframe = keyframes.get(each.first_index)
        if keyframe is not None and since >= KEYFRAME_CHUNKS and 2 * keyframe_bytes <= events_bytes:
            chunk = _stored(keyframe)
            keyframe_bytes += len(chunk.data)
            since = 0
            yield "K", chunk
        for chunk in [each.chunk] if schema_is_current(each.schema) else encode_chunks(events_of(each)):
            events_bytes += len(chunk.data)
            yield "E", chunk
        since += 1
    state = before_tail.state()
    for chunk in encode_chunks(tail):
        yield "E", chunk
    yield "K", encode_state(state.apply_all(tail))


def _stored(keyframe: Keyframe | StoredKeyframe) -> Chunk:
    return keyframe.chunk if isinstance(keyframe, StoredKeyframe) else encode_state(keyframe.state())


# -- in ---------------------------------------------------------------------------------------------------------------------


def load(log: "EventLog", path: str | os.PathLike[str]) -> None:
    """Fill a new log. CodecError for a file that is not in order as far as can be seen without decoding its events."""
    frames = read_file(path)
    header = next(frames)
    assert isinstance(header, Header)
    try:
        log.facts = header.facts
        log._next = log._tail_index = _plain_count(header.facts.get("first_index", 0))
        log._dropped = _plain_count(header.facts.get("dropped", 0))
        # The same list for all chunks that this version could have written, so that they are told from others by identity.
        schema = SCHEMA if schema_is_current(header.schema) else header.schema
        if header.keyframe == SIGNATURE:
            _load_frames(log, frames, schema)
        else:
            _replay_frames(log, frames, schema)
    except CodecError as error:
        raise error if str(error).startswith(os.fspath(path)) else CodecError(f"{os.fspath(path)}: {error}") from None
    except ValueError as error:
        raise CodecError(f"{os.fspath(path)}: {error}") from None


def _load_frames(log: "EventLog", frames: Iterable[Any], schema: Schema) -> None:
    """Take the chunks as they are; decode the start and the last keyframe only."""
    from engine.events.log import Sealed

    start: Keyframe | StoredKeyframe = Keyframe(State())
    keyframe: StoredKeyframe | None = None  # the one that was read last, if no events came after it
    for kind, chunk in frames:
        if chunk.first_step > chunk.last_step or (kind != "S" and chunk.first_step < log._step):
            raise CodecError("steps go back")
        if kind == "S":
            state = State().apply_all(decode_chunk(chunk, schema))
            log._step, log._started, start = state.step, state.engine, Keyframe(state)
        elif kind == "K":
            keyframe = StoredKeyframe(chunk)
        elif chunk.num_events:
            log._add_chunk(Sealed(chunk, log._next, schema), start if not log._sealed else keyframe)
            log._next += chunk.num_events
            log._step, keyframe = chunk.last_step, None
            log._drop()
    if keyframe is None:
        raise CodecError("the keyframe at the end is missing")
    end = keyframe.state()
    if end.step != log._step and log._sealed:
        raise CodecError(f"the keyframe at the end is of step {end.step}, the events end with {log._step}")
    log._tail_index, log._tail_keyframe, log._started = log._next, Keyframe(end), end.engine


def _replay_frames(log: "EventLog", frames: Iterable[Any], schema: Schema) -> None:
    """A file without keyframes (or with some of another version): every event is decoded and replayed once."""
    from engine.events.log import Sealed

    state = State()
    light = replay_schema(schema)
    for kind, chunk in frames:
        if kind == "K":
            continue
        events = decode_chunk(chunk, light)
        if kind == "S":
            state.apply_all(events)
            log._step, log._started, log._tail_keyframe = state.step, state.engine, Keyframe(state)
        elif events:
            chunk = chunk._replace(first_step=events[0].step, last_step=events[-1].step)
            check_steps(events, chunk)
            if chunk.first_step < log._step:
                raise CodecError("steps go back")
            log._add_chunk(Sealed(chunk, log._next, schema), Keyframe(state))
            state.apply_all(events)
            log._next += len(events)
            log._step = chunk.last_step
            log._drop()
    log._tail_index, log._tail_keyframe, log._started = log._next, Keyframe(state), state.engine


def check(log: "EventLog") -> None:
    """Replay all that is kept; the stored keyframes must be what the events give."""
    with log._lock:
        sealed, keyframes = list(log._sealed), dict(log._keyframes)
        last, state = log._tail_keyframe, log._start()
    try:
        for each in sealed:
            keyframe = keyframes.get(each.first_index)
            if isinstance(keyframe, StoredKeyframe) and save_state(keyframe.state()) != save_state(state):
                raise CodecError(f"the keyframe before event {each.first_index} is not what the events before it give")
            state.apply_all(events_of(each, replay=True))
        if save_state(last.state()) != save_state(state):
            raise CodecError("the keyframe at the end is not what the events give")
    except CodecError:
        raise
    except ValueError as error:
        raise CodecError(str(error)) from None


def _plain_count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise CodecError(f"a count was expected, got {value!r:.60}")
    return value
