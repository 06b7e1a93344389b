"""The figures of the Speculation page: acceptance by position, accepted lengths, tokens a pass, and the clock's curve. Pure."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span

from explorer.i18n import _
from explorer.kv_cache.figure import Line, legend_html
from explorer.speculation.clock import MAX_K, Costs, Paired
from explorer.speculation.rows import StepRow
from explorer.speculation.stats import AVERAGED, MAX_GROUPS, Group, per_pass
from explorer.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, figure

WINDOW = 300  # steps on the screen
# A group is told by its marker, its dash and its hatch as well as by its colour.
LOOKS = (
    (BLUE, "circle", "solid", " "),
    (ORANGE, "square", "dashed", "/"),
    (GREEN, "triangle", "dotted", "-"),
    (PURPLE, "diamond", "dashdot", "x"),
    (VERMILLION, "inverted_triangle", "dotdash", "."),
)
_SIGNS = {"circle": "●", "square": "■", "triangle": "▲", "diamond": "◆", "inverted_triangle": "▼"}
CLOCK_LINES = (
    Line("curve", _("speed-up, modelled"), BLUE, "dashed"),
    Line("points", _("measured on the same requests"), VERMILLION, marker="square"),
    Line("even", _("plain decoding"), GREY, "dotted"),
    Line("today", _("today's K"), ORANGE),
)
PASS_LINES = (
    Line("each", _("each step"), BLUE, marker="circle"),
    Line("mean", _("mean of {n} steps").format(n=AVERAGED), VERMILLION),
    Line("one", _("plain decoding: 1"), GREY, "dotted"),
)
__all__ = ["CLOCK_LINES", "PASS_LINES", "AcceptanceFigures", "ClockFigure", "legend_html"]


def groups_legend(groups: Sequence[Group]) -> str:
    """One look a group, with its sign."""
    parts = [
        f'<span><b style="color:{colour};font-size:15px;line-height:1">{_SIGNS[marker]}</b>{html.escape(group.name)}</span>'
        for group, (colour, marker, _dash, _hatch) in zip(groups, LOOKS)
    ]
    return f'<div class="kv-legend">{"".join(parts)}</div>'


def position_columns(group: Group) -> dict[str, list[Any]]:
    """One row a position of the draft, from 1."""
    n = len(group.proposed)
    return {
        "position": list(range(1, n + 1)),
        "share": [a / p if p else math.nan for a, p in zip(group.passed, group.proposed)],
        "given": [a / r if r else math.nan for a, r in zip(group.passed, group.reached)],
        "accepted": list(group.passed),
        "proposed": list(group.proposed),
        "name": [group.name] * n,
    }


def length_columns(group: Group, place: int, of: int) -> dict[str, list[Any]]:
    """One row a number of accepted tokens; ``place`` of ``of`` groups beside each other."""
    n, width = len(group.lengths), 0.8 / max(1, of)
    return {
        "x": [i + (place - (of - 1) / 2) * width for i in range(n)],
        "length": list(range(n)),
        "share": [count / group.rounds for count in group.lengths],
        "count": list(group.lengths),
        "width": [width * 0.92] * n,
        "name": [group.name] * n,
    }


@dataclass
class AcceptanceFigures:
    """Three plots: ``positions``, ``lengths`` and ``passes``."""

    positions: Any = None
    lengths: Any = None
    passes: Any = None
    by_position: list[ColumnDataSource] = field(default_factory=list)
    by_length: list[ColumnDataSource] = field(default_factory=list)
    by_step: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"step": [], "each": [], "mean": []}))
    here: Any = None

    def __post_init__(self) -> None:
        self._build_positions()
        self._build_lengths()
        self._build_passes()

    def _build_positions(self) -> None:
        plot = self.positions = figure(210, x_axis_label=_("position in the draft"), y_axis_label=_("accepted"),
                                       y_range=Range1d(start=0, end=1.05), x_range=Range1d(start=0.5, end=4.5))  # fmt: skip
        marks = []
        for colour, marker, dash, _hatch in LOOKS:
            source = ColumnDataSource({name: [] for name in ("position", "share", "given", "accepted", "proposed", "name")})
            plot.line("position", "share", source=source, line_color=colour, line_dash=dash, line_width=2)
            marks.append(
                plot.scatter("position", "share", source=source, marker=marker, size=9, fill_color=colour, line_color="white")
            )
            self.by_position.append(source)
        tips = [
            ("", "@name"), (_("position"), "@position"), (_("accepted"), "@accepted of @proposed drafts (@share{0.0 %})"),
            (_("of those that got so far"), "@given{0.0 %}"),
        ]  # fmt: skip
        plot.add_tools(HoverTool(renderers=marks, tooltips=tips, attachment="horizontal"))
        _whole(plot.xaxis[0])
        plot.yaxis.formatter = NumeralTickFormatter(format="0 %")

    def _build_lengths(self) -> None:
        plot = self.lengths = figure(210, x_axis_label=_("tokens accepted of a draft"), y_axis_label=_("drafts"),
                                     y_range=Range1d(start=0, end=1), x_range=Range1d(start=-0.6, end=4.6))  # fmt: skip
        bars = []
        for colour, _marker, _dash, hatch in LOOKS:
            source = ColumnDataSource({name: [] for name in ("x", "length", "share", "count", "width", "name")})
            bars.append(plot.vbar(x="x", top="share", width="width", source=source, fill_color=colour, line_color=None,
                                  hatch_pattern=hatch, hatch_color="white", hatch_alpha=0.75, hatch_scale=7))  # fmt: skip
            self.by_length.append(source)
        tips = [("", "@name"), (_("accepted"), "@length tokens"), (_("drafts"), "@count (@share{0.0 %})")]
        plot.add_tools(HoverTool(renderers=bars, tooltips=tips, attachment="horizontal"))
        _whole(plot.xaxis[0])
        plot.yaxis.formatter = NumeralTickFormatter(format="0 %")

    def _build_passes(self) -> None:
        plot = self.passes = figure(210, x_axis_label=_("engine step"), y_axis_label=_("tokens a request and pass"),
                                    y_range=Range1d(start=0, end=5), x_range=Range1d(start=0.5, end=20.5))  # fmt: skip
        dots = plot.scatter("step", "each", source=self.by_step, size=4, fill_color=BLUE, line_color=None, fill_alpha=0.5)
        plot.line("step", "mean", source=self.by_step, line_color=VERMILLION, line_width=2.5)
        plot.add_layout(Span(location=1, dimension="width", line_color=GREY, line_dash="dotted", line_width=1.5))
        self.here = Span(location=0, dimension="height", line_color=VERMILLION, line_dash="4 3", visible=False)
        plot.add_layout(self.here)
        tips = [(_("step"), "@step"), (_("tokens"), "@each{0.00}"), (_("mean"), "@mean{0.00}")]
        plot.add_tools(HoverTool(renderers=[dots], tooltips=tips, mode="vline", attachment="horizontal"))

    def show(self, groups: Sequence[Group], steps: Sequence[StepRow]) -> None:
        """``steps``: those to draw, with the few in front that the running mean needs."""
        empty: dict[str, list[Any]] = {name: [] for name in ("position", "share", "given", "accepted", "proposed", "name")}
        none: dict[str, list[Any]] = {name: [] for name in ("x", "length", "share", "count", "width", "name")}
        for i in range(MAX_GROUPS):
            group = groups[i] if i < len(groups) else None
            self.by_position[i].data = dict(empty) if group is None else position_columns(group)
            self.by_length[i].data = dict(none) if group is None else length_columns(group, i, len(groups))
        deepest = max([4, *(len(g.proposed) for g in groups)])
        highest = max([0.2, *(n / g.rounds for g in groups for n in g.lengths)])
        _fit(self.positions.x_range, 0.5, deepest + 0.5)
        _fit(self.lengths.x_range, -0.6, deepest + 0.6)
        _fit(self.lengths.y_range, 0, min(1.05, 1.15 * highest))
        x, each, mean = per_pass(steps)
        self.by_step.data = {"step": x[-WINDOW:], "each": each[-WINDOW:], "mean": mean[-WINDOW:]}
        if x:
            first = x[-WINDOW:][0]
            _fit(self.passes.x_range, first - 0.5, max(x[-1], first + 20) + 0.5)
            _fit(self.passes.y_range, 0, 1.15 * max([2.0, *each[-WINDOW:]]))

    def mark(self, step: int, visible: bool) -> None:
        """The step on the screen, while it is not the newest."""
        if (self.here.location, self.here.visible) != (step, visible):
            self.here.update(location=step, visible=visible)


@dataclass
class ClockFigure:
    """Speed-up over K: the modelled curve, and the points that were measured."""

    curve: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"k": [], "x": [], "e": [], "cost": []}))
    points: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"k": [], "x": [], "name": [], "n": []}))
    root: Any = None
    today: Any = None

    def __post_init__(self) -> None:
        plot = self.root = figure(240, x_axis_label=_("K, tokens proposed in a row"), y_axis_label=_("times plain decoding"),
                                  x_range=Range1d(start=-0.4, end=MAX_K + 0.4), y_range=Range1d(start=0, end=2))  # fmt: skip
        plot.add_layout(Span(location=1, dimension="width", line_color=GREY, line_dash="dotted", line_width=1.5))
        self.today = Span(location=0, dimension="height", line_color=ORANGE, line_width=1.5, visible=False)
        plot.add_layout(self.today)
        plot.line("k", "x", source=self.curve, line_color=BLUE, line_dash="dashed", line_width=2.5)
        dots = plot.scatter("k", "x", source=self.curve, size=7, fill_color=BLUE, line_color="white")
        marks = plot.scatter("k", "x", source=self.points, marker="square", size=11, fill_color=VERMILLION, line_color="white")
        tips = [
            ("K", "@k"),
            (_("modelled"), "@x{0.00} times"),
            (_("tokens a pass, E"), "@e{0.00}"),
            (_("passes it costs"), "@cost{0.00}"),
        ]
        plot.add_tools(HoverTool(renderers=[dots], tooltips=tips, attachment="horizontal"))
        measured = [("", "@name"), (_("measured"), "@x{0.00} times"), (_("requests"), "@n")]
        plot.add_tools(HoverTool(renderers=[marks], tooltips=measured, attachment="horizontal"))
        _whole(plot.xaxis[0])

    def show(self, costs: Costs | None, pairs: Sequence[Paired]) -> None:
        ks = list(range(MAX_K + 1)) if costs is not None and costs.ready else []
        curve: dict[str, list[Any]] = {"k": ks, "x": [], "e": [], "cost": []}
        if costs is not None and ks:
            curve = {
                "k": ks, "x": [costs.speedup(k) for k in ks], "e": [costs.expected(k) for k in ks], "cost": [costs.cost(k) for k in ks],
            }  # fmt: skip
        mine = [p for p in pairs if costs is not None and p.fits(costs)]
        at = [p.setting.k if isinstance(p.setting.k, int) else (costs.k if costs is not None else 0) for p in mine]
        if mine:  # K = 0 is what it is compared with
            at, names = [0, *at], [_("plain decoding"), *(p.name for p in mine)]
            self.points.data = {
                "k": at,
                "x": [1.0, *(p.speedup for p in mine)],
                "name": names,
                "n": [mine[-1].num_requests, *(p.num_requests for p in mine)],
            }
        else:
            self.points.data = {"k": [], "x": [], "name": [], "n": []}
        self.curve.data = curve
        highest = max([1.2, *curve["x"], *(p.speedup for p in mine)])
        _fit(self.root.y_range, 0, 1.12 * highest)
        k = costs.k if costs is not None else 0
        if (self.today.location, self.today.visible) != (k, costs is not None):
            self.today.update(location=k, visible=costs is not None)


def _fit(span: Range1d, start: float, end: float) -> None:
    if (span.start, span.end) != (start, end):
        span.update(start=start, end=end)


def _whole(axis: Any) -> None:
    axis.ticker = FixedTicker(ticks=list(range(17)))
