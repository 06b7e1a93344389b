"""The figures of the searches: AWQ's curve, GPTQ's running error, what a step moves, and a window of the weights. Pure."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bokeh.models import BasicTicker, ColumnDataSource, HoverTool, LinearColorMapper, NumeralTickFormatter, Range1d
from bokeh.models.annotations import BoxAnnotation, Span

from explorer.i18n import _
from explorer.kv_cache.figure import Line
from explorer.theme import BLUE, GREEN, GREY, ORANGE, VERMILLION, figure

AWQ_LINES = (
    Line("curve", _("output error, relative to plain rounding"), BLUE, marker="circle"),
    Line("best", _("the exponent that is taken"), VERMILLION, marker="square"),
    Line("plain", _("plain rounding: exponent 0"), GREY, "dotted"),
)
ERROR_LINES = (
    Line("plain", _("plain rounding"), ORANGE, "dashed"),
    Line("gptq", _("GPTQ"), BLUE),
    Line("here", _("the column that is rounded now"), VERMILLION, "dashed", 1.5),
)
# Transparent in the middle, so that both light and dark grounds show through.
_SHADES = 24
PALETTE = [f"{BLUE}{round(255 * (1 - i / _SHADES)):02x}" for i in range(_SHADES)] + [
    f"{VERMILLION}{round(255 * i / _SHADES):02x}" for i in range(_SHADES + 1)
]


@dataclass
class AwqFigure:
    plot: Any = None
    source: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"alpha": [], "ratio": [], "percent": []}))
    best: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"alpha": [], "ratio": []}))

    def __post_init__(self) -> None:
        plot = self.plot = figure(
            250, x_axis_label=_("exponent α of the scales s = (mean |x|)^α"), y_axis_label=_("output error / plain rounding's"),
            x_range=Range1d(start=-0.03, end=1.03), y_range=Range1d(start=0, end=2),
        )  # fmt: skip
        plot.line("alpha", "ratio", source=self.source, line_color=BLUE, line_width=2)
        dots = plot.scatter("alpha", "ratio", source=self.source, size=6, fill_color=BLUE, line_color="white")
        plot.scatter("alpha", "ratio", source=self.best, size=12, marker="square", fill_color=VERMILLION, line_color="white")
        plot.add_layout(Span(location=1, dimension="width", line_color=GREY, line_dash="dotted", line_width=1.5))
        tips = [
            ("α", "@alpha{0.00}"),
            (_("error / plain rounding's"), "@ratio{0.000}"),
            (_("|(W − Q) x| / |W x|"), "@percent{0.000} %"),
        ]
        plot.add_tools(HoverTool(renderers=[dots], tooltips=tips, attachment="horizontal"))

    def show(self, alpha: np.ndarray, ratio: np.ndarray, percent: np.ndarray, best: int) -> None:
        self.source.data = {"alpha": alpha, "ratio": ratio, "percent": percent}
        self.best.data = {"alpha": alpha[best : best + 1], "ratio": ratio[best : best + 1]}
        # Large exponents may be many times worse: they may leave the picture, the dip must not vanish in it.
        low, high = float(ratio.min()), float(min(ratio.max(), 2.5))
        pad = 0.08 * (high - low or 1)
        self.plot.y_range.update(start=max(0.0, low - 2 * pad), end=high + pad)


@dataclass
class GptqFigures:
    """``errors``: running output error; ``pushed``: what this step moves; ``window``: the weights around it."""

    errors: Any = None
    pushed: Any = None
    window: Any = None
    running: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"step": [], "gptq": [], "plain": []}))
    moves: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"left": [], "right": [], "moved": []}))
    image: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"image": [], "x": [], "y": [], "dw": [], "dh": []}))
    here: list[Span] = field(default_factory=list)
    rounded: Any = None
    mapper: Any = None

    def __post_init__(self) -> None:
        plot = self.errors = figure(
            220,
            x_axis_label=_("columns rounded"),
            y_axis_label=_("output error"),
            x_range=Range1d(start=0, end=1),
            y_range=Range1d(start=0, end=1),
        )
        plot.line("step", "plain", source=self.running, line_color=ORANGE, line_dash="dashed", line_width=2)
        line = plot.line("step", "gptq", source=self.running, line_color=BLUE, line_width=2.5)
        tips = [(_("columns rounded"), "@step"), (_("GPTQ"), "@gptq{0.000} %"), (_("plain rounding"), "@plain{0.000} %")]
        plot.add_tools(HoverTool(renderers=[line], tooltips=tips, mode="vline", attachment="horizontal"))
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[00]")
        plot.yaxis.axis_label = _("output error, %")
        plot = self.pushed = figure(
            150,
            x_axis_label=_("column"),
            y_axis_label=_("moved by"),
            x_range=Range1d(start=0, end=1),
            y_range=Range1d(start=0, end=1),
        )
        bars = plot.quad(left="left", right="right", bottom=0, top="moved", source=self.moves, fill_color=GREEN, line_color=None)
        plot.add_tools(
            HoverTool(renderers=[bars], tooltips=[(_("columns from"), "@left"), (_("moved by, at most"), "@moved{0.00000}")])
        )
        plot = self.window = figure(
            170,
            x_axis_label=_("column"),
            y_axis_label=_("output channel"),
            x_range=Range1d(start=0, end=1),
            y_range=Range1d(start=0, end=1),
        )
        self.mapper = LinearColorMapper(palette=PALETTE, low=-1, high=1)
        plot.image("image", x="x", y="y", dw="dw", dh="dh", source=self.image, color_mapper=self.mapper)
        self.rounded = BoxAnnotation(left=0, right=0, fill_color=GREY, fill_alpha=0.16, line_color=None, level="underlay")
        plot.add_layout(self.rounded)
        plot.yaxis.ticker = BasicTicker(desired_num_ticks=3, min_interval=1)
        for each in (self.errors, self.pushed, self.window):
            each.min_border_left = 54
            span = Span(location=0, dimension="height", line_color=VERMILLION, line_width=1.5, line_dash="4 3")
            each.add_layout(span)
            self.here.append(span)

    def show_run(self, gptq: np.ndarray, plain: np.ndarray) -> None:
        """Both in percent, one a step."""
        self.running.data = {"step": np.arange(1, len(gptq) + 1), "gptq": gptq, "plain": plain}
        self.errors.x_range.update(start=0, end=len(gptq))
        self.errors.y_range.update(start=0, end=1.08 * max(float(np.nanmax(gptq)), float(np.nanmax(plain)), 1e-6))
        self.pushed.x_range.update(start=0, end=len(gptq))

    def show_step(
        self,
        step: int,
        moved: tuple[np.ndarray, np.ndarray, np.ndarray],
        most: float,
        around: np.ndarray,
        first: int,
        scale: float,
    ) -> None:
        """``moved``: left and right edges of bins of columns and the largest move in each; ``most``: the y axis's end; ``around``: the
        changes so far [rows, columns] from column ``first`` on; ``scale``: the change that has the full colour."""
        left, right, height = moved
        self.moves.data = {"left": left, "right": right, "moved": height}
        self.pushed.y_range.update(start=0, end=most or 1)
        rows, columns = around.shape
        self.image.data = {"image": [around.astype(np.float32)], "x": [first], "y": [0], "dw": [columns], "dh": [rows]}
        self.mapper.update(low=-scale, high=scale)
        self.window.x_range.update(start=first, end=first + columns)
        self.window.y_range.update(start=0, end=rows)
        self.rounded.update(left=first, right=max(first, step))
        for span in self.here:
            span.location = step - 0.5 if step else 0


def binned(values: np.ndarray, most: int = 192) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(left, right, largest) of at most ``most`` bins of neighbouring values, zeros left out."""
    width = max(1, math.ceil(len(values) / most))
    starts = np.arange(0, len(values), width)
    top = np.maximum.reduceat(values, starts) if len(values) else values
    keep = top > 0
    return starts[keep], np.minimum(starts + width, len(values))[keep], top[keep]
