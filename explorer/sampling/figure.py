"""The plots over positions: how the nucleus breathes, what a fixed top-k holds, entropy, and the rank that was drawn. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bokeh.layouts import column
from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span

from explorer.i18n import _
from explorer.kv_cache.figure import Line, legend_html
from explorer.sampling.rows import Point, mass_of, nucleus_of
from explorer.theme import BLUE, GREEN, ORANGE, PURPLE, VERMILLION, figure

WINDOW = 240  # positions on the screen
COLUMNS = (
    "position", "text", "step", "nucleus", "beyond", "size", "mass", "entropy", "rank", "prob", "kept", "source",
)  # fmt: skip
__all__ = ["COLUMNS", "LINES", "PositionsFigure", "legend_html", "point_columns", "positions_figure"]


def lines(p: float, k: int) -> tuple[Line, ...]:
    """What the legend says."""
    return (
        Line("nucleus", _("tokens that hold {p:g} of the raw mass: the nucleus").format(p=p), BLUE),
        Line("beyond", _("more than were recorded"), BLUE, marker="square"),
        Line("k", _("a fixed top-k of {k}").format(k=k), VERMILLION, "dashed", 1.5),
        Line("mass", _("mass that top-k {k} holds").format(k=k), ORANGE),
        Line("entropy", _("entropy"), GREEN),
        Line("rank", _("rank of the chosen token"), PURPLE, marker="circle"),
    )


LINES = lines(0.9, 10)


def point_columns(points: Sequence[Point], p: float, k: int) -> dict[str, list[Any]]:
    """One row a token. ``nucleus``: NaN where it is larger than what is known; ``beyond`` is then how much that is."""
    data: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for point in points:
        size, known = nucleus_of(point.head, p), len(point.head)
        mass = mass_of(point.head, k)
        row = (
            point.position, point.text, point.step, math.nan if size is None else size, math.nan if size is not None or not known else known,
            _("more than {n}").format(n=known) if size is None else str(size), math.nan if mass is None else mass, point.entropy,
            point.rank or math.nan, math.exp(point.logprob), point.nucleus_size or 1,
            _("from all logits") if point.whole else _("from {n} candidates").format(n=known),
        )  # fmt: skip
        for name, value in zip(COLUMNS, row, strict=True):
            data[name].append(value)
    return data


@dataclass
class PositionsFigure:
    source: ColumnDataSource
    root: Any
    x_range: Range1d
    top_k: Span
    top_p: Span
    here: list[Span] = field(default_factory=list)
    plots: list[Any] = field(default_factory=list)
    highest: list[float] = field(default_factory=lambda: [10.0, 10.0])  # nucleus and rank

    def show(self, points: Sequence[Point], p: float, k: int) -> None:
        """Draw these points, all of them."""
        self.highest = [10.0, 10.0]
        self.source.data = self._fit(point_columns(points, p, k), k)
        if (self.top_k.location, self.top_p.location) != (k, p):
            self.top_k.location, self.top_p.location = k, p

    def add(self, points: Sequence[Point], p: float, k: int) -> None:
        """Draw these as well."""
        self.source.stream(self._fit(point_columns(points, p, k), k))

    def _fit(self, data: dict[str, list[Any]], k: int) -> dict[str, Any]:
        """Make room for the values of the two logarithmic axes."""
        seen = ([*data["nucleus"], *data["beyond"], k], data["rank"])
        for i, (values, plot) in enumerate(zip(seen, (self.plots[0], self.plots[3]), strict=True)):
            self.highest[i] = max([self.highest[i], *(v for v in values if not math.isnan(v))])
            if plot.y_range.end != 1.6 * self.highest[i]:
                plot.y_range.end = 1.6 * self.highest[i]
        return dict(data)

    def look_at(self, first: int, last: int, position: int | None) -> None:
        """Show positions up to ``last`` (``WINDOW`` of them at most, ``position`` among them), with a line at ``position``."""
        end = last if position is None or position > last - WINDOW else position + WINDOW // 2
        start = max(first, end - WINDOW)
        wanted = (start - 0.5, max(end, start + 20) + 0.5)
        if (self.x_range.start, self.x_range.end) != wanted:
            self.x_range.update(start=wanted[0], end=wanted[1])
        for span in self.here:
            if (span.location, span.visible) != (position, position is not None):
                span.update(location=position, visible=position is not None)


def positions_figure(p: float, k: int) -> PositionsFigure:
    """Four plots over the same positions."""
    source = ColumnDataSource({name: [] for name in COLUMNS})
    x_range = Range1d(start=-0.5, end=20.5)
    tooltips = [
        (_("position"), "@position"), (_("token"), "@text"), (_("engine step"), "@step"), (_("nucleus"), "@size tokens, @source"),
        (_("mass of top-k"), "@mass{0.0000}"), (_("entropy"), "@entropy{0.000} nat"), (_("rank"), "@rank"),
        (_("raw probability"), "@prob{0.00000}"), (_("tokens kept"), "@kept{0,0}"),
    ]  # fmt: skip
    sizes = figure(140, x_range=x_range, y_range=Range1d(start=0.7, end=20), y_axis_type="log", y_axis_label=_("tokens"))
    masses = figure(90, x_range=x_range, y_range=Range1d(start=0, end=1.04), y_axis_label=_("mass"))
    nats = figure(90, x_range=x_range, y_axis_label=_("nat"))
    ranks = figure(
        130,
        x_range=x_range,
        y_range=Range1d(start=0.7, end=20),
        y_axis_type="log",
        y_axis_label=_("rank"),
        x_axis_label=_("position in the sequence"),
    )
    sizes.step("position", "nucleus", source=source, mode="center", line_color=BLUE, line_width=2.5)
    sizes.scatter("position", "beyond", source=source, marker="square", size=6, fill_color=BLUE, line_color=None)
    masses.step("position", "mass", source=source, mode="center", line_color=ORANGE, line_width=2.5)
    nats.step("position", "entropy", source=source, mode="center", line_color=GREEN, line_width=2.5)
    ranks.scatter("position", "rank", source=source, size=6, fill_color=PURPLE, line_color=None)
    nats.y_range.start = 0
    top_k = Span(location=k, dimension="width", line_color=VERMILLION, line_width=1.5, line_dash="dashed")
    top_p = Span(location=p, dimension="width", line_color=BLUE, line_width=1, line_dash="dotted")
    sizes.add_layout(top_k)
    masses.add_layout(top_p)
    made = PositionsFigure(source, None, x_range, top_k, top_p, plots=[sizes, masses, nats, ranks])
    for plot in made.plots:
        plot.min_border_left = 58  # so that the positions stand below each other
        field_ = {id(sizes): "size_", id(masses): "mass", id(nats): "entropy", id(ranks): "rank"}[id(plot)]
        dots = plot.scatter("position", "kept" if field_ == "size_" else field_, source=source, size=4, alpha=0)
        plot.add_tools(HoverTool(tooltips=tooltips, mode="vline", renderers=[dots], attachment="horizontal"))
        span = Span(location=0, dimension="height", line_color=VERMILLION, line_width=1.5, line_dash="4 3", visible=False)
        plot.add_layout(span)
        made.here.append(span)
    for plot in (sizes, ranks):  # 1, 10, 100: not 10⁰; no code as text, which a saved page forbids
        plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
        plot.yaxis.ticker = plot.ygrid.ticker = FixedTicker(ticks=[10**i for i in range(7)])
    for plot in (sizes, masses, nats):
        plot.xaxis.visible = False
        plot.min_border_bottom = 9  # the lowest number of the axis
    made.root = column(*made.plots, sizing_mode="stretch_width", spacing=4)
    return made
