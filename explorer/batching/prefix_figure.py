"""The figures of the prefix cache: the tree as an icicle over tokens, and the gain over the share that was found. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d

from explorer.batching.prefix_rows import TREE, Group, gain
from explorer.batching.whatif_figure import fit
from explorer.i18n import _
from explorer.kv_cache.figure import Line
from explorer.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, figure

GAIN_LINES = (
    Line("none", _("the prompt alone, D = 0: 1 / (1 − h)"), GREY, "dotted"),
    Line("short", _("answers a quarter as long"), GREEN, "dashdot"),
    Line("formula", _("(P + D) / ((1 − h) P + D)"), BLUE),
    Line("long", _("answers four times as long"), PURPLE, "dashed"),
    Line("measured", _("measured, each request alone"), VERMILLION, marker="square"),
)
_ROW = 22  # pixels
_LETTERS = 14  # pixels that a row needs for its text
_TIMES = {"none": 0.0, "short": 0.25, "formula": 1.0, "long": 4.0}  # how often D
MOST = 12.0  # of the gain's axis


@dataclass
class TreeFigure:
    """What is cached, tokens from left to right; the darker, the more often it was used."""

    plot: Any = None
    sources: dict[str, ColumnDataSource] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plot = self.plot = figure(
            140,
            x_axis_label=_("tokens from the beginning of a prompt"),
            x_range=Range1d(start=0, end=64),
            y_range=Range1d(start=4, end=0),
        )
        looks = {"held": (ORANGE, " "), "cached": (BLUE, " "), "lost": (GREY, "/")}
        bars = []
        for name, (colour, hatch) in looks.items():
            source = self.sources[name] = ColumnDataSource({n: [] for n in TREE})
            more = {} if hatch == " " else {"hatch_pattern": hatch, "hatch_color": GREY, "hatch_alpha": 0.8, "hatch_scale": 8}
            bars.append(
                plot.quad(left="left", right="right", top="top", bottom="bottom", source=source, fill_color=colour, fill_alpha="alpha",
                          line_color=colour, line_alpha=0.9, **more)
            )  # fmt: skip
            plot.text(
                "left", "top", text="label", source=source, x_offset=4, y_offset=15, text_font_size="11px", text_color="ink"
            )
        tips = [
            ("", "@text"), (_("tokens"), "@tokens{0,0} from @depth{0,0} on"), (_("used"), "@hits{0,0} times"), (_("blocks end in it"), "@blocks"),
            (_("held"), "@held blocks by @holders"), ("", "@state"),
        ]  # fmt: skip
        plot.add_tools(HoverTool(renderers=bars, tooltips=tips, attachment="vertical"))
        plot.yaxis.visible = False
        plot.ygrid.visible = False

    def show(self, columns: dict[str, list[Any]], reachable: Sequence[bool]) -> None:
        """``columns``: as ``tree_columns`` gives them; ``reachable``: of each row."""
        lines = max(2, math.ceil(max(columns["bottom"], default=2.0)))
        height = min(620, 62 + _ROW * lines)
        least = _LETTERS * lines / (height - 62)  # lower ones have no text: it would lie over the next one's
        tall = [bottom - top >= least for top, bottom in zip(columns["top"], columns["bottom"])]
        columns = {**columns, "label": [label if room else "" for label, room in zip(columns["label"], tall)]}
        kinds = ["lost" if not ok else "held" if held else "cached" for ok, held in zip(reachable, columns["held"])]
        for name, source in self.sources.items():
            rows = [i for i, kind in enumerate(kinds) if kind == name]
            source.data = {column: [values[i] for i in rows] for column, values in columns.items()}
        if self.plot.height != height:
            self.plot.height = height
        fit(self.plot.y_range, lines, 0)
        fit(self.plot.x_range, 0, 1.02 * max(columns["right"], default=64))


@dataclass
class GainFigure:
    plot: Any = None
    curves: dict[str, ColumnDataSource] = field(default_factory=dict)
    points: ColumnDataSource = field(
        default_factory=lambda: ColumnDataSource(
            {name: [] for name in ("share", "gain", "formula", "total", "prefill", "decode", "name")}
        )
    )

    def __post_init__(self) -> None:
        plot = self.plot = figure(
            270, x_axis_label=_("h, share of the prompt that is found"), y_axis_label=_("times faster"), x_range=Range1d(start=-0.02, end=1.02),
            y_range=Range1d(start=0.8, end=3),
        )  # fmt: skip
        for line in GAIN_LINES[:-1]:
            source = self.curves[line.name] = ColumnDataSource({"share": [], "gain": []})
            plot.line(
                "share",
                "gain",
                source=source,
                line_color=line.colour,
                line_dash=line.dash,
                line_width=2 if line.name != "formula" else 2.5,
            )
        marks = plot.scatter(
            "share", "gain", source=self.points, marker="square", size=10, fill_color=VERMILLION, line_color="white"
        )
        tips = [
            (_("request"), "@name"), (_("found"), "@share{0.0 %}"), (_("measured"), "@gain{0.00} times faster"), (_("formula"), "@formula{0.00} times"),
            (_("it took"), "@total{0,0} ms = @prefill{0,0} + @decode{0,0}"),
        ]  # fmt: skip
        plot.add_tools(HoverTool(renderers=[marks], tooltips=tips, attachment="horizontal"))
        plot.xaxis.formatter = NumeralTickFormatter(format="0 %")

    def show(self, prefill_s: float, decode_s: float, group: Group | None) -> None:
        shares = np.linspace(0, 1, 81)
        tops = [1.5]
        for name, source in self.curves.items():
            values = [gain(prefill_s, _TIMES[name] * decode_s, float(h)) for h in shares]
            kept = [(float(h), v) for h, v in zip(shares, values) if v <= 2 * MOST]
            source.data = {"share": [h for h, _v in kept], "gain": [v for _h, v in kept]}
            if name in ("formula", "short"):
                tops.append(kept[-1][1])
        rows = [*group.cold, *group.warm] if group is not None else []
        gained = [group.gained(s) for s in rows] if group is not None else []
        self.points.data = {
            "share": [s.share for s in rows], "gain": gained, "formula": [gain(prefill_s, decode_s, s.share) for s in rows],
            "total": [1e3 * s.total_s for s in rows], "prefill": [1e3 * s.prefill_s for s in rows], "decode": [1e3 * s.decode_s for s in rows],
            "name": [s.name for s in rows],
        }  # fmt: skip
        fit(self.plot.y_range, 0.7, min(MOST, 1.12 * max([*tops, *gained])))
