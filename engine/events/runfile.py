"""The file of a saved run: framed chunks of events, keyframes between them, and what is to be known about the run.

A file is::

    magic "CUTAWAY\\n", version u16, 0 u16
    frames: type u8, raw size u32, stored size u32, events u32, first step i64, last step i64, crc32 u32 (of the frame's
            fields and payload), payload
        H  header: JSON, the schema of every event kind, the layout of keyframes, and the caller's facts about the run
        S  start (optional): EngineStarted and a Snapshot from which the events go on, when the beginning was dropped
        K  keyframe (optional): the state between the events before and after it, so that nothing before need be replayed
        E  events, any number of frames
        Z  end: JSON, the totals

Little-endian throughout. A reader refuses, with a CodecError (a ValueError) that says where: another magic or version, an
event kind or field it does not know, a missing end, bytes after it, a wrong checksum, and sizes beyond the limits below,
before it allocates for them. Version 1 (read, no longer written) had no keyframes and no steps in its frames.
"""

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec

from engine.events.codec import MAX_CHUNK_BYTES, MAX_CHUNK_EVENTS, SCHEMA, Chunk, Schema
from engine.events.columns import CodecError, loads
from engine.events.layouts import struct_like

__all__ = ["Header", "read_file", "write_file"]

MAGIC = b"CUTAWAY\n"
VERSION = 2
MAX_HEADER_BYTES = 4 << 20
MAX_FILE_EVENTS = 1 << 26
MAX_FILE_BYTES = 4 << 30  # of all chunks, decompressed
_FRAMES = {1: struct.Struct("<BIIII"), 2: struct.Struct("<BIIIqqI")}  # by version of the file


class Header(NamedTuple):
    """What a file says before its events."""

    version: int
    schema: Schema
    keyframe: str  # the layout of its keyframes; "" in a file that has none
    facts: dict[str, Any]  # what the writer told about the run


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
        now = [(field, c.signature) for field, c in zip(column.names, column.columns)]
        schema.append((kind, column if fields == now else struct_like(kind, fields)))
    if len(pairs) > 127 or len({kind for kind, _ in schema}) != len(schema):
        raise CodecError("too many event kinds, or one twice")
    return schema


def schema_is_current(schema: Schema) -> bool:
    """Whether chunks of this schema are just what this version writes."""
    return len(schema) == len(SCHEMA) and all(a[0] is b[0] and a[1] is b[1] for a, b in zip(schema, SCHEMA, strict=True))


def write_file(
    path: str | os.PathLike[str], frames: Iterable[tuple[str, Chunk]], *, facts: dict[str, Any], keyframe: str = ""
) -> None:
    """Write a whole file, or none: it is put in place when it is complete.

    ``frames``: ("S" | "K" | "E", chunk) in order. ``facts``: plain values about the run. ``keyframe``: the layout of K frames.
    """
    path = Path(path)
    header = json.dumps({"schema": describe(SCHEMA), "keyframe": keyframe, "facts": facts}).encode()
    if len(header) > MAX_HEADER_BYTES:
        raise CodecError(f"the facts about the run take {len(header)} bytes, at most {MAX_HEADER_BYTES} are allowed")
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(MAGIC + struct.pack("<HH", VERSION, 0))
            _write_frame(file, "H", Chunk(header, len(header), 0))
            total = count = 0
            for kind, chunk in frames:
                _write_frame(file, kind, chunk)
                if kind == "E":
                    total += chunk.num_events
                    count += 1
            end = json.dumps({"events": total, "frames": count}).encode()
            _write_frame(file, "Z", Chunk(end, len(end), 0))
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def _write_frame(file: BinaryIO, kind: str, chunk: Chunk) -> None:
    fields = (ord(kind), chunk.raw_size, len(chunk.data), chunk.num_events, chunk.first_step, chunk.last_step)
    frame = _FRAMES[VERSION]
    try:
        crc = zlib.crc32(chunk.data, zlib.crc32(frame.pack(*fields, 0)))
    except struct.error:
        raise CodecError(f"steps {chunk.first_step} to {chunk.last_step} do not fit 64 bits") from None
    file.write(frame.pack(*fields, crc))
    file.write(chunk.data)


def read_file(path: str | os.PathLike[str]) -> Iterator[Header | tuple[str, Chunk]]:
    """First the Header, then ("S" | "K" | "E", chunk) as they come, one in memory at a time. The chunks are not decoded yet.

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
    if version not in _FRAMES or zero:
        newer = ": it was written by a newer version of Cutaway" if version > VERSION else ""
        raise CodecError(f"file format version {version}.{zero}, this program reads 1.0 to {VERSION}.0{newer}")
    frame = _FRAMES[version]
    kind, chunk = _read_frame(file, size, frame)
    if kind != "H":
        raise CodecError("the header is missing")
    yield _header(version, loads(chunk.data))
    allowed = ("S", "E") if version == 1 else ("S", "K", "E")
    events = count = raw = 0
    while True:
        kind, chunk = _read_frame(file, size, frame)
        if kind == "Z":
            break
        if kind not in allowed or (kind == "S" and count):
            raise CodecError(f"unexpected frame {kind!r}")
        events += chunk.num_events if kind == "E" else 0
        count += kind == "E"
        raw += chunk.raw_size
        if events > MAX_FILE_EVENTS or raw > MAX_FILE_BYTES:
            raise CodecError(f"more than {MAX_FILE_EVENTS} events or {MAX_FILE_BYTES} bytes of them")
        yield kind, chunk
    if loads(chunk.data) != {"events": events, "frames": count}:
        raise CodecError(f"{events} events in {count} frames do not agree with the end of the file")
    if file.read(1):
        raise CodecError("bytes after the end")


def _header(version: int, header: Any) -> Header:
    if not isinstance(header, dict) or not isinstance(header.get("facts"), dict):
        raise CodecError("malformed header")
    keyframe = header.get("keyframe", "")
    return Header(version, _schema_of(header.get("schema")), keyframe if isinstance(keyframe, str) else "", header["facts"])


def _read_frame(file: BinaryIO, size: int, frame: struct.Struct) -> tuple[str, Chunk]:
    at = file.tell()
    head = file.read(frame.size)
    if len(head) < frame.size:
        raise CodecError(f"truncated at byte {at}: the end of the run is missing")
    *fields, crc = frame.unpack(head)
    kind, raw_size, stored, num_events = chr(fields[0]), *fields[1:4]
    if kind not in "HSKEZ":
        raise CodecError(f"unknown frame {kind!r} at byte {at}")
    limit = MAX_CHUNK_BYTES + (1 << 16) if kind in "SKE" else MAX_HEADER_BYTES
    if raw_size > limit or stored > limit or num_events > MAX_CHUNK_EVENTS:
        raise CodecError(f"frame at byte {at} of {stored} ({raw_size}) bytes and {num_events} events is larger than allowed")
    if stored > size - file.tell():
        raise CodecError(f"truncated at byte {at}: {stored} bytes announced, {size - file.tell()} are left")
    data = file.read(stored)
    if zlib.crc32(data, zlib.crc32(frame.pack(*fields, 0))) != crc:
        raise CodecError(f"checksum of the frame at byte {at} is wrong: the file is damaged")
    return kind, Chunk(data, raw_size, num_events, *fields[4:])
