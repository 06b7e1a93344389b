"""Recorded events as bytes: chunks of some thousands of events, and the versioned file that holds them.

A chunk is columnar (``engine.events.columns``): which kind each event is, then for each kind one column a field, all through
zlib. A file is::

    magic "CUTAWAY\\n", version u16, 0 u16
    frames: type u8, raw size u32, stored size u32, events u32, crc32 u32 (of the frame's fields and payload), payload
        H  header: JSON, the schema of every event kind and the caller's facts about the run
        S  start (optional): EngineStarted and a Snapshot from which the events go on, when the beginning was dropped
        E  events, any number of frames
        Z  end: JSON, the totals

Little-endian throughout. Nothing is ever unpickled or evaluated. A reader refuses, with a CodecError (a ValueError) that
says where: another magic or version, an event kind or field it does not know, a missing end, bytes after it, a wrong checksum,
and sizes beyond the limits below, before it allocates for them.
"""

import contextlib
import gc
import json
import os
import struct
import tempfile
import typing
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from engine.events.columns import CodecError, Reader, StructColumn, Writer, loads
from engine.events.types import AnyEvent, CacheTimed, Event, LogitsRecorded, StepDone, TokenSampled

__all__ = ["Chunk", "CodecError", "Header", "decode_chunk", "encode_chunks", "read_file", "write_file"]

MAGIC = b"CUTAWAY\n"
VERSION = 1
MAX_HEADER_BYTES = 4 << 20
MAX_CHUNK_BYTES = 64 << 20  # of a chunk, decompressed
MAX_CHUNK_EVENTS = 1 << 16
MAX_FILE_EVENTS = 1 << 26
MAX_FILE_BYTES = 4 << 30  # of all chunks, decompressed
_FRAME = struct.Struct("<BIIII")

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
    return [(kind, StructColumn(kind, c.names, _REPLAYED[kind]) if kind in _REPLAYED else c) for kind, c in schema]


REPLAY_SCHEMA = replay_schema(SCHEMA)


class Chunk(NamedTuple):
    """Events, encoded and compressed."""

    data: bytes
    raw_size: int  # bytes before compression
    num_events: int


class Header(NamedTuple):
    """What a file says before its events."""

    version: int
    schema: Schema
    facts: dict[str, Any]  # what the writer told about the run


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
        return [Chunk(zlib.compress(raw, level), len(raw), len(events))]
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
    r = Reader(_decompress(chunk.data, chunk.raw_size))
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


def _decompress(data: bytes, size: int) -> bytes:
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


def describe(schema: Schema) -> list[Any]:
    """The schema as the header holds it: kind, and name and layout of each field."""
    return [[kind.__name__, [[n, c.signature] for n, c in zip(column.names, column.columns)]] for kind, column in schema]


def _schema_of(described: Any) -> Schema:
    """The schema of a file. A field that came later takes its default; what this version does not know is refused."""
    known = {kind.__name__: (kind, column) for kind, column in SCHEMA}
    try:
        pairs = msgspec.convert(described, list[tuple[str, list[tuple[str, str]]]])
    except msgspec.ValidationError as error:
        raise CodecError(f"malformed schema: {error}") from None
    schema: Schema = []
    for name, fields in pairs[:128]:
        if name not in known:
            raise CodecError(f"event kind {name!r:.60} is not known here: the file was written by a newer version")
        kind, column = known[name]
        layouts = dict(zip(column.names, (c.signature for c in column.columns)))
        for field, layout in fields:
            if layouts.get(field) != layout:
                raise CodecError(
                    f"field {name}.{field:.60} is not known here in this form: the file was written by another version"
                )
        names = [field for field, _ in fields]
        required = {f.name for f in msgspec.structs.fields(kind) if f.required}
        if len(set(names)) != len(names) or not required <= set(names):
            raise CodecError(f"event kind {name} lacks {sorted(required - set(names))} or names a field twice")
        schema.append((kind, column if names == column.names else StructColumn(kind, names)))
    if len(pairs) > 127 or len({kind for kind, _ in schema}) != len(schema):
        raise CodecError("too many event kinds, or one twice")
    return schema


def schema_is_current(schema: Schema) -> bool:
    """Whether chunks of this schema are just what this version writes."""
    return len(schema) == len(SCHEMA) and all(a[0] is b[0] and a[1] is b[1] for a, b in zip(schema, SCHEMA, strict=True))


def write_file(
    path: str | os.PathLike[str], chunks: Iterable[Chunk], *, start: Chunk | None = None, facts: dict[str, Any]
) -> None:
    """Write a whole file, or none: it is put in place when it is complete. ``facts``: plain values about the run."""
    path = Path(path)
    header = json.dumps({"schema": describe(SCHEMA), "facts": facts}).encode()
    if len(header) > MAX_HEADER_BYTES:
        raise CodecError(f"the facts about the run take {len(header)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + struct.pack("<HH", VERSION, 0))
            _write_frame(file, b"H", Chunk(header, len(header), 0))
            if start is not None:
                _write_frame(file, b"S", start)
            total = frames = 0
            for chunk in chunks:
                _write_frame(file, b"E", chunk)
                total += chunk.num_events
                frames += 1
            end = json.dumps({"events": total, "frames": frames}).encode()
            _write_frame(file, b"Z", Chunk(end, len(end), 0))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _write_frame(file: BinaryIO, kind: bytes, chunk: Chunk) -> None:
    fields = (kind[0], chunk.raw_size, len(chunk.data), chunk.num_events)
    crc = zlib.crc32(chunk.data, zlib.crc32(_FRAME.pack(*fields, 0)))
    file.write(_FRAME.pack(*fields, crc))
    file.write(chunk.data)


def read_file(path: str | os.PathLike[str]) -> Iterator[Header | tuple[str, Chunk]]:
    """First the Header, then ("S" | "E", chunk) as they come, one in memory at a time. The chunks are not decoded yet.

    CodecError as the module says; one that comes after some chunks means that the file is damaged further on.
    """
    with open(path, "rb") as file:
        try:
            yield from _read(file, os.fstat(file.fileno()).st_size)
        except CodecError as error:
            raise CodecError(f"{os.fspath(path)}: {error}") from None


def _read(file: BinaryIO, size: int) -> Iterator[Header | tuple[str, Chunk]]:
    lead = file.read(len(MAGIC) + 4)
    if len(lead) < len(MAGIC) + 4 or lead[: len(MAGIC)] != MAGIC:
        raise CodecError("not a recorded run (its first bytes are others)")
    version, zero = struct.unpack("<HH", lead[len(MAGIC) :])
    if version != VERSION or zero:
        raise CodecError(f"file format version {version}.{zero}, this program reads {VERSION}.0")
    kind, chunk = _read_frame(file, size)
    if kind != "H":
        raise CodecError("the header is missing")
    header = loads(chunk.data)
    if not isinstance(header, dict) or not isinstance(header.get("facts"), dict):
        raise CodecError("malformed header")
    yield Header(version, _schema_of(header.get("schema")), header["facts"])
    events = frames = raw = 0
    while True:
        kind, chunk = _read_frame(file, size)
        if kind == "Z":
            break
        if kind not in ("S", "E") or (kind == "S" and frames):
            raise CodecError(f"unexpected frame {kind!r}")
        events += chunk.num_events if kind == "E" else 0
        frames += kind == "E"
        raw += chunk.raw_size
        if events > MAX_FILE_EVENTS or raw > MAX_FILE_BYTES:
            raise CodecError(f"more than {MAX_FILE_EVENTS} events or {MAX_FILE_BYTES} bytes of them")
        yield kind, chunk
    if loads(chunk.data) != {"events": events, "frames": frames}:
        raise CodecError(f"{events} events in {frames} frames do not agree with the end of the file")
    if file.read(1):
        raise CodecError("bytes after the end")


def _read_frame(file: BinaryIO, size: int) -> tuple[str, Chunk]:
    at = file.tell()
    head = file.read(_FRAME.size)
    if len(head) < _FRAME.size:
        raise CodecError(f"truncated at byte {at}: the end of the run is missing")
    code, raw_size, stored, num_events, crc = _FRAME.unpack(head)
    kind = chr(code)
    if kind not in "HSEZ":
        raise CodecError(f"unknown frame {kind!r} at byte {at}")
    limit = MAX_CHUNK_BYTES + (1 << 16) if kind in "SE" else MAX_HEADER_BYTES
    if raw_size > limit or stored > limit or num_events > MAX_CHUNK_EVENTS:
        raise CodecError(f"frame at byte {at} of {stored} ({raw_size}) bytes and {num_events} events is larger than allowed")
    if stored > size - file.tell():
        raise CodecError(f"truncated at byte {at}: {stored} bytes announced, {size - file.tell()} are left")
    data = file.read(stored)
    if zlib.crc32(data, zlib.crc32(_FRAME.pack(code, raw_size, stored, num_events, 0))) != crc:
        raise CodecError(f"checksum of the frame at byte {at} is wrong: the file is damaged")
    return kind, Chunk(data, raw_size, num_events)


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
