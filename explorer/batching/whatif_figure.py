"""The figures of the what-if: slots over time, as it ran and as it would run. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d

from explorer.batching.whatif_rows import GANTT
from explorer.i18n import _
from explorer.theme import BLUE, GREY, ORANGE, figure

# phase -> (colour, opacity, hatch, name): the hatch tells it too.
LOOKS = {
    "prefill": (ORANGE, 0.95, " ", _("prefill")),
    "decode": (BLUE, 0.9, " ", _("decode")),
    "padding": (GREY, 0.35, "/", _("padding: computed for nobody")),
}
_HEIGHT = {"prefill": 0.86, "decode": 0.62, "padding": 0.86}
_SWATCH = {" ": "", "/": "repeating-linear-gradient(135deg, {c} 0 2px, transparent 2px 5px)"}


def phases_legend() -> str:
    """HTML: what the bars of a Gantt are."""
    parts = []
    for phase, (colour, _alpha, hatch, name) in LOOKS.items():
        ground = _SWATCH[hatch].format(c=colour) or colour
        height = 12 if _HEIGHT[phase] > 0.7 else 8
        parts.append(
            f'<span><i aria-hidden="true" style="display:inline-block;width:22px;height:{height}px;border-radius:2px;background:{ground}"></i>{name}</span>'
        )
    idle = '<i aria-hidden="true" style="display:inline-block;width:22px;height:12px;border-bottom:1px dashed currentColor"></i>'
    return f'<div class="kv-legend">{"".join(parts)}<span>{idle}{_("idle: nothing there")}</span></div>'


@dataclass
class GanttFigure:
    """One row a slot of the batch; bars in seconds since the first arrival."""

    plot: Any = None
    sources: dict[str, ColumnDataSource] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plot = self.plot = figure(
            150,
            x_range=Range1d(start=0, end=1),
            y_range=Range1d(start=-0.6, end=3.6),
            y_axis_label=_("slot"),
            x_axis_label=_("seconds"),
        )
        bars = []
        for phase, (colour, alpha, hatch, _name) in LOOKS.items():
            source = self.sources[phase] = ColumnDataSource({name: [] for name in (*GANTT, "bottom", "top")})
            more = {} if hatch == " " else {"hatch_pattern": hatch, "hatch_color": GREY, "hatch_scale": 7, "hatch_alpha": 0.9}
            bars.append(
                plot.quad(
                    left="left", right="right", bottom="bottom", top="top", source=source, fill_color=colour, fill_alpha=alpha,
                    line_color="white", line_width=0.4, line_alpha=0.6, **more,
                )
            )  # fmt: skip
        tips = [
            (_("request"), "@name"), ("", "@phase"), (_("tokens"), "@tokens{0,0} tokens"), (_("steps"), "@steps"), (_("time"), "@ms{0,0.0} ms"),
            (_("from"), "@left{0.000} s"),
        ]  # fmt: skip
        plot.add_tools(HoverTool(renderers=bars, tooltips=tips, attachment="horizontal"))
        plot.ygrid.visible = False
        plot.min_border_left = 44

    def show(self, bars: dict[str, list[Any]], slots: int, end: float) -> None:
        """``bars``: as ``whatif_rows.gantt`` gives them; ``end``: of the axis, in seconds."""
        fit(self.plot.x_range, 0, end)
        for phase, source in self.sources.items():
            rows = [i for i, p in enumerate(bars["phase"]) if p == phase]
            columns = {name: [bars[name][i] for i in rows] for name in GANTT}
            half = _HEIGHT[phase] / 2
            source.data = {
                **columns, "bottom": [s - half for s in columns["slot"]], "top": [s + half for s in columns["slot"]],
            }  # fmt: skip
        height = min(300, max(96, 62 + 15 * slots))
        if self.plot.height != height:
            self.plot.height = height
        every = max(1, -(-slots // 12))
        self.plot.yaxis[0].ticker = FixedTicker(ticks=list(range(0, slots, every)))
        fit(self.plot.y_range, slots - 0.4, -0.6)  # slot 0 on top


def fit(span: Range1d, start: float, end: float) -> None:
    if (span.start, span.end) != (start, end):
        span.update(start=start, end=end)


def longest(*columns: Sequence[float]) -> float:
    """A common end of several Gantts."""
    return max([1e-3, *(max(c, default=0.0) for c in columns)])
