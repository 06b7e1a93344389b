"""The figures of the stall: the readers' ITL against the prompt's TTFT over budgets, and the tokens of one reader in time. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d
from bokeh.models.annotations import LabelSet, Span

from explorer.batching.stall_rows import BEFORE_S, Modelled, Stall
from explorer.batching.whatif_figure import fit
from explorer.i18n import _
from explorer.kv_cache.figure import Line
from explorer.theme import BLUE, GREY, ORANGE, VERMILLION, figure

TRADE_LINES = (
    Line("modelled", _("modelled, by token budget"), BLUE, marker="circle"),
    Line("measured", _("measured here"), VERMILLION, marker="square"),
    Line("usual", _("usual ITL, nobody's prompt among them"), GREY, "dotted"),
)
STRIP_LINES = (
    Line("tokens", _("a token of one reader"), BLUE, marker="circle"),
    Line("gap", _("its longest wait"), VERMILLION),
    Line("first", _("first token of the long prompt"), ORANGE, marker="square"),
)
_POINT = ("x", "y", "label", "max", "prompt", "readers", "usual", "dx", "align")


@dataclass
class TradeFigure:
    """p99 of the readers' ITL over the prompt's TTFT, both in ms."""

    plot: Any = None
    curve: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({name: [] for name in _POINT}))
    points: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({name: [] for name in _POINT}))
    usual: Any = None

    def __post_init__(self) -> None:
        plot = self.plot = figure(
            290, x_axis_label=_("TTFT of the long prompt, ms"), y_axis_label=_("p99 ITL of the readers, ms"),
            x_range=Range1d(start=0, end=1), y_range=Range1d(start=0, end=1),
        )  # fmt: skip
        self.usual = Span(location=0, dimension="width", line_color=GREY, line_dash="dotted", line_width=1.5, visible=False)
        plot.add_layout(self.usual)
        plot.line("x", "y", source=self.curve, line_color=BLUE, line_dash="dashed", line_width=2)
        dots = plot.scatter("x", "y", source=self.curve, size=9, fill_color=BLUE, line_color="white")
        marks = plot.scatter("x", "y", source=self.points, marker="square", size=11, fill_color=VERMILLION, line_color="white")
        for source, offset in ((self.curve, 6), (self.points, -16)):
            plot.add_layout(
                LabelSet(x="x", y="y", text="label", x_offset="dx", y_offset=offset, text_align="align", source=source,
                         text_font_size="11px", text_color="#8a8f98")
            )  # fmt: skip
        for name, renderer in ((_("modelled"), dots), (_("measured"), marks)):
            tips = [
                ("", name), (_("token budget"), "@label"), (_("TTFT"), "@x{0,0.0} ms"), (_("p99 ITL"), "@y{0,0.0} ms"), (_("longest"), "@max{0,0.0} ms"),
                (_("usual ITL"), "@usual{0,0.0} ms"), (_("prompt"), "@prompt{0,0} tokens"), (_("readers"), "@readers"),
            ]  # fmt: skip
            plot.add_tools(HoverTool(renderers=[renderer], tooltips=tips, attachment="horizontal"))

    def show(self, curve: Sequence[Modelled], measured: Sequence[Stall]) -> None:
        """``curve``: from the smallest budget on; it is drawn by TTFT."""
        self.curve.data, self.points.data = _columns(curve), _columns(measured)
        every = [*curve, *measured]
        fit(self.plot.x_range, 0, 1.12e3 * max((s.ttft_s for s in every), default=1e-3))
        fit(self.plot.y_range, 0, 1.15e3 * max((s.itl_p99_s for s in every), default=1e-3))
        usual = 1e3 * curve[0].usual_s if curve else 0.0
        if (self.usual.location, self.usual.visible) != (usual, bool(curve)):
            self.usual.update(location=usual, visible=bool(curve))


def _columns(stalls: Sequence[Stall]) -> dict[str, list[Any]]:
    right = 0.75 * max((s.ttft_s for s in stalls), default=0.0)
    return {
        "x": [1e3 * s.ttft_s for s in stalls], "y": [1e3 * s.itl_p99_s for s in stalls], "label": [s.label for s in stalls],
        "max": [1e3 * s.itl_max_s for s in stalls], "prompt": [s.prompt_tokens for s in stalls], "readers": [s.readers for s in stalls],
        "usual": [1e3 * s.usual_s if s.usual_s == s.usual_s else None for s in stalls],
        "dx": [-9 if s.ttft_s > right else 9 for s in stalls], "align": ["right" if s.ttft_s > right else "left" for s in stalls],
    }  # fmt: skip


@dataclass
class StripFigure:
    """A row a budget: when one reader got its tokens, and when the long prompt got its first."""

    plot: Any = None
    tokens: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"x": [], "y": [], "gap": [], "label": []}))
    gaps: ColumnDataSource = field(
        default_factory=lambda: ColumnDataSource({"left": [], "right": [], "y": [], "ms": [], "label": []})
    )
    firsts: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"x": [], "y": [], "label": []}))

    def __post_init__(self) -> None:
        plot = self.plot = figure(
            200, x_axis_label=_("ms since the long prompt came"), y_axis_label=_("token budget"), x_range=Range1d(start=-1, end=1),
            y_range=Range1d(start=0, end=1),
        )  # fmt: skip
        plot.add_layout(Span(location=0, dimension="height", line_color=GREY, line_dash="dotted", line_width=1.5))
        waits = plot.segment("left", "y", "right", "y", source=self.gaps, line_color=VERMILLION, line_width=4, line_alpha=0.75)
        ticks = plot.scatter("x", "y", source=self.tokens, size=6, fill_color=BLUE, line_color=None)
        first = plot.scatter("x", "y", source=self.firsts, marker="square", size=10, fill_color=ORANGE, line_color="white")
        for renderer, tips in (
            (ticks, [(_("budget"), "@label"), (_("token at"), "@x{0,0.0} ms"), (_("since its last"), "@gap{0,0.0} ms")]),
            (waits, [(_("budget"), "@label"), (_("longest wait"), "@ms{0,0.0} ms")]),
            (first, [(_("budget"), "@label"), (_("first token of the prompt"), "@x{0,0.0} ms")]),
        ):
            plot.add_tools(HoverTool(renderers=[renderer], tooltips=tips, attachment="vertical"))
        plot.ygrid.visible = False

    def show(self, curve: Sequence[Modelled]) -> None:
        names = {len(curve) - 1 - i: s.label for i, s in enumerate(curve)}  # the smallest budget on top
        tokens: dict[str, list[Any]] = {"x": [], "y": [], "gap": [], "label": []}
        gaps: dict[str, list[Any]] = {"left": [], "right": [], "y": [], "ms": [], "label": []}
        for i, s in enumerate(curve):
            y, times = len(curve) - 1 - i, [1e3 * t for t in s.tokens_s]
            tokens["x"] += times
            tokens["y"] += [y] * len(times)
            tokens["gap"] += [None, *(b - a for a, b in pairwise(times))][: len(times)]
            tokens["label"] += [s.label] * len(times)
            if len(times) > 1:
                width, left, right = max((b - a, a, b) for a, b in pairwise(times))
                for name, value in zip(gaps, (left, right, y, width, s.label)):
                    gaps[name].append(value)
        self.tokens.data, self.gaps.data = tokens, gaps
        self.firsts.data = {
            "x": [1e3 * s.ttft_s for s in curve],
            "y": [len(curve) - 1 - i for i in range(len(curve))],
            "label": [s.label for s in curve],
        }
        height = 70 + 24 * max(2, len(curve))
        if self.plot.height != height:
            self.plot.height = height
        self.plot.yaxis[0].update(ticker=FixedTicker(ticks=list(names)), major_label_overrides=names)
        fit(self.plot.y_range, -0.7, max(1, len(curve)) - 0.3)
        fit(self.plot.x_range, -1e3 * BEFORE_S / 2, 1.04e3 * max((s.ttft_s for s in curve), default=1.0))
