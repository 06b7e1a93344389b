"""The trade: what each method tried in this session costs in bytes, and what it loses. Rows are pure; ``TradePanel`` is the tab."""

import html
import json
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.types import EngineStarted, Event, QualityMeasured, QuantizationProgress, WeightsChanged
from explorer.i18n import _
from explorer.kv_cache.figure import legend_html
from explorer.quantization.labels import CSS, kv_label, line, said, set_html, share, small, table, weights_label
from explorer.quantization.trade_figure import BASE_LINE, LOOKS, Scatter
from explorer.theme import card, empty, grid, number, pane

KEPT = 40  # measurements, the newest
PATIENCE_S = 30.0  # how long a measurement that was asked for may take to begin
_PREFIX = "measuring"  # how QuantizationProgress.doing begins while quality is measured


@dataclass(frozen=True)
class Point:
    """One measurement: weights of one kind with a KV cache of one dtype. NaN: not measured."""

    method: str
    group_size: int
    options: str  # as JSON, sorted: part of what is compared
    kv_cache_dtype: str
    bits_per_weight: float
    linear_bytes: int
    total_bytes: int
    perplexity: dict[str, float]
    perplexity_tokens: dict[str, int]
    window: int
    stride: int
    kl_mean: float
    kl_p99: float
    kl_positions: int
    top1: float
    retrieval: float
    retrieval_items: int
    arithmetic: float
    arithmetic_items: int
    tokens_per_s: float
    seconds: float

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.method, self.group_size, self.options, self.kv_cache_dtype

    @property
    def short(self) -> str:
        kv = "" if self.kv_cache_dtype == "auto" else f" + KV {kv_label(self.kv_cache_dtype)}"
        return weights_label(self.method, self.group_size) + ("*" if self.options != "{}" else "") + kv

    @property
    def label(self) -> str:
        kv = "" if self.kv_cache_dtype == "auto" else f" + KV {kv_label(self.kv_cache_dtype)}"
        return weights_label(self.method, self.group_size, json.loads(self.options)) + kv


def point_of(event: QualityMeasured) -> Point:
    return Point(
        method=event.method, group_size=event.group_size, options=json.dumps(event.options, sort_keys=True, default=str),
        kv_cache_dtype=event.kv_cache_dtype or "auto", bits_per_weight=event.bits_per_weight, linear_bytes=event.linear_bytes,
        total_bytes=event.linear_bytes + event.other_bytes, perplexity=dict(event.perplexity),
        perplexity_tokens=dict(event.perplexity_tokens), window=event.window, stride=event.stride, kl_mean=event.kl_mean,
        kl_p99=event.kl_p99, kl_positions=event.kl_positions, top1=event.top1_agreement, retrieval=event.retrieval,
        retrieval_items=event.retrieval_items, arithmetic=event.arithmetic, arithmetic_items=event.arithmetic_items,
        tokens_per_s=event.decode_tokens_per_s, seconds=event.seconds,
    )  # fmt: skip


def merged(points: Sequence[Point], new: Iterable[Point]) -> list[Point]:
    """In the order in which they were first measured; what is measured again takes the place of the old."""
    found = {point.key: point for point in points}
    for point in new:
        found[point.key] = point
    return list(found.values())[-KEPT:]


def baseline_of(points: Sequence[Point], chosen: Any = None) -> Point | None:
    """The pinned one; else the weights as loaded; else the first."""
    by_key = {point.key: point for point in points}
    if chosen in by_key:
        return by_key[chosen]
    return next((p for p in points if not p.method and p.kv_cache_dtype == "auto"), points[0] if points else None)


def texts_of(points: Sequence[Point]) -> list[str]:
    """The names of the texts, in order of first appearance."""
    return list(dict.fromkeys(name for point in points for name in point.perplexity))


def hidden_loss(points: Sequence[Point], base: Point) -> tuple[Point, float, str, float, float] | None:
    """The case that an average hides best: (point, factor of perplexity, probe, share right before, after).

    Perplexity grew by at most a tenth on every text, and a probe lost at least five points, and more than two of its items.
    """
    best = None
    for point in points:
        factors = [point.perplexity[n] / base.perplexity[n] for n in point.perplexity if base.perplexity.get(n)]
        if point.key == base.key or not factors or max(factors) > 1.1:
            continue
        for probe in ("retrieval", "arithmetic"):
            before, after, items = getattr(base, probe), getattr(point, probe), getattr(point, f"{probe}_items")
            lost = before - after
            if lost >= 0.05 and lost * items > 2 and (best is None or lost > best[3] - best[4]):
                best = (point, max(factors), probe, before, after)
    return best


def _delta(value: float, base: float, text: str, same: bool) -> str:
    if same or math.isnan(value) or math.isnan(base):
        return ""
    return f"<small>{html.escape(text)}</small>"


def _signed(value: float, unit: str = "", digits: int = 3) -> str:
    if not value:
        return "±0"
    return ("+" if value > 0 else "−") + small(abs(value), unit) if digits == 3 else f"{value:+.{digits}f} {unit}".strip()


def trade_table(points: Sequence[Point], base: Point | None, now: Any = None) -> str:
    """One row a measurement, deltas to the baseline in small print. ``now``: the key of what runs."""
    texts = texts_of(points)
    head = [
        _("weights"), _("KV cache"), _("bits a weight"), _("linear weights"), _("KL mean, nats"), _("KL 99 %, nats"), _("top-1 agrees"),
        *(_("perplexity, {text}").format(text=name) for name in texts), _("retrieval"), _("arithmetic"), _("decode, tokens/s"),
    ]  # fmt: skip
    return table(head, [_row(point, base, texts, now) for point in points])


def _row(p: Point, base: Point | None, texts: Sequence[str], now: Any) -> tuple[str, list[str]]:
    b = base if base is not None else p
    same = p.key == b.key
    perplexities = []
    for name in texts:
        mine, other = p.perplexity.get(name, math.nan), b.perplexity.get(name, math.nan)
        change = f"{100 * (mine / other - 1):+.2f} %" if other and mine == mine and other == other else ""
        perplexities.append(f"{number(mine, digits=4)}{_delta(mine, other, change, same)}")
    bytes_change = f"× {p.linear_bytes / b.linear_bytes:.3f}" if b.linear_bytes else ""
    speed = f"× {p.tokens_per_s / b.tokens_per_s:.2f}" if b.tokens_per_s else ""

    def probe(value: float, other: float, items: int) -> str:
        return f"{share(value)}{_delta(value, other, f'{100 * (value - other):+.1f} pp', same)}" if items else "–"

    cells = [
        html.escape(weights_label(p.method, p.group_size, json.loads(p.options))), html.escape(kv_label(p.kv_cache_dtype)),
        f"{p.bits_per_weight:.2f}{_delta(p.bits_per_weight, b.bits_per_weight, f'{p.bits_per_weight - b.bits_per_weight:+.2f}', same)}",
        f"{number(p.linear_bytes, 'B')}{_delta(p.linear_bytes, b.linear_bytes, bytes_change, same)}",
        f"{small(p.kl_mean)}{_delta(p.kl_mean, b.kl_mean, _signed(p.kl_mean - b.kl_mean), same)}", small(p.kl_p99),
        f"{share(p.top1)}{_delta(p.top1, b.top1, f'{100 * (p.top1 - b.top1):+.1f} pp', same)}", *perplexities,
        probe(p.retrieval, b.retrieval, p.retrieval_items), probe(p.arithmetic, b.arithmetic, p.arithmetic_items),
        f"{number(p.tokens_per_s)}{_delta(p.tokens_per_s, b.tokens_per_s, speed, same)}",
    ]  # fmt: skip
    return " ".join(["base"] * same + ["now"] * (p.key == now)), cells


def words(points: Sequence[Point], base: Point | None) -> str:
    """What the measurements say, as HTML."""
    if not points or base is None:
        return ""
    hidden = hidden_loss(points, base)
    if hidden is not None:
        point, factor, probe, before, after = hidden
        name = _("arithmetic") if probe == "arithmetic" else _("retrieval from far back")
        text = _(
            "{label}: perplexity grows by {percent} at most, and yet {probe} falls from {before} to {after}. An average hides what needs every digit, or one token far back."
        )
        return said(
            text.format(label=f"<b>{html.escape(point.label)}</b>", percent=share(max(0.0, factor - 1)), probe=name, before=share(before), after=share(after)),
            "mind",
        )  # fmt: skip
    text = _(
        "Perplexity and mean KL are averages over thousands of tokens, most of them easy. Look at KL's 99th percentile, at retrieval from far back and at arithmetic as well: there one wrong digit is a wrong answer. With few items, two or three more or fewer are chance."
    )
    return said(html.escape(text), "mind")


class TradePanel(pn.viewable.Viewer):
    """The tab in which methods are compared. ``view``: the page's view, whose store's events are given to ``take``."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.points: list[Point] = []
        self.running: WeightsChanged | None = None
        self.progress: QuantizationProgress | None = None
        self._asked_at = 0.0  # on the monotonic clock; 0: no measurement is awaited
        self._showing = False  # the baseline is being shown, not chosen
        self._changed = True
        self._base: Any = None
        live = view.session is not None
        small_ = {"size": "small", "margin": 0}
        self.measure = pmui.Button(
            label=_("Measure what runs now"), icon="straighten", color="primary", variant="contained", **small_
        )
        self.stop = pmui.Button(label=_("Cancel"), icon="close", variant="text", visible=False, **small_)
        self.measure.on_click(lambda _event: self._measure())
        self.stop.on_click(lambda _event: view.session.cancel_quantization(view.clock.owner))
        self.state = pane(css=CSS, margin=(8, 0, 0, 0))
        self.by = pmui.RadioButtonGroup(options={_("bits a weight"): "bits", _("bytes"): "bytes"}, value="bits", **small_)
        self.base = pmui.Select(label=_("Baseline"), options={_("none yet"): ""}, value="", sizing_mode="stretch_width", **small_)
        self.by.param.watch(lambda _event: self._mark(), "value")
        self.base.param.watch(self._pin, "value")
        self.divergence, self.perplexity = Scatter(_("KL to 16 bits, nats")), Scatter(_("perplexity"))
        for made in (self.divergence, self.perplexity):
            made.source.selected.on_change("indices", partial(self._tapped, made))
        self.text_name = pane(css=CSS)
        self.rows, self.words = pane(css=CSS), pane(css=CSS, margin=(12, 0, 0, 0))
        legend = "".join(
            f'<span><b style="color:{colour};font-size:15px;line-height:1">{sign}</b>{html.escape(_("KV cache in {name}").format(name=kv_label(name)))}</span>'
            for (name, (_marker, colour)), sign in zip(LOOKS.items(), "●■▲◆")
        )  # fmt: skip
        both = grid(
            pn.Column(
                pane(f'<p class="qp-what">{_("Distance of the distribution: mean over the positions")}</p>', css=CSS),
                pn.pane.Bokeh(self.divergence.plot, sizing_mode="stretch_width", margin=0), sizing_mode="stretch_width", margin=0,
            ),
            pn.Column(self.text_name, pn.pane.Bokeh(self.perplexity.plot, sizing_mode="stretch_width", margin=0),
                      sizing_mode="stretch_width", margin=0),
            min_width=300, columns="minmax(0, 1fr) minmax(0, 1fr)", gap=20,
        )  # fmt: skip
        self.drawn = pn.Column(
            grid(self.by, self.base, min_width=200, gap=14, margin=(12, 0, 8, 0)),
            pane(f'<div class="kv-legend">{legend}</div>{legend_html([BASE_LINE])}', css=CSS), both, self.rows, self.words,
            sizing_mode="stretch_width", margin=0, visible=False,
        )  # fmt: skip
        nothing = (
            _("Nothing has been measured yet. Measure the weights as loaded first: all others are compared with them. Then choose a method and measure again.")
            if live
            else _("In this recorded run nobody measured the quality of the weights.")
        )  # fmt: skip
        self.nothing = pane(empty(nothing), margin=(12, 0, 0, 0))
        what = _(
            "What a method saves against what it loses, on real text: Python's own help and a plain essay; then numbers to be found far back, and sums. All measured on the weights that ran."
        )
        buttons = (
            [pn.Row(self.measure, self.stop, margin=0, styles={"gap": "8px", "flex-wrap": "wrap"}), self.state] if live else []
        )
        self._layout = card(
            _("The trade"), *buttons, self.nothing, self.drawn, kinds=("measured", "live") if live else "measured", margin=0, hint=what,
            acts=_("A click on a point pins it as the baseline."),
        )  # fmt: skip

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what comes in -----------------------------------------------------------------------------------------------------

    def take(self, events: Iterable[Event]) -> None:
        """New events of the store, in order."""
        for event in events:
            if isinstance(event, EngineStarted):
                self.points, self.running, self.progress, self._asked_at, self._base = [], None, None, 0.0, None
            elif isinstance(event, WeightsChanged):
                self.running = event
            elif isinstance(event, QuantizationProgress) and _of_measuring(event, bool(self._asked_at)):
                self.progress = event
            elif isinstance(event, QualityMeasured):
                self.points = merged(self.points, [point_of(event)])
                self._asked_at, self.progress = 0.0, None
            else:
                continue
            self._changed = True

    @property
    def measuring(self) -> bool:
        """Whether a measurement goes on, as far as is known here."""
        if self.progress is not None and self.progress.doing.startswith(_PREFIX):
            return True
        return bool(self._asked_at) and (self.progress is None or not _ended(self.progress))

    def now(self) -> Any:
        """The key of what runs, as ``Point.key``; None where that is not known."""
        if self.running is None:
            return None
        kv = self.view.store.latest().knobs.get("kv_cache_dtype") or "auto"
        return self.running.method, self.running.group_size, json.dumps(self.running.options, sort_keys=True, default=str), kv

    # -- what is drawn ------------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        self._changed = True

    def update(self) -> None:
        if self._asked_at and self.progress is None and time.monotonic() - self._asked_at > PATIENCE_S:
            self._asked_at, self._changed = 0.0, True  # refused, or lost with an engine that died
        if not self._changed:
            return
        self._changed = False
        self._draw_state()
        base = baseline_of(self.points, self._base)
        if bool(self.points) != self.drawn.visible:
            self.drawn.visible, self.nothing.visible = bool(self.points), not self.points
        if base is None:
            return
        options = {point.label: str(i) for i, point in enumerate(self.points)}
        value = str([p.key for p in self.points].index(base.key))
        if options != self.base.options or value != self.base.value:
            self._showing = True
            self.base.param.update(options=options, value=value)
            self._showing = False
        by_bytes = self.by.value == "bytes"
        self.divergence.show([(i, p, p.kl_mean) for i, p in enumerate(self.points)], by_bytes, base.kl_mean, "nats")
        text = (texts_of(self.points) or [""])[-1]
        self.perplexity.show(
            [(i, p, p.perplexity.get(text, math.nan)) for i, p in enumerate(self.points)], by_bytes, base.perplexity.get(text)
        )
        tokens = base.perplexity_tokens.get(text, 0)
        told = _("Perplexity of “{text}”: {tokens:,} tokens, windows of {window}, stride {stride}").format(
            text=text, tokens=tokens, window=base.window, stride=base.stride
        )
        set_html(self.text_name, f'<p class="qp-what">{html.escape(told)}</p>')
        set_html(self.rows, trade_table(self.points, base, self.now()))
        set_html(self.words, words(self.points, base))

    def _draw_state(self) -> None:
        if self.view.session is None:
            return
        busy = self.measuring
        for widget, name, value in ((self.measure, "disabled", busy), (self.stop, "visible", busy)):
            if getattr(widget, name) != value:
                setattr(widget, name, value)
        if busy and self.progress is not None and self.progress.doing.startswith(_PREFIX):
            p = self.progress
            width = 100 * p.done / p.total if p.total else 0
            text = (
                f"{html.escape(p.doing)}: {p.done:,} / {p.total:,}"
                + f'<div class="qp-progress"><i style="width:{width:.0f}%"></i></div>'
            )
            set_html(self.state, said(text, "wait"))
        elif busy:
            set_html(
                self.state, said(html.escape(_("Asked. The engine begins when it has a moment; others' requests go on.")), "wait")
            )
        elif self.progress is not None and self.progress.doing.startswith("failed"):
            set_html(self.state, said(html.escape(self.progress.doing), "error"))
        else:
            set_html(self.state, line(html.escape(self._ready())))

    def _ready(self) -> str:
        took = [p.seconds for p in self.points if p.seconds == p.seconds]
        long = _("the last one took {s:.0f} s").format(s=took[-1]) if took else _("it takes 20 to 60 s on two cores")
        if self.now() in {p.key for p in self.points}:
            return _(
                "What runs now has been measured. Choose another method among the live knobs, then measure again; {long}."
            ).format(long=long)
        return _("What runs now has not been measured yet; {long}, and others' requests are slower meanwhile.").format(long=long)

    # -- what a user does ----------------------------------------------------------------------------------------------------

    def _measure(self) -> None:
        self._asked_at, self.progress = time.monotonic(), None
        self._changed = True
        self.view.session.measure_quality(self.view.clock.owner)

    def _pin(self, event: Any) -> None:
        if not self._showing and event.new and int(event.new) < len(self.points):
            key = self.points[int(event.new)].key
            if key != self._base:
                self._base, self._changed = key, True

    def _tapped(self, made: Scatter, _attr: str, _old: Any, indices: Sequence[int]) -> None:
        if indices:
            at = made.source.data["index"][indices[0]]
            if at < len(self.points):
                self._base, self._changed = self.points[at].key, True


def _of_measuring(progress: QuantizationProgress, awaited: bool) -> bool:
    """Whether this is about a measurement, and not about weights that are being made or about another study's end."""
    return progress.doing.startswith(_PREFIX) or (awaited and not progress.method and _ended(progress))


def _ended(progress: QuantizationProgress) -> bool:
    return progress.doing.startswith("failed") or progress.doing == "cancelled"
