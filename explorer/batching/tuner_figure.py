"""The figure of a search: throughput against latency, with the front and what it dominates. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bokeh.models import ColumnDataSource, HoverTool, Range1d
from bokeh.models.annotations import Span

from explorer.batching.tuner_rows import Point, staircase
from explorer.i18n import _
from explorer.theme import BLUE, GREEN, GREY, ORANGE, VERMILLION, figure

# kind -> (marker, colour, size): told apart by form too
LOOKS = {
    "chosen": ("star", GREEN, 19),
    "default": ("diamond", ORANGE, 15),
    "front": ("circle", BLUE, 10),
    "dominated": ("circle", GREY, 7),
}
LEGEND = (
    ("front", BLUE, _("the front: nothing measured is better in both")),
    ("dominated", GREY, _("dominated")),
    ("default", ORANGE, _("the configuration as it is")),
    ("chosen", GREEN, _("chosen: most goodput")),
    ("limit", VERMILLION, _("your limit")),
)
_COLUMNS = ("x", "y", "number", "label", "marker", "colour", "size", "alpha")


@dataclass
class FrontFigure:
    """A scatter; a tap selects a trial in ``source``."""

    plot: Any = None
    source: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({name: [] for name in _COLUMNS}))
    front: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"x": [], "y": []}))
    limit: Any = None

    def __post_init__(self) -> None:
        plot = self.plot = figure(
            300, x_axis_label=" ", y_axis_label=" ", x_range=Range1d(start=0, end=1), y_range=Range1d(start=0, end=1), tools="tap"
        )
        self.limit = Span(location=0, dimension="height", line_color=VERMILLION, line_dash="dashed", line_width=2, visible=False)
        plot.add_layout(self.limit)
        plot.line("x", "y", source=self.front, line_color=BLUE, line_width=2)
        marks = plot.scatter(
            "x", "y", source=self.source, marker="marker", size="size", fill_color="colour", line_color="white", fill_alpha="alpha",
            selection_line_color=VERMILLION, selection_line_width=2.5, nonselection_fill_alpha=0.8, nonselection_line_alpha=1,
        )  # fmt: skip
        tips = [(_("trial"), "@number"), ("", "@label"), (_("latency"), "@x{0,0.0} ms"), (_("throughput"), "@y{0,0.00}")]
        plot.add_tools(HoverTool(renderers=[marks], tooltips=tips, attachment="horizontal"))

    def show(self, points: Sequence[Point], latency: str, throughput: str, limit_ms: float | None) -> None:
        """``latency`` and ``throughput``: how the axes are called."""
        points = sorted(points, key=lambda p: list(LOOKS).index(p.kind), reverse=True)  # the chosen one lies on top
        looks = [LOOKS[p.kind] for p in points]
        self.source.data = {
            "x": [p.x for p in points], "y": [p.y for p in points], "number": [p.number for p in points], "label": [p.label for p in points],
            "marker": [look[0] for look in looks], "colour": [look[1] for look in looks], "size": [look[2] for look in looks],
            "alpha": [0.55 if p.kind == "dominated" else 0.95 for p in points],
        }  # fmt: skip
        xs, ys = staircase(points)
        most_x, most_y = max((p.x for p in points), default=1.0), max((p.y for p in points), default=1.0)
        shown = limit_ms is not None and limit_ms <= 3 * most_x
        right = 1.1 * max([most_x, *([limit_ms] if shown and limit_ms else [])]) or 1.0
        self.front.data = {"x": [*xs, right] if xs else [], "y": [*ys, ys[-1]] if ys else []}
        self.limit.update(location=limit_ms if shown else 0, visible=shown)
        self.plot.x_range.update(start=0, end=right)
        self.plot.y_range.update(start=0, end=1.15 * most_y or 1.0)
        self.plot.xaxis[0].axis_label, self.plot.yaxis[0].axis_label = f"{latency}, ms", throughput

    def number_at(self, index: int) -> int | None:
        """The trial of a selected row."""
        numbers = self.source.data["number"]
        return int(numbers[index]) if 0 <= index < len(numbers) else None

    def mark(self, number: int | None) -> None:
        """Show which trial is selected."""
        numbers = list(self.source.data["number"])
        self.source.selected.indices = [numbers.index(number)] if number in numbers else []
