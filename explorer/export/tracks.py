"""A recorded run walked through the real views, step by step: what each part of a page shows at which step.

A view of a recorded run changes only by assignment: given the step, every property of every part has one value. So what a
``Mirror`` tells at each step is kept as *tracks*, one for each thing that changes (a node's property, a canvas's parameter or
messages, a Bokeh model's attribute), and any step can be shown from any other by giving each track its value there.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from explorer.base import Clock
from explorer.mirror import Mirror, to_text
from explorer.pages import PAGES, Page
from explorer.theme import in_file

MAX_FRAMES = 400  # steps that are kept of a long run


@dataclass
class Recording:
    """One page. ``spec`` draws its first frame, ``opening`` are operations that follow once (what canvases hold of the whole run).

    ``tracks``: [operation without its value, [frame, index into values, ...]]; ``values``: JSON texts, each once.
    """

    slug: str
    title: str
    question: str
    spec: str
    opening: str
    tracks: list[list[Any]] = field(default_factory=list)
    values: list[str] = field(default_factory=list)


def frames_of(first: int, last: int, limit: int = MAX_FRAMES) -> list[int]:
    """The steps that are kept: all, or ``limit`` evenly spread with both ends."""
    count = last - first + 1
    if count <= limit:
        return list(range(first, last + 1))
    return sorted({first + round(i * (count - 1) / (limit - 1)) for i in range(limit)})


def record(store: Any, page: Page, steps: list[int]) -> Recording:
    """Walk a page of the run in ``store`` through ``steps``. RuntimeError where a view changes by anything but assignment."""
    clock = Clock(step=steps[0], live=False)
    token = in_file.set(True)
    try:
        view = page.build(store, None, clock)
    finally:
        in_file.reset(token)
    mirror = Mirror(view)
    try:
        mirror.spec()
        mirror.open_canvases()
        view.update()
        opening = [op for op in mirror.drain() if op[1] == "message"]
        spec = mirror.spec()
        tracks = _Tracks(mirror)
        for frame, step in [*enumerate(steps), (0, steps[0])]:  # back to the first: what it shows is known then too
            clock.goto(step, store.first_step, store.last_step)
            view.forget()
            view.update()
            tracks.take(frame, spec)
        return Recording(
            page.slug, page.title, page.question, to_text(spec), to_text(opening), tracks.finished(spec), list(tracks.values)
        )
    finally:
        mirror.close()
        view.close()


class _Tracks:
    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror
        self.values: dict[str, int] = {}  # JSON text -> index
        self._tracks: dict[str, tuple[list[Any], dict[int, int]]] = {}  # key -> (operation, frame -> value)

    def take(self, frame: int, spec: dict[str, Any]) -> None:
        """What changed on the way to this frame."""
        messages: dict[str, list[Any]] = {}
        for id, name, value, *_who in self._operations():
            if id == "*":  # texts and nodes that came: part of the whole from the beginning
                for where, new in value.items() if name == "texts" else (("nodes", value),):
                    spec[where].update(new)
            elif name == "message":
                messages.setdefault(id, []).append(value)
            elif name == "state":
                for each, now in value.items():
                    self._put(frame, [id, "state", each], now)
            elif name == "patch":
                for event in value:
                    self._put(frame, *self._assignment(id, event))
            else:
                self._put(frame, [id, name], value)
        for id, sent in messages.items():
            self._put(frame, [id, "message"], sent)

    def _operations(self) -> list[list[Any]]:
        """A canvas that tells differences is asked for the whole instead: those would only fit one way through the run."""
        ops = self.mirror.drain()
        told = {op[0] for op in ops if op[1] == "state" and "delta" in op[2]}
        for id in told:
            self.mirror.apply([id, "state", {"resync": self.mirror.object(id).resync + 1}])
        ops += self.mirror.drain() if told else []
        return [op for op in ops if not (op[1] == "state" and {"delta", "resync"} & set(op[2]))]

    def _put(self, frame: int, op: list[Any], value: Any) -> None:
        text = to_text(value)
        index = self.values.setdefault(text, len(self.values))
        self._tracks.setdefault(json.dumps(op), (op, {}))[1][frame] = index

    def _assignment(self, id: str, event: dict[str, Any]) -> tuple[list[Any], Any]:
        """(operation, value) of a Bokeh event: what assigns stays as it is, what adds to columns becomes all of the columns."""
        kind = event.get("kind")
        if kind == "ModelChanged":
            return [id, "patch", event["model"]["id"], event["attr"]], event["new"]
        if kind == "ColumnDataChanged" and (event.get("cols") is None or set(event["cols"]) == set(_columns(event["data"]))):
            return [id, "columns", event["model"]["id"]], event["data"]
        if kind in ("ColumnDataChanged", "ColumnsStreamed", "ColumnsPatched"):
            return [id, "columns", event["model"]["id"]], self.mirror.columns(id, event["model"]["id"])
        raise RuntimeError(f"a recorded run's figure changes by {kind}, not by assignment: it could not be stepped back")

    def finished(self, spec: dict[str, Any]) -> list[list[Any]]:
        """Each track as [operation, [frame, value, ...]], with its value at frame 0: that of the spec, or (of a figure, and of messages)
        what the way back to the first step gave; if it gave nothing, that is what the last frame had."""
        made = []
        for op, points in self._tracks.values():
            drawn = _drawn(spec, op)
            if drawn is not None:
                points[0] = self.values.setdefault(drawn, len(self.values))
            points.setdefault(0, points[max(points)])
            flat: list[int] = []
            for frame in sorted(points):
                if not flat or flat[-1] != points[frame]:
                    flat += [frame, points[frame]]
            if drawn is None or len(flat) > 2:
                made.append([op, flat])
        return made


def _drawn(spec: dict[str, Any], op: list[Any]) -> str | None:
    """The value that a spec gives this property or canvas parameter, as JSON; None where it does not say."""
    node = spec["nodes"].get(op[0], {})
    if op[1] == "state":
        return to_text(node["state"][op[2]]) if op[2] in node.get("state", {}) else None
    return to_text(node[op[1]]) if op[1] in node and op[1] not in ("message", "patch", "columns") else None


def _columns(data: Any) -> list[str]:
    """Names of the columns in Bokeh's own JSON: a map, as entries or plain."""
    return [name for name, _values in data["entries"]] if isinstance(data, dict) and "entries" in data else list(data)


def record_pages(store: Any, slugs: list[str] | None = None, limit: int = MAX_FRAMES) -> tuple[list[int], list[Recording]]:
    """(steps kept, one recording for each page). ValueError for an unknown page, or a run without a step."""
    for slug in slugs or ():
        if slug not in PAGES:
            raise ValueError(f"page must be one of {', '.join(PAGES)}, got {slug!r}")
    if store.last_step < 1:
        raise ValueError("the run has no step yet")
    steps = frames_of(store.first_step, store.last_step, limit)
    return steps, [record(store, page, steps) for slug, page in PAGES.items() if slugs is None or slug in slugs]
