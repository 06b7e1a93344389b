"""The file of a saved run: whatever is not in order is a CodecError that says where, and never much memory."""

import json
import random
import struct
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest

from engine.events import codec, columns, runfile
from engine.events import types as t
from engine.events.codec import Chunk, CodecError, decode_chunk, encode_chunks
from engine.events.log import EventLog
from engine.events.runfile import read_file, write_file
from engine.events.saved_state import SIGNATURE, decode_state, encode_state
from engine.events.state import State
from tests.engine.events.simulate import simulate

DATA = Path(__file__).parents[2] / "data"
LIVE_AT_37 = ["r0", "r0#1", "r0#2", "r1", "r3", "r4#1", "r4#2", "r5", "r6", "r7", "r8", "r9"]  # of the runs in DATA


def frames(events: list[t.Event]) -> list[tuple[str, Chunk]]:
    return [("E", chunk) for chunk in encode_chunks(events)]


def saved(path: Path, steps: int = 60) -> bytes:
    log = EventLog()
    log.extend(simulate(steps))
    log.save(path, {"seed": 1})
    return path.read_bytes()


def refused(path: Path, data: bytes) -> str:
    """Opening and reading gives a CodecError (and nothing else); its message."""
    path.write_bytes(data)
    with pytest.raises(CodecError) as caught:
        EventLog.load(path, check=True)
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
    newer = data[:8] + struct.pack("<HH", 3, 0) + data[12:]
    message = refused(tmp_path / "newer", newer)
    assert "version 3.0, this program reads 1.0 to 2.0" in message and "newer version of Cutaway" in message


def frame(
    kind: bytes, payload: bytes, raw_size: int | None = None, events: int = 0, stored: int | None = None, version: int = 2,
    steps: tuple[int, int] = (0, 0),
) -> bytes:  # fmt: skip
    fields = (kind[0], len(payload) if raw_size is None else raw_size, len(payload) if stored is None else stored, events)
    layout = runfile._FRAMES[version]
    fields += steps if version > 1 else ()
    return layout.pack(*fields, zlib.crc32(payload, zlib.crc32(layout.pack(*fields, 0)))) + payload


def of_chunk(kind: bytes, chunk: Chunk, **changes: Any) -> bytes:
    chunk = chunk._replace(**changes)
    return frame(kind, chunk.data, chunk.raw_size, chunk.num_events, steps=(chunk.first_step, chunk.last_step))


def hostile(
    schema: Any = None, frames: bytes = b"", end: dict[str, int] | None = None, header: bytes | None = None, keyframe: str = "",
    version: int = 2,
) -> bytes:  # fmt: skip
    """A file with right checksums and wrong contents."""
    described = runfile.describe(codec.SCHEMA) if schema is None else schema
    head = json.dumps({"schema": described, "keyframe": keyframe, "facts": {}}).encode() if header is None else header
    tail = frame(b"Z", json.dumps({"events": 0, "frames": 0} if end is None else end).encode(), version=version)
    return runfile.MAGIC + struct.pack("<HH", version, 0) + frame(b"H", head, version=version) + frames + tail


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
        (hostile(schema=runfile.describe(codec.SCHEMA) * 2), "one twice"),
        (hostile(end={"events": 5, "frames": 0}), "do not agree"),
        (hostile(frames=frame(b"Q", b"")), "unknown frame"),
        (hostile(frames=frame(b"H", b"{}")), "unexpected frame"),
        (hostile(frames=frame(b"E", b"junk", 100, 1)), "broken compression"),
        (hostile(frames=frame(b"E", one, 999, 1)), "another number"),
        (hostile(frames=frame(b"E", one, 7, 9)), "were announced"),
        (hostile(frames=frame(b"E", one, 7, 1)), "truncated"),
        (hostile(frames=frame(b"E", b"x", 2**32 - 1, 1)), "larger than allowed"),
        (hostile(frames=frame(b"E", b"x", 10, 2**32 - 1)), "larger than allowed"),
        (hostile(frames=frame(b"E", b"x", 10, 1, stored=30_000_000)), "truncated"),
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


@pytest.mark.parametrize("field", ["top", "step_ms"])
def test_a_field_that_came_later_takes_its_default(tmp_path: Path, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a version before ``field`` existed."""
    events = simulate(30)
    old = [
        (kind, columns.StructColumn(kind, [n for n in c.names if n != field]) if kind is t.TokenSampled else c)
        for kind, c in codec.SCHEMA
    ]
    monkeypatch.setattr(codec, "SCHEMA", old)
    monkeypatch.setattr(runfile, "SCHEMA", old)
    write_file(tmp_path / "old", frames(events), facts={})
    monkeypatch.undo()
    log = EventLog.load(tmp_path / "old")
    default = {"top": [], "step_ms": 0.0}[field]
    tokens = [e for e in log if isinstance(e, t.TokenSampled)]
    assert tokens and all(getattr(e, field) == default for e in tokens)
    log.save(tmp_path / "new")
    assert len(EventLog.load(tmp_path / "new")) == len(events)


def test_a_field_of_a_candidate_that_came_later_takes_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, one level down: a file from when a candidate had four fields."""
    events = simulate(30)
    layout = "list[{token_id:int,text:str,logprob:float,prob:float}]"
    described = runfile.describe(codec.SCHEMA)
    fields = next(fields for name, fields in described if name == "TokenSampled")
    fields[[name for name, _ in fields].index("top")][1] = layout
    schema = runfile._schema_of(described)
    assert not runfile.schema_is_current(schema)
    monkeypatch.setattr(codec, "SCHEMA", schema)
    monkeypatch.setattr(runfile, "SCHEMA", schema)
    write_file(tmp_path / "old", frames(events), facts={})
    monkeypatch.undo()
    tokens = [e for e in EventLog.load(tmp_path / "old") if isinstance(e, t.TokenSampled)]
    want = [e for e in events if isinstance(e, t.TokenSampled)]
    assert tokens and repr([e.top for e in tokens]) == repr([e.top for e in want])


@pytest.mark.parametrize(
    "layout",
    ["list[int]", "list[{}]", "list[{token_id:int}]", "list[{token_id:str,text:str,logprob:float,prob:float}]",
     "list[{token_id:int,text:str,logprob:float,prob:float,unheard:int}]", "list[{token_id:int,token_id:int,text:str,logprob:float,prob:float}]",
     "list[", "]", "{", "", "list[" * 5000, "{:" * 5000],
)  # fmt: skip
def test_layouts_that_do_not_fit_are_refused(layout: str) -> None:
    described = runfile.describe(codec.SCHEMA)
    fields = next(fields for name, fields in described if name == "TokenSampled")
    fields[[name for name, _ in fields].index("top")][1] = layout
    with pytest.raises(CodecError, match=r"TokenSampled\.top"):
        runfile._schema_of(described)


def test_nothing_is_left_when_writing_fails(tmp_path: Path) -> None:
    def chunks() -> Any:
        yield from frames(simulate(2))
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


# -- keyframes ----------------------------------------------------------------------------------------------------------------


def keyed(frames: list[bytes], events: int, count: int) -> bytes:
    return hostile(frames=b"".join(frames), end={"events": events, "frames": count}, keyframe=SIGNATURE)


def test_a_state_comes_back_whole() -> None:
    events = simulate(120, seed=3)
    for size in (1, 50, 400, len(events)):
        state = State().apply_all(events[:size])
        again = decode_state(encode_state(state))
        for name in set(State.__slots__) - {"ref_counts", "_own", "_cow_pool"}:  # these two are about who shares what
            assert getattr(again, name) == getattr(state, name), name
        assert list(again.requests) == list(state.requests) and again.ref_counts.tolist() == state.ref_counts.tolist()
        rest = events[size:]
        assert again.apply_all(rest).snapshot(finished=True) == state.apply_all(rest).snapshot(finished=True)


def test_opening_decodes_no_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.events.log.SEAL_EVENTS", 64)
    log = EventLog()
    log.extend(simulate(200))
    log.save(tmp_path / "run")
    sizes = []

    def counted(chunk: Chunk, *more: Any) -> list[t.Event]:
        sizes.append(chunk.num_events)
        return decode_chunk(chunk, *more)

    monkeypatch.setattr("engine.events.saved_log.decode_chunk", counted)
    loaded = EventLog.load(tmp_path / "run")
    assert sizes == []
    assert loaded.at(150).snapshot() == log.at(150).snapshot()
    assert 0 < len(sizes) < len(log._sealed) / 4
    loaded.check()


def test_a_keyframe_that_is_not_what_the_events_give_is_found(tmp_path: Path) -> None:
    events = simulate(40)
    (chunk,) = encode_chunks(events)
    true = State().apply_all(events)
    other = true.copy()
    other.knobs["max_num_seqs"] = 77
    for state, ok in ((true, True), (other, False)):
        (tmp_path / "run").write_bytes(keyed([of_chunk(b"E", chunk), of_chunk(b"K", encode_state(state))], len(events), 1))
        log = EventLog.load(tmp_path / "run")
        if ok:
            log.check()
        else:
            with pytest.raises(CodecError, match="keyframe at the end is not what the events give"):
                log.check()


def test_hostile_keyframes_and_steps_are_refused(tmp_path: Path) -> None:
    events = simulate(40)
    (chunk,) = encode_chunks(events)
    key = encode_state(State().apply_all(events))
    good, count = of_chunk(b"E", chunk), len(events)
    bomb = Chunk(zlib.compress(bytes(100 << 20), 1), codec.MAX_CHUNK_BYTES, 0, 40, 40)
    for frames_, message in [
        ([good], "keyframe at the end is missing"),
        ([of_chunk(b"K", key), good], "keyframe at the end is missing"),
        ([good, of_chunk(b"K", key._replace(data=b"junk"))], "broken compression"),
        ([good, of_chunk(b"K", key, raw_size=key.raw_size + 1)], "another number"),
        ([good, of_chunk(b"K", key, first_step=41, last_step=41)], "keyframe of step 40 where 41"),
        ([good, of_chunk(b"K", key, first_step=39, last_step=39)], "steps go back"),
        ([good, of_chunk(b"K", bomb)], "another number|more"),
        ([of_chunk(b"E", chunk, first_step=3, last_step=2), of_chunk(b"K", key)], "steps go back"),
        ([of_chunk(b"E", chunk, first_step=3), of_chunk(b"K", key)], "were announced"),
        ([of_chunk(b"E", chunk, data=b"junk"), of_chunk(b"K", key)], "broken compression"),
    ]:
        text = refused(tmp_path / "hostile", keyed(frames_, count, sum(f[:1] == b"E" for f in frames_)))
        assert any(part in text for part in message.split("|")), (text, message)


def test_reading_a_damaged_chunk_says_so_and_nothing_else(tmp_path: Path) -> None:
    """Opened without a check, the fault shows where the chunk is read; the log itself stays usable."""
    events = simulate(40)
    (chunk,) = encode_chunks(events)
    key = encode_state(State().apply_all(events))
    (tmp_path / "run").write_bytes(keyed([of_chunk(b"E", chunk, data=b"junk"), of_chunk(b"K", key)], len(events), 1))
    log = EventLog.load(tmp_path / "run")
    for read in (lambda: log.at(20), lambda: log.since(0), lambda: log.window(3, 4), lambda: list(log), log.check):
        with pytest.raises(CodecError, match="broken compression"):
            read()
    assert log.at(log.last_step).snapshot() == State().apply_all(events).snapshot()


def test_numbers_inside_a_keyframe_replaced_by_others_take_no_memory() -> None:
    """A fuzz: an error or a state, in bounded memory."""
    key = encode_state(State().apply_all(simulate(60)))
    raw = zlib.decompress(key.data)
    rng = random.Random(5)
    refusals = 0
    tracemalloc.start()
    for _ in range(400):
        position = rng.randrange(len(raw))
        junk = rng.choice((b"\xff", b"\x00", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", rng.randbytes(4)))
        bad = (raw[:position] + junk + raw[position + len(junk) :])[: len(raw)]
        try:
            decode_state(Chunk(zlib.compress(bad, 0), len(bad), 0, key.first_step, key.last_step))
        except CodecError:
            refusals += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 << 20 and refusals > 100


# -- older files --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_each_version_is_read(version: int, tmp_path: Path) -> None:
    """Written by the program as it was when the version was current; the same events each."""
    log = EventLog.load(DATA / f"run_v{version}.cutaway", check=True)
    assert (len(log), log.last_step, log.facts["seed"]) == (757, 60, 7)
    assert isinstance(log.started, t.EngineStarted) and log.started.versions == {"cutaway": "0"}
    state = log.at(37)
    assert sorted(view.request_id for view in state.live) == LIVE_AT_37
    log.save(tmp_path / "again.cutaway")
    again = EventLog.load(tmp_path / "again.cutaway", check=True)
    assert repr(again.since(0)) == repr(log.since(0)) and again.at(37).snapshot() == state.snapshot()


def test_keyframes_of_another_layout_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = simulate(60)
    log = EventLog()
    log.extend(events)
    monkeypatch.setattr("engine.events.saved_log.SIGNATURE", "{another}")
    log.save(tmp_path / "run")
    monkeypatch.undo()
    loaded = EventLog.load(tmp_path / "run", check=True)
    assert len(loaded) == len(events) and loaded.at(30).snapshot() == log.at(30).snapshot()
