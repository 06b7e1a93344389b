"""Recorded events as bytes: chunks of some thousands of events. ``engine.events.runfile`` is the file that holds them.

A chunk is columnar (``engine.events.columns``): which kind each event is, then for each kind one column a field, all through
zlib. Little-endian throughout. Nothing is ever unpickled or evaluated. A reader refuses, with a CodecError (a ValueError)
that says where, whatever ``encode_chunks`` would not have written, and sizes beyond the limits below before it allocates for
them.
"""

import contextlib
import gc
import typing
import zlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from engine.events.columns import CodecError, Reader, StructColumn, Writer
from engine.events.types import AnyEvent, CacheTimed, Event, LogitsRecorded, StepDone, TokenSampled

__all__ = ["Chunk", "CodecError", "decode_chunk", "encode_chunks"]

MAX_CHUNK_BYTES = 32 << 20  # of a chunk, decompressed
MAX_CHUNK_EVENTS = 1 << 16

KINDS: tuple[type[Event], ...] = typing.get_args(AnyEvent)
Schema = list[tuple[type[Event], StructColumn]]
SCHEMA: Schema = [(kind, StructColumn(kind)) for kind in KINDS]
# What ``State`` wants of the kinds whose other fields are many: reading for a replay leaves the others out.
_REPLAYED: dict[type[Event], frozenset[str]] = {
    StepDone: frozenset(("step", "time_ns", "runs")),
    TokenSampled: frozenset(("step", "time_ns", "request_id", "index", "token_id", "text")),
    LogitsRecorded: frozenset(("step", "time_ns")),
    CacheTimed: frozenset(("step", "time_ns")),
}
_CODES = {kind: code for code, kind in enumerate(KINDS)}


def replay_schema(schema: Schema) -> Schema:
    """``schema`` for ``decode_chunk`` when the events are wanted for ``State.apply`` only: 3 times as fast, all of it still checked."""
    return [(kind, StructColumn(kind, c.names, _REPLAYED[kind], c.columns) if kind in _REPLAYED else c) for kind, c in schema]


REPLAY_SCHEMA = replay_schema(SCHEMA)


class Chunk(NamedTuple):
    """Events, encoded and compressed."""

    data: bytes
    raw_size: int  # bytes before compression
    num_events: int
    first_step: int = 0  # of its first event
    last_step: int = 0  # of its last


def encode_chunks(events: list[Event], level: int = 1) -> list[Chunk]:
    """Usually one chunk; more when the events would pass a limit. CodecError for a single event that passes it alone."""
    if not events:
        return []
    try:
        if len(events) > MAX_CHUNK_EVENTS:
            raise CodecError(f"{len(events)} events in one chunk, at most {MAX_CHUNK_EVENTS} are allowed")
        raw = _encode(events)
        if len(raw) > MAX_CHUNK_BYTES:
            raise CodecError(f"{type(events[0]).__name__} takes {len(raw)} bytes, at most {MAX_CHUNK_BYTES} are allowed")
        return [Chunk(zlib.compress(raw, level), len(raw), len(events), events[0].step, events[-1].step)]
    except CodecError:
        if len(events) == 1:
            raise
    half = len(events) // 2
    return encode_chunks(events[:half], level) + encode_chunks(events[half:], level)


def _encode(events: list[Event]) -> bytes:
    by_kind: dict[int, list[Event]] = {}
    codes = []
    for event in events:
        code = _CODES.get(type(event))
        if code is None:
            raise CodecError(f"not an event: {type(event).__name__}")
        codes.append(code)
        by_kind.setdefault(code, []).append(event)
    w = Writer()
    w.size(len(events))
    w.array(np.array(codes, np.int8))
    for code in sorted(by_kind):
        kind, column = SCHEMA[code]
        try:
            column.write(w, by_kind[code])
        except CodecError as error:
            raise CodecError(f"{kind.__name__}.{error}") from None
    return b"".join(w.parts)


def decode_chunk(chunk: Chunk, schema: Schema = SCHEMA) -> list[Event]:
    """The events of a chunk in their order. CodecError for anything that ``encode_chunks`` would not have written."""
    r = Reader(decompress(chunk.data, chunk.raw_size))
    count = r.size()
    if count != chunk.num_events or count > MAX_CHUNK_EVENTS:
        raise CodecError(f"a chunk of {count} events, {chunk.num_events} were announced and {MAX_CHUNK_EVENTS} are allowed")
    codes = r.array((b"i1",), count)
    if count and (int(codes.min()) < 0 or int(codes.max()) >= len(schema)):
        raise CodecError("event kind out of range")
    rows: dict[int, Iterator[Event]] = {}
    counts = np.bincount(codes, minlength=len(schema)).tolist()
    for code, (kind, column) in enumerate(schema):
        if counts[code]:
            try:
                rows[code] = iter(column.read(r, counts[code]))
            except CodecError as error:
                raise CodecError(f"{kind.__name__}.{error}") from None
    if r.pos != len(r.data):
        raise CodecError(f"{len(r.data) - r.pos} bytes too many in a chunk")
    return [next(rows[code]) for code in codes.tolist()]


def decompress(data: bytes, size: int) -> bytes:
    """Exactly ``size`` bytes, and never more than that in memory."""
    if size > MAX_CHUNK_BYTES:
        raise CodecError(f"{size} bytes decompressed, at most {MAX_CHUNK_BYTES} are allowed")
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(data, size + 1)
    except zlib.error as error:
        raise CodecError(f"broken compression: {error}") from None
    if len(raw) != size or not inflate.eof or inflate.unused_data:
        raise CodecError(
            f"{size} bytes were announced, the compressed data hold {'more' if len(raw) > size else 'another number'}"
        )
    return raw


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Millions of events are made and dropped in no time, none in a cycle: looking for cycles would take half of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
