"""The figures of the KV tab: keys and values of one layer by channel. Pure."""

from dataclasses import dataclass, field
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d
from bokeh.models.annotations import Span

from explorer.i18n import _
from explorer.kv_cache.figure import Line
from explorer.theme import BLUE, GREY, SKY, VERMILLION, figure

CHANNEL_LINES = (
    Line("largest", _("largest magnitude over the tokens"), SKY),
    Line("mean", _("mean magnitude"), BLUE),
    Line(
        "outlier", _("outlier channel: its mean is over {n} times the median channel's").format(n=3), VERMILLION, marker="circle"
    ),
    Line("heads", _("next KV head"), GREY, "dotted"),
)
_COLUMNS = ("channel", "head", "within", "largest", "mean", "times", "outlier")
_HEADS = 64  # boundaries that are drawn at most


@dataclass
class ChannelFigure:
    """Magnitude by channel, all KV heads beside each other."""

    y_label: str
    plot: Any = None
    source: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({name: [] for name in _COLUMNS}))
    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        plot = self.plot = figure(
            190, y_axis_label=self.y_label, x_range=Range1d(start=-0.5, end=1), y_range=Range1d(start=0, end=1)
        )
        bars = plot.vbar(
            "channel", top="largest", width=1.0, source=self.source, fill_color=SKY, fill_alpha=0.45, line_color=None
        )
        plot.vbar("channel", top="mean", width=0.8, source=self.source, fill_color=BLUE, line_color=None)
        plot.scatter("channel", "outlier", source=self.source, size=7, fill_color=VERMILLION, line_color="white")
        tips = [
            (_("KV head"), "@head"), (_("channel of the head"), "@within"), (_("largest"), "@largest{0.000}"), (_("mean"), "@mean{0.000}"),
            (_("mean / median channel's"), "@times{0.0}"),
        ]  # fmt: skip
        plot.add_tools(HoverTool(renderers=[bars], tooltips=tips, mode="vline", attachment="vertical"))
        plot.min_border_left = 52

    def show(self, columns: dict[str, list[Any]], heads: int, head_dim: int) -> None:
        """``columns``: as ``kv.channel_columns`` gives them."""
        self.source.data = dict(columns)
        n = max(1, heads * head_dim)
        self.plot.x_range.update(start=-1, end=n)
        self.plot.y_range.update(start=0, end=1.1 * max([*columns["largest"], 1e-9]))
        self._mark_heads(heads, head_dim)

    def _mark_heads(self, heads: int, head_dim: int) -> None:
        places = [h * head_dim - 0.5 for h in range(1, heads)][:_HEADS]
        while len(self.spans) < len(places):
            span = Span(location=0, dimension="height", line_color=GREY, line_dash="dotted", line_width=1.5)
            self.plot.add_layout(span)
            self.spans.append(span)
        for i, span in enumerate(self.spans):
            if i < len(places):
                span.update(location=places[i], visible=True)
            elif span.visible:
                span.visible = False
        centres = {(h + 0.5) * head_dim: _("head {h}").format(h=h) for h in range(heads)}
        every = max(1, -(-heads // 8))
        kept = {at: text for i, (at, text) in enumerate(centres.items()) if i % every == 0}
        self.plot.xaxis.ticker = FixedTicker(ticks=list(kept))
        self.plot.xaxis.major_label_overrides = kept
        self.plot.xaxis.major_tick_line_color = None
