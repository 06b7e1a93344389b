"""The figures of the sweep: throughput and latency over the batch size with what bounds them, and the padding of static batches. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span

from explorer.batching.sweep_rows import Bounds, Padded, Point, columns
from explorer.batching.whatif_figure import fit
from explorer.i18n import _
from explorer.kv_cache.figure import Line
from explorer.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, figure

POINT_LINES = (
    Line("tokens", _("measured"), BLUE, marker="circle"),
    Line("roof", _("what the roofline allows, modelled"), GREY, "dashed"),
    Line("knee", _("the roofline's knee"), ORANGE, "dotted"),
    Line("limit", _("KV limit: most requests that fit"), VERMILLION, "dashdot"),
)
ITL_LINES = (*POINT_LINES[:1], Line("p99", _("99th percentile, measured"), PURPLE, marker="square"), *POINT_LINES[1:])
PADDING_LINES = (
    Line("exponential", _("exponential lengths"), VERMILLION, "dashed"),
    Line("uniform", _("uniform lengths"), ORANGE, "dashdot"),
    Line("equal", _("equal lengths: none"), GREEN),
    Line("own", _("what the lengths of the newest load say, derived"), GREY, "dotted"),
    Line("measured", _("measured in static batches"), BLUE, marker="square"),
)
_NAMES = ("batch", "tokens", "itl", "p99", "each", "steps", "context")
_TICKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def log2(batch: float) -> float:
    """Where a batch size stands on the axis: Bokeh has no axis of powers of two."""
    return math.log2(max(batch, 1e-9))


def batch_axis(axis: Any, most: float) -> None:
    ticks = [t for t in _TICKS if t <= 2 * most]
    axis.update(ticker=FixedTicker(ticks=[log2(t) for t in ticks]), major_label_overrides={log2(t): str(t) for t in ticks})


@dataclass
class SweepFigures:
    """Two plots over the batch size: ``throughput`` and ``latency``."""

    throughput: Any = None
    latency: Any = None
    points: list[ColumnDataSource] = field(default_factory=list)  # one a plot: a source belongs to one document
    roofs: list[ColumnDataSource] = field(default_factory=list)
    knees: list[Span] = field(default_factory=list)
    limits: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.throughput = self._plot(_("tokens/s, all requests"), "tokens", "tokens_per_s")
        self.latency = self._plot(_("ms between two tokens"), "itl", "ms")

    def _plot(self, label: str, column: str, roof: str) -> Any:
        plot = figure(240, x_axis_label=_("requests that decode at once"), y_axis_label=label, x_range=Range1d(start=-0.4, end=3.4),
                      y_range=Range1d(start=0, end=1))  # fmt: skip
        source = ColumnDataSource({"x": [], **{name: [] for name in _NAMES}})
        curve = ColumnDataSource({"x": [], "y": []})
        self.points.append(source)
        self.roofs.append(curve)
        for spans, colour, dash in ((self.knees, ORANGE, "dotted"), (self.limits, VERMILLION, "dashdot")):
            spans.append(Span(location=0, dimension="height", line_color=colour, line_dash=dash, line_width=2, visible=False))
            plot.add_layout(spans[-1])
        plot.line("x", "y", source=curve, line_color=GREY, line_dash="dashed", line_width=2)
        plot.line("x", column, source=source, line_color=BLUE, line_width=2)
        marks = [plot.scatter("x", column, source=source, size=9, fill_color=BLUE, line_color="white")]
        if column == "itl":
            marks.append(plot.scatter("x", "p99", source=source, marker="square", size=7, fill_color=PURPLE, line_color="white"))
        tips = [
            (_("requests"), "@batch"), (_("together"), "@tokens{0,0.0} tokens/s"), (_("each"), "@each{0,0.0} tokens/s"),
            (_("median step"), "@itl{0,0.00} ms"), (_("99 %"), "@p99{0,0.00} ms"), (_("steps"), "@steps{0,0}"), (_("context"), "@context{0,0} tokens"),
        ]  # fmt: skip
        plot.add_tools(HoverTool(renderers=marks, tooltips=tips, attachment="horizontal"))
        return plot

    def show(self, points: Sequence[Point], bounds: Bounds | None, limit: int | None) -> None:
        """``limit``: requests that fit the pool; None: not known."""
        rows = columns(points)
        knee = bounds.knee if bounds is not None else math.inf
        most = max([8.0, *rows["batch"]])
        right = max([most, *(x for x in (knee, float(limit or 0)) if x <= 16 * most)])
        grid = [2 ** (log2(right) * i / 60) for i in range(61)] if bounds is not None else []
        roof = [bounds.tokens_per_s(b) for b in grid] if bounds is not None else []
        heights = (
            (self.throughput, roof, rows["tokens"]),
            (self.latency, [1e3 * bounds.seconds(b) for b in grid] if bounds is not None else [], rows["p99"]),
        )
        for i, (plot, allowed, seen) in enumerate(heights):
            self.points[i].data = {"x": [log2(b) for b in rows["batch"]], **rows}
            self.roofs[i].data = {"x": [log2(b) for b in grid], "y": allowed}
            top = 1.15 * max(seen, default=1.0)
            # The roof may be far above what was measured; then its beginning is in the picture, and its end leaves it.
            fit(plot.y_range, 0, max(top, min(1.1 * max(allowed, default=0.0), 3 * top)) or 1.0)
            fit(plot.x_range, -0.4, log2(right) + 0.4)
            batch_axis(plot.xaxis[0], right)
            _place(self.knees[i], knee if math.isfinite(knee) and knee >= 1 else None)
            _place(self.limits[i], float(limit) if limit else None)


def _place(span: Span, batch: float | None) -> None:
    at = log2(batch) if batch else 0.0
    if (span.location, span.visible) != (at, batch is not None):
        span.update(location=at, visible=batch is not None)


@dataclass
class PaddingFigure:
    """Share of the decoded tokens that a static batch computes for nobody, over the batch size."""

    plot: Any = None
    curves: dict[str, ColumnDataSource] = field(default_factory=dict)
    marks: ColumnDataSource = field(
        default_factory=lambda: ColumnDataSource(
            {n: [] for n in ("x", "batch", "measured", "derived", "spread", "requests", "number")}
        )
    )

    def __post_init__(self) -> None:
        plot = self.plot = figure(240, x_axis_label=_("batch size"), y_axis_label=_("padding, share of decoded tokens"),
                                  x_range=Range1d(start=-0.2, end=6.2), y_range=Range1d(start=-0.02, end=1))  # fmt: skip
        for line in PADDING_LINES[:-1]:
            source = self.curves[line.name] = ColumnDataSource({"x": [], "y": []})
            plot.line("x", "y", source=source, line_color=line.colour, line_dash=line.dash, line_width=2)
        marks = plot.scatter("x", "measured", source=self.marks, marker="square", size=11, fill_color=BLUE, line_color="white")
        tips = [
            (_("load"), "@number"), (_("batch size"), "@batch"), (_("padding, measured"), "@measured{0.0 %}"),
            (_("what its lengths say"), "@derived{0.0 %}"), (_("spread of lengths"), "@spread{0.00}"), (_("requests"), "@requests"),
        ]  # fmt: skip
        plot.add_tools(HoverTool(renderers=[marks], tooltips=tips, attachment="horizontal"))
        plot.yaxis.formatter = NumeralTickFormatter(format="0 %")
        batch_axis(plot.xaxis[0], 64)

    def show(self, curves: Mapping[str, Sequence[tuple[int, float]]], measured: Sequence[Padded]) -> None:
        """``curves``: by the names of PADDING_LINES, (batch size, share)."""
        for name, source in self.curves.items():
            points = curves.get(name, ())
            source.data = {"x": [log2(b) for b, _share in points], "y": [s for _b, s in points]}
        self.marks.data = {
            "x": [log2(p.batch) for p in measured], "batch": [p.batch for p in measured], "measured": [p.measured for p in measured],
            "derived": [p.derived for p in measured], "spread": [p.spread for p in measured], "requests": [p.num_requests for p in measured],
            "number": [p.number for p in measured],
        }  # fmt: skip
