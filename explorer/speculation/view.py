"""The Speculation page: who wrote each token, how a draft is verified, and whether it pays."""

import html
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.types import Event
from explorer.base import Clock, ExplorerView
from explorer.canvas.drafttree import DraftTree
from explorer.canvas.ribbon import Ribbon
from explorer.canvas.verification import Verification
from explorer.i18n import _
from explorer.pace import Pace
from explorer.speculation import clock as clocks
from explorer.speculation import picture, words
from explorer.speculation.asking import CSS, Asking
from explorer.speculation.figure import (
    CLOCK_LINES,
    PASS_LINES,
    WINDOW,
    AcceptanceFigures,
    ClockFigure,
    groups_legend,
    legend_html,
)
from explorer.speculation.rows import Round, SpeculationRows, Track
from explorer.speculation.stats import AVERAGED, Group, groups
from explorer.theme import badge, card, empty, grid, pane


class SpeculationView(ExplorerView):
    live_knobs = ("max_num_seqs", "enable_prefix_caching")

    def __init__(self, store: Any, session: Any = None, clock: Clock | None = None, **params: Any) -> None:
        super().__init__(store, session, clock, **params)
        self.rows = SpeculationRows()
        self.pace, self.ribbon_pace = Pace(), Pace()
        self._shown: tuple[Any, ...] = ()
        self._round: tuple[str, int] | str | None = None  # (request, position) of the round on the screen
        self._missed = 0
        self._build()
        self.clock.param.watch(lambda *_events: self._draw_again(), ["request_id", "token_index"])
        self.update()

    # -- what stands where -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        live = self.session is not None
        self.asking = Asking(self.session, self.clock, self.store, self.rows) if live else None
        nothing = words.NOTHING if live else words.NOTHING_RECORDED
        self.requests = pmui.Select(
            label=_("Request"),
            options={_("none yet"): ""},
            value="",
            size="small",
            sizing_mode="stretch_width",
            margin=(0, 0, 10, 0),
        )
        self.requests.param.watch(self._request_chosen, "value")
        self.now = pane(css=CSS, margin=(0, 0, 8, 0))
        self.ribbon = Ribbon(self._token_clicked, empty=nothing)
        self.player = Verification(empty=words.NO_ROUND)
        self.tree = DraftTree(empty=words.NO_ROUND)
        text = card(
            _("The text, and who wrote it"), self.now, self.requests, self.ribbon, kinds="measured",
            hint=_("Accepted, rejected, corrected, bonus. Hover a token for p, q and the draw."),
            acts=_("Click one to look at its verification below; without a click the newest is shown."),
        )  # fmt: skip
        steps = card(
            _("One verification, step by step"), self.player, kinds="measured", margin=0,
            hint=_("The values are those of this very draft. Play it, or go stage by stage."),
        )  # fmt: skip
        shape = card(
            _("Its tree, and who attends to whom"), self.tree, kinds=("measured", "derived"), margin=0,
            hint=_("The pass computes all of the draft at once. The mask keeps every token to its own past."),
        )  # fmt: skip
        self._layout = pn.Column(
            *([self.asking] if self.asking is not None else []), text,
            grid(steps, shape, columns="minmax(0, 3fr) minmax(0, 2fr)", margin=(0, 0, 16, 0)),
            self._clock_card(), self._acceptance_card(), sizing_mode="stretch_width", margin=0,
        )  # fmt: skip

    def _clock_card(self) -> pn.Column:
        self.verdict = pane(css=CSS)
        self.times, self.formula, self.pairs = (
            pane(css=CSS),
            pane(css=CSS, margin=(6, 0, 0, 0)),
            pane(css=CSS, margin=(10, 0, 0, 0)),
        )
        self.curve = ClockFigure()
        drawn = pn.pane.Bokeh(self.curve.root, sizing_mode="stretch_width", margin=0)
        times = pn.Column(
            pane(_part(_("Where a step's time goes"), "measured")), self.times, self.pairs, sizing_mode="stretch_width", margin=0
        )
        curve = pn.Column(
            pane(_part(_("Speed-up over K"), ("modelled", "measured"))), pane(legend_html(CLOCK_LINES), css=CSS), drawn, self.formula,
            sizing_mode="stretch_width", margin=0,
        )  # fmt: skip
        self.clock_parts = pn.Column(
            grid(times, curve, min_width=360, gap=26), sizing_mode="stretch_width", margin=0, visible=False
        )
        above = [self.verdict, *([self.asking.buttons] if self.asking is not None else [])]
        return card(
            _("The clock: does it pay?"), *above, self.clock_parts, kinds=("measured", "modelled"),
            hint=_("Tokens a pass are not the speed-up: drafting takes time, and a pass over more tokens takes longer."),
        )  # fmt: skip

    def _acceptance_card(self) -> pn.Column:
        self.figures = AcceptanceFigures()
        self.legend, self.metrics = pane(css=CSS), pane(css=CSS, margin=(10, 0, 0, 0))
        self.no_acceptance = pane(empty(_("The figures fill as drafts are verified.")))
        parts = [
            (_("Accepted, by position in the draft"), self.figures.positions, ""),
            (_("How many of a draft are accepted"), self.figures.lengths, ""),
            (_("Tokens a request gains in a pass of the target"), self.figures.passes, legend_html(PASS_LINES)),
        ]
        columns = [
            pn.Column(
                pane(f'<p class="sp-what">{html.escape(title)}</p>{legend}', css=CSS),
                pn.pane.Bokeh(plot, sizing_mode="stretch_width", margin=0), sizing_mode="stretch_width", margin=0,
            )
            for title, plot, legend in parts
        ]  # fmt: skip
        self.acceptance = pn.Column(
            self.legend, grid(*columns, min_width=300, gap=20), self.metrics, sizing_mode="stretch_width", margin=0, visible=False
        )
        return card(
            _("Acceptance, by drafter, rule and temperature"), self.no_acceptance, self.acceptance, kinds=("measured", "derived"),
            hint=_("Counted over the drafts that are kept, all requests together. The chance of a token is 1 minus the total variation of p and q."),
        )  # fmt: skip

    def __panel__(self) -> pn.Column:
        return self._layout

    def controls(self) -> dict[str, Any]:
        if self.asking is None:
            return {}
        knobs = self.asking.settings
        return {
            "drafter": knobs.drafter, "num_speculative_tokens": knobs.k, "draft_tree": knobs.tree, "acceptance": knobs.acceptance,
            "draft_temperature": knobs.temperature,
        }  # fmt: skip

    # -- what is new ---------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        with self.lock:
            self._update()

    def _update(self) -> None:
        events: list[Event] = self.new_events()
        shown = (self.shown_step, self.clock.live, self.clock.request_id, self.clock.token_index)
        waiting = self.asking is not None and self.asking.unsettled
        if not events and shown == self._shown:
            self._draw_late()
            if waiting:
                self._update_asking(self.track)
            return
        if self.missed > self._missed:
            self._missed = self.missed
            self.rows.begin_late(self.store)
        self.rows.feed(events)
        if self.rows.restarted:
            self._round = "another engine's"
            if self.asking is not None:
                self.asking.stage.forget()
        # While live the step moves on by itself: only a jump in time or another choice is drawn at once.
        moved = self.rows.restarted or shown[1:] != self._shown[1:] or (shown != self._shown and not self.clock.live)
        self._shown, track = shown, self.track
        self._set(self.now, f'<p class="sp-line">{html.escape(words.setting_words(self.rows.setting))}</p>')
        if moved or self.rows.changed:
            self._draw_requests(track)
        if moved or (track is not None and track.request_id in self.rows.changed):
            self._draw_track(track, moved)
        if moved or self.rows.new_steps or self.rows.changed:
            self._draw_numbers(moved)
        self._update_asking(track)
        self.rows.taken()

    def _update_asking(self, track: Track | None) -> None:
        if self.asking is not None:
            self.asking.followed = track
            self.asking.update(track)

    def _draw_late(self) -> None:
        if self.ribbon_pace.late:
            self._draw_track(self.track, False)
        if self.pace.late:
            self._draw_numbers(False)

    @property
    def track(self) -> Track | None:
        """The request that is looked at: the chosen one, else the one that was drafted for last, else the newest."""
        chosen = self.rows.tracks.get(self.clock.request_id or "")
        if chosen is not None:
            return chosen
        step, best, at = self.shown_step, None, (-1, -1)
        for track in self.rows.tracks.values():
            if track.arrived_step <= step:
                last = max((r.step for r in track.rounds if r.step <= step), default=-1)
                if (last, track.ordinal) > at:
                    best, at = track, (last, track.ordinal)
        return best

    def round_of(self, track: Track | None) -> Round | None:
        """Its round that is looked at: that of the chosen token, else the newest at the step on the screen."""
        if track is None:
            return None
        _tokens, rounds = track.until(self.shown_step)
        position = self.clock.token_index
        if track.request_id == self.clock.request_id and position is not None:
            return next((r for r in reversed(rounds) if r.covers(position)), None)
        return rounds[-1] if rounds else None

    def _draw_requests(self, track: Track | None) -> None:
        step = self.shown_step
        there = [t for t in reversed(self.rows.tracks.values()) if t.arrived_step <= step]
        options = {picture.track_label(t): t.request_id for t in there} or {_("none yet"): ""}
        value = track.request_id if track is not None else ""
        if options != self.requests.options or value != self.requests.value:
            self.requests.param.update(
                options=options, value=value if value in options.values() else next(iter(options.values()))
            )

    def _draw_track(self, track: Track | None, now: bool) -> None:
        if not self.ribbon_pace.due() and not now:
            return
        self.ribbon_pace.late = False
        made = self.round_of(track)
        data = picture.ribbon_data(track, self.shown_step) if track is not None and (track.rounds or track.tokens) else {}
        if data != self.ribbon.data:
            self.ribbon.data = data
        chosen = self.clock.token_index if track is not None and track.request_id == self.clock.request_id else None
        for name, value in (("round", made.position if made is not None else -1), ("selected", -1 if chosen is None else chosen)):
            if getattr(self.ribbon, name) != value:
                setattr(self.ribbon, name, value)
        key = (made.verified.request_id, made.position) if made is not None else None
        if key != self._round:
            self._round = key
            self.player.data = picture.verification_data(track, made) if track is not None and made is not None else {}
            self.tree.data = picture.tree_data(made) if made is not None else {}

    # -- the numbers -----------------------------------------------------------------------------------------------------------

    def _draw_numbers(self, now: bool) -> None:
        if not self.pace.due() and not now:
            return
        self.pace.late = False
        step = self.shown_step
        costs = clocks.costs(self.rows.steps, self.rows.tallies, step)
        pairs = clocks.paired(self.rows.tracks.values(), step)
        self._draw_clock(costs, pairs)
        found = groups(self.rows.tallies, step)
        show(self.acceptance, bool(found))
        show(self.no_acceptance, not found)
        if found:
            rows = [row for row in self.rows.steps if row.step <= step][-WINDOW - AVERAGED :]
            self.figures.show(found, rows)
            self.figures.mark(step, not self.clock.live)
            self._set(self.legend, groups_legend(found))
            self._set(self.metrics, metrics_html(found))

    def _draw_clock(self, costs: clocks.Costs | None, pairs: list[clocks.Paired]) -> None:
        said = words.verdict(costs, pairs, self.session is not None)
        self._set(self.verdict, f'<div class="sp-verdict" role="status">{said}</div>' if said else empty(words.NO_CLOCK))
        show(self.clock_parts, costs is not None)
        if costs is None:
            return
        self.curve.show(costs, pairs)
        self._set(self.times, words.times_html(costs))
        self._set(self.formula, f'<p class="ct-muted ct-small">{html.escape(words.formula(costs))}</p>')
        none = words.NO_PAIR if self.session is not None else words.NO_PAIR_RECORDED
        self._set(self.pairs, words.pairs_html(pairs) if pairs else f'<p class="ct-muted ct-small">{html.escape(none)}</p>')

    @staticmethod
    def _set(target: pn.pane.HTML, body: str) -> None:
        if target.object != body:
            target.object = body

    # -- the selection ------------------------------------------------------------------------------------------------------------

    def _draw_again(self) -> None:
        self._shown = ()  # by the next update: a figure may be changed on the document's own callbacks only

    def _request_chosen(self, event: Any) -> None:
        track = self.track
        if event.new and (track is None or event.new != track.request_id):
            self.clock.param.update(request_id=event.new, token_index=None)

    def _token_clicked(self, position: int | None) -> None:
        track = self.track
        if track is not None:
            self.clock.param.update(request_id=track.request_id, token_index=position)


def show(view: Any, visible: bool) -> None:
    if view.visible != visible:
        view.visible = visible


def _part(title: str, kinds: Any) -> str:
    marks = "".join(badge(kind) for kind in ((kinds,) if isinstance(kinds, str) else kinds))
    return f'<p class="ct-small" style="margin-bottom:6px"><b>{html.escape(title)}</b> {marks}</p>'


def metrics_html(found: list[Group]) -> str:
    """Each group in numbers, and the newest under the names that vLLM's metrics have."""
    head = (_("drafter, rule, temperature"), _("drafts"), _("accepted of looked at"), _("tokens a pass"))
    body = ""
    for group in found:
        cells = (f"{group.rounds:,}", f"{100 * group.rate:.1f} %", f"{group.per_pass:.2f}")
        body += f"<tr><td>{html.escape(group.name)}</td>{''.join(f'<td class=num>{cell}</td>' for cell in cells)}</tr>"
    heads = "".join(f"<th{'' if i == 0 else ' class=num'}>{html.escape(name)}</th>" for i, name in enumerate(head))
    terms = "".join(f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in found[0].metrics())
    under = _("The first line of these, under the names of vLLM's metrics:")
    return (
        f'<div class="sp-scroll"><table class="sp-table"><tr>{heads}</tr>{body}</table></div>'
        f'<p class="sp-what" style="margin-top:10px">{html.escape(under)}</p><dl class="sp-metrics">{terms}</dl>'
    )
