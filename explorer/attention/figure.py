"""The figures of the Attention page: arrays to Bokeh sources and roots. Pure."""

import math
from collections.abc import Sequence
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d
from bokeh.models.annotations import LabelSet, Span

from explorer.attention.traffic_rows import Counted
from explorer.i18n import _
from explorer.theme import BLUE, GREEN, GREY, ORANGE, VERMILLION, figure, number

FLASH, STANDARD, COUNTED, HERE = BLUE, VERMILLION, GREEN, ORANGE


def _ticks(axis: Any, values: Sequence[float], unit: str) -> None:
    axis.ticker = FixedTicker(ticks=list(values))
    axis.major_label_overrides = {value: number(int(value), unit) for value in values}
    axis.axis_label_text_font_style = "normal"


def _powers(low: float, high: float, most: int = 6) -> list[float]:
    """Powers of two (of whole kilobytes from there on) from low to high, at most ``most``."""
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    step = max(1, -(-(last - first) // most))
    return [2.0**i for i in range(first, last + 1, step)]


class TrafficFigure:
    """Bytes over tokens, both axes logarithmic."""

    def __init__(self) -> None:
        empty: dict[str, list[Any]] = {"x": [], "y": [], "size": []}
        self.flash, self.standard, self.counted, self.here = (ColumnDataSource(dict(empty)) for _i in range(4))
        plot = self.root = figure(
            300,
            x_axis_type="log",
            y_axis_type="log",
            x_axis_label=_("tokens"),
            x_range=Range1d(start=100, end=40000),
            y_range=Range1d(start=1e4, end=1e10),
        )
        hovered = [
            plot.line("x", "y", source=self.standard, line_color=STANDARD, line_width=2.5, line_dash="dashed"),
            plot.line("x", "y", source=self.flash, line_color=FLASH, line_width=2.5),
            plot.scatter("x", "y", source=self.counted, marker="circle", size=10, fill_color=COUNTED, line_color="white"),
            plot.scatter("x", "y", source=self.here, marker="diamond", size=14, fill_color=HERE, line_color="white"),
        ]
        tips = [(_("tokens"), "@x{0,0}"), (_("moved"), "@size")]
        plot.add_tools(HoverTool(renderers=hovered, tooltips=tips, attachment="vertical"))
        _ticks(plot.xaxis[0], [128, 512, 2048, 8192, 32768], "")

    def show(
        self,
        lengths: Sequence[int],
        flash: Sequence[int],
        standard: Sequence[int],
        counts: Sequence[Counted],
        here: tuple[int, int],
    ) -> None:
        for source, ys in ((self.flash, flash), (self.standard, standard)):
            source.data = {"x": list(lengths), "y": list(ys), "size": [number(y, "B") for y in ys]}
        self.counted.data = {
            "x": [c.tokens for c in counts], "y": [c.nbytes for c in counts], "size": [number(c.nbytes, "B") for c in counts],
        }  # fmt: skip
        self.here.data = {"x": [here[0]], "y": [here[1]], "size": [number(here[1], "B")]}
        low, high = min(flash) / 2, max(standard) * 2
        self.root.y_range.update(start=low, end=high)
        _ticks(self.root.yaxis[0], [y for y in _powers(low, high) if low <= y <= high], "B")


class SramFigure:
    """Bytes over what a program has of fast memory; where the GPUs are."""

    def __init__(self) -> None:
        self.line = ColumnDataSource({"x": [], "y": [], "size": [], "sram": []})
        self.marks = ColumnDataSource({"x": [], "y": [], "name": [], "size": [], "sram": [], "colour": [], "dy": []})
        plot = self.root = figure(
            300, x_axis_type="log", y_axis_type="log", x_axis_label=_("shared memory that a program may take"),
            x_range=Range1d(start=14e3, end=1.15e6), y_range=Range1d(start=1e4, end=1e8),
        )  # fmt: skip
        line = plot.line("x", "y", source=self.line, line_color=FLASH, line_width=2.5)
        marks = plot.scatter("x", "y", source=self.marks, size=11, fill_color="colour", line_color="white")
        plot.add_layout(
            LabelSet(
                x="x", y="y", text="name", x_offset=-6, y_offset="dy", source=self.marks, text_font_size="11px", text_color=GREY
            )
        )
        tips = [("", "@name"), (_("shared memory"), "@sram"), (_("moved"), "@size")]
        plot.add_tools(HoverTool(renderers=[line, marks], tooltips=tips, attachment="vertical"))
        _ticks(plot.xaxis[0], [2.0**i for i in range(14, 21)], "B")

    def show(self, line: Sequence[tuple[float, float]], marks: Sequence[tuple[str, float, float, bool]]) -> None:
        """``line``: (bytes of shared memory, bytes moved); ``marks``: name, the same two, whether it is the chosen one."""
        self.line.data = {
            "x": [x for x, _y in line], "y": [y for _x, y in line], "size": [number(y, "B") for _x, y in line],
            "sram": [number(round(x), "B") for x, _y in line],
        }  # fmt: skip
        self.marks.data = {
            "x": [m[1] for m in marks], "y": [m[2] for m in marks], "name": [m[0] for m in marks],
            "size": [number(round(m[2]), "B") for m in marks], "sram": [number(round(m[1]), "B") for m in marks],
            "colour": [HERE if m[3] else GREY for m in marks], "dy": [8 if i % 2 == 0 else -24 for i in range(len(marks))],
        }  # fmt: skip
        ys = [y for _x, y in line if y == y] or [1.0]
        low, high = min(ys) / 1.6, max(ys) * 1.6
        self.root.y_range.update(start=low, end=high)
        _ticks(self.root.yaxis[0], [y for y in _powers(low, high) if low <= y <= high], "B")


class SplitsFigure:
    """Modelled time over the number of parts, in tiles."""

    def __init__(self) -> None:
        self.line = ColumnDataSource({"x": [], "y": [], "waves": [], "busy": []})
        self.best = ColumnDataSource({"x": [], "y": [], "waves": [], "busy": []})
        plot = self.root = figure(
            240, x_axis_type="log", x_axis_label=_("parts of the context"), y_axis_label=_("time, in tiles"),
            x_range=Range1d(start=0.9, end=140), y_range=Range1d(start=0, end=1),
        )  # fmt: skip
        line = plot.line("x", "y", source=self.line, line_color=FLASH, line_width=2)
        best = plot.scatter("x", "y", source=self.best, marker="diamond", size=15, fill_color=HERE, line_color="white")
        tips = [(_("parts"), "@x"), (_("time"), "@y{0} " + _("tiles")), (_("waves"), "@waves"), (_("chip busy"), "@busy{0} %")]
        plot.add_tools(HoverTool(renderers=[line, best], tooltips=tips, attachment="vertical"))
        _ticks(plot.xaxis[0], [1, 2, 4, 8, 16, 32, 64, 128], "")
        self.one = Span(dimension="width", location=0, line_color=VERMILLION, line_dash="dashed", line_width=1.5)
        plot.add_layout(self.one)

    def show(self, curve: Sequence[tuple[int, int, int, float]], best: int) -> None:
        """``curve``: parts, time, waves, share of the chip that is busy."""
        names = ("x", "y", "waves", "busy")
        self.line.data = {name: [100 * row[i] if name == "busy" else row[i] for row in curve] for i, name in enumerate(names)}
        at = [row for row in curve if row[0] == best]
        self.best.data = {name: [100 * row[i] if name == "busy" else row[i] for row in at] for i, name in enumerate(names)}
        self.root.y_range.update(start=0, end=1.1 * max(row[1] for row in curve))
        self.root.x_range.update(start=0.9, end=max(2.2, 1.1 * curve[-1][0]))
        self.one.location = curve[0][1]
