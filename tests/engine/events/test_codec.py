"""The codec: every kind of event comes back exactly, and a file that is not in order is a CodecError, never more."""

import contextlib
import json
import math
import random
import struct
import tracemalloc
import typing
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.events import codec, columns
from engine.events import types as t
from engine.events.codec import Chunk, CodecError, decode_chunk, encode_chunks, read_file, write_file
from engine.events.log import EventLog
from tests.engine.events.simulate import simulate

INTS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-3, 300))
FLOATS = st.floats(allow_nan=True, allow_infinity=True)
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(["", "r1", "é✓漢字🙂", "\ud800", "a\x00b", "<script>"]))
PLAIN = st.recursive(
    st.one_of(st.none(), st.booleans(), INTS, FLOATS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation, edges included."""
    simple: dict[Any, st.SearchStrategy[Any]] = {
        int: INTS, float: FLOATS, bool: st.booleans(), str: TEXTS, bytes: st.binary(max_size=9), Any: PLAIN,
        dict[str, Any]: st.dictionaries(TEXTS, PLAIN, max_size=3), dict[str, str]: st.dictionaries(TEXTS, TEXTS, max_size=3),
        dict[int, int]: st.dictionaries(INTS, INTS, max_size=3),
    }  # fmt: skip
    if hint in simple:
        return simple[hint]
    args = typing.get_args(hint)
    if typing.get_origin(hint) is list:
        return st.lists(values(args[0]), max_size=3)
    if type(None) in args:
        return st.none() | values(args[0])
    hints = typing.get_type_hints(hint)
    return st.builds(hint, **{name: values(hints[name]) for name in hint.__struct_fields__})


EVENTS = {kind: values(kind) for kind in codec.KINDS}


def bits(value: Any) -> Any:
    """A form in which NaN equals itself and -0.0 does not equal 0.0, and 1 is neither 1.0 nor True."""
    if isinstance(value, float):
        return ("float", "nan" if math.isnan(value) else struct.pack("<d", value))
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, *(bits(getattr(value, f)) for f in value.__struct_fields__))
    if isinstance(value, list):
        return [bits(v) for v in value]
    if isinstance(value, dict):
        return {k: bits(v) for k, v in value.items()}
    return (type(value).__name__, value)


def round_trip(events: list[t.Event]) -> list[t.Event]:
    return [e for chunk in encode_chunks(events) for e in decode_chunk(chunk)]


def test_every_kind_of_event_is_covered() -> None:
    everything = [k for k in vars(t).values() if isinstance(k, type) and issubclass(k, t.Event) and k is not t.Event]
    assert set(everything) == set(codec.KINDS)


@pytest.mark.parametrize("kind", codec.KINDS, ids=lambda k: k.__name__)
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_kind_comes_back_exactly(kind: type[t.Event], data: st.DataObject) -> None:
    events = data.draw(st.lists(EVENTS[kind], min_size=1, max_size=4))
    assert bits(round_trip(events)) == bits(events)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(events=st.lists(st.one_of(*EVENTS.values()), max_size=12))
def test_mixtures_keep_their_order(events: list[t.Event]) -> None:
    assert bits(round_trip(events)) == bits(events)


@settings(max_examples=300, deadline=None)
@given(st.lists(INTS, max_size=40))
def test_integers_of_any_width(numbers: list[int]) -> None:
    w = columns.Writer()
    column = columns.column_of(int)
    column.write(w, numbers)
    r = columns.Reader(b"".join(w.parts))
    assert column.read(r, len(numbers)) == numbers and r.pos == len(r.data)


def test_a_real_run_is_small() -> None:
    events = simulate(400)
    chunks = encode_chunks(events)
    assert bits(round_trip(events)) == bits(events)
    assert sum(len(c.data) for c in chunks) < 60 * len(events)
    light = decode_chunk(chunks[0], codec.REPLAY_SCHEMA)
    assert [(type(e), e.step, e.time_ns) for e in light] == [(type(e), e.step, e.time_ns) for e in events]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hit_tokens": 1.5}, "PrefixLookup.num_hit_tokens: integers"),
        ({"num_hit_tokens": "7"}, "PrefixLookup.num_hit_tokens: integers"),
        ({"request_id": 7}, "PrefixLookup.request_id: strings"),
        ({"block_ids": [None]}, "PrefixLookup.block_ids: integers"),
    ],
)
def test_wrong_values_are_named(change: dict[str, Any], message: str) -> None:
    fields = {
        "step": 1,
        "time_ns": 1,
        "request_id": "r",
        "num_tokens": 1,
        "num_hit_tokens": 0,
        "block_ids": [],
        "miss_reason": "",
    }
    with pytest.raises(CodecError, match=message):
        encode_chunks([t.PrefixLookup(**{**fields, **change})])


@pytest.mark.parametrize("value", [{1, 2}, {1: 2}, object(), b"x"])
def test_knob_values_must_be_plain(value: Any) -> None:
    with pytest.raises(CodecError, match=r"KnobChanged\.new: not a plain value"):
        encode_chunks([t.KnobChanged(step=1, time_ns=1, name="k", old=None, new=value)])
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(CodecError, match="deep"):
        encode_chunks([t.KnobChanged(step=1, time_ns=1, name="k", old=None, new=deep)])


def test_large_events_are_spread_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_CHUNK_BYTES", 10_000)
    rng = random.Random(0)
    events: list[t.Event] = [
        t.LogitsRecorded(
            step=i, time_ns=i, request_id="r", position=i, dtype="float16", logits=rng.randbytes(3000), max_logit=1.0
        )
        for i in range(10)
    ]
    chunks = encode_chunks(events)
    assert len(chunks) > 3 and [e for c in chunks for e in decode_chunk(c)] == events
    monkeypatch.setattr(codec, "MAX_CHUNK_BYTES", 1000)
    with pytest.raises(CodecError, match="LogitsRecorded takes"):
        encode_chunks(events)


# -- files --------------------------------------------------------------------------------------------------------------------


def saved(path: Path, steps: int = 60) -> bytes:
    log = EventLog()
    log.extend(simulate(steps))
    log.save(path, {"seed": 1})
    return path.read_bytes()


def refused(path: Path, data: bytes) -> str:
    """Loading gives a CodecError (and nothing else); its message."""
    path.write_bytes(data)
    with pytest.raises(CodecError) as caught:
        EventLog.load(path)
    assert path.name in str(caught.value)
    return str(caught.value)


def test_any_truncation_is_noticed(tmp_path: Path) -> None:
    data = saved(tmp_path / "run")
    for size in [*range(0, 80), *random.Random(0).sample(range(80, len(data)), 60), len(data) - 1]:
        refused(tmp_path / "cut", data[:size])
    assert "bytes after the end" in refused(tmp_path / "longer", data + b"\0")


def test_any_flipped_bit_is_noticed(tmp_path: Path) -> None:
    data = bytearray(saved(tmp_path / "run"))
    for position in [*range(0, 64), *random.Random(1).sample(range(len(data)), 150)]:
        data[position] ^= 1 << position % 8
        refused(tmp_path / "flipped", bytes(data))
        data[position] ^= 1 << position % 8


def test_other_files_and_versions_are_refused(tmp_path: Path) -> None:
    data = saved(tmp_path / "run")
    assert "not a recorded run" in refused(tmp_path / "empty", b"")
    assert "not a recorded run" in refused(tmp_path / "png", b"\x89PNG\r\n\x1a\n" + bytes(100))
    newer = data[:8] + struct.pack("<HH", 2, 0) + data[12:]
    assert "version 2.0, this program reads 1.0" in refused(tmp_path / "newer", newer)


def frame(kind: bytes, payload: bytes, raw_size: int | None = None, events: int = 0, stored: int | None = None) -> bytes:
    fields = (kind[0], len(payload) if raw_size is None else raw_size, len(payload) if stored is None else stored, events)
    return codec._FRAME.pack(*fields, zlib.crc32(payload, zlib.crc32(codec._FRAME.pack(*fields, 0)))) + payload


def hostile(schema: Any = None, frames: bytes = b"", end: dict[str, int] | None = None, header: bytes | None = None) -> bytes:
    """A file with right checksums and wrong contents."""
    head = (
        json.dumps({"schema": codec.describe(codec.SCHEMA) if schema is None else schema, "facts": {}}).encode()
        if header is None
        else header
    )
    tail = frame(b"Z", json.dumps({"events": 0, "frames": 0} if end is None else end).encode())
    return codec.MAGIC + struct.pack("<HH", 1, 0) + frame(b"H", head) + frames + tail


def test_the_hostile_builder_builds_good_files_too(tmp_path: Path) -> None:
    (chunk,) = encode_chunks(simulate(3))
    good = hostile(
        frames=frame(b"E", chunk.data, chunk.raw_size, chunk.num_events), end={"events": chunk.num_events, "frames": 1}
    )
    (tmp_path / "good").write_bytes(good)
    assert len(EventLog.load(tmp_path / "good")) == chunk.num_events


def test_hostile_frames_are_refused(tmp_path: Path) -> None:
    one = zlib.compress(struct.pack("<I", 1) + b"i1\x00")
    for data, message in [
        (hostile(header=b"[1]"), "malformed header"),
        (hostile(header=b"{" * 100_000), "not JSON"),
        (hostile(schema=7), "malformed schema"),
        (hostile(schema=[["Unheard", []]]), "newer version"),
        (hostile(schema=[["StepDone", [["step", "int"]]]]), "lacks"),
        (hostile(schema=[["BlockCached", [["step", "float"]]]]), "another version"),
        (hostile(schema=codec.describe(codec.SCHEMA) * 2), "one twice"),
        (hostile(end={"events": 5, "frames": 0}), "do not agree"),
        (hostile(frames=frame(b"Q", b"")), "unknown frame"),
        (hostile(frames=frame(b"H", b"{}")), "unexpected frame"),
        (hostile(frames=frame(b"E", b"junk", 100, 1)), "broken compression"),
        (hostile(frames=frame(b"E", one, 999, 1)), "another number"),
        (hostile(frames=frame(b"E", one, 7, 9)), "were announced"),
        (hostile(frames=frame(b"E", one, 7, 1)), "truncated"),
        (hostile(frames=frame(b"E", b"x", 2**32 - 1, 1)), "larger than allowed"),
        (hostile(frames=frame(b"E", b"x", 10, 2**32 - 1)), "larger than allowed"),
        (hostile(frames=frame(b"E", b"x", 10, 1, stored=50_000_000)), "truncated"),
    ]:
        assert message in refused(tmp_path / "hostile", data)


def test_a_decompression_bomb_takes_no_memory(tmp_path: Path) -> None:
    bomb = zlib.compress(bytes(100 << 20), 1)
    for announced in (1000, codec.MAX_CHUNK_BYTES, 100 << 20):
        tracemalloc.start()
        refused(tmp_path / "bomb", hostile(frames=frame(b"E", bomb, announced, 1)))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 * codec.MAX_CHUNK_BYTES


def test_huge_lengths_inside_a_chunk_take_no_memory() -> None:
    """Bytes of a small chunk replaced by large numbers: an error or events, and never much memory."""
    events = [e for e in simulate(40) if not isinstance(e, t.EngineStarted)][:60]
    (chunk,) = encode_chunks(events)
    raw = zlib.decompress(chunk.data)
    tracemalloc.start()
    for position in random.Random(2).sample(range(len(raw)), 120):
        for junk in (b"\xff", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x40"):
            bad = (raw[:position] + junk + raw[position + len(junk) :])[: len(raw)]
            with contextlib.suppress(CodecError):
                decode_chunk(Chunk(zlib.compress(bad, 0), len(bad), len(events)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 70_000))
def test_random_bytes_as_a_chunk(raw: bytes, count: int) -> None:
    raw = struct.pack("<I", count) + raw
    with pytest.raises(CodecError):
        decode_chunk(Chunk(zlib.compress(raw), len(raw), count))
        if count == 0 and raw == struct.pack("<I", 0) + b"i1":
            raise CodecError("an empty chunk is in order")


@pytest.mark.parametrize("field", ["top", "step_ms"])
def test_a_field_that_came_later_takes_its_default(tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a version before ``field`` existed."""
    events = simulate(30)
    old = [
        (kind, columns.StructColumn(kind, [n for n in c.names if n != field]) if kind is t.TokenSampled else c)
        for kind, c in codec.SCHEMA
    ]
    monkeypatch.setattr(codec, "SCHEMA", old)
    write_file(tmp_path / "old", encode_chunks(events), facts={})
    monkeypatch.undo()
    log = EventLog.load(tmp_path / "old")
    default = {"top": [], "step_ms": 0.0}[field]
    tokens = [e for e in log if isinstance(e, t.TokenSampled)]
    assert tokens and all(getattr(e, field) == default for e in tokens)
    log.save(tmp_path / "new")
    assert len(EventLog.load(tmp_path / "new")) == len(events)


def test_nothing_is_left_when_writing_fails(tmp_path: Path) -> None:
    def chunks() -> Any:
        yield from encode_chunks(simulate(2))
        raise RuntimeError("the disk is full")

    (tmp_path / "run").write_bytes(b"the one before")
    with pytest.raises(RuntimeError):
        write_file(tmp_path / "run", chunks(), facts={})
    assert [p.name for p in tmp_path.iterdir()] == ["run"] and (tmp_path / "run").read_bytes() == b"the one before"
    with pytest.raises(CodecError, match="facts"):
        write_file(tmp_path / "run", [], facts={"x": "y" * (5 << 20)})


def test_reading_stops_at_the_first_fault_and_keeps_nothing_open(tmp_path: Path) -> None:
    data = saved(tmp_path / "run")
    (tmp_path / "run").write_bytes(data[:-5])
    items: list[Any] = []
    with pytest.raises(CodecError):
        items.extend(read_file(tmp_path / "run"))


def test_every_annotation_has_a_column() -> None:
    with pytest.raises(TypeError, match="no column"):
        columns.column_of(Callable)
