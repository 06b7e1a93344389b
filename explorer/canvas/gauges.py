"""Tiles with one number each and the course of its last steps."""

from dataclasses import dataclass
from typing import Any

import param

from explorer.canvas.base import HERE, Canvas
from explorer.i18n import _
from explorer.theme import BADGES, provenance

KEEP = 160  # points a tile draws; more are not sent
Point = tuple[int, float, str]  # step, raw value, value with unit as text


@dataclass(frozen=True)
class Gauge:
    key: str
    label: str
    hint: str  # what it is and how it is computed
    kind: str  # provenance, a key of theme.BADGES
    top: float | None = None  # the full height of the line; None: its own maximum

    def facts(self) -> dict[str, Any]:
        sign, colour, meaning = BADGES[provenance(self.kind)]
        return {
            "key": self.key, "label": self.label, "hint": self.hint, "top": self.top, "sign": sign, "colour": colour,
            "badge": meaning, "step_label": _("step"),
        }  # fmt: skip


class Gauges(Canvas):
    """Tiles for ``gauges``. The owner of the data calls ``add``, and sends all points when ``due``: a browser has (re)drawn."""

    _esm = HERE / "gauges.js"
    kinds = ("ready",)

    gauges = param.List(default=[])

    def __init__(self, gauges: list[Gauge], **params: Any) -> None:
        super().__init__(gauges=[g.facts() for g in gauges], sizing_mode="stretch_width", margin=0, **params)
        self.ready = False  # until the browser has drawn, nothing is sent
        self.due = False  # it has drawn and waits for everything

    def add(self, points: dict[str, list[Point]], reset: bool = False) -> None:
        if self.ready and (reset or any(points.values())):
            self.send({"reset": reset, "points": {key: [list(p) for p in more[-KEEP:]] for key, more in points.items()}})

    def on_ready(self, action: dict[str, Any]) -> None:
        self.ready = self.due = True
