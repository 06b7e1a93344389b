"""The Gantt of requests over steps: arrays to a Bokeh source and figure, pure."""

import math
from collections.abc import Iterable
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, Range1d
from bokeh.models.annotations import Span

from explorer.i18n import _
from explorer.run.rows import Bar
from explorer.theme import GREY, PHASE_COLOURS, figure, number, owner_colour

WINDOW = 160  # steps on the screen, at most
EVERY = 20  # of a shorter run the axis holds the next multiple of these, so that it does not move with every step
MIN_LANES = 8  # rows on the screen, so that one request does not fill it
MAX_LABELS = 16  # of rows
ROLLOVER = WINDOW * 64

# How each phase is drawn: height of its bar, fill's opacity, hatch. Shape and pattern tell the phase, colour the owner.
# A renderer a phase: Bokeh makes a canvas for every bar whose hatch comes from a column.
PHASES = {
    "waiting": (0.14, 0.6, None, _("waiting")),
    "prefill": (0.84, 0.4, "right_diagonal_line", _("prefill")),
    "decode": (0.84, 1.0, None, _("decode")),
    "preempted": (0.60, 0.15, "diagonal_cross", _("preempted")),
}
COLUMNS = ("step", "ordinal", "colour", "request_id", "owner", "phase", "tokens", "ms")
Columns = dict[str, Any]  # lists, all of one length


def gantt_columns(bars: Iterable[Bar]) -> dict[str, Columns]:
    """For each phase the columns of its source, one row a bar: step along x, the request's ordinal along y."""
    data: dict[str, Columns] = {phase: {name: [] for name in COLUMNS} for phase in PHASES}
    for bar in bars:
        colour = GREY if bar.phase == "waiting" else owner_colour(bar.owner)
        label = PHASES[bar.phase][3]
        row = (bar.step, bar.ordinal, colour, bar.request_id, bar.owner, label, _span(bar), number(bar.step_ms, "ms"))
        for name, value in zip(COLUMNS, row, strict=True):
            data[bar.phase][name].append(value)
    return data


def _span(bar: Bar) -> str:
    if not bar.num_tokens:
        return _("none")
    where = f"{bar.start}" if bar.num_tokens == 1 else f"{bar.start}–{bar.start + bar.num_tokens - 1}"
    return _("{n} (position {where})").format(n=bar.num_tokens, where=where)


def gantt(height: int = 300) -> tuple[dict[str, ColumnDataSource], Any, Span]:
    """An empty Gantt: a source for each phase, its figure, and the line that marks the step on the screen."""
    sources = {phase: ColumnDataSource({name: [] for name in COLUMNS}) for phase in PHASES}
    plot = figure(
        height,
        tooltips=[
            (_("request"), "@request_id"),
            (_("owner"), "@owner"),
            (_("step"), "@step"),
            (_("phase"), "@phase"),
            (_("tokens computed"), "@tokens"),
            (_("step time"), "@ms"),
        ],
        x_axis_label=_("engine step"),
        y_axis_label=_("request"),
        x_range=Range1d(start=0.5, end=EVERY + 0.5),
        y_range=Range1d(start=MIN_LANES - 0.5, end=-0.5),
    )
    for phase, (thickness, alpha, hatch, _label) in PHASES.items():
        # Solid bars overlap a little, or the pixels between two steps would show through.
        plot.rect(
            "step", "ordinal", 1.06 if alpha == 1 else 1, thickness, source=sources[phase], fill_color="colour", fill_alpha=alpha, line_color=None,
            hatch_pattern=hatch, hatch_color=PHASE_COLOURS[phase] if phase == "preempted" else GREY, hatch_alpha=0.9,
            hatch_scale=6, hatch_weight=1.2, nonselection_fill_alpha=alpha, dilate=True,
        )  # fmt: skip
    plot.ygrid.grid_line_color = None
    plot.yaxis.ticker = FixedTicker(ticks=[])
    here = Span(
        location=0, dimension="height", line_color=PHASE_COLOURS["preempted"], line_width=1.5, line_dash="4 3", visible=False
    )
    plot.add_layout(here)
    return sources, plot, here


def ranges(bars: Iterable[Bar], last: int) -> tuple[tuple[float, float], tuple[float, float], dict[int, str]]:
    """The x range, the y range (downwards) and the rows to label with their request's id, so that ``bars`` show with ``last``
    as the newest step."""
    names = {bar.ordinal: bar.request_id for bar in bars}
    ordinals = sorted(names)
    low, high = (ordinals[0], ordinals[-1]) if ordinals else (0, 0)
    end = last if last > WINDOW else EVERY * max(1, math.ceil(last / EVERY))
    every = 1 + (high - low) // MAX_LABELS
    return (
        (max(0, end - WINDOW) + 0.5, end + 0.5),
        (max(high, low + MIN_LANES - 1) + 0.6, low - 0.6),
        {k: names[k] for k in ordinals if k % every == 0},
    )
