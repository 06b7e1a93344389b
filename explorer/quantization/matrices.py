"""The tab "Matrices": which matrix loses how much, and one of them under any grid."""

import html
import threading
import time
from functools import partial
from typing import Any

import panel as pn
import panel_material_ui as pmui
from bokeh.events import Tap

from explorer.i18n import _
from explorer.kv_cache.figure import legend_html
from explorer.pace import Pace, quick
from explorer.quantization import words
from explorer.quantization.figure import COMPARE_LINES, LEVEL_LINES, HeatFigure, MatrixFigures, scale_html
from explorer.quantization.labels import CSS, line, said, set_html, weights_label
from explorer.quantization.rows import MATRICES, QUANTITIES, Place, heat_map
from explorer.quantization.whatif import BITS, COMPARED, GROUP_SIZES, ROW, How, Matrix, Tried, live_knobs
from explorer.theme import badge, card, empty, grid, pane

AT_ONCE_S = 0.05  # of work on the comparison in one tick
PATIENCE_S = 60.0  # after which a matrix that was asked for may be asked for again
LEVEL_NAMES = {_("even (int)"): "int", _("normal float (NF4)"): "nf4", _("floating point (FP8)"): "fp8"}
ONE_LINE: dict[str, Any] = {"sx": {"& .MuiToggleButton-root": {"whiteSpace": "nowrap"}}}
KNOBS = ("levels", "bits", "group_size", "symmetric")


class MatricesPanel(pn.viewable.Viewer):
    """``view``: the page's view, whose parameters say which matrix and which grid, and whose rows say what is known."""

    def __init__(self, view: Any, css: str, **params: Any) -> None:
        super().__init__(**params)
        self.view, self.css = view, CSS + css
        self.live = view.session is not None
        self.pace = Pace()
        self.matrix: Matrix | None = None
        self.tried: Tried | None = None
        self.compared: list[tuple[How, dict[str, float]]] = []
        self.running: tuple[str, dict[str, float]] | None = None
        self.failed = ""
        self.asked: tuple[Place, float] | None = None  # what was asked for, and when
        self._inside: Place | None = None  # which matrix somebody wants to see inside
        self._event: Any = None  # of ``matrix``
        self._both: Any = (None, None)  # the levels' comparison, and what it is of
        self._busy, self._wanted, self._fresh, self._fresh_table = threading.Lock(), False, False, False
        self._in_table: Tried | None = None  # whose row is marked
        self._drawn: Any = None
        self._build()
        view.param.watch(lambda *_events: self._moved(), list(KNOBS))
        view.param.watch(lambda *_events: self.look_inside(), ["layer", "matrix"])

    # -- what stands where ---------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        view, small = self.view, {"size": "small", "margin": 0}
        wide = {**small, "sizing_mode": "stretch_width"}
        self.quantity = self._bound(
            "quantity",
            pmui.RadioButtonGroup(options={q.title: q.key for q in QUANTITIES.values()}, value="sqnr", **ONE_LINE, **small),
        )
        self.layer = self._bound(
            "layer", pmui.Select(label=_("Layer"), options=list(range(view.layer + 1)), value=view.layer, **wide)
        )
        self.which = self._bound("matrix", pmui.Select(label=_("Matrix"), options=list(MATRICES), value=view.matrix, **wide))
        self.fetch = pmui.Button(label=_("Look inside"), icon="zoom_in", variant="outlined", **small)
        self.fetch.on_click(lambda _event: self.look_inside(again=True))
        self.heat = HeatFigure()
        self.heat.root.on_event(Tap, self._tapped)
        self.scale, self.told = pane(css=self.css), pane(css=self.css, margin=(4, 0, 0, 0))
        self.no_map = pane(empty(words.NO_ENGINE), margin=(10, 0, 0, 0))
        self.map = pn.Column(
            self.scale, pn.pane.Bokeh(self.heat.root, sizing_mode="stretch_width", margin=0), self.told,
            sizing_mode="stretch_width", margin=(8, 0, 0, 0), visible=False,
        )  # fmt: skip
        first = card(
            _("What rounding did, layer by layer"), self.quantity, self.no_map, self.map, kinds="measured",
            hint=_("Every linear layer's weights that run, against the checkpoint's own."), acts=_("Click a cell to look inside."),
        )  # fmt: skip
        choose = grid(self.layer, self.which, *([self.fetch] if self.live else []), min_width=120, gap=14)
        self.state = pane(css=self.css, margin=(8, 0, 0, 0))
        self.no_matrix = pane(empty(words.LOOK_INSIDE if self.live else words.NO_MATRIX_RECORDED), margin=(10, 0, 0, 0))
        self._build_inside(wide, small)
        second = card(
            _("Inside one matrix"), choose, self.state, self.no_matrix, self.inside, kinds=("derived", "what-if"), margin=0,
            hint=_("The checkpoint's weights under any grid, computed from the recorded matrix; the engine does not notice."),
        )  # fmt: skip
        self._layout = pn.Column(first, second, sizing_mode="stretch_width", margin=0)

    def _build_inside(self, wide: dict[str, Any], small: dict[str, Any]) -> None:
        view, self.figures = self.view, MatrixFigures()
        self.levels = self._bound("levels", pmui.Select(label=_("Levels"), options=LEVEL_NAMES, value=view.levels, **wide))
        self.bits = self._bound(
            "bits", quick(pmui.IntSlider(label=_("Bits"), start=BITS[0], end=BITS[-1], step=1, value=view.bits, **wide))
        )
        sizes = {_("whole row") if size == ROW else str(size): size for size in GROUP_SIZES}
        self.group = self._bound("group_size", pmui.Select(label=_("Group size"), options=sizes, value=view.group_size, **wide))
        self.symmetric = self._bound("symmetric", pmui.Switch(label=_("Symmetric"), value=view.symmetric, **small))
        self.numbers, self.why = pane(css=self.css, margin=(12, 0, 0, 0)), pane(css=self.css)
        self.run = pmui.Button(label=_("Run the model with this"), icon="bolt", color="warning", variant="outlined", **small)
        self.run.on_click(lambda _event: self._make_live())
        self.by = pmui.RadioButtonGroup(
            options={_("output channels"): False, _("input channels"): True}, value=False, **ONE_LINE, **small
        )
        self.by.param.watch(lambda _event: self._redraw(), "value")
        self.level_words, self.source, self.table = (
            pane(css=self.css),
            pane(css=self.css, margin=(12, 0, 0, 0)),
            pane(css=self.css),
        )

        def part(title: str, plot: Any, *above: Any, below: Any = ()) -> pn.Column:
            head = pane(f'<p class="qp-what"><b>{html.escape(title)}</b></p>', css=self.css)
            drawn = pn.pane.Bokeh(plot, sizing_mode="stretch_width", margin=0)
            return pn.Column(head, *above, drawn, *below, sizing_mode="stretch_width", margin=0)

        live = [pn.Row(self.run, margin=(10, 0, 4, 0)), self.why] if self.live else []
        f = self.figures
        wide_grid: dict[str, Any] = {"min_width": 300, "gap": 22, "margin": (14, 0, 0, 0)}
        self.inside = pn.Column(
            grid(self.levels, self.bits, self.group, self.symmetric, min_width=150, gap=18, margin=(12, 0, 0, 0)), self.numbers, *live,
            grid(
                part(_("The weights, and the levels that they can take"), f.levels, pane(legend_html(LEVEL_LINES), css=self.css), self.level_words),
                part(_("int4's and NF4's levels on the same weights"), f.compared, pane(legend_html(COMPARE_LINES), css=self.css),
                     pane(f'<p class="qp-what">{html.escape(_("Of int4’s two outermost levels a group has one. NF4 spends more of its levels about 0 and fewer at the ends."))}</p>', css=self.css)),
                columns="minmax(0, 1fr) minmax(0, 1fr)", **wide_grid,
            ),
            grid(part(_("The error of each weight"), f.errors), part(_("The scales of the groups"), f.scales),
                 part(_("Error by channel"), f.channels, below=[self.by]), **wide_grid),
            self.source,
            pane(f'<p class="qp-what" style="margin-top:14px"><b>{html.escape(_("The same matrix on other grids"))}</b> {badge("derived")}</p>', css=self.css),
            self.table, sizing_mode="stretch_width", margin=0, visible=False,
        )  # fmt: skip

    def _bound(self, name: str, widget: Any) -> Any:
        """``widget`` shows the view's parameter and sets it."""
        view = self.view

        def show(event: Any) -> None:
            if name == "layer" and event.new not in widget.options:
                widget.options = list(range(event.new + 1))
            if widget.value != event.new:
                widget.value = event.new

        def take(event: Any) -> None:
            if event.new is not None and getattr(view, name) != event.new:
                setattr(view, name, event.new)

        widget.param.watch(take, "value")
        view.param.watch(show, name)
        return widget

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what a user does ----------------------------------------------------------------------------------------------------

    @property
    def place(self) -> Place:
        return self.view.layer, self.view.matrix

    @property
    def how(self) -> How:
        view = self.view
        return How(view.levels, view.bits, view.group_size, view.symmetric)

    def look_inside(self, again: bool = False) -> None:
        """The chosen matrix is wanted; ``again``: also where it was asked for already."""
        self._inside = self.place
        if again:
            self.asked = None
        self._drawn = None

    def _tapped(self, event: Any) -> None:
        place = self.heat.place(event.x, event.y)
        change = self.view.change
        if place is not None and change is not None and place in change.layers:
            self.view.layer = place[0]  # one after the other: whoever listens may take one event at a time
            self.view.matrix = place[1]
            self.look_inside()

    def _make_live(self) -> None:
        knobs, _why = live_knobs(self.how)
        if knobs is not None and self.live:
            self.view.session.reconfigure(self.view.clock.owner, **knobs)

    def _redraw(self) -> None:
        self._fresh = True
        self._soon()

    def _moved(self) -> None:
        """A knob of the what-if moved: computed at once and beside the document, drawn in its next tick. Of many moves in a row the last counts."""
        self._wanted = True
        self._compute()
        self._soon()

    def _compute(self) -> None:
        if not self._busy.acquire(blocking=False):
            return  # who is at it sees that more is wanted
        try:
            while self._wanted:
                self._wanted, matrix = False, self.matrix
                if matrix is not None:
                    self.tried, self._fresh = matrix.tried(self.how), True
                    size = self.view.group_size
                    if self._both[1] != (id(matrix), size):
                        self._both = (matrix.compare_levels(size), (id(matrix), size))
        finally:
            self._busy.release()

    def _soon(self) -> None:
        document = pn.state.curdoc
        if document is not None:
            document.add_next_tick_callback(partial(self._draw_fresh, True))

    # -- what is drawn ---------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Called by the view, with its lock held, in the document's own callbacks."""
        view, rows = self.view, self.view.rows
        self._ask()
        event = rows.matrix(self.place, view.shown_step)
        if event is not self._event:
            self._take(event)
        if self._wanted:
            self._compute()
        self._compare()
        drawn = (
            view.change,
            view.quantity,
            self.place,
            self.how,
            view.shown_step,
            self._status,
            id(event),
            self.asked,
            view.num_layers,
        )
        moved = drawn != self._drawn
        if moved or ((rows.changed or self.pace.late) and self.pace.due()):
            self._drawn, self.pace.late = drawn, False
            self._draw_map()
            self._draw_state()
        self._draw_fresh()

    @property
    def _status(self) -> str:
        return self.view.session.status if self.live else "recorded"

    def _ask(self) -> None:
        """Ask for the wanted matrix, once; again where other weights run since."""
        rows, place = self.view.rows, self.place
        if not self.live or self._inside != place or self._status not in ("running", "paused") or not rows.changes:
            return
        there = rows.observed.get(place)
        if there is not None and not rows.stale(place):
            self.asked = None
            return
        now = time.monotonic()
        since = rows.changes[-1].event.time_ns
        if self.asked is not None and self.asked[0] == place and now - self.asked[1] < PATIENCE_S and self._asked_for == since:
            return
        self.asked, self._asked_for = (place, now), since
        self.view.session.observe_matrix(self.view.clock.owner, *place)

    _asked_for = -1  # of which weights

    def _take(self, event: Any) -> None:
        self._event, self.compared, self.running, self.failed = event, [], None, ""
        self.tried = self._in_table = None
        self.matrix = None
        if event is not None:
            try:
                self.matrix = Matrix(event)
            except ValueError as error:
                self.failed = str(error)
        self._wanted, self._fresh = self.matrix is not None, True

    def _compare(self) -> None:
        """Some more rows of the comparison, no more than one tick has time for."""
        begin = time.monotonic()
        while self.matrix is not None and len(self.compared) < len(COMPARED) and time.monotonic() - begin < AT_ONCE_S:
            how = COMPARED[len(self.compared)]
            self.compared = [*self.compared, (how, self.matrix.compare(how))]
            self._compare_running(self.matrix)
            self._fresh_table = True

    def _compare_running(self, matrix: Matrix) -> None:
        change = self.view.change
        known = change.layers.get(self.place) if change is not None else None
        if self.running is None and change is not None and known is not None:
            numbers = matrix.compare_running(known.bits_per_weight)
            if numbers is not None:
                self.running = (weights_label(change.event.method, change.event.group_size, change.event.options), numbers)

    def _draw_map(self) -> None:
        view, change = self.view, self.view.change
        quantity = QUANTITIES[view.quantity]
        there = change is not None and bool(change.layers)
        for part, visible in ((self.map, there), (self.no_map, not there)):
            if part.visible != visible:
                part.visible = visible
        if not self.live:
            nothing = words.NOT_RECORDED
        else:
            nothing = words.NO_WATCH if self._status in ("running", "paused") else words.NO_ENGINE
        set_html(self.no_map, empty(nothing))
        layers = list(range(max(1, view.num_layers, view.layer + 1)))
        if self.layer.options != layers:
            self.layer.options = layers
        if not there or change is None:
            return
        found = heat_map(change, quantity)
        self.heat.show(found, quantity, view.num_layers)
        self.heat.choose(self.place)
        set_html(self.scale, scale_html(found, quantity))
        set_html(self.told, words.map_html(change, quantity, found.exact, 7 * view.num_layers))

    def _draw_state(self) -> None:
        event, (layer, name) = self._event, self.place
        if self.failed:
            text = said(html.escape(self.failed), "error")
        elif event is None and self.asked is not None and self.asked[0] == self.place:
            text = said(html.escape(words.FETCHING.format(layer=layer, name=name)), "wait")
        elif event is None:
            text = line(html.escape(_("Layer {layer}, {name}: not fetched yet.").format(layer=layer, name=name)))
        else:
            about = _(
                "Layer {layer}, {name}: {rows:,} output × {columns:,} input channels; inputs: {n} recorded positions of calibration text."
            )
            text = line(
                html.escape(about.format(layer=layer, name=name, rows=event.rows, columns=event.columns, n=event.input_rows))
            )
        set_html(self.state, text)
        for part, visible in ((self.inside, self.matrix is not None), (self.no_matrix, event is None)):
            if part.visible != visible:
                part.visible = visible
        if self.live:
            self._draw_run()
            if self.fetch.disabled != (self._status not in ("running", "paused")):
                self.fetch.disabled = not self.fetch.disabled

    def _draw_fresh(self, locking: bool = False) -> None:
        """What was computed since. ``locking``: called by itself, not by the view."""
        if locking and not self.view.lock.acquire(blocking=False):
            return  # the view is at it, or comes by soon
        try:
            if self.matrix is None or self.tried is None:
                return
            if self._fresh:
                self._fresh = False
                self._draw_inside(self.tried, self.matrix)
            if self._fresh_table or self.tried is not self._in_table:
                self._fresh_table, self._in_table = False, self.tried
                self._draw_table(self.tried, self.matrix)
        finally:
            if locking:
                self.view.lock.release()

    def _draw_inside(self, tried: Tried, matrix: Matrix) -> None:
        how = tried.how
        for widget, disabled in (
            (self.bits, how.levels != "int"),
            (self.symmetric, how.levels != "int"),
            (self.group, how.levels == "fp8"),
        ):
            if widget.disabled != disabled:
                widget.disabled = disabled
        self.figures.show(tried, self._both[0], self.by.value)
        set_html(self.numbers, words.tried_html(tried, matrix.every))
        set_html(self.level_words, f'<p class="qp-what">{html.escape(words.levels_words(tried, matrix.event))}</p>')

    def _draw_table(self, tried: Tried, matrix: Matrix) -> None:
        set_html(self.table, words.comparison_html([(h.label, n) for h, n in self.compared], tried, self.running))
        set_html(self.source, words.source_html(matrix.event, self.compared))

    def _draw_run(self) -> None:
        how, change = self.how, self.view.change
        knobs, why = live_knobs(how)
        if knobs is not None and words.what_became(how, change.event if change is not None else None):
            knobs, why = None, words.RUNS_ALREADY
        if knobs is not None and self._status not in ("running", "paused"):
            knobs, why = None, words.NEEDS_ENGINE
        if self.run.disabled != (knobs is None):
            self.run.disabled = knobs is None
        told = why or _("Changes the engine for everybody, at the next step; running requests are computed again.")
        set_html(self.why, f'<p class="ct-small ct-muted">{badge("live")} {html.escape(told)}</p>')
