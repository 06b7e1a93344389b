"""The self-contained HTML: what its tracks give at a step is what the real view shows there, whichever way it was reached."""

import base64
import gzip
import html
import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.events.log import EventLog
from explorer.base import Clock
from explorer.export.html import run_html, write_html
from explorer.export.tracks import Recording, frames_of, record, record_pages
from explorer.mirror import Mirror, to_text
from explorer.pages import PAGES
from explorer.runs import SHIPPED
from explorer.store import EventStore
from explorer.theme import in_file
from tests.engine.events.simulate import simulate
from tests.explorer.quantization.tabs import layer_quantized, weights


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> EventStore:
    """A shipped run; in the middle of it the weights change."""
    log, longer = EventLog.load(SHIPPED["full-pool"].path), EventLog()
    middle = (log.first_step + log.last_step) // 2
    for event in log:
        if event.step > middle and longer.last_step <= middle:
            seen = weights("int4", 64), layer_quantized(3), layer_quantized(5, sqnr_db=12.5)
            longer.extend([msgspec.structs.replace(e, step=middle, time_ns=event.time_ns) for e in seen])
        longer.append(event)
    path = tmp_path_factory.mktemp("run") / "weights.cutaway"
    longer.save(path)
    return EventStore.load(path)


def value_at(points: list[int], frame: int) -> int:
    return [value for at, value in zip(points[::2], points[1::2]) if at <= frame][-1]


def shown(recording: Recording, frame: int) -> dict[tuple[str, str], Any]:
    """(node, property or canvas parameter) -> value at a frame, as the player computes it."""
    spec = json.loads(recording.spec)
    found: dict[tuple[str, str], Any] = {}
    for id, node in spec["nodes"].items():
        found |= {(id, name): value for name, value in node.items() if name not in ("state", "document")}
        found |= {(id, f"state {name}"): value for name, value in node.get("state", {}).items()}
    for op, points in recording.tracks:
        value = json.loads(recording.values[value_at(points, frame)])
        if op[1] == "state":
            found[op[0], f"state {op[2]}"] = value
        elif op[1] not in ("message", "patch", "columns"):
            found[op[0], op[1]] = value
    return found


def truly(store: EventStore, slug: str, step: int, first: int) -> dict[tuple[str, str], Any]:
    """The same of a real view that was made at the first step and went straight to ``step``."""
    clock = Clock(step=first, live=False)
    token = in_file.set(True)
    try:
        view = PAGES[slug].build(store, None, clock)
    finally:
        in_file.reset(token)
    mirror = Mirror(view)
    mirror.spec()
    clock.goto(step, store.first_step, store.last_step)
    view.update()
    if hasattr(view, "map"):
        view.map.resync += 1  # the whole, in place of the differences so far
    spec = json.loads(to_text(mirror.spec()))
    mirror.close()
    return {
        **{(id, n): v for id, node in spec["nodes"].items() for n, v in node.items() if n not in ("state", "document")},
        **{(id, f"state {n}"): v for id, node in spec["nodes"].items() for n, v in node.get("state", {}).items()},
    }


def blocks(shown: dict[tuple[str, str], Any], node: str) -> list[Any]:
    """A block map's blocks in their colours: (kind, references, level, colour). The palette's order depends on what was seen before."""
    whole = base64.b64decode(shown[node, "state full"]["$base64"])[8:]
    palette = shown[node, "state palette"]
    return [(k, n, level, palette[c] if palette and k > 1 else None) for k, c, n, level in zip(*[iter(whole)] * 4)]


# The longest to step through, beside others that are drawn by the same code.
LONG = ("quantization", "speculation", "attention")


@pytest.mark.parametrize("slug", [pytest.param(slug, marks=[pytest.mark.long] if slug in LONG else []) for slug in PAGES])
def test_every_step_is_what_the_view_shows_there(store: EventStore, slug: str) -> None:
    steps = frames_of(store.first_step, store.last_step)
    recording = record(store, PAGES[slug], steps)
    assert recording.tracks
    assert any(op[1] == "message" for op, _points in recording.tracks) or slug != "run"
    rng = random.Random(0)
    for frame in [0, 1, len(steps) - 1, *rng.sample(range(len(steps)), 6)]:
        got, want = shown(recording, frame), truly(store, slug, steps[frame], steps[0])
        for key, value in want.items():
            name = key[1]
            if name in ("state delta", "state resync", "state action", "state palette"):
                continue
            if name == "state full":
                assert blocks(got, key[0]) == blocks(want, key[0]), (frame, key)
            else:
                assert got[key] == value, (frame, key)


@pytest.mark.parametrize("slug", PAGES)
def test_figures_hold_no_code_as_text(store: EventStore, slug: str) -> None:
    """The file's policy forbids to evaluate a string: a model that does draws nothing, and its figure stays empty."""
    recording = record(store, PAGES[slug], [store.first_step, store.last_step])
    names = set(re.findall(r'"name":"(\w+)"', recording.spec))
    assert "FixedTicker" in names or slug == "kv-cache"
    assert not {name for name in names if name.startswith(("CustomJS", "HTMLTemplate", "FuncTick"))}


@pytest.mark.parametrize("slug", PAGES)
def test_a_file_tells_nobody_to_click_or_to_send(store: EventStore, slug: str) -> None:
    """Nothing in it answers, and what is built after it for the app is told again."""
    texts = record(store, PAGES[slug], [store.first_step, store.last_step])
    assert not re.findall(
        r"(?:Click|Double-click|Press|Send|press Send) (?:a|an|one|the|the same) ", texts.spec + "".join(texts.values)
    )
    assert "step of the recorded run" in texts.spec
    if slug != "kv-cache":
        assert re.search("Click (a|one) ", json.dumps(Mirror(PAGES[slug].build(store, None, Clock())).spec(), default=str))


def test_the_frames_of_a_long_run_are_spread_and_keep_both_ends() -> None:
    assert frames_of(3, 10) == list(range(3, 11))
    kept = frames_of(0, 119_200, 400)
    assert len(kept) == 400 and (kept[0], kept[-1]) == (0, 119_200)
    gaps = {b - a for a, b in pairwise(kept)}
    assert max(gaps) - min(gaps) <= 1


def test_what_a_view_streams_is_kept_as_a_whole(store: EventStore, monkeypatch: pytest.MonkeyPatch) -> None:
    from explorer.run.view import RunView

    update = RunView.update

    def streaming(self: RunView) -> None:
        update(self)
        source = self.sources["decode"]
        source.stream({name: [values[0]] if len(values) else [0] for name, values in source.data.items()})

    monkeypatch.setattr(RunView, "update", streaming)
    recording = record(store, PAGES["run"], [0, 20, 40])
    tracks = [(op, points) for op, points in recording.tracks if op[1] == "columns"]
    lengths = [
        {len(column[1]) for column in json.loads(recording.values[index])["entries"] if isinstance(column[1], list)}
        for _op, points in tracks
        for index in points[1::2]
    ]
    assert lengths and all(len(each) <= 1 for each in lengths)  # columns of one length: a whole source each


def unpacked(data: bytes) -> Any:
    (packed,) = re.findall(rb'id="packed">([^<]*)<', data)
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_file_asks_for_nothing_and_escapes_what_people_wrote(tmp_path: Path) -> None:
    events = simulate(12)
    log = EventLog()
    log.extend(events)
    store = EventStore(log=log)
    data = run_html(store, "</title><script>alert(1)</script>", ["run"])
    text = data.decode()
    assert "<script>alert" not in text and "&lt;script&gt;alert" in text
    assert "Content-Security-Policy" in text and "default-src 'none'" in text
    outside = re.sub(rb'id="packed">[^<]*<', b"", data)
    assert b"http://" not in outside.replace(b"http://www.w3.org/", b"") and b"https://" not in outside
    inside = unpacked(data)
    assert [page["slug"] for page in inside["data"]["pages"]] == ["run"] and inside["data"]["steps"] == list(range(13))
    size = write_html(store, tmp_path / "run.html", pages=["run"], limit=5)
    assert size == (tmp_path / "run.html").stat().st_size
    assert len(unpacked((tmp_path / "run.html").read_bytes())["data"]["steps"]) == 5
    assert "5 of the run&#x27;s 12 steps" in (tmp_path / "run.html").read_text()


def test_a_title_that_reads_like_a_place_of_the_template_is_a_title(store: EventStore) -> None:
    title = "/*PLAYER*/ /*CSS*/ /*DATA*/ <!--HEAD-->"
    text = run_html(store, title, ["run"], limit=2).decode()
    assert f"<title>{html.escape(title)}</title>" in text
    assert '<script type="module">/*' not in text and "<style>/*" not in text


def test_bad_input_is_refused(store: EventStore) -> None:
    with pytest.raises(ValueError, match="page must be one of"):
        run_html(store, "x", ["nowhere"])
    with pytest.raises(ValueError, match="no step"):
        record_pages(EventStore())
    for limit in (1, 0, 2.5):
        with pytest.raises(ValueError, match="limit"):
            run_html(store, "x", limit=limit)  # type: ignore[arg-type]
