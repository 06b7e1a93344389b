"""From error to token: one thing is rounded, and what comes of it is followed to the text. Rows are pure; ``ProbePanel`` is the tab."""

import html
import math
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.types import EngineStarted, Event, LayerQuantized, MatrixObserved, QuantizationProbed, QuantizationProgress
from explorer.i18n import _
from explorer.pace import quick
from explorer.quantization.labels import (
    CALIBRATED,
    CSS,
    GROUPED,
    TITLES,
    bar,
    line,
    said,
    set_html,
    share,
    small,
    weights_label,
)
from explorer.quantization.probe_figure import HistogramFigure, LayerErrors, kl_html, nucleus_html, texts_html
from explorer.theme import card, empty, grid, heading, pane

KEPT = 20  # probes, the newest
TEXT = "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is"
METHODS = ("int4", "int3", "int2", "nf4", "int8", "fp8", "gptq", "awq")
GROUPS = (32, 64, 128)
BINS = 64


@dataclass(frozen=True)
class Errors:
    """The error histogram of one matrix under one method; "measured" in the engine, or "derived" from the observed matrix."""

    low: float
    high: float
    counts: list[int]
    kind: str


def recorded_errors(event: LayerQuantized, method: str, group_size: int) -> Errors | None:
    """None where the recorded rounding is not this one, or lost nothing."""
    if event.method != method or (method in GROUPED and event.group_size != group_size) or not sum(event.error_counts):
        return None
    return (
        Errors(event.error_low, event.error_high, list(event.error_counts), "measured")
        if event.error_high > event.error_low
        else None
    )


def computed_errors(event: MatrixObserved, method: str, group_size: int) -> Errors | None:
    """The histogram of another method's errors on the observed weights. None for methods that look at the inputs first."""
    if method in CALIBRATED:
        return None
    from engine.quantization.error import weight_error
    from engine.quantization.methods import quantize
    from explorer.quantization.search import arrays

    weight, _calibration = arrays(event)
    found = weight_error(weight, quantize(weight, method, group_size if method in GROUPED else None), BINS).errors
    return Errors(found.low, found.high, found.counts.tolist(), "derived")


def rounded_layers(only: Sequence[str], layers: int) -> set[int]:
    """The layers that ``QuantizationProbed.only`` names; all where it is empty."""
    if not only:
        return set(range(layers))
    return {int(name.partition(".")[0]) for name in only if name.partition(".")[0].isdigit()}


def scope_label(only: Sequence[str]) -> str:
    if not only:
        return _("all layers")
    text = ", ".join(_("layer {n}").format(n=name) if name.isdigit() else name for name in only[:3])
    return text + (f" + {len(only) - 3}" if len(only) > 3 else "")


def probe_label(event: QuantizationProbed) -> str:
    """How a probe is named in a list."""
    label = f"{weights_label(event.method, event.group_size)} · {scope_label(event.only)}"
    if event.error_between:
        low, high = event.error_between
        label += " · " + _("errors {low} to {high}").format(low=f"{low:.2g}", high=f"{high:.2g}")
    return label


def verdict(event: QuantizationProbed) -> str:
    """What came of it, as HTML."""
    finite = [k for k in event.kl if math.isfinite(k)]
    mean, most = (sum(finite) / len(finite), max(finite)) if finite else (math.nan, math.nan)
    changed = _("<b>{n:,} numbers changed</b> ({what}).").format(n=event.changed_weights, what=html.escape(probe_label(event)))
    last = next((e for e in reversed(event.layer_errors) if math.isfinite(e)), math.nan)
    grew = _(
        "The last layer's output is off by {error}, and the distribution by a KL of {mean} on average, {most} at most."
    ).format(error=share(last, 2), mean=small(mean, "nats"), most=small(most, "nats"))
    if not event.changed_weights:
        return said(changed + " " + html.escape(_("Nothing else can have changed.")), "mind")
    if event.first_difference < 0:
        tokens = min(len(event.continuation), len(event.continuation_changed))
        end = _(
            "And yet no token differs: all {n} of the continuation are the same. The largest logit is still the largest."
        ).format(n=tokens)
        return said(f"{changed} {html.escape(grew)} {html.escape(end)}")
    at = event.first_difference
    was, now = (_token_at(tokens, at) for tokens in (event.continuation, event.continuation_changed))
    margin = "" if math.isnan(event.margin) else " " + _("There the two largest logits were {margin} apart: a near tie, or the push was large.").format(margin=small(event.margin))  # fmt: skip
    end = _("Token {n} of the continuation is the first that differs: “{was}” became “{now}”.").format(n=at + 1, was=was, now=now)
    return said(f"{changed} {html.escape(grew)} <b>{html.escape(end)}</b>{html.escape(margin)}", "wait")


def _token_at(tokens: Sequence[str], at: int) -> str:
    return tokens[at] if at < len(tokens) else _("(end)")


class ProbePanel(pn.viewable.Viewer):
    """The tab "from error to token". ``view``: the page's view; its ``layer`` and ``matrix`` are what can be rounded alone."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.probes: dict[str, QuantizationProbed] = {}
        self.quantized: dict[tuple[int, str], LayerQuantized] = {}
        self.matrices: dict[tuple[int, str], MatrixObserved] = {}
        self.errors: Errors | None = None
        self._errors_of: Any = None
        self._awaited: set[str] = set()
        self._failed = ""  # why the last probe came to nothing
        self._shown: str | None = None
        self._changed = True
        self._showing = False
        self._drawn: Any = None
        self._build()

    def _build(self) -> None:
        live = self.view.session is not None
        small_ = {"size": "small", "margin": 0}
        wide = {**small_, "sizing_mode": "stretch_width"}
        self.scope = pmui.RadioButtonGroup(
            options={_("all layers"): "all", _("this layer"): "layer", _("this matrix"): "matrix"}, value="matrix", **small_
        )
        self.method = pmui.Select(label=_("Method"), options={TITLES[m]: m for m in METHODS}, value="int4", **wide)
        self.group = pmui.Select(label=_("Group size"), options=list(GROUPS), value=64, **wide)
        self.top_p: Any = pmui.FloatSlider(label=_("Nucleus p"), start=0.5, end=0.99, step=0.01, value=0.9, **wide)
        self.text = pmui.TextInput(label=_("Text"), value=TEXT, **wide)
        self.range: Any = pmui.IntRangeSlider(
            label=_("Only weights whose error lies in these bins"), start=0, end=BINS, value=(0, BINS), **wide
        )
        quick(self.range, 30)
        for widget in (self.scope, self.method, self.group, self.range):
            widget.param.watch(lambda _event: self._mark(), "value")
        self.go = pmui.Button(
            label=_("Round only this and read the text"), icon="science", color="primary", variant="contained", **small_
        )
        self.go.on_click(lambda _event: self._probe())
        self.state = pane(css=CSS, margin=(8, 0, 0, 0))
        self.histogram = HistogramFigure()
        self.histogram_head = pane(css=CSS)
        self.cut = pn.Column(
            self.histogram_head, pn.pane.Bokeh(self.histogram.plot, sizing_mode="stretch_width", margin=0), self.range,
            sizing_mode="stretch_width", margin=(10, 0, 0, 0), visible=False,
        )  # fmt: skip
        self.no_errors = pane(css=CSS, margin=(10, 0, 0, 0))
        self.place = pane(css=CSS, margin=(6, 0, 0, 0))
        self.chosen = pmui.Select(label=_("Probe"), options={_("none yet"): ""}, value="", **wide)
        self.chosen.param.watch(self._choose, "value")
        self.verdict = pane(css=CSS, margin=(10, 0, 0, 0))
        self.layers = LayerErrors()
        self.kl, self.nucleus_head, self.nucleus, self.texts = (pane(css=CSS) for _i in range(4))

        def part(title: str, kinds: Any, hint: str, *children: Any) -> pn.Column:
            head = pane(heading(title, kinds, hint), css="h2 { font-size: 13.5px; }", margin=(16, 0, 8, 0))
            return pn.Column(head, *children, sizing_mode="stretch_width", margin=0)

        both = f'<div class="kv-legend"><span>{_swatch("")}{_("before")}</span><span>{_swatch("other")}{_("after")}</span></div>'
        self.found = pn.Column(
            self.verdict,
            part(_("The error on its way through the layers"), "measured", _("Hatched: layers that were rounded. Residual streams carry an error on; later layers may damp it or make it grow."),
                 pn.pane.Bokeh(self.layers.plot, sizing_mode="stretch_width", margin=0)),
            part(_("KL by position"), "measured", _("A bar over each token: how far the distribution of what follows it moved, in nats. Hover for the number."), self.kl),
            part(_("Who leaves the nucleus, who enters"), "measured", "", self.nucleus_head, pane(both, css=CSS), self.nucleus),
            part(_("And the text"), "measured", _("Greedy, from the text's end. The same requests, one thing changed."), self.texts),
            sizing_mode="stretch_width", margin=0, visible=False,
        )  # fmt: skip
        nothing = (
            _("Choose what to round, and how; the running weights stay as they are.")
            if live
            else _("In this recorded run nothing was probed.")
        )
        self.nothing = pane(empty(nothing), margin=(10, 0, 0, 0))
        ask: list[Any] = [
            self.scope, self.place, grid(self.method, self.group, self.top_p, min_width=130, gap=14, margin=(12, 0, 10, 0)), self.text, self.cut,
            self.no_errors, pn.Row(self.go, margin=(12, 0, 0, 0)), self.state,
        ]  # fmt: skip
        first = card(
            _("Round one thing"), *ask, kinds="what-if",
            hint=_("The engine reads the text twice, once with these weights rounded and nothing else. The weights that run are not touched."),
        )  # fmt: skip
        second = card(_("From error to token"), self.chosen, self.nothing, self.found, kinds="measured", margin=0)
        self._layout = pn.Column(*([first] if live else []), second, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what comes in -----------------------------------------------------------------------------------------------------

    def take(self, events: Iterable[Event]) -> None:
        """New events of the store, in order."""
        for event in events:
            if isinstance(event, EngineStarted):
                self.probes, self.quantized, self.matrices, self._shown, self._errors_of = {}, {}, {}, None, None
                self._awaited.clear()
            elif isinstance(event, LayerQuantized):
                self.quantized[event.layer, event.name] = event
            elif isinstance(event, MatrixObserved):
                self.matrices = {(event.layer, event.name): event}  # the newest alone: it is large
            elif isinstance(event, QuantizationProbed):
                self.probes.pop(event.probe_id, None)
                self.probes[event.probe_id] = event
                while len(self.probes) > KEPT:
                    del self.probes[next(iter(self.probes))]
                if event.probe_id in self._awaited or self._shown not in self.probes or self.view.session is None:
                    self._shown = event.probe_id
                self._awaited.discard(event.probe_id)
            elif isinstance(event, QuantizationProgress) and not event.method and event.doing.startswith(("failed", "cancelled")):
                self._failed = event.doing if self._awaited else ""
                self._awaited.clear()
            else:
                continue
            self._changed = True

    def update(self) -> None:
        looked = (self.view.layer, self.view.matrix)
        if not self._changed and looked == self._drawn:
            return
        self._changed, self._drawn = False, looked
        if self.view.session is not None:
            self._draw_controls()
        self._draw_probes()

    # -- what is drawn ------------------------------------------------------------------------------------------------------

    def _draw_controls(self) -> None:
        layer, matrix = self.view.layer, self.view.matrix
        set_html(self.place, line(_("Chosen on the map: layer {n}, {matrix}.").format(n=layer, matrix=matrix)))
        grouped = self.method.value in GROUPED
        if self.group.disabled == grouped:
            self.group.disabled = not grouped
        self._find_errors()
        there = self.errors is not None and self.scope.value == "matrix"
        if self.cut.visible != there:
            self.cut.visible = there
        set_html(self.no_errors, "" if there else line(f'<span class="ct-muted">{html.escape(self._why_no_range())}</span>'))
        if there and self.errors is not None:
            errors = self.errors
            self.histogram.show(errors.low, errors.high, errors.counts, self.between)
            head = _("Rounding errors of {matrix} in {method}").format(
                matrix=f"{layer}.{matrix}", method=weights_label(self.method.value, self.group.value)
            )
            low, high = self.range.value
            inside = sum(errors.counts[low:high])
            kept = _("{n:,} of {of:,} weights are in the range").format(n=inside, of=sum(errors.counts))
            set_html(self.histogram_head, heading(head, errors.kind, kept).replace("<h2>", '<h2 style="font-size:13.5px">'))
        if self._failed and not self._awaited:
            set_html(self.state, said(html.escape(self._failed), "error"))
        else:
            set_html(self.state, said(html.escape(_("Reading the text twice …")), "wait") if self._awaited else "")

    def _find_errors(self) -> None:
        at = (self.view.layer, self.view.matrix)
        quantized, matrix = self.quantized.get(at), self.matrices.get(at)
        key = (at, self.method.value, self.group.value, id(quantized), id(matrix))
        if key == self._errors_of:
            return
        self._errors_of, method, group = key, self.method.value, self.group.value
        self.errors = recorded_errors(quantized, method, group) if quantized is not None else None
        if self.errors is None and matrix is not None:
            self.errors = computed_errors(matrix, method, group)
        bins = len(self.errors.counts) if self.errors is not None else BINS
        if (self.range.end, self.range.value) != (bins, (0, bins)):
            self.range.param.update(end=bins, value=(0, bins))

    def _why_no_range(self) -> str:
        if self.scope.value != "matrix":
            return _("A range of errors can be chosen for one matrix at a time.")
        if self.method.value in CALIBRATED:
            return _(
                "A range of errors can be chosen once this method runs (make it live), or for a method that needs no calibration."
            )
        return _(
            "The histogram of errors shows once this method runs live, or the matrix is fetched (on the tab of the searches, or the map)."
        )

    @property
    def between(self) -> tuple[float, float] | None:
        """The chosen range of errors; None: all."""
        if self.errors is None or self.scope.value != "matrix":
            return None
        low, high = self.range.value
        bins = len(self.errors.counts)
        if (low, high) == (0, bins):
            return None
        width = (self.errors.high - self.errors.low) / bins
        return self.errors.low + low * width, self.errors.low + high * width

    def _draw_probes(self) -> None:
        newest = list(reversed(self.probes.values()))
        options = {f"{len(newest) - i}. {probe_label(event)}": event.probe_id for i, event in enumerate(newest)} or {
            _("none yet"): ""
        }
        value = self._shown if self._shown in self.probes else next(iter(options.values()))
        if options != self.chosen.options or value != self.chosen.value:
            self._showing = True
            self.chosen.param.update(options=options, value=value)
            self._showing = False
        event = self.probes.get(value or "")
        for part, there in ((self.nothing, event is None), (self.found, event is not None)):
            if part.visible != there:
                part.visible = there
        if event is None:
            return
        set_html(self.verdict, verdict(event))
        self.layers.show(event.layer_errors, rounded_layers(event.only, len(event.layer_errors)))
        set_html(self.kl, kl_html(event))
        at = event.positions[0] if event.positions else -1
        after = "".join(event.token_texts[max(0, at - 7) : at + 1])
        head = _("After “…{after}” (position {at}), nucleus of p = {p:g}:").format(after=after, at=at, p=event.nucleus_p)
        set_html(self.nucleus_head, f'<p class="qp-what">{html.escape(head)}</p>')
        set_html(self.nucleus, nucleus_html(event))
        set_html(self.texts, texts_html(event))

    # -- what a user does ----------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        self._changed = True

    def _choose(self, event: Any) -> None:
        if event.new and not self._showing:
            self._shown, self._changed = event.new, True

    @property
    def only(self) -> list[str]:
        layer, matrix = self.view.layer, self.view.matrix
        return {"all": [], "layer": [str(layer)], "matrix": [f"{layer}.{matrix}"]}[self.scope.value]

    def _probe(self) -> None:
        text = self.text.value.strip()
        if not text:
            self.view.session.notify(self.view.clock.owner, _("The text is empty: write something to be read."))
            return
        probe_id = f"probe-{uuid.uuid4().hex[:12]}"
        self._awaited.add(probe_id)
        self._failed, self._changed = "", True
        self.view.session.probe_quantization(
            self.view.clock.owner, probe_id=probe_id, method=self.method.value,
            group_size=self.group.value if self.method.value in GROUPED else None, only=self.only or None,
            error_between=list(self.between) if self.between else None, text=text, top_p=float(self.top_p.value),
        )  # fmt: skip


def _swatch(kind: str) -> str:
    return f'<span style="width:40px;display:inline-block">{bar(1.0, kind)}</span>'
