"""The Bokeh figures of the KV cache page: arrays to sources and roots, pure."""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span

from explorer.i18n import _
from explorer.kv_cache.arithmetic import CacheCurves
from explorer.kv_cache.usage import COLUMNS
from explorer.pace import Pace
from explorer.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, figure

KEPT = 5000  # steps the browser keeps
WINDOW = 400  # steps on the screen
_LOG = ("tokens", "stored", "slots", "reserved")  # drawn on a logarithmic axis, where nothing is no zero but a gap


@dataclass(frozen=True)
class Line:
    """A line or a row of markers: its column, its name in the legend, how it is drawn."""

    name: str
    label: str
    colour: str
    dash: str = "solid"
    width: float = 2.5
    marker: str = ""


USAGE_LINES = (
    Line("reserved", _("contiguous: max_model_len for each"), VERMILLION, "dotted"),
    Line("pool", _("the pool"), GREY, "dashed", 1.5),
    Line("slots", _("paged: blocks held × block size"), BLUE),
    Line("stored", _("tokens stored"), GREEN, "dashdot"),
    Line("tokens", _("tokens the requests see (shared ones for each)"), ORANGE, "dashed", 2),
)
SHARE_LINES = (Line("paged_use", _("paged"), BLUE), Line("contiguous_use", _("contiguous"), VERMILLION, "dotted"))
TIMING_LINES = (
    Line("without_ms", _("without, measured"), VERMILLION, marker="square"),
    Line("with_ms", _("with the cache, measured"), BLUE, marker="circle"),
    Line("without_ms", _("without, modelled: t d² + t² d"), VERMILLION, "dashed"),
    Line("attention", _("its t² d alone, modelled"), PURPLE, "dotted"),
    Line("with_ms", _("with, modelled: d² + t d"), BLUE, "dashed"),
)


@dataclass
class UsageFigure:
    """Two plots over the same steps: what is held (logarithmic), and how much of it is in use."""

    source: ColumnDataSource
    root: Any
    x_range: Range1d
    here: list[Span] = field(default_factory=list)  # the step on the screen when the view is not live
    pace: Pace = field(default_factory=Pace)
    pending: list[dict[str, list[float]]] = field(default_factory=list)  # rows that are not in the source yet

    def clear(self) -> None:
        self.pending = []
        self.source.data = {name: [] for name in COLUMNS}

    def add(self, rows: dict[str, list[float]]) -> None:
        """Rows to be drawn by the next ``look_at``."""
        if rows["step"]:
            self.pending.append(rows)

    def look_at(self, step: int, last: int, live: bool) -> None:
        """Show ``WINDOW`` steps that end at the newest one, or that have ``step`` among them, with a line at it.

        While live it keeps its pace: what came too early is drawn by a later call (``pace.late``)."""
        if not self.pace.due() and live:
            return
        self.pace.late = False
        if self.pending:
            rows = {name: [v for part in self.pending for v in part[name]][-KEPT:] for name in self.pending[0]}
            self.pending = []
            self.source.stream(usage_columns(rows), KEPT)
        end = last if live else min(max(step + WINDOW // 2, WINDOW), max(last, step))
        end = max(end, 20)
        start = max(0, end - WINDOW)
        if (self.x_range.start, self.x_range.end) != (start, end + 0.5):
            self.x_range.update(start=start, end=end + 0.5)
        for span in self.here:
            if (span.location, span.visible) != (step, not live):
                span.update(location=step, visible=not live)


def usage_columns(rows: dict[str, list[float]]) -> dict[str, Any]:
    """The rows as the source takes them: zeros become gaps where the axis is logarithmic."""
    nan = float("nan")
    return {name: [v or nan for v in values] if name in _LOG else list(values) for name, values in rows.items()}


def usage_figure(height: int = 210) -> UsageFigure:
    source = ColumnDataSource({name: [] for name in COLUMNS})
    x_range = Range1d(start=0, end=20.5)
    tooltips = [
        (_("step"), "@step"), (_("requests with blocks"), "@requests"), (_("tokens, shared ones for each"), "@tokens{0,0} tokens"),
        (_("tokens, shared ones once"), "@stored{0,0} tokens"), (_("blocks held"), "@blocks{0,0} blocks = @slots{0,0} slots"),
        (_("contiguous"), "@reserved{0,0} slots"), (_("pool"), "@pool{0,0} slots"),
        (_("in use, paged"), "@paged_use{0.00} %"), (_("in use, contiguous"), "@contiguous_use{0.00} %"),
    ]  # fmt: skip
    held = figure(height, x_range=x_range, y_axis_type="log", y_axis_label=_("slots (log)"))
    _lines(held, source, USAGE_LINES, tooltips)
    use = figure(
        height - 40,
        x_range=x_range,
        y_range=Range1d(start=0, end=105),
        y_axis_label=_("in use, %"),
        x_axis_label=_("engine step"),
    )
    _lines(use, source, SHARE_LINES, tooltips)
    held.yaxis.formatter = NumeralTickFormatter(format="0,0")
    here = []
    for plot in (held, use):
        plot.min_border_left = 56  # so that the steps stand below each other
        span = Span(location=0, dimension="height", line_color=VERMILLION, line_width=1.5, line_dash="4 3", visible=False)
        plot.add_layout(span)
        here.append(span)
    return UsageFigure(source, column(held, use, sizing_mode="stretch_width", spacing=4), x_range, here)


def _lines(plot: Any, source: ColumnDataSource, lines: Sequence[Line], tooltips: Any) -> None:
    """Step lines that differ in colour and dash, and one hover that tells everything of a step."""
    for line in lines:
        plot.step(
            "step", line.name, source=source, mode="center", line_color=line.colour, line_dash=line.dash, line_width=line.width
        )
    dots = plot.scatter("step", "slots" if len(lines) > 2 else "paged_use", source=source, size=5, alpha=0)
    plot.add_tools(HoverTool(tooltips=tooltips, mode="vline", renderers=[dots], attachment="horizontal"))


def legend_html(lines: Sequence[Line]) -> str:
    """The legend as text that wraps on a phone: each line's sample, dash or marker included, and its name."""
    return (
        '<div class="kv-legend">' + "".join(f"<span>{_sample(line)}{html.escape(line.label)}</span>" for line in lines) + "</div>"
    )


def _sample(line: Line) -> str:
    dash = {"solid": "", "dashed": "6 4", "dotted": "2 3", "dashdot": "7 3 2 3"}[line.dash]
    drawn = f'<path d="M1 6H27" stroke="{line.colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>'
    if line.marker:
        shape = '<circle cx="14" cy="6" r="4.5"' if line.marker == "circle" else '<rect x="10" y="2" width="8" height="8"'
        drawn = f'{shape} fill="{line.colour}"/>'
    return f'<svg width="28" height="12" aria-hidden="true">{drawn}</svg>'


@dataclass
class TimingFigure:
    points: ColumnDataSource
    curves: ColumnDataSource
    root: Any

    def show(self, curves: CacheCurves | None) -> None:
        if curves is None:
            self.points.data = {key: [] for key in ("t", "with_ms", "without_ms", "ratio")}
            self.curves.data = {key: [] for key in ("t", "with_ms", "without_ms", "attention")}
            return
        self.points.data = {
            "t": curves.lengths, "with_ms": curves.with_ms, "without_ms": curves.without_ms,
            "ratio": curves.without_ms / np.maximum(curves.with_ms, 1e-9),
        }  # fmt: skip
        self.curves.data = {
            "t": curves.grid, "with_ms": curves.model_with, "without_ms": curves.model_without, "attention": curves.attention_only,
        }  # fmt: skip


def timing_figure(height: int = 280) -> TimingFigure:
    """Time of the next token over context length: measured points, and the formula's curves through them."""
    points, curves = ColumnDataSource(), ColumnDataSource()
    plot = figure(height, x_axis_label=_("tokens of context"), y_axis_label=_("ms for the next token"))
    plot.y_range.start = 0
    plot.y_range.range_padding = 0.08
    marks = []
    for line in TIMING_LINES:
        if line.marker:
            marks.append(
                plot.scatter(
                    "t", line.name, source=points, marker=line.marker, size=9, fill_color=line.colour, line_color="white"
                )
            )
        else:
            plot.line("t", line.name, source=curves, line_color=line.colour, line_dash=line.dash, line_width=2)
    plot.add_tools(
        HoverTool(
            renderers=marks,
            tooltips=[
                (_("context"), "@t tokens"), (_("with the cache"), "@with_ms{0.000} ms"), (_("without"), "@without_ms{0.000} ms"),
                (_("ratio"), "@ratio{0.00}"),
            ],
        )
    )  # fmt: skip
    timing = TimingFigure(points, curves, plot)
    timing.show(None)
    return timing
