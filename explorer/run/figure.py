"""The Gantt of requests over steps: arrays to a Bokeh source and figure, pure."""

from collections.abc import Iterable
from typing import Any

from bokeh.models import ColumnDataSource, CustomJSTickFormatter, Range1d, SingleIntervalTicker, Span

from explorer.i18n import _
from explorer.run.rows import Bar
from explorer.theme import GREY, PHASE_COLOURS, figure, owner_colour

WINDOW = 160  # steps on the screen
MIN_LANES = 8  # rows on the screen, so that one request does not fill it
ROLLOVER = WINDOW * 64

# How each phase is drawn: half its height, fill's opacity, hatch. Shape and pattern tell the phase, colour the owner.
PHASES = {
    "waiting": (0.07, 0.55, " ", _("waiting")),
    "prefill": (0.42, 0.35, "/", _("prefill")),
    "decode": (0.42, 1.0, " ", _("decode")),
    "preempted": (0.30, 0.12, "x", _("preempted")),
}
COLUMNS = (
    "left", "right", "top", "bottom", "colour", "alpha", "hatch", "line",
    "ordinal", "request_id", "owner", "step", "phase", "tokens", "ms",
)  # fmt: skip


def gantt_columns(bars: Iterable[Bar]) -> dict[str, list[Any]]:
    """Columns for the source, one row a bar. A step spans [step - 0.5, step + 0.5], request k the lane k."""
    data: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for bar in bars:
        half, alpha, hatch, label = PHASES[bar.phase]
        colour = GREY if bar.phase == "waiting" else owner_colour(bar.owner)
        row = (
            bar.step - 0.5, bar.step + 0.5, bar.ordinal + half, bar.ordinal - half, colour, alpha, hatch,
            PHASE_COLOURS["preempted"] if bar.phase == "preempted" else colour,
            bar.ordinal, bar.request_id, bar.owner, bar.step, label, _span(bar), f"{bar.step_ms:.2f} ms",
        )  # fmt: skip
        for name, value in zip(COLUMNS, row, strict=True):
            data[name].append(value)
    return data


def _span(bar: Bar) -> str:
    if not bar.num_tokens:
        return _("none")
    where = f"{bar.start}" if bar.num_tokens == 1 else f"{bar.start}–{bar.start + bar.num_tokens - 1}"
    return _("{n} (position {where})").format(n=bar.num_tokens, where=where)


def gantt(height: int = 250) -> tuple[ColumnDataSource, Any, Span]:
    """An empty Gantt: its source, its figure, and the line that marks the step on the screen."""
    source = ColumnDataSource({name: [] for name in COLUMNS})
    plot = figure(
        height,
        tooltips=[
            (_("request"), "#@ordinal (@request_id)"),
            (_("owner"), "@owner"),
            (_("step"), "@step"),
            (_("phase"), "@phase"),
            (_("tokens computed"), "@tokens"),
            (_("step time"), "@ms"),
        ],
        x_axis_label=_("engine step"),
        y_axis_label=_("request"),
        x_range=Range1d(0.5, WINDOW + 0.5),
        y_range=Range1d(MIN_LANES - 0.5, -0.5),
    )
    plot.quad(
        "left", "right", "top", "bottom", source=source, fill_color="colour", fill_alpha="alpha", line_color=None,
        hatch_pattern="hatch", hatch_color="line", hatch_alpha=0.8, hatch_scale=7, hatch_weight=1.1,
        nonselection_fill_alpha="alpha",
    )  # fmt: skip
    plot.ygrid.grid_line_color = None
    plot.yaxis.ticker = SingleIntervalTicker(interval=1, num_minor_ticks=0)
    plot.yaxis.formatter = CustomJSTickFormatter(
        code="return tick < 0 || (ticks.length > 17 && tick % 4) ? '' : '#' + tick.toFixed(0)"
    )
    here = Span(
        location=0, dimension="height", line_color=PHASE_COLOURS["preempted"], line_width=1.5, line_dash="4 3", visible=False
    )
    plot.add_layout(here)
    return source, plot, here


def ranges(bars: Iterable[Bar], last: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """The x and y ranges that show ``bars`` with ``last`` as the newest step; y runs downwards."""
    ordinals = [bar.ordinal for bar in bars]
    low, high = (min(ordinals), max(ordinals)) if ordinals else (0, 0)
    high = max(high, low + MIN_LANES - 1)
    end = max(last, WINDOW)
    return (end - WINDOW + 0.5, end + 0.5), (high + 0.6, low - 0.6)
