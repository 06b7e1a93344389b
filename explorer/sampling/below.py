"""The cards of the Sampling page that compare texts: branches of a request, two requests side by side, beams."""

from typing import Any

import panel as pn
import panel_material_ui as pmui

from explorer.base import Clock
from explorer.canvas.lanes import TokenLanes
from explorer.i18n import _
from explorer.sampling import beams, lanes, pairs
from explorer.sampling.asking import CSS
from explorer.sampling.picture import track_label
from explorer.sampling.rows import BeamRun, SamplingRows, Track
from explorer.theme import card, empty, pane

NO_BRANCH = _(
    "No branch yet. Choose a token above and click one of its alternatives: the text goes on from there with that token."
)
NO_PARTNER = _("Nothing to compare with yet: move a slider and press Run again so, or send the same prompt with another setting.")
NO_BRANCH_RECORDED = _("No branch of this text at this step of the recorded run.")
NO_PARTNER_RECORDED = _("Nothing to compare with at this step of the recorded run: no other request with this prompt.")
NO_BEAMS = _("No beam search yet. Press the scene Beam search against greedy.")
NO_BEAMS_RECORDED = _("No beam search yet at this step of the recorded run, or none in it.")


class Below(pn.viewable.Viewer):
    """``update`` is called by the page with what it looks at; a click in a tree sets the clock's selection."""

    def __init__(self, store: Any, rows: SamplingRows, clock: Clock, live: bool, **params: Any) -> None:
        super().__init__(**params)
        self.store, self.rows, self.clock = store, rows, clock
        self.sent: dict[str, str] = {}  # requests that repeat another one with other settings, and which
        self._track: Track | None = None
        self._beams_shown: tuple[Any, ...] = ()
        self.branches = TokenLanes(self._node_chosen, empty=NO_BRANCH if live else NO_BRANCH_RECORDED)
        self.partner = _select(_("Beside it"))
        self.partner.param.watch(lambda _event: self._draw_pair(), "value")
        self.pair = pane(css=CSS)
        self._no_partner = NO_PARTNER if live else NO_PARTNER_RECORDED
        self.search = _select(_("Beam search"))
        self.search.param.watch(lambda _event: self._draw_beams(), "value")
        self.beams = TokenLanes(lambda _key: None, empty=NO_BEAMS if live else NO_BEAMS_RECORDED)
        self.beams_told = pane(css=CSS, margin=(10, 0, 0, 0))
        self.sums = pane(css=CSS, margin=(10, 0, 0, 0))
        self._layout = pn.Column(
            card(_("Branches of this text"), self.branches, kinds="measured",
                 hint=_("Each lane is a request, each column a position. A branch hangs where its token was forced."),
                 acts=_("Click a token to look at it.")),
            card(_("Side by side"), self.partner, self.pair, kinds=("measured", "derived"),
                 hint=_("The same prompt twice, with something changed: the first token that differs, and why.")),
            card(_("Beams"), self.search, self.beams, self.beams_told, self.sums, kinds=("measured", "derived"),
                 hint=_("Each lane is a beam; an edge is what it went on from. Struck through: dead. Green: the way to the best sequence.")),
            sizing_mode="stretch_width", margin=0,
        )  # fmt: skip

    def __panel__(self) -> pn.Column:
        return self._layout

    def update(self, track: Track | None, position: int | None, step: int, changed: set[str], moved: bool) -> None:
        """Draw what has changed: ``changed`` are the requests with something new."""
        other = track is not self._track
        self._track, self._step = track, step
        members = [t for t in lanes.family(self.rows.tracks, track) if t.arrived_step <= step] if track is not None else []
        if moved or other or changed.intersection(t.request_id for t in members):
            self.branches.data = lanes.branch_lanes(members, step).data() if len(members) > 1 else {}
        selected = [track.request_id, position] if track is not None and position is not None else []
        if self.branches.selected != selected:
            self.branches.selected = selected
        self._draw_partners(track, other)
        if moved or other or (track is not None and {track.request_id, self.partner.value} & changed):
            self._draw_pair()
        self._draw_searches()
        if moved or self.rows.restarted or changed:
            self._draw_beams()

    # -- side by side --------------------------------------------------------------------------------------------------------------

    def _draw_partners(self, track: Track | None, other: bool) -> None:
        there = pairs.partners(self.rows.tracks, track) if track is not None else []
        options = {track_label(t, self.rows.tracks): t.request_id for t in there}
        value = self.partner.value
        if other or value not in options.values():
            source = self.sent.get(track.request_id) if track is not None else None
            source = source or (track.branched_from if track is not None else None)
            value = source if source in options.values() else next(iter(options.values()), "")
        _offer(self.partner, options, value)

    def _draw_pair(self) -> None:
        track, other = self._track, self.rows.tracks.get(self.partner.value or "")
        if track is None or other is None or other is track:
            _set(self.pair, empty(self._no_partner))
            return
        first, second = sorted((track, other), key=lambda t: t.ordinal)
        _set(self.pair, pairs.pair_html(pairs.side_by_side(self.store, self.rows, first, second)))

    # -- beams ------------------------------------------------------------------------------------------------------------------------

    @property
    def run(self) -> BeamRun | None:
        return self.rows.beams.get(self.search.value or "")

    def show_beams(self) -> None:
        """Have the browser scroll to the newest beam search."""
        if self.search.options:
            self.search.value = next(iter(self.search.options.values()))
        self.beams.look += 1

    def _draw_searches(self) -> None:
        options = {}
        for run in reversed(self.rows.beams.values()):
            prompt = " ".join(self.rows.tracks[run.request_id].prompt_text.split()) if run.request_id in self.rows.tracks else ""
            options[f"{run.request_id} · {_('width')} {run.width} · {prompt[-40:]}"] = run.request_id
        newest = next(iter(options.values()), "")
        chosen = self.search.value if self.search.value in options.values() else ""
        known = len(self.search.options) if chosen else -1
        _offer(self.search, options, chosen if known == len(options) else newest)

    def _draw_beams(self) -> None:
        run = self.run
        steps = [e for e in run.steps if e.step <= self._step] if run is not None else []
        over = run is not None and run.finished is not None and run.finished.step <= self._step
        shown = (run.request_id if run is not None else "", len(steps), over)
        if run is None:
            self.beams.data = {}
        elif shown != self._beams_shown:
            self.beams.data = lanes.beam_lanes(run, self._step).data()
            _set(self.beams_told, f'<p class="sa-line">{beams.told(run, self._step)}</p>')
        self._beams_shown = shown
        _set(self.sums, beams.sums_html(beams.sums(run, self.rows.tracks, self._step)) if run is not None else "")

    # -- walking ---------------------------------------------------------------------------------------------------------------------

    def _node_chosen(self, key: list[Any]) -> None:
        match key:
            case [str(request_id), int(position)] if request_id in self.rows.tracks:
                self.clock.param.update(request_id=request_id, token_index=position)


def _select(label: str) -> Any:
    return pmui.Select(
        label=label, options={}, value=None, size="small", sizing_mode="stretch_width", margin=(0, 0, 10, 0), visible=False
    )


def _offer(select: Any, options: dict[str, str], value: str) -> None:
    """Set what can be chosen; nothing to choose from: not shown."""
    if options != select.options or (value or None) != select.value:
        select.param.update(options=options, value=value or None, visible=bool(options))


def _set(target: pn.pane.HTML, body: str) -> None:
    if target.object != body:
        target.object = body
