"""The Sampling page: why this token came out, and which one another setting would have given."""

import time
from html import escape
from typing import Any

import panel as pn
import panel_material_ui as pmui
import param
from bokeh.events import Tap

from engine.events.types import Event, TokenSampled
from engine.request import SamplingParams
from explorer.base import Clock, ExplorerView
from explorer.canvas.choice import ChoicePicture
from explorer.canvas.strip import TokenStrip
from explorer.delivery import as_one
from explorer.i18n import _
from explorer.pace import Pace, quick
from explorer.sampling import picture, whatif
from explorer.sampling.asking import CSS, Asking
from explorer.sampling.below import Below
from explorer.sampling.choice import Choice, outcome_choice, recorded_choice
from explorer.sampling.figure import LINES, legend_html, lines, positions_figure
from explorer.sampling.rows import Point, SamplingRows, Track
from explorer.sampling.settings import Settings
from explorer.sampling.words import NOTHING, NOTHING_RECORDED, outcome_words, recorded_words
from explorer.theme import card, empty, grid, heading, pane

LATE_MS = 20
WHAT_BUTTONS_DO = _(
    "Make live: a request of yours that still runs goes on with these values from its next token on. Run again so: the same prompt "
    "and seed as a new request."
)
HINT_CHOICE = _("Each row is a candidate, each column what a processor left of it, in the order in which they are applied.")


class SamplingView(ExplorerView):
    live_knobs = ("max_num_seqs", "enable_prefix_caching")
    url_params = (*whatif.KNOBS, "nucleus_p", "fixed_k")

    temperature = param.Number(default=None, allow_None=True, bounds=(0, 100), doc="What if; None: as recorded.")
    top_k = param.Integer(default=None, allow_None=True, bounds=(-1, None))
    top_p = param.Number(default=None, allow_None=True, bounds=(0, 1), inclusive_bounds=(False, True))
    min_p = param.Number(default=None, allow_None=True, bounds=(0, 1))
    repetition_penalty = param.Number(default=None, allow_None=True, bounds=(0, 100), inclusive_bounds=(False, True))
    presence_penalty = param.Number(default=None, allow_None=True, bounds=(-2, 2))
    frequency_penalty = param.Number(default=None, allow_None=True, bounds=(-2, 2))
    nucleus_p = param.Number(default=0.9, bounds=(0.05, 0.999), doc="Mass of the nucleus in the plots over positions.")
    fixed_k = param.Integer(default=10, bounds=(1, 200), doc="The fixed top-k that is compared with it.")

    def __init__(self, store: Any, session: Any = None, clock: Clock | None = None, **params: Any) -> None:
        super().__init__(store, session, clock, **params)
        self.rows = SamplingRows()
        self.choice: Choice | None = None  # what is on the screen
        self._looked: tuple[str, int] | None = None  # (request, position) on the screen
        self._event: TokenSampled | None = None
        self._basis: whatif.Basis | None = None
        self._history: set[int] = set()
        self._recorded = SamplingParams()
        self._shown: tuple[Any, ...] = ()
        self._plotted: tuple[Any, ...] = ()
        self._by_hand = self._late = False  # a person moves a knob; one moved while nothing is drawn
        self._redrawn = (0.0, 0.0)  # when, and for how long nothing is drawn after it
        self._missed = 0
        self.pace = Pace()  # of the plots
        self._build()
        self.param.watch(lambda *_events: self._redraw(), list(whatif.KNOBS))
        self.param.watch(lambda *_events: self._draw_again(), ["nucleus_p", "fixed_k"])
        self.clock.param.watch(lambda *_events: self._draw_again(), ["request_id", "token_index"])
        self.update()

    # -- what stands where -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        live = self.session is not None
        nothing = NOTHING if live else NOTHING_RECORDED
        self.requests = pmui.Select(
            label=_("Request"),
            options={_("none yet"): ""},
            value="",
            size="small",
            sizing_mode="stretch_width",
            margin=(8, 0, 10, 0),
        )
        self.requests.param.watch(self._request_chosen, "value")
        self.strip = TokenStrip(self._token_clicked, self._branch_clicked, empty=nothing, recorded=not live)
        self.picture = ChoicePicture(empty=nothing)
        self.settings = Settings(self._knob_moved)
        self.below = Below(self.store, self.rows, self.clock, live)
        called = (self._moved_settings, self._forget_settings, self.below.show_beams)
        self.asking = Asking(self.session, self.clock, *called, self.below.sent) if live else None
        self.head = pane(margin=(0, 0, 10, 0))
        self.told_of = pane(css=CSS, margin=(8, 0, 0, 0))
        self.plots = positions_figure(self.nucleus_p, self.fixed_k)
        for plot in self.plots.plots:
            plot.on_event(Tap, self._plot_tapped)
        self.legend = pane(legend_html(LINES), css=CSS)
        self.plots_empty = pane(empty(_("The plots fill as tokens come.")))
        drawn = pn.pane.Bokeh(self.plots.root, sizing_mode="stretch_width", margin=0)
        # In a column: a pane itself would stay hidden.
        self.plots_pane = pn.Column(drawn, sizing_mode="stretch_width", margin=0, visible=False)
        which = card(
            _("Which token"), self.requests, self.strip, kinds="measured",
            acts=_("Click a token to look at its choice; without a click the newest is shown.")
            + (" " + _("Click an alternative to branch there.") if live else ""),
        )  # fmt: skip
        self.choice_card = card("", self.head, self.picture, self.told_of, margin=0)
        over = card(
            _("Over the positions of this text"), self._mark_sliders(), self.legend, self.plots_empty, self.plots_pane, kinds=("measured", "derived"),
            margin=(16, 0, 16, 0), hint=_("Of the raw distribution, at temperature 1."),
            acts=_("Click a position to look at its token."),
        )  # fmt: skip
        self._layout = pn.Column(
            *([self.asking] if self.asking is not None else []), which,
            grid(self._settings_card(), self.choice_card, columns="minmax(250px, 300px) minmax(0, 1fr)"), over, self.below,
            sizing_mode="stretch_width", margin=0,
        )  # fmt: skip

    def _settings_card(self) -> pn.Column:
        small = {"size": "small", "variant": "outlined", "margin": 0, "sizing_mode": "stretch_width", "disabled": True}
        self.reset = pmui.Button(label=_("As recorded"), icon="undo", **small)
        self.live = pmui.Button(label=_("Make live"), icon="bolt", color="warning", **small)
        self.again = pmui.Button(label=_("Run again so"), icon="replay", **small)
        self.reset.on_click(lambda _event: self._forget_settings())
        self.live.on_click(lambda _event: self._make_live())
        self.again.on_click(lambda _event: self._run_again())
        below: list[Any] = [self.reset]
        if self.session is not None:
            below += [self.live, self.again, pane(f'<p class="ct-muted ct-small">{escape(WHAT_BUTTONS_DO)}</p>')]
        return card(
            _("What if"), self.settings, pn.Column(*below, sizing_mode="stretch_width", margin=(14, 0, 0, 0), styles={"gap": "8px"}),
            kinds="what-if", margin=0, hint=_("Other settings for the same token, the same logits, the same dart."),
        )  # fmt: skip

    def _mark_sliders(self) -> pn.Column:
        wide = {"size": "small", "margin": 0, "sizing_mode": "stretch_width"}
        p: Any = pmui.FloatSlider.from_param(
            self.param.nucleus_p, start=0.05, end=0.99, step=0.01, label=_("Nucleus of mass p"), **wide
        )
        k: Any = pmui.IntSlider.from_param(self.param.fixed_k, start=1, end=100, step=1, label=_("A fixed top-k"), **wide)
        return grid(quick(p), quick(k), min_width=180, gap=22, margin=(0, 0, 8, 0))

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what is new ---------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        if self.lock.acquire(blocking=False):  # else a knob is being drawn, and the document need not wait: there is a next tick
            try:
                self._update()
            finally:
                self.lock.release()

    def _update(self) -> None:
        if self.session is not None:
            self.session.look_at_candidates(self.clock.owner)
        events: list[Event] = self.new_events()
        self._redraw_late()
        shown = (self.shown_step, self.clock.live, self.clock.request_id, self.clock.token_index)
        if not events and shown == self._shown:
            if self.pace.late:
                self._draw_plots(self.track)
            return
        if self.missed > self._missed:
            self._missed = self.missed
            self.rows.begin_late(self.store)
        self.rows.feed(events)
        if self.rows.restarted:
            self._looked, self._event, self._basis, self._plotted = None, None, None, ()
        moved, self._shown = shown != self._shown, shown
        track = self.track
        if moved or self.rows.restarted or self.rows.changed:
            self._draw_requests(track)
        if moved or self.rows.restarted or (track is not None and track.request_id in self.rows.changed):
            self._draw_track(track)
        point = self.point_of(track)
        self.below.update(track, point.position if point is not None else None, shown[0], self.rows.changed, moved)
        self.rows.taken()

    @property
    def track(self) -> Track | None:
        """The request that is looked at: the chosen one, else the one that got a token last."""
        chosen = self.rows.tracks.get(self.clock.request_id or "")
        if chosen is not None and not chosen.is_beam:
            return chosen
        step = self.shown_step
        best, at = None, -1
        for track in self.rows.tracks.values():
            if not track.is_beam and track.points and track.arrived_step <= step:
                last = max((p.step for p in track.until(step)), default=-1)
                if last > at:
                    best, at = track, last
        return best

    def point_of(self, track: Track | None) -> Point | None:
        """Its token that is looked at: the chosen one, else its newest at the step on the screen."""
        if track is None:
            return None
        points = track.until(self.shown_step)
        if track.request_id == self.clock.request_id and self.clock.token_index is not None:
            return next((p for p in points if p.position == self.clock.token_index), None)
        return points[-1] if points else None

    def _draw_requests(self, track: Track | None) -> None:
        step = self.shown_step
        there = [t for t in reversed(self.rows.tracks.values()) if not t.is_beam and t.arrived_step <= step]
        options = {picture.track_label(t, self.rows.tracks): t.request_id for t in there} or {_("none yet"): ""}
        value = track.request_id if track is not None else ""
        if options != self.requests.options or value != self.requests.value:
            self.requests.param.update(
                options=options, value=value if value in options.values() else next(iter(options.values()))
            )

    def _draw_track(self, track: Track | None) -> None:
        points = track.until(self.shown_step) if track is not None else []
        point = self.point_of(track)
        self.strip.data = picture.strip_data(track, points) if track is not None else {}
        self.strip.selected = point.position if point is not None else -1
        self._draw_plots(track)
        self._look_at(track, point)

    # -- one token -------------------------------------------------------------------------------------------------------------

    def _look_at(self, track: Track | None, point: Point | None) -> None:
        looked = (track.request_id, point.position) if track is not None and point is not None else None
        if looked != self._looked or (self._basis is not None and point is not None and point.whole and not self._basis.full):
            self._looked, self._event, self._basis = looked, None, None
            if track is not None and point is not None:
                self._recorded = whatif.params_of(track.sampling_at(point.position))
                self._history = {t for part in track.before(point.position) for t in part}
                self._event, logits = self.rows.events_of(self.store, point, track.request_id)
                if logits is not None:
                    self._basis = whatif.Basis.of_logits(logits, track.before(point.position))
                elif self._event is not None and self._event.top:
                    self._basis = whatif.Basis.of_candidates(self._event, track.before(point.position))
        self._draw_alternatives(track, point)
        self._draw_choice()

    def _draw_alternatives(self, track: Track | None, point: Point | None) -> None:
        found: dict[str, Any] = {}
        if track is not None and point is not None:
            items, branch = picture.alternatives(self._event), self.session is not None
            found = {"position": point.position, "token": point.text, "items": items, "branch": branch}
        if found != self.strip.alternatives:
            self.strip.alternatives = found

    @property
    def changes(self) -> dict[str, Any]:
        """The knobs that differ from what was recorded."""
        values = {name: getattr(self, name) for name in whatif.KNOBS}
        return {name: value for name, value in values.items() if value is not None and value != getattr(self._recorded, name)}

    def _moved_settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in whatif.KNOBS if getattr(self, name) is not None}

    def _redraw(self) -> None:
        """A knob moved. Drawn at once, unless many come together: then as often as there is time, and the last of them always."""
        with self.lock:
            begin = time.monotonic()
            if begin - self._redrawn[0] < self._redrawn[1]:
                self._wait_to_redraw()
                return
            with as_one():
                self._draw_choice()
            self._redrawn = (time.monotonic(), min(0.1, time.monotonic() - begin))

    def _wait_to_redraw(self) -> None:
        """Soon, where there is a document to wait for; else the next ``update`` does it."""
        document = pn.state.curdoc
        if document is not None and not self._late:
            document.add_timeout_callback(self._redraw_late, LATE_MS)
        self._late = True

    def _redraw_late(self) -> None:
        with self.lock:
            if self._late:
                self._late = False
                self._draw_choice()
                self._redrawn = (time.monotonic(), 0.0)

    def _draw_choice(self) -> None:
        event, changes = self._event, self.changes
        params = self._recorded.changed(**changes)
        need = set() if self._basis is None or self._basis.full else {"repetition_penalty"}
        if not self._by_hand:
            self.settings.show_params(params, need)
        self._draw_buttons(changes)
        if event is None:
            self.choice = None
            what = self.strip.empty if self._looked is None else _("What was recorded of this token is no longer kept.")
            self.head.object = heading(_("How it was chosen"), "measured", HINT_CHOICE)
            self.picture.empty, self.picture.data = what, {}
            self.told_of.object = ""
            return
        try:
            self.choice, words = self._made(event, params, changes)
        except ValueError as error:  # what was recorded does not allow this question
            self.choice, words = recorded_choice(event, self._recorded, self._vocab, self._history), escape(str(error))
        kinds = ("derived", "what-if") if self.choice.derived else ("measured",)
        self.head.object = heading(_("How {token} was chosen").format(token=f"“{event.text}”"), kinds, HINT_CHOICE)
        self.picture.data = picture.choice_data(self.choice, params, self.rows.text_of)
        self.told_of.object = f'<p class="sa-line">{words}</p>'

    def _made(self, event: TokenSampled, params: SamplingParams, changes: dict[str, Any]) -> tuple[Choice, str]:
        if not changes:
            return recorded_choice(event, self._recorded, self._vocab, self._history), recorded_words(event, self._recorded)
        if self._basis is None:
            raise ValueError(_("No candidates were recorded with this token: there is nothing to recompute."))
        outcome = whatif.recompute(self._basis, params, event.u)
        orders = whatif.orders_differ(self._basis, params, outcome)
        words = outcome_words(outcome, orders, event, params, self.rows.text_of)
        return outcome_choice(outcome, params, event.token_id, event.u, self._vocab), words

    @property
    def _vocab(self) -> int:
        return self.rows.vocab_size or 1

    def _draw_buttons(self, changes: dict[str, Any]) -> None:
        track = self.track
        mine = self.session is not None and track is not None and self.session.owns(track.group_id, self.clock.owner)
        for button, off in (
            (self.reset, not any(getattr(self, name) is not None for name in whatif.KNOBS)),
            (self.live, not (changes and mine)), (self.again, not changes or track is None),
        ):  # fmt: skip
            if button.disabled != off:
                button.disabled = off

    # -- over positions ----------------------------------------------------------------------------------------------------------

    def _draw_plots(self, track: Track | None) -> None:
        points = track.until(self.shown_step) if track is not None else []
        point = self.point_of(track)
        marks = (track.request_id if track is not None else "", self.nucleus_p, self.fixed_k)
        if not self.pace.due() and self._plotted and self._plotted[0] == marks and self.clock.live:
            return
        self.pace.late = False
        known = [(p.position, p.whole) for p in points]
        if self._plotted and self._plotted[0] == marks and known[: len(self._plotted[1])] == self._plotted[1]:
            new = points[len(self._plotted[1]) :]
            if new:
                self.plots.add(new, self.nucleus_p, self.fixed_k)
        else:
            self.plots.show(points, self.nucleus_p, self.fixed_k)
            self.legend.object = legend_html(lines(self.nucleus_p, self.fixed_k))
        self._plotted = (marks, known)
        for view, visible in ((self.plots_pane, bool(points)), (self.plots_empty, not points), (self.legend, bool(points))):
            if view.visible != visible:
                view.visible = visible
        if points:
            self.plots.look_at(points[0].position, points[-1].position, point.position if point is not None else None)

    def _draw_again(self) -> None:
        self._shown = ()  # by the next update: a figure may be changed on the document's own callbacks only

    def _plot_tapped(self, event: Any) -> None:
        track = self.track
        if track is not None and event.x is not None and round(event.x) in track.points:
            self.clock.param.update(request_id=track.request_id, token_index=round(event.x))

    # -- the selection ------------------------------------------------------------------------------------------------------------

    def _request_chosen(self, event: Any) -> None:
        track = self.track
        if event.new and (track is None or event.new != track.request_id):
            self.clock.param.update(request_id=event.new, token_index=None)

    def _token_clicked(self, position: int) -> None:
        """A second click lets go of it. (The first one may be on the newest token, which is shown without having been chosen.)"""
        track, clock = self.track, self.clock
        if track is not None:
            again = (clock.request_id, clock.token_index) == (track.request_id, position)
            clock.param.update(request_id=track.request_id, token_index=None if again else position)

    # -- what the user does ---------------------------------------------------------------------------------------------------------

    def _knob_moved(self, name: str, value: float) -> None:
        with self.lock:  # a slider under a person's hand is not set meanwhile: it may be further than what is drawn
            self._by_hand = True
            try:
                setattr(self, name, None if value == getattr(self._recorded, name) else value)
            finally:
                self._by_hand = False

    def _branch_clicked(self, position: int, token_id: int) -> None:
        track = self.track
        if self.asking is not None and track is not None:
            self.asking.branch(track, position, token_id)

    def _make_live(self) -> None:
        track = self.track
        if track is not None and self.changes:
            self.session.update_sampling(track.group_id, self.clock.owner, **self.changes)

    def _run_again(self) -> None:
        track = self.track
        if self.asking is not None and track is not None:
            self.asking.again(track, self.changes)

    def _forget_settings(self, _scene: str = "") -> None:
        self.param.update(**dict.fromkeys(whatif.KNOBS))
