"""The figures of the trade: bits or bytes against the distance from the 16-bit logits and against perplexity. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d
from bokeh.models.annotations import LabelSet

from explorer.i18n import _
from explorer.kv_cache.figure import Line
from explorer.quantization.labels import small
from explorer.theme import BLUE, GREEN, ORANGE, PURPLE, VERMILLION, figure, number

if TYPE_CHECKING:
    from explorer.quantization.trade import Point

# KV dtype -> (marker, colour): how the cache is held is told by both; the weights by the label.
LOOKS = {"auto": ("circle", BLUE), "int8": ("square", ORANGE), "fp8": ("triangle", GREEN), "int4": ("diamond", PURPLE)}
BASE_LINE = Line("base", _("the baseline"), VERMILLION, "dashed")
_WIDTH, _HEIGHT = 400.0, 260.0  # pixels that labels are placed for: a narrow card
_LETTER, _ROW = 6.0, 13.0  # of a label, in pixels
_PLACES = (
    (9.0, -6.0, "left"),
    (-9.0, -6.0, "right"),
    (0.0, 8.0, "center"),
    (0.0, -22.0, "center"),
    (9.0, 8.0, "left"),
    (9.0, -20.0, "left"),
)
_COLUMNS = ("x", "y", "label", "dx", "dy", "align", "colour", "marker", "full", "bits", "size", "value", "index", "alpha")


def axis(values: Sequence[float]) -> tuple[bool, float, float, list[tuple[float, str]]]:
    """(logarithmic?, low, high, ticks) that shows ``values`` (finite, 0 allowed): a logarithm from a spread of 4 on.

    On a logarithmic axis zero is drawn at the low end, under the tick "0". Ticks and ends are in drawn coordinates.
    """
    positive = [v for v in values if v > 0]
    if not positive:
        return False, -0.5, 1.0, [(0.0, "0"), (1.0, "1")]
    low, high = min(positive), max(positive)
    zero = len(positive) < len(values)
    if high / low < 4 and not zero:
        low, high = low - 0.12 * (high - low or high), high + 0.15 * (high - low or high)
        step = 10 ** math.floor(math.log10(high - low))
        step *= next(m for m in (0.2, 0.5, 1, 2, 5) if (high - low) / (m * step) <= 6.5)
        first = math.ceil(low / step)
        return False, low, high, [(i * step, f"{i * step:g}") for i in range(first, math.floor(high / step) + 1)]
    span = math.log10(high) - math.log10(low)
    bottom = math.log10(low) - (0.9 if zero else 0.12 * span + 0.1)
    top = math.log10(high) + 0.08 * span + 0.15
    steps = (1, 2, 5) if top - bottom < 2.5 else (1, 3) if top - bottom < 4 else (1,)
    ticks = [
        (math.log10(m) + e, f"{m * 10.0**e:g}") for e in range(math.floor(bottom), math.ceil(top) + 1) for m in steps
        if (math.log10(low) - 0.15 if zero else bottom) <= math.log10(m) + e <= top
    ]  # fmt: skip
    return True, bottom, top, ([(math.log10(low) - 0.6, "0")] if zero else []) + ticks


def drawn(value: float, logarithmic: bool, ticks: Sequence[tuple[float, str]]) -> float:
    """Where ``value`` stands on an axis of ``axis``."""
    if not logarithmic:
        return value
    return math.log10(value) if value > 0 else ticks[0][0]


def placed(
    points: Sequence[tuple[float, float, str]], xs: tuple[float, float], ys: tuple[float, float]
) -> list[tuple[float, float, str]]:
    """For each (x, y, label) where its label stands, (dx, dy, align) in pixels: the first place that hits no label and no point."""
    at = [
        (_WIDTH * (x - xs[0]) / (xs[1] - xs[0] or 1), _HEIGHT * (y - ys[0]) / (ys[1] - ys[0] or 1), label)
        for x, y, label in points
    ]
    taken = [(x - 6, y - 6, x + 6, y + 6) for x, y, _label in at]
    found = []
    for i, (x, y, label) in enumerate(at):
        best, least = _PLACES[0], math.inf
        for place in _PLACES:
            box = _box(x, y, len(label), place)
            out = max(0.0, -box[0]) + max(0.0, box[2] - _WIDTH)
            cost = 20 * out + sum(_overlap(box, other) for j, other in enumerate(taken) if j != i)
            if cost < least - 1e-9:
                best, least = place, cost
        taken.append(_box(x, y, len(label), best))
        found.append(best)
    return found


def _box(x: float, y: float, letters: int, place: tuple[float, float, str]) -> tuple[float, float, float, float]:
    dx, dy, align = place
    width = letters * _LETTER
    left = x + dx - {"left": 0.0, "right": width, "center": width / 2}[align]
    return left, y + dy, left + width, y + dy + _ROW


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


@dataclass
class Scatter:
    """One plot; ``show`` gives it points, the values that stand on its y axis, and the baseline's."""

    y_label: str
    plot: Any = None
    source: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({name: [] for name in _COLUMNS}))
    base: ColumnDataSource = field(default_factory=lambda: ColumnDataSource({"x": [], "y": []}))

    def __post_init__(self) -> None:
        plot = self.plot = figure(
            270, y_axis_label=self.y_label, x_range=Range1d(start=0, end=1), y_range=Range1d(start=0, end=1), tools="tap"
        )
        plot.line("x", "y", source=self.base, line_color=VERMILLION, line_dash="dashed", line_width=1.5)
        marks = plot.scatter(
            "x", "y", source=self.source, marker="marker", size=11, fill_color="colour", line_color="white", fill_alpha="alpha",
            nonselection_fill_alpha=1, nonselection_line_alpha=1,
        )  # fmt: skip
        plot.add_layout(
            LabelSet(
                x="x", y="y", text="label", x_offset="dx", y_offset="dy", text_align="align", source=self.source,
                text_font_size="11px", text_color="#8a8f98",
            )
        )  # fmt: skip
        tips = [("", "@full"), (_("bits a weight"), "@bits{0.00} bits"), (_("weights"), "@size"), (self.y_label, "@value")]
        plot.add_tools(HoverTool(renderers=[marks], tooltips=tips, attachment="horizontal"))
        plot.xaxis.ticker = plot.yaxis.ticker = FixedTicker(ticks=[])
        for axes in (plot.xaxis, plot.yaxis):
            axes.ticker = FixedTicker(ticks=[])
        plot.xgrid.visible = False

    def show(self, points: "Sequence[tuple[int, Point, float]]", by_bytes: bool, base: float | None, unit: str = "") -> None:
        """``points``: (index in the list of measurements, the measurement, its value)."""
        points = [p for p in points if math.isfinite(p[2])]
        x_of = [p.linear_bytes / 2**20 if by_bytes else p.bits_per_weight for _i, p, _v in points]
        if not points:
            self.source.data = {name: [] for name in _COLUMNS}
            self.base.data = {"x": [], "y": []}
            return
        logarithmic, low, high, ticks = axis([v for _i, _p, v in points])
        ys = [drawn(v, logarithmic, ticks) for _i, _p, v in points]
        right = max(x_of) * 1.12
        _x_log, x_low, x_high, x_ticks = False, 0.0, right, _round_ticks(right)
        places = placed([(x, y, p.short) for x, y, (_i, p, _v) in zip(x_of, ys, points)], (x_low, x_high), (low, high))
        looks = [LOOKS.get(p.kv_cache_dtype, LOOKS["auto"]) for _i, p, _v in points]
        self.source.data = {
            "x": x_of, "y": ys, "label": [p.short for _i, p, _v in points],
            "dx": [place[0] for place in places], "dy": [place[1] for place in places], "align": [place[2] for place in places],
            "marker": [look[0] for look in looks], "colour": [look[1] for look in looks], "full": [p.label for _i, p, _v in points],
            "bits": [p.bits_per_weight for _i, p, _v in points], "size": [number(p.linear_bytes, "B") for _i, p, _v in points],
            "value": [small(v, unit) for _i, _p, v in points], "index": [i for i, _p, _v in points], "alpha": [0.95] * len(points),
        }  # fmt: skip
        level = math.nan if base is None or not math.isfinite(base) else drawn(base, logarithmic, ticks)
        self.base.data = {"x": [x_low, x_high], "y": [level, level]} if level == level else {"x": [], "y": []}
        self.plot.x_range.update(start=x_low, end=x_high)
        self.plot.y_range.update(start=low, end=high)
        self.plot.xaxis.axis_label = _("MiB of linear weights") if by_bytes else _("bits a weight, scales counted")
        self._ticks(self.plot.xaxis[0], x_ticks)
        self._ticks(self.plot.yaxis[0], ticks)
        self.plot.ygrid.ticker = self.plot.yaxis[0].ticker
        self.plot.yaxis[0].axis_label = self.y_label + (_(" (log)") if logarithmic else "")

    @staticmethod
    def _ticks(of_axis: Any, ticks: Sequence[tuple[float, str]]) -> None:
        of_axis.update(ticker=FixedTicker(ticks=[at for at, _text in ticks]), major_label_overrides=dict(ticks))


def _round_ticks(high: float) -> list[tuple[float, str]]:
    step = 10 ** math.floor(math.log10(high))
    step *= next(m for m in (0.1, 0.2, 0.5, 1) if high / (m * step) <= 6.5)
    return [(i * step, f"{i * step:g}") for i in range(math.floor(high / step) + 1)]
