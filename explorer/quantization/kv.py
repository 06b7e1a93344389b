"""K and V in few bits: which channels are large, what each KV dtype loses on them, how many more tokens fit. Rows are pure."""

import html
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.types import EngineStarted, Event, KvObserved, PoolResized, QuantizationProgress
from explorer.i18n import _
from explorer.kv_cache.figure import legend_html
from explorer.pace import quick
from explorer.quantization.kv_figure import CHANNEL_LINES, ChannelFigure
from explorer.quantization.labels import CSS, bar, kv_label, line, said, set_html, share
from explorer.theme import badge, card, empty, grid, number, pane

OUTLIER_TIMES = 3.0  # a channel whose mean magnitude is over so many times the median channel's stands out
ORDER = ("auto", "int8", "fp8", "int4")


@dataclass(frozen=True)
class PoolFacts:
    """The pool as allocated. 0: not known."""

    kv_dtype: str = "auto"
    block_size: int = 0
    bytes_per_block: int = 0
    pool_bytes: int = 0

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_per_block / self.block_size if self.block_size else math.nan


@dataclass(frozen=True)
class Dtype:
    """One KV dtype on the observed layer; NaN where it is not known. Errors are relative, |k' - k| / |k|."""

    name: str
    key_error: float
    value_error: float
    bytes_per_token: float
    tokens: float  # that fit the pool's bytes
    times: float  # as many as in the model's dtype


def channel_columns(largest: Sequence[float], mean: Sequence[float], head_dim: int) -> dict[str, list[Any]]:
    """One row a channel, all heads after each other; "outlier" is where its mark stands, NaN for a channel that does not stand out."""
    n = min(len(largest), len(mean))
    middle = statistics.median(mean[:n]) if n else 0.0
    times = [m / middle if middle else math.nan for m in mean[:n]]
    return {
        "channel": list(range(n)), "head": [i // head_dim for i in range(n)], "within": [i % head_dim for i in range(n)],
        "largest": list(largest[:n]), "mean": list(mean[:n]), "times": times,
        "outlier": [largest[i] if times[i] > OUTLIER_TIMES else math.nan for i in range(n)],
    }  # fmt: skip


def outliers(columns: dict[str, list[Any]]) -> list[tuple[int, int, float]]:
    """(head, channel of the head, times the median) of the channels that stand out, the largest first."""
    found = [
        (h, c, t) for h, c, t in zip(columns["head"], columns["within"], columns["times"]) if t == t and t > OUTLIER_TIMES
    ]  # fmt: skip
    return sorted(found, key=lambda each: -each[2])


def dtypes(seen: KvObserved, pool: PoolFacts) -> list[Dtype]:
    """Every KV dtype that was tried or whose size is known, the model's own first."""
    names = [n for n in ORDER if n == "auto" or n in seen.key_errors or n in seen.bytes_per_token]
    names += [n for n in seen.key_errors if n not in names]
    sizes = dict(seen.bytes_per_token)
    if pool.kv_dtype not in sizes and pool.bytes_per_token == pool.bytes_per_token:
        sizes[pool.kv_dtype] = pool.bytes_per_token
    plain = sizes.get("auto", math.nan)
    made = []
    for name in names:
        size, exact = sizes.get(name, math.nan), 0.0 if name == "auto" else math.nan
        made.append(
            Dtype(
                name, seen.key_errors.get(name, exact), seen.value_errors.get(name, exact), size,
                pool.pool_bytes / size if size and pool.pool_bytes else math.nan, plain / size if size else math.nan,
            )
        )  # fmt: skip
    return made


def errors_html(rows: Sequence[Dtype]) -> str:
    """Two bars a dtype: what keys and what values lose."""
    most = max((e for d in rows for e in (d.key_error, d.value_error) if math.isfinite(e)), default=0.0) or 1.0
    body = ""
    for d in rows:
        body += (
            f'<div class="qp-dtype"><b>{html.escape(kv_label(d.name))}</b>{bar(d.key_error / most)}<span>{share(d.key_error, 2)}</span>'
            f"{bar(d.value_error / most, 'other')}<span>{share(d.value_error, 2)}</span></div>"
        )
    return body


def room_html(rows: Sequence[Dtype], pool: PoolFacts) -> str:
    """Bytes a token, and how many tokens the pool's bytes hold then."""
    most = max((d.tokens for d in rows if math.isfinite(d.tokens)), default=0.0) or 1.0
    body = ""
    for d in rows:
        here = f' <small class="ct-muted">{_("now")}</small>' if d.name == pool.kv_dtype else ""
        tokens = _("{n} tokens").format(n=number(int(d.tokens))) if math.isfinite(d.tokens) else "–"
        times = f"× {d.times:.2f}" if math.isfinite(d.times) else "–"
        size = _("{size} a token").format(size=number(d.bytes_per_token, "B"))
        body += (
            f'<div class="qp-dtype"><b>{html.escape(kv_label(d.name))}{here}</b>{bar(d.tokens / most)}<span>{times}</span>'
            f'<span style="text-align:left;grid-column:2 / -1">{tokens}, {size}</span></div>'
        )
    return body


def words(seen: KvObserved, keys: dict[str, list[Any]], values: dict[str, list[Any]]) -> str:
    """What the two pictures show, as HTML."""
    found, of_values = outliers(keys), outliers(values)
    if not found:
        text = _("No key channel of layer {layer} is over {n:g} times the median one. Try another layer.").format(
            layer=seen.layer, n=OUTLIER_TIMES
        )
        return said(html.escape(text), "mind")  # fmt: skip
    head, channel, times = found[0]
    text = _(
        "{keys} key channels of layer {layer} stand out, the largest (head {head}, channel {channel}) with {times:.0f} times the median; of the values {values}. They are large in every token: a scale for each channel serves them, a scale for each token must stretch over them, and the small channels get what is left."
    )
    return said(
        html.escape(text.format(keys=len(found), layer=seen.layer, head=head, channel=channel, times=times, values=len(of_values))), "mind"
    )  # fmt: skip


EXPLAINED = (
    ("int8", _("A token's vector of one head has one scale: its largest magnitude / 127. Mostly lossless, at half the bytes of 16 bits.")),
    ("fp8", _("The same scale, but steps that grow with the number (e4m3: 3 bits of mantissa): small channels keep their relative accuracy beside large ones. Without a scale, values beyond 448 would be cut.")),
    ("int4", _("As in KIVI: keys by channel, over the tokens of one block, so that an outlier channel has a scale of its own; values by token, in groups of channels. The block that still fills, and what a roll-back may need, stay in full precision: the tail.")),
)  # fmt: skip


def explained_html() -> str:
    return (
        '<ul class="qp-list">'
        + "".join(f"<li><b>{html.escape(kv_label(n))}</b>: {html.escape(text)}</li>" for n, text in EXPLAINED)
        + "</ul>"
    )


class KvPanel(pn.viewable.Viewer):
    """The tab of the KV cache in few bits. ``view``: the page's view."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.seen: dict[int, KvObserved] = {}
        self.pool = PoolFacts()
        self.layers = 0
        self._changed = True
        self._asked: int | None = None
        self._showing = False
        live = view.session is not None
        self.layer: Any = pmui.IntSlider(
            label=_("Layer"), start=0, end=1, value=0, size="small", margin=0, sizing_mode="stretch_width",
            description=_("What to look at. The engine reads a text once and looks at this layer's keys and values; nothing is changed."),
        )  # fmt: skip
        quick(self.layer, 150)
        self.layer.param.watch(self._moved, "value")
        self.look = pmui.Button(
            label=_("Look at this layer"), icon="visibility", color="primary", variant="contained", size="small", margin=0
        )
        self.look.on_click(lambda _event: self._ask(self.layer.value))
        self.state = pane(css=CSS, margin=(6, 0, 0, 0))
        self.keys, self.values = ChannelFigure(_("|key|")), ChannelFigure(_("|value|"))
        self.key_words, self.value_words, self.words = (
            pane(css=CSS),
            pane(css=CSS, margin=(8, 0, 0, 0)),
            pane(css=CSS, margin=(10, 0, 0, 0)),
        )
        self.errors, self.room = pane(css=CSS), pane(css=CSS)
        legend = legend_html(CHANNEL_LINES)
        self.channels = pn.Column(
            pane(legend, css=CSS), self.key_words, pn.pane.Bokeh(self.keys.plot, sizing_mode="stretch_width", margin=0), self.value_words,
            pn.pane.Bokeh(self.values.plot, sizing_mode="stretch_width", margin=0), self.words, sizing_mode="stretch_width", margin=0,
        )  # fmt: skip
        both = f'<div class="kv-legend"><span>{_swatch("")}{_("keys")}</span><span>{_swatch("other")}{_("values")}</span></div>'
        losses = pn.Column(
            pane(f'<p class="qp-what"><b>{_("Error by KV dtype")}</b>, |k′ − k| / |k| {badge("measured")}</p>{both}', css=CSS), self.errors,
            sizing_mode="stretch_width", margin=0,
        )  # fmt: skip
        gains = pn.Column(
            pane(f'<p class="qp-what"><b>{_("Tokens that fit the pool")}</b>, {_("scales counted")} {badge("derived")}</p>', css=CSS), self.room,
            sizing_mode="stretch_width", margin=0,
        )  # fmt: skip
        self.dtypes = pn.Column(grid(losses, gains, min_width=300, gap=28), sizing_mode="stretch_width", margin=(0, 0, 8, 0))
        nothing = (
            _(
                "Nobody has looked at the keys and values yet. Choose a layer: the engine reads a text and shows what it would store."
            )
            if live
            else _("In this recorded run nobody looked at the keys and values.")
        )
        self.nothing = pane(empty(nothing), margin=(10, 0, 0, 0))
        pick = [self.layer, self.look] if live else [self.layer]
        self.first = card(
            _("Keys and values by channel"), grid(*pick, min_width=200, gap=14, columns="minmax(0, 1fr) 200px" if live else ""),
            self.state, self.nothing, self.channels, kinds="measured",
            hint=_("As they are stored: keys after the rotary embedding. All KV heads of one layer side by side."),
        )  # fmt: skip
        self.second = card(
            _("What few bits cost, and what they bring"), self.dtypes, pane(explained_html(), css=CSS), margin=0,
            hint=_("kv_cache_dtype is a live knob: it takes effect when the running requests have finished, with an empty pool."),
        )  # fmt: skip
        self.channels.visible = self.dtypes.visible = False
        self._layout = pn.Column(self.first, self.second, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    def take(self, events: Iterable[Event]) -> None:
        """New events of the store, in order."""
        for event in events:
            if isinstance(event, EngineStarted):
                self.seen, self._asked = {}, None
                self.layers = int(event.model.get("num_layers") or 0)
                config = event.config
                self.pool = PoolFacts(
                    config.get("kv_cache_dtype") or "auto", int(config.get("block_size") or 0), event.kv_bytes_per_block, event.kv_pool_bytes
                )  # fmt: skip
            elif isinstance(event, PoolResized):
                dtype = self.view.store.latest().knobs.get("kv_cache_dtype") or "auto"
                self.pool = PoolFacts(dtype, event.block_size, event.kv_bytes_per_block, event.kv_pool_bytes)
            elif isinstance(event, KvObserved):
                self.seen[event.layer] = event
                if self._asked == event.layer:
                    self._asked = None
            elif isinstance(event, QuantizationProgress) and not event.method and event.doing.startswith(("failed", "cancelled")):
                self._asked = None
            else:
                continue
            self._changed = True

    def update(self) -> None:
        if not self._changed:
            return
        self._changed = False
        self._draw_slider()
        seen = self.seen.get(self.layer.value)
        for part, there in ((self.channels, seen is not None), (self.dtypes, seen is not None), (self.nothing, not self.seen)):
            if part.visible != there:
                part.visible = there
        set_html(self.state, self._said(seen))
        if seen is None:
            return
        keys = channel_columns(seen.key_abs_max, seen.key_abs_mean, seen.head_dim)
        values = channel_columns(seen.value_abs_max, seen.value_abs_mean, seen.head_dim)
        for figure, columns, target, name in (
            (self.keys, keys, self.key_words, _("Keys")), (self.values, values, self.value_words, _("Values")),
        ):  # fmt: skip
            figure.show(columns, seen.num_kv_heads, seen.head_dim)
            set_html(target, f'<p class="qp-what"><b>{html.escape(name)}</b> {_("of layer {layer}, {n:,} tokens").format(layer=seen.layer, n=seen.num_tokens)}</p>')  # fmt: skip
        set_html(self.words, words(seen, keys, values))
        rows = dtypes(seen, self.pool)
        set_html(self.errors, errors_html(rows))
        set_html(self.room, room_html(rows, self.pool))

    def _draw_slider(self) -> None:
        end = max(1, (self.layers or max(self.seen, default=0) + 1) - 1)
        self._showing = True
        try:
            if self.layer.end != end:
                self.layer.param.update(end=end, value=min(self.layer.value, end))
            if self.view.session is None and self.seen and self.layer.value not in self.seen:
                self.layer.value = min(self.seen, key=lambda at: abs(at - self.layer.value))
        finally:
            self._showing = False

    def _said(self, seen: KvObserved | None) -> str:
        if self._asked is not None:
            return line(html.escape(_("Asked for layer {layer}: the engine reads the text …").format(layer=self._asked)))
        if self.view.session is None:
            return (
                line(
                    html.escape(
                        _("Layers looked at in this run: {layers}.").format(layers=", ".join(map(str, sorted(self.seen))))
                    )
                )
                if self.seen
                else ""
            )
        if seen is None and self.seen:
            return line(html.escape(_("Layer {layer} has not been looked at yet.").format(layer=self.layer.value)))
        return line(html.escape(_("Text: “{text}”").format(text=_cut(seen.text)))) if seen is not None else ""

    def _moved(self, event: Any) -> None:
        self._changed = True
        if not self._showing and self.view.session is not None and event.new not in self.seen:
            self._ask(event.new)

    def _ask(self, layer: int) -> None:
        self._asked, self._changed = layer, True
        self.view.session.observe_kv(self.view.clock.owner, layer)


def _swatch(kind: str) -> str:
    return f'<span style="width:40px;display:inline-block">{bar(1.0, kind)}</span>'


def _cut(text: str, most: int = 120) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 1] + "…"
