"""The roofline: measured steps and modelled points under measured and modelled roofs, both axes logarithmic. Pure."""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Range1d

from explorer.i18n import _, ngettext
from explorer.kv_cache.figure import Line
from explorer.roofline.rows import PHASES, Step, judge
from explorer.roofline.whatif import Point, WhatIf
from explorer.theme import BLUE, GREEN, GREY, ORANGE, PURPLE, VERMILLION, figure, number

# phase -> (colour, marker): shape and colour both tell it
LOOKS = {"prefill": (ORANGE, "square"), "decode": (BLUE, "circle"), "mixed": (GREY, "diamond")}
NARROWEST = 3.0  # decades that an axis spans at least
STEP_COLUMNS = ("x", "y", "step", "what", "work", "moved", "took", "reached", "bound", "share")
POINT_COLUMNS = ("x", "y", "name", "roofs", "work", "moved", "took", "reached", "bound")
ROOF_COLUMNS = ("x", "y", "name", "at")
_PREFIXES = {0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}

DEVICE_LOOK = (GREEN, "solid")
GPU_LOOK = (PURPLE, "dashed")


def legend_lines(device: str, gpu: str, sweep: bool) -> list[Line]:
    lines = [Line("", _("{phase} step, measured").format(phase=PHASES[p]), c, marker=m) for p, (c, m) in LOOKS.items()]
    if device:
        lines.append(Line("", _("roofs of this device, measured"), GREEN))
    if gpu:
        lines.append(Line("", _("roofs of {gpu}, modelled").format(gpu=gpu), PURPLE, "dashed"))
    if sweep:
        lines.append(Line("", _("decode at other batch sizes, modelled"), BLUE, "dotted"))
    return lines


def legend_html(lines: Sequence[Line]) -> str:
    """Line samples and markers, also the diamond, and the hollow signs of what is modelled."""
    drawn = {
        "circle": '<circle cx="14" cy="6" r="4.5"', "square": '<rect x="10" y="2" width="8" height="8"',
        "diamond": '<path d="M14 1l5 5-5 5-5-5z"',
    }  # fmt: skip
    dashes = {"solid": "", "dashed": "6 4", "dotted": "2 3"}
    parts = []
    for line in lines:
        sample = (
            f'{drawn[line.marker]} fill="{line.colour}"/>'
            if line.marker
            else f'<path d="M1 6H27" stroke="{line.colour}" stroke-width="2.5" stroke-dasharray="{dashes[line.dash]}"/>'
        )
        parts.append(f'<span><svg width="28" height="12" aria-hidden="true">{sample}</svg>{html.escape(line.label)}</span>')
    return f'<div class="kv-legend">{"".join(parts)}</div>'


# ------------------------------------------------------------------------------------------------------- rows of the sources


def times(value: float) -> str:
    """ "6.4 times"; "1.04 times"."""
    return _("{n} times").format(n="∞" if math.isinf(value) else f"{value:.1f}" if value >= 2 else f"{value:.2f}")


def bound_words(by: str, by_times: float) -> str:
    """What binds and by how much. Plain text."""
    if by == "memory":
        return _("memory: moving the bytes takes {n} as long as the arithmetic").format(n=times(by_times))
    return _("arithmetic: it takes {n} as long as moving the bytes").format(n=times(by_times))


def step_row(s: Step, roofs: Any, dtype: str) -> tuple[Any, ...]:
    """A step's values of ``STEP_COLUMNS``. ``roofs``: None where they are not known; then nothing is said of what binds."""
    bound, share = _("measure the roofs to see"), "–"
    if roofs is not None:
        found = judge(s, roofs, dtype)
        bound, share = bound_words(found.bound.by, found.bound.times), f"{100 * found.share:.0f} %"
    tokens = ngettext("{n} token", "{n} tokens", s.tokens).format(n=s.tokens)
    requests = ngettext("{n} request", "{n} requests", s.requests).format(n=s.requests)
    what = _("{phase}: {tokens} of {requests}").format(phase=PHASES[s.phase], tokens=tokens, requests=requests)
    return (
        s.intensity, s.rate, s.step, what, number(s.flops, "FLOP"), number(s.bytes, "B"), number(1e3 * s.seconds, "ms"),
        number(s.rate, "FLOP/s"), bound, share,
    )  # fmt: skip


def step_columns(steps: Sequence[Step], roofs: Any, dtype: str) -> dict[str, list[Any]]:
    """One row a step."""
    return _columns(STEP_COLUMNS, [step_row(s, roofs, dtype) for s in steps])


def point_columns(points: Iterable[tuple[Point, str]]) -> dict[str, list[Any]]:
    """One row a modelled point; with each the name of its roofs."""
    rows = []
    for p, roofs in points:
        name = (
            _("decode, batch {b}, context {t:,}").format(b=p.batch, t=p.context)
            if p.kind == "decode"
            else _("prefill of {t:,} tokens").format(t=p.context)
        )
        rows.append((
            p.intensity, p.rate, name, roofs, number(p.flops, "FLOP"), number(p.bytes, "B"), number(1e3 * p.bound.seconds, "ms"),
            number(p.rate, "FLOP/s"), bound_words(p.bound.by, p.bound.times),
        ))  # fmt: skip
    return _columns(POINT_COLUMNS, rows)


def rate_name(roofs: Any, dtype: str) -> str:
    """The rate that counts for ``dtype``: GPUs multiply float32 as TF32."""
    return dtype if dtype in roofs.peak else {"bfloat16": "bf16", "float16": "fp16", "float32": "tf32"}.get(dtype, dtype)


def roof_columns(roofs: Any, dtype: str, low: float, high: float) -> dict[str, list[Any]]:
    """The two straight lines from ``low`` to ``high`` operations a byte, and the ridge between. Empty where they are not known."""
    if roofs is None:
        return _columns(ROOF_COLUMNS, [])
    peak, bandwidth = roofs.peak_of(dtype), roofs.bandwidth
    ridge = peak / bandwidth
    text = _("{bandwidth} and {peak} in {dtype}, ridge at {ridge} FLOP/B").format(
        bandwidth=number(bandwidth, "B/s"), peak=number(peak, "FLOP/s"), dtype=rate_name(roofs, dtype), ridge=number(ridge)
    )
    xs = [low, *([ridge] if low < ridge < high else []), high]
    return _columns(ROOF_COLUMNS, [(x, min(peak, x * bandwidth), roofs.name, text) for x in xs])


def _columns(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def _source(names: Sequence[str]) -> ColumnDataSource:
    return ColumnDataSource(_columns(names, []))


def _put(source: ColumnDataSource, data: dict[str, list[Any]]) -> None:
    """Nothing is sent where nothing changed."""
    if dict(source.data) != data:
        source.data = data


def span(values: Iterable[float], least: float = NARROWEST) -> tuple[float, float]:
    """Ends of a logarithmic axis with all of ``values`` inside, some room around them, and at least so many decades."""
    logs = [math.log10(v) for v in values if v > 0 and math.isfinite(v)]
    low, high = (min(logs) - 0.25, max(logs) + 0.25) if logs else (-0.5, 2.5)
    if high - low < least:
        low, high = low - (least - (high - low)) / 2, high + (least - (high - low)) / 2
    return 10**low, 10**high


def steady(now: Any, needed: tuple[float, float]) -> tuple[float, float]:
    """Ends of an axis: those of ``now``, (start, end), while what is ``needed`` fits without more than a decade of it left empty, so that it
    stands still when a value moves."""
    empty = math.log10(now[1] / now[0]) - math.log10(needed[1] / needed[0])
    inside = now[0] <= needed[0] * 1.5 and now[1] * 1.5 >= needed[1]  # of the room around
    return (now[0], now[1]) if inside and empty <= 1.0 else needed


# -------------------------------------------------------------------------------------------------------------- the figure


@dataclass
class RooflineFigure:
    """``show`` draws; ``nearest`` tells which step was tapped."""

    root: Any = None
    steps: dict[str, ColumnDataSource] = field(default_factory=lambda: {phase: _source(STEP_COLUMNS) for phase in LOOKS})
    here: ColumnDataSource = field(default_factory=lambda: _source(("x", "y")))
    device: ColumnDataSource = field(default_factory=lambda: _source(ROOF_COLUMNS))
    gpu: ColumnDataSource = field(default_factory=lambda: _source(ROOF_COLUMNS))
    modelled: dict[str, ColumnDataSource] = field(
        default_factory=lambda: {kind: _source(POINT_COLUMNS) for kind in ("prefill", "decode")}
    )
    sweeps: list[ColumnDataSource] = field(default_factory=lambda: [_source(POINT_COLUMNS), _source(POINT_COLUMNS)])
    _drawn: list[Step] = field(default_factory=list)
    _rows: dict[Step, tuple[Any, ...]] = field(default_factory=dict)  # of the steps that are drawn
    _under: Any = None  # roofs and dtype that the rows were judged by

    def __post_init__(self) -> None:
        plot = self.root = figure(
            400, x_axis_type="log", y_axis_type="log", x_axis_label=_("operations a byte (log)"),
            y_axis_label=_("operations a second (log)"), x_range=Range1d(start=0.3, end=300), y_range=Range1d(start=1e8, end=1e12),
        )  # fmt: skip
        roofs = []
        for source, (colour, dash) in ((self.device, DEVICE_LOOK), (self.gpu, GPU_LOOK)):
            plot.line("x", "y", source=source, line_color=colour, line_dash=dash, line_width=2.5)
            roofs.append(plot.scatter("x", "y", source=source, marker="x", size=8, line_color=colour, line_width=2))
        # What moves with a knob lies in a layer of its own: the browser need not draw some hundred steps again for it.
        for source in self.sweeps:
            plot.line("x", "y", source=source, line_color=BLUE, line_dash="dotted", line_width=1.5, level="overlay")
        small = [plot.scatter("x", "y", source=s, size=4, fill_color=None, line_color=BLUE, level="overlay") for s in self.sweeps]
        marks = []
        for phase, source in self.steps.items():
            colour, marker = LOOKS[phase]
            marks.append(plot.scatter("x", "y", source=source, marker=marker, size=10 if phase == "mixed" else 8, fill_color=colour, fill_alpha=0.55,
                                      line_color="white", line_width=0.5))  # fmt: skip
        hollow = []
        for kind, source in self.modelled.items():
            colour, marker = LOOKS[kind]
            hollow.append(
                plot.scatter(
                    "x",
                    "y",
                    source=source,
                    marker=marker,
                    size=15,
                    fill_color=None,
                    line_color=colour,
                    line_width=2.5,
                    level="overlay",
                )
            )
        plot.scatter("x", "y", source=self.here, size=20, fill_color=None, line_color=VERMILLION, line_width=2.5, level="overlay")
        self._hovers(plot, marks, [*hollow, *small], roofs)
        for axis in (plot.xaxis[0], plot.yaxis[0]):
            axis.ticker = FixedTicker(ticks=[])
        plot.ygrid.grid_line_alpha = 0.5

    @staticmethod
    def _hovers(plot: Any, marks: list[Any], modelled: list[Any], roofs: list[Any]) -> None:
        work = [(_("arithmetic"), "@work"), (_("bytes"), "@moved"), (_("intensity"), "@x{0.00} FLOP/B")]
        measured = [
            (_("step"), "@step"), ("", "@what"), *work, (_("took"), "@took"), (_("reached"), "@reached"), (_("bound by"), "@bound"),
            (_("of what the roofs allow"), "@share"),
        ]  # fmt: skip
        would = [
            ("", "@name"), (_("on"), "@roofs"), *work, (_("at the least"), "@took"), (_("at the most"), "@reached"), (_("bound by"), "@bound"),
        ]  # fmt: skip
        for renderers, tips in ((marks, measured), (modelled, would), (roofs, [("", "@name"), ("", "@at")])):
            plot.add_tools(HoverTool(renderers=renderers, tooltips=tips, attachment="horizontal"))

    def show(
        self, steps: Sequence[Step], shown: int, dtype: str, device: Any, gpu: Any, gpu_dtype: str, what_ifs: Sequence[WhatIf]
    ) -> None:
        """``device``, ``gpu``: roofs or None, in the dtypes that count for each; ``shown``: the step that gets a ring."""
        self._show_steps(list(steps), device, dtype)
        here = [s for s in steps if s.step == shown]
        _put(self.here, {"x": [s.intensity for s in here], "y": [s.rate for s in here]})
        for kind, source in self.modelled.items():
            _put(source, point_columns((getattr(w, kind), w.roofs.name) for w in what_ifs))
        for i, source in enumerate(self.sweeps):
            _put(source, point_columns((p, w.roofs.name) for w in what_ifs[i : i + 1] for p in w.sweep))
        points = [p for w in what_ifs for p in (w.prefill, w.decode, *w.sweep)]
        roofs = [(r, d) for r, d in ((device, dtype), (gpu, gpu_dtype)) if r is not None]
        xs = [s.intensity for s in steps] + [p.intensity for p in points] + [r.peak_of(d) / r.bandwidth for r, d in roofs]
        low, high = steady((self.root.x_range.start, self.root.x_range.end), span(xs))
        _put(self.device, roof_columns(device, dtype, low, high))
        _put(self.gpu, roof_columns(gpu, gpu_dtype, low, high))
        lowest = [min(r.peak_of(d), low * r.bandwidth) for r, d in roofs]
        ys = [s.rate for s in steps] + [p.rate for p in points] + [r.peak_of(d) for r, d in roofs] + lowest
        bottom, top = steady((self.root.y_range.start, self.root.y_range.end), span(ys))
        self._fit(self.root.x_range, self.root.xaxis[0], low, high)
        self._fit(self.root.y_range, self.root.yaxis[0], bottom, top)

    def _show_steps(self, steps: list[Step], device: Any, dtype: str) -> None:
        """Nothing is made anew where only a what-if knob moved, and of a run that goes on only the new steps are."""
        if (device, dtype) != self._under:
            self._under, self._rows = (device, dtype), {}
        elif steps == self._drawn:
            return
        self._drawn = steps
        self._rows = {s: self._rows.get(s) or step_row(s, device, dtype) for s in steps}
        for phase, source in self.steps.items():
            _put(source, _columns(STEP_COLUMNS, [row for s, row in self._rows.items() if s.phase == phase]))

    @staticmethod
    def _fit(axis_range: Range1d, axis: Any, start: float, end: float) -> None:
        if (axis_range.start, axis_range.end) != (start, end):
            axis_range.update(start=start, end=end)
        exponents = range(math.ceil(math.log10(start)), math.floor(math.log10(end)) + 1)
        ticks = [float(10.0**e) for e in exponents]
        if axis.ticker.ticks != ticks:
            axis.ticker.ticks = ticks
            axis.major_label_overrides = {10.0**e: power(e) for e in exponents}

    def nearest(self, x: float | None, y: float | None) -> int | None:
        """The step of the point nearest to where somebody tapped, within a fifteenth of the picture; None where there is none."""
        best, found = 1 / 15, None
        width = math.log(self.root.x_range.end / self.root.x_range.start)
        height = math.log(self.root.y_range.end / self.root.y_range.start)
        if x is None or y is None or not (x > 0 and y > 0):
            return None  # outside of the frame
        for s in self._drawn:
            away = math.hypot(math.log(s.intensity / x) / width, math.log(s.rate / y) / height)
            if away <= best:
                best, found = away, s.step
        return found


def power(exponent: int) -> str:
    """ "100 G" for 11, "0.1" for -1."""
    if exponent < 0:
        return f"{10.0**exponent:g}"
    base = min(exponent - exponent % 3, max(_PREFIXES))
    return f"{10 ** (exponent - base)} {_PREFIXES[base]}".strip()
