"""The Bokeh figures of the KV cache page: arrays to sources and roots, pure."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Legend, LegendItem, Span

from explorer.i18n import _
from explorer.kv_cache.arithmetic import CacheCurves
from explorer.kv_cache.usage import COLUMNS
from explorer.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, figure

KEPT = 5000  # steps the browser keeps
WINDOW = 400  # steps on the screen
_LOG = ("tokens", "stored", "slots", "reserved")  # drawn on a logarithmic axis, where nothing is no zero but a gap


@dataclass
class UsageFigure:
    """Two plots over the same steps: what is held (logarithmic), and how much of it is in use."""

    source: ColumnDataSource
    root: Any
    x_range: Range1d
    here: list[Span] = field(default_factory=list)  # the step on the screen when the view is not live

    def clear(self) -> None:
        self.source.data = {name: [] for name in COLUMNS}

    def stream(self, rows: dict[str, list[float]]) -> None:
        if rows["step"]:
            self.source.stream(usage_columns(rows), KEPT)

    def look_at(self, step: int, last: int, live: bool) -> None:
        """Show ``WINDOW`` steps that end at the newest one, or that have ``step`` among them, with a line at it."""
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
    lines = (
        ("reserved", _("contiguous: max_model_len each"), VERMILLION, "dotted", 2.5),
        ("pool", _("pool"), GREY, "dashed", 1.5),
        ("slots", _("blocks held × block size"), BLUE, "solid", 2.5),
        ("stored", _("tokens stored"), GREEN, "dashdot", 2.5),
        ("tokens", _("tokens the requests see"), ORANGE, "dashed", 2),
    )
    _lines(held, source, lines, tooltips)
    use = figure(
        height - 40, x_range=x_range, y_range=Range1d(start=0, end=105), y_axis_label=_("in use, %"), x_axis_label=_("engine step")
    )
    share = (
        ("paged_use", _("paged"), BLUE, "solid", 2.5),
        ("contiguous_use", _("contiguous"), VERMILLION, "dotted", 2.5),
    )
    _lines(use, source, share, tooltips)
    held.yaxis.formatter = NumeralTickFormatter(format="0,0")
    here = []
    for plot in (held, use):
        plot.min_border_left = 56  # so that the steps stand below each other
        span = Span(location=0, dimension="height", line_color=VERMILLION, line_width=1.5, line_dash="4 3", visible=False)
        plot.add_layout(span)
        here.append(span)
    return UsageFigure(source, column(held, use, sizing_mode="stretch_width", spacing=4), x_range, here)


def _lines(plot: Any, source: ColumnDataSource, lines: Any, tooltips: Any) -> None:
    """Step lines that differ in colour and dash, a legend above, and one hover that tells everything of a step."""
    items = []
    for name, label, colour, dash, width in lines:
        line = plot.step("step", name, source=source, mode="center", line_color=colour, line_dash=dash, line_width=width)
        items.append(LegendItem(label=label, renderers=[line]))
    _legend(plot, items)
    dots = plot.scatter("step", lines[0][0] if lines[0][0] != "reserved" else "slots", source=source, size=5, alpha=0)
    plot.add_tools(HoverTool(tooltips=tooltips, mode="vline", renderers=[dots], attachment="horizontal"))


def _legend(plot: Any, items: list[LegendItem]) -> None:
    plot.add_layout(
        Legend(
            items=items, orientation="horizontal", ncols=3, label_text_font_size="11px", glyph_width=26, spacing=10, padding=2, margin=0,
            border_line_color=None, background_fill_alpha=0, click_policy="mute",
        ),
        "above",
    )  # fmt: skip


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
    model = [
        ("without_ms", _("without: t d² + t² d (modelled)"), VERMILLION, "dashed"),
        ("attention", _("its t² d alone (modelled)"), PURPLE, "dotted"),
        ("with_ms", _("with: d² + t d (modelled)"), BLUE, "dashed"),
    ]
    items = []
    for name, label, colour, dash in model:
        line = plot.line("t", name, source=curves, line_color=colour, line_dash=dash, line_width=2)
        items.append(LegendItem(label=label, renderers=[line]))
    marks = []
    for name, label, colour, marker in (
        ("without_ms", _("without (measured)"), VERMILLION, "square"),
        ("with_ms", _("with the cache (measured)"), BLUE, "circle"),
    ):
        dots = plot.scatter("t", name, source=points, marker=marker, size=9, fill_color=colour, line_color="white")
        marks.append(dots)
        items.append(LegendItem(label=label, renderers=[dots]))
    _legend(plot, items)
    plot.legend.ncols = 2
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
