"""The codec: every kind of event comes back exactly, and a file that is not in order is a CodecError, never more."""

import contextlib
import math
import random
import struct
import tracemalloc
import typing
import zlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.events import codec, columns
from engine.events import types as t
from engine.events.codec import Chunk, CodecError, decode_chunk, encode_chunks
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
        dict[int, int]: st.dictionaries(INTS, INTS, max_size=3), dict[str, int]: st.dictionaries(TEXTS, INTS, max_size=3),
        dict[str, float]: st.dictionaries(TEXTS, FLOATS, max_size=3),
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


def test_every_annotation_has_a_column() -> None:
    with pytest.raises(TypeError, match="no column"):
        columns.column_of(Callable)
