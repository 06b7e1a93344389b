"""Batch size: throughput and latency as measured in this session, what bounds them, and what static batches pad. ``SweepPanel`` is the tab."""

import html
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import panel as pn
import panel_material_ui as pmui

from engine.events.types import Event
from engine.load.ideal import static_padding_share
from engine.load.lengths import Drawer, Equal, Exponential, Lengths, Uniform
from explorer.batching.sweep_figure import ITL_LINES, PADDING_LINES, POINT_LINES, PaddingFigure, SweepFigures
from explorer.batching.sweep_rows import (
    WIDTHS,
    Bounds,
    Padded,
    Point,
    SweepRows,
    best_batch,
    bounds_of,
    kv_limit,
    mean_tokens,
    padded,
    padding_curves,
)
from explorer.batching.whatif_rows import History
from explorer.batching.whatif_run import Ask, Sender, Stage, exactly, state_html
from explorer.i18n import _
from explorer.kv_cache.figure import legend_html
from explorer.pace import quick
from explorer.quantization.labels import CSS, line, said, set_html, share, table
from explorer.theme import card, empty, grid, number, pane

BURSTS = (1, 2, 4, 8, 16, 32)
TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PROMPT, OUTPUT = 16, 24  # tokens of a request of a burst
PADDED_BATCH, PADDED_REQUESTS, PADDED_MEAN = 4, 16, 16
LENGTHS: dict[str, Lengths] = {
    "equal": Equal(PADDED_MEAN), "uniform": Uniform(2, 2 * PADDED_MEAN), "exponential": Exponential(PADDED_MEAN, 6 * PADDED_MEAN),
}  # fmt: skip
OWN = _("as in the newest load")


def words(points: Sequence[Point], bounds: Bounds | None, limit: int, tokens: int) -> str:
    """What the curve says, as HTML."""
    first, best = points[0], best_batch(points)
    assert best is not None
    alone = _(
        "{b} decoded at once: <b>{y}</b>, and {t} between two tokens. With another number of them there is something to compare."
    )
    many = _(
        "From {a} to {b} requests the throughput goes from {x} to <b>{y}</b>, and the time between two tokens from {s} to {t}: the weights are read once for all of them, the arithmetic is done for each."
    )
    text = (alone if len(points) == 1 else many).format(
        a=first.batch, b=points[-1].batch, x=number(first.tokens_per_s, "tokens/s"), y=number(points[-1].tokens_per_s, "tokens/s"),
        s=number(first.itl_ms, "ms"), t=number(points[-1].itl_ms, "ms"),
    )  # fmt: skip
    if len(points) > 1 and best is points[-1]:
        text += " " + _("More may bring more: the largest batch that was measured comes out highest.")
    elif len(points) > 1:
        text += " " + _("Nine tenths of the most that was measured are reached at <b>{n}</b>; beyond that, requests mostly wait for each other.").format(
            n=best.batch
        )  # fmt: skip
    rest = [_("The pool has room for <b>{n:,}</b> requests of {k:,} tokens each, none shared.").format(n=limit, k=tokens)]
    if bounds is not None:
        rest.append(
            _("On this device ({name}, {dtype}: {bw}/s, {peak}/s) arithmetic takes over from memory at <b>{n}</b> requests.").format(
                name=html.escape(bounds.roof.name), dtype=html.escape(bounds.roof.dtype), bw=number(bounds.roof.bandwidth, "B"), peak=number(bounds.roof.peak, "FLOP"),
                n=number(round(bounds.knee)) if math.isfinite(bounds.knee) else _("no number of"),
            )
        )  # fmt: skip
    return said(text, "mind") + line(" ".join(rest))


def padding_words(measured: Sequence[Padded]) -> str:
    """Static padding, as HTML."""
    text = line(
        _(
            "A static batch ends with its longest request; until then those that are done are padded. How much that is depends on the spread of lengths alone: 1 − mean / mean of the longest. So the gain of continuous batching is 1 for equal lengths, below 2 for uniform ones, and the harmonic number H<sub>B</sub> for exponential ones."
        )
    )
    if not measured:
        return text
    head = [_("load"), _("batch size"), _("requests"), _("spread of lengths"), _("padding, measured"), _("what its lengths say")]
    rows = [
        ("", [number(p.number), number(p.batch), number(p.num_requests), f"{p.spread:.2f}", share(p.measured), share(p.derived)])
        for p in measured
    ]
    return text + table(head, rows)


class SweepPanel(pn.viewable.Viewer):
    """``view``: the page's view."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.history, self.rows = History(), SweepRows()
        self.sender: Sender | None = None
        self._changed = True
        live = view.session is not None
        small = {"size": "small", "margin": 0}
        self.tokens: Any = pmui.Select(
            label=_("Tokens of a request, for the KV limit"), options={OWN: 0, **{f"{n:,}": n for n in TOKENS}}, value=0,
            sizing_mode="stretch_width", **small,
        )  # fmt: skip
        quick(self.tokens, 20)
        self.tokens.param.watch(lambda _event: self._mark(), "value")
        strong = {**small, "variant": "contained", "color": "primary"}
        self.run: Any = pmui.Button(label=_("Measure 1, 2, 4, … 32 at once"), icon="play_arrow", **strong)
        self.run.on_click(lambda _event: self._send(self.bursts()))
        self.pad: Any = pmui.Button(label=_("Measure the padding"), icon="play_arrow", variant="outlined", **small)
        self.pad.on_click(lambda _event: self._send(self.padding_stages()))
        self.roofs: Any = pmui.Button(label=_("Measure the device's roofs (2 s)"), icon="speed", variant="outlined", **small)
        self.roofs.on_click(lambda _event: self.view.session.measure_roofs(self.view.clock.owner))
        self.stop: Any = pmui.Button(label=_("Stop"), icon="stop", variant="text", visible=False, **small)
        self.stop.on_click(lambda _event: self.close())
        self.state = pane(css=CSS, margin=(10, 0, 0, 0))
        self.figures, self.padding = SweepFigures(), PaddingFigure()
        self.told, self.padding_told = pane(css=CSS, margin=(10, 0, 0, 0)), pane(css=CSS, margin=(10, 0, 0, 0))
        self._build(live)

    def _build(self, live: bool) -> None:
        def drawn(title: str, legend: Any, figure: Any) -> pn.Column:
            head = f'<p class="qp-what"><b>{html.escape(title)}</b></p>' if title else ""
            return pn.Column(
                pane(head + legend_html(legend), css=CSS), pn.pane.Bokeh(figure, sizing_mode="stretch_width", margin=0),
                sizing_mode="stretch_width", margin=0,
            )  # fmt: skip

        nothing = (
            _("Nothing has decoded yet. Send prompts or start a load, or measure it here: bursts of 1, 2, 4, … requests, one after the other.")
            if live
            else _("In this recorded run nothing was decoded by itself: each step had a prompt in it.")
        )  # fmt: skip
        self.nothing = pane(empty(nothing), margin=(12, 0, 0, 0))
        row = {"styles": {"gap": "8px", "flex-wrap": "wrap"}, "margin": (10, 0, 0, 0)}
        self.drawn = pn.Column(
            grid(
                drawn(_("Throughput"), POINT_LINES, self.figures.throughput), drawn(_("Latency"), ITL_LINES, self.figures.latency), min_width=300,
                columns="minmax(0, 1fr) minmax(0, 1fr)", gap=20, margin=(12, 0, 0, 0),
            ),
            self.told, sizing_mode="stretch_width", margin=0, visible=False,
        )  # fmt: skip
        first = card(
            _("Batch size"), grid(self.tokens, min_width=220), *([pn.Row(self.run, self.roofs, self.stop, **row), self.state] if live else []),
            self.nothing, self.drawn, kinds=("measured", "modelled", "live") if live else ("measured", "modelled"),
            hint=_("Every step of this session in which nothing but decoding ran, by the number of requests in it."),
        )  # fmt: skip
        second = card(
            _("What static batches pad"), drawn("", PADDING_LINES, self.padding.plot), self.padding_told,
            *([pn.Row(self.pad, **row)] if live else []), kinds=("derived", "measured"), margin=0,
            hint=_("The lines are the ideal shares for many requests; a square is a load that ran here in static or dynamic batches."),
        )  # fmt: skip
        self._layout = pn.Column(first, second, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what comes in -----------------------------------------------------------------------------------------------------

    def take(self, events: Iterable[Event]) -> None:
        """New events of the store, in order."""
        events = list(events)
        self.rows.feed(events)
        if self.history.feed(events):
            self._changed = True

    def update(self) -> None:
        if self.sender is not None:
            self._draw_state(self.sender)
        if not self._changed:
            return
        self._changed = False
        points = self.rows.points
        if bool(points) != self.drawn.visible:
            self.drawn.visible, self.nothing.visible = bool(points), not points
        if points:
            tokens = int(self.tokens.value) or mean_tokens(self.history) or PROMPT + OUTPUT
            limit = kv_limit(self.rows.num_blocks, self.rows.block_size, tokens)
            bounds = bounds_of(points, self.rows.roof)
            self.figures.show(points, bounds, limit)
            set_html(self.told, words(points, bounds, limit, tokens))
        if self.roofs.visible != (self.rows.roofs is None):
            self.roofs.visible = self.rows.roofs is None
        self._draw_padding()

    def _draw_padding(self) -> None:
        curves: dict[str, Any] = padding_curves()
        usable = self.history.usable()
        if usable:
            lengths = [r.num_output_tokens - 1 for r in self.history.records(usable[-1]) if r.num_output_tokens > 1]
            curves["own"] = [(b, static_padding_share(lengths, b)) for b in WIDTHS if b <= len(lengths)]
        measured = [p for p in (padded(self.history, load) for load in usable) if p is not None]
        self.padding.show(curves, measured)
        set_html(self.padding_told, padding_words(measured))

    def _draw_state(self, sender: Sender) -> None:
        busy = sender.busy
        set_html(self.state, state_html(sender))
        if self.stop.visible != busy:
            self.stop.visible = self.run.disabled = self.pad.disabled = busy
            self._changed = True

    # -- what a user does ----------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        self._changed = True

    def _send(self, stages: list[Stage]) -> None:
        if self.sender is not None and self.sender.busy:
            return
        now = self.history.setting
        restore = {name: getattr(now, name) for name in sorted({name for stage in stages for name in stage.knobs})}
        self.sender = Sender(self.view.session, self.view.clock.owner, stages, restore).start()

    def _tokens(self, count: int, seed: str) -> tuple[int, ...]:
        started = self.view.store.started
        vocab = int((started.model if started is not None else {}).get("vocab_size") or 1000)
        draw = random.Random(seed)
        return tuple(draw.randrange(min(256, vocab - 1), vocab) for _i in range(count))

    def bursts(self) -> list[Stage]:
        """1, 2, 4, ... requests at once, each burst when the one before has ended; as many as the pool has room for."""
        room = kv_limit(self.rows.num_blocks, self.rows.block_size, PROMPT + OUTPUT) if self.rows.num_blocks else 1
        sizes = [b for b in BURSTS if b <= max(1, room)]
        asks = [Ask(self._tokens(PROMPT, f"{size}-{i}"), exactly(OUTPUT), after=i == 0) for size in sizes for i in range(size)]
        knobs = {"max_num_seqs": max(self.history.setting.max_num_seqs, sizes[-1]), "batching": "continuous"}
        return [Stage(_("Bursts of {sizes} requests …").format(sizes=", ".join(map(str, sizes))), knobs, tuple(asks))]

    def padding_stages(self) -> list[Stage]:
        """Equal, uniform and exponential lengths of the same mean in dynamic batches, which wait until they are full."""
        names = {"equal": _("equal"), "uniform": _("uniform"), "exponential": _("exponential")}
        knobs = {"batching": "dynamic", "batching_timeout_ms": 400.0, "max_num_seqs": PADDED_BATCH}
        out: list[Stage] = []
        for kind, lengths in LENGTHS.items():
            draw = Drawer(lengths, np.random.default_rng(5))
            asks = [Ask(self._tokens(PROMPT, f"{kind}-{i}"), exactly(1 + draw())) for i in range(PADDED_REQUESTS)]
            title = _("Static batches of {n}, {kind} lengths …").format(n=PADDED_BATCH, kind=names[kind])
            out.append(Stage(title, knobs if not out else {}, tuple(asks)))
        return out

    def close(self) -> None:
        """Stop what is being sent."""
        if self.sender is not None:
            self.sender.stop()
