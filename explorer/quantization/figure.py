"""The figures of the tab "Matrices": the map of layers by matrices, and one matrix under one grid. Pure."""

import html
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bokeh.models import (
    BasicTicker,
    BasicTickFormatter,
    ColumnDataSource,
    FixedTicker,
    HoverTool,
    LinearColorMapper,
    NumeralTickFormatter,
    Range1d,
)
from bokeh.palettes import Cividis256

from explorer.i18n import _
from explorer.kv_cache.figure import Line
from explorer.quantization.rows import MATRICES, HeatMap, Place, Quantity
from explorer.quantization.whatif import Histogram, Tried
from explorer.theme import BLUE, ORANGE, PURPLE, VERMILLION, figure

MANY_LEVELS = 32  # from so many on the levels are ticks below the axis, without lines through the picture
PERCENT = (
    "0.[00] %"  # how ticks of a share are written; a formatter in JavaScript would not run in a file that is opened from disk
)
UNKNOWN = "#9a9fa8"  # of a cell without a number
# From the least loss to the greatest: cividis reads the same with every kind of colour vision, and in greys.
PALETTE = tuple(Cividis256)
LEVEL_LINES = (Line("weights", _("weights"), BLUE, width=6), Line("levels", _("levels that they can take"), VERMILLION))
COMPARE_LINES = (
    Line("weights", _("weights"), BLUE, width=6), Line("int4", _("int4, symmetric: k / 8"), ORANGE), Line("nf4", _("NF4"), PURPLE, "dashed"),
)  # fmt: skip


def scale_html(found: HeatMap, quantity: Quantity) -> str:
    """The colours of the map with their numbers; in words where nothing was lost."""
    if found.exact:
        words = _("All cells are grey: nothing was lost. What runs are the checkpoint's own numbers, to the last bit.")
        return f'<div class="qm-scale"><span class="ct-muted">{html.escape(words)}</span></div>'
    ends = (found.low, found.high) if quantity.worse > 0 else (found.high, found.low)
    digits = 1 if quantity.key == "sqnr" else 2
    texts = [f"{value:.{digits}f} {quantity.unit}" for value in ends]
    stops = ", ".join(PALETTE[i] for i in range(0, 256, 51))
    return (
        f'<div class="qm-scale"><span>{html.escape(texts[0])}</span><i style="background:linear-gradient(90deg, {stops})"></i>'
        f'<span>{html.escape(texts[1])}</span><span class="ct-muted">{html.escape(_("yellow: loses most") if quantity.key != "outliers" else _("yellow: most"))}</span>'
        f'<span class="ct-muted"><i class="none"></i>{html.escape(_("grey: no number, or nothing lost"))}</span></div>'
    )


@dataclass
class HeatFigure:
    """Layers from left to right, the seven matrices from top to bottom."""

    cells: ColumnDataSource = field(default_factory=lambda: ColumnDataSource(
        {name: [] for name in ("layer", "matrix", "row", "value", "text", "sqnr", "output", "outliers", "largest", "bits", "shape", "form")}
    ))  # fmt: skip
    chosen: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"layer": [], "row": []}))
    root: Any = None
    mapper: Any = None

    def __post_init__(self) -> None:
        self.mapper = LinearColorMapper(palette=list(PALETTE), low=0, high=1, nan_color=UNKNOWN)
        plot = self.root = figure(
            250,
            x_axis_label=_("layer"),
            x_range=Range1d(start=-0.5, end=29.5),
            y_range=Range1d(start=len(MATRICES) - 0.5, end=-0.5),
        )
        fill = {"field": "value", "transform": self.mapper}
        cells = plot.rect("layer", "row", 0.94, 0.92, source=self.cells, fill_color=fill, line_color=None)
        for width, colour in ((5, "white"), (3, VERMILLION)):  # seen on every colour of the scale
            plot.rect("layer", "row", 0.9, 0.86, source=self.chosen, fill_color=None, line_color=colour, line_width=width)
        plot.yaxis.ticker = FixedTicker(ticks=list(range(len(MATRICES))))
        plot.yaxis.major_label_overrides = dict(enumerate(MATRICES))
        plot.xaxis.ticker = BasicTicker(min_interval=1)
        plot.ygrid.grid_line_color = None
        plot.xaxis.axis_line_color = plot.yaxis.axis_line_color = None
        tips = [
            ("", "layer @layer, @matrix (@shape)"), (_("SQNR"), "@sqnr"), (_("output error"), "@output"), (_("outliers"), "@outliers"),
            (_("largest error"), "@largest"), (_("bits per weight"), "@bits"), (_("runs"), "@form"),
        ]  # fmt: skip
        plot.add_tools(HoverTool(renderers=[cells], tooltips=tips, attachment="vertical"))

    def show(self, found: HeatMap, quantity: Quantity, num_layers: int) -> None:
        palette = list(PALETTE if quantity.worse > 0 else reversed(PALETTE))
        if self.mapper.palette != palette or (self.mapper.low, self.mapper.high) != (found.low, found.high):
            self.mapper.update(palette=palette, low=found.low, high=found.high)
        self.cells.data = found.columns
        fit(self.root.x_range, -0.5, max(1, num_layers) - 0.5)

    def choose(self, place: Place | None) -> None:
        data: dict[str, list[Any]] = {"layer": [], "row": []}
        if place is not None and place[1] in MATRICES:
            data = {"layer": [place[0]], "row": [MATRICES.index(place[1])]}
        if dict(self.chosen.data) != data:
            self.chosen.data = data

    @staticmethod
    def place(x: float, y: float) -> Place | None:
        """The matrix at a place of the plot."""
        layer, row = round(x), round(y)
        return (layer, MATRICES[row]) if layer >= 0 and 0 <= row < len(MATRICES) else None


def bars(found: Histogram) -> dict[str, Any]:
    total = max(1, int(found.counts.sum()))
    return {
        "left": found.edges[:-1], "right": found.edges[1:], "count": found.counts, "share": found.counts / total,
        "middle": (found.edges[:-1] + found.edges[1:]) / 2,
    }  # fmt: skip


def _bars_source() -> ColumnDataSource:
    return ColumnDataSource({name: [] for name in ("left", "right", "count", "share", "middle")})


def _marks_source() -> ColumnDataSource:
    return ColumnDataSource({name: [] for name in ("x", "top", "end", "bottom")})


@dataclass
class MatrixFigures:
    """Five plots: ``levels``, ``compared``, ``errors``, ``channels`` and ``scales``."""

    levels: Any = None
    compared: Any = None
    errors: Any = None
    channels: Any = None
    scales: Any = None
    weight_bars: ColumnDataSource = field(default_factory=_bars_source)
    level_marks: ColumnDataSource = field(default_factory=_marks_source)
    both_bars: ColumnDataSource = field(default_factory=_bars_source)
    int_marks: ColumnDataSource = field(default_factory=_marks_source)
    nf4_marks: ColumnDataSource = field(default_factory=_marks_source)
    error_bars: ColumnDataSource = field(default_factory=_bars_source)
    scale_bars: ColumnDataSource = field(default_factory=_bars_source)
    channel_line: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"channel": [], "error": []}))

    def __post_init__(self) -> None:
        self.levels = self._with_levels(_("weight / half its group's range"))
        self.levels.segment(
            "x", 0, "x", "top", source=self.level_marks, line_color=VERMILLION, line_alpha=0.45, line_dash="dotted"
        )
        self._marks(self.levels, self.level_marks, VERMILLION, "solid")
        self.levels.add_tools(self._hover(self.weight_bars, _("weight / half the range")))
        self._histogram(self.levels, self.weight_bars)
        self.compared = self._with_levels(_("weight / its group's largest magnitude"))
        self._histogram(self.compared, self.both_bars)
        self._marks(self.compared, self.int_marks, ORANGE, "solid")
        self._marks(self.compared, self.nf4_marks, PURPLE, "dashed")
        self.errors = figure(180, x_axis_label=_("rounded minus original weight"), y_axis_label=_("share of weights"),
                             x_range=Range1d(start=-1, end=1), y_range=Range1d(start=0, end=1))  # fmt: skip
        self._histogram(self.errors, self.error_bars)
        self.scales = figure(180, x_axis_label=_("size of a group's scale"), y_axis_label=_("share of groups"),
                             x_range=Range1d(start=0, end=1), y_range=Range1d(start=0, end=1))  # fmt: skip
        self._histogram(self.scales, self.scale_bars)
        self.channels = figure(180, x_axis_label=_("channel"), y_axis_label=_("rms error"), x_range=Range1d(start=0, end=1),
                               y_range=Range1d(start=0, end=1))  # fmt: skip
        dots = self.channels.scatter(
            "channel", "error", source=self.channel_line, size=3.5, fill_color=BLUE, line_color=None, fill_alpha=0.75
        )
        self.channels.add_tools(
            HoverTool(
                renderers=[dots],
                tooltips=[(_("channel"), "@channel"), (_("rms error"), "@error{0.00e+0}")],
                attachment="horizontal",
            )
        )
        for plot in (self.levels, self.compared, self.errors, self.scales):
            plot.yaxis.formatter = NumeralTickFormatter(format=PERCENT)
            plot.yaxis.ticker = BasicTicker(desired_num_ticks=4)
        for axis in (self.errors.xaxis[0], self.scales.xaxis[0], self.channels.yaxis[0]):
            axis.formatter = BasicTickFormatter(power_limit_low=-3, power_limit_high=5)
            axis.ticker = BasicTicker(desired_num_ticks=4)

    def _with_levels(self, axis: str) -> Any:
        return figure(210, x_axis_label=axis, y_axis_label=_("share of weights"), x_range=Range1d(start=-1.06, end=1.06),
                      y_range=Range1d(start=-0.1, end=1))  # fmt: skip

    def _histogram(self, plot: Any, source: ColumnDataSource) -> None:
        drawn = plot.quad(
            left="left", right="right", top="share", bottom=0, source=source, fill_color=BLUE, fill_alpha=0.9, line_color=None
        )
        for tool in plot.tools:
            if isinstance(tool, HoverTool) and tool.renderers == "auto":
                tool.renderers = [drawn]
                return
        plot.add_tools(self._hover(source, _("value"), drawn))

    @staticmethod
    def _hover(_source: ColumnDataSource, label: str, drawn: Any = None) -> HoverTool:
        tips = [(label, "@left{0.00e+0} … @right{0.00e+0}"), (_("count"), "@count{0,0} (@share{0.00 %})")]
        made = HoverTool(tooltips=tips, attachment="horizontal")
        if drawn is not None:
            made.renderers = [drawn]
        return made

    @staticmethod
    def _marks(plot: Any, source: ColumnDataSource, colour: str, dash: str) -> None:
        plot.segment("x", "bottom", "x", "end", source=source, line_color=colour, line_width=2, line_dash=dash)

    def show(self, tried: Tried, both: tuple[Histogram, np.ndarray, np.ndarray], by_input: bool) -> None:
        self.weight_bars.data = bars(tried.normalized)
        high = _top(self.levels, self.weight_bars)
        self.level_marks.data = marks(tried.levels, high, few=len(tried.levels) <= MANY_LEVELS)
        found, ints, nf4 = both
        self.both_bars.data = bars(found)
        high = _top(self.compared, self.both_bars, below=0.3)
        self.int_marks.data = marks(ints, high, row=0)
        self.nf4_marks.data = marks(nf4, high, row=1)
        self.error_bars.data = bars(tried.errors)
        fit(self.errors.x_range, float(tried.errors.edges[0]), float(tried.errors.edges[-1]))
        _top(self.errors, self.error_bars, below=0)
        self.scale_bars.data = bars(tried.scales)
        fit(self.scales.x_range, 0, float(tried.scales.edges[-1]))
        _top(self.scales, self.scale_bars, below=0)
        self.show_channels(tried, by_input)

    def show_channels(self, tried: Tried, by_input: bool) -> None:
        error = tried.by_input if by_input else tried.by_output
        self.channel_line.data = {"channel": np.arange(len(error)), "error": error}
        fit(self.channels.x_range, -0.5, len(error) - 0.5)
        fit(self.channels.y_range, 0, float(error.max()) * 1.08 or 1.0)
        label = _("input channel") if by_input else _("output channel")
        if self.channels.xaxis[0].axis_label != label:
            self.channels.xaxis[0].axis_label = label


def marks(levels: np.ndarray, high: float, row: int | None = None, few: bool = False) -> dict[str, Any]:
    """Where the levels are drawn: a tick below the axis, through the picture where they are ``few``; in one of two rows of ticks."""
    end, bottom = (-0.02, -0.1) if row is None else (-0.03 - 0.14 * row, -0.13 - 0.14 * row)
    return {
        "x": levels,
        **{name: np.full(len(levels), y * high) for name, y in (("top", float(few)), ("end", end), ("bottom", bottom))},
    }


def _top(plot: Any, source: ColumnDataSource, below: float = 0.1) -> float:
    """Fit the plot's height to the bars; the height."""
    high = float(max(source.data["share"], default=0.0)) * 1.12 or 1.0
    fit(plot.y_range, -below * high, high)
    return high


def fit(span: Range1d, start: float, end: float) -> None:
    if (span.start, span.end) != (start, end):
        span.update(start=start, end=end)
