"""The first tab: the schedule as it runs, the load that makes it, and what that is worth."""

import html
import time
from collections.abc import Callable, Sequence
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.types import Event
from explorer.batching import words
from explorer.batching.feed import Feed
from explorer.batching.figure import PERCENTILES, GapsFigure, gaps_ms
from explorer.batching.load import CSS, LoadPanel
from explorer.batching.scenes import MOVED, SCENES
from explorer.canvas.schedule import Schedule
from explorer.i18n import _
from explorer.pace import Pace
from explorer.quantization.labels import set_html
from explorer.scenes import scene_buttons
from explorer.theme import card, empty, grid, pane

PATIENCE_S = 10.0  # for the knobs of a scene
MEASURES_S = 0.5  # between two looks at the measures


class MeasuresPace(Pace):
    seconds = MEASURES_S


class NowPanel(pn.viewable.Viewer):
    """``view``: the page's view."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        live = view.session is not None
        self.canvas = Schedule(
            self._selected, self._goto, empty=words.NOTHING if live else words.NOTHING_RECORDED, axis=view.axis
        )
        self.canvas.param.watch(lambda event: setattr(view, "axis", event.new), "axis")
        view.param.watch(lambda event: setattr(self.canvas, "axis", event.new), "axis")
        view.clock.param.watch(lambda _event: self._mark(), "request_id")
        self.feed = Feed(self.canvas, view.rows)
        self.now = pane(css=CSS, margin=(0, 0, 6, 0))
        self.gaps = GapsFigure()
        self.tiles, self.table, self.line = pane(css=CSS), pane(css=CSS), pane(css=CSS, margin=(0, 0, 8, 0))
        self.pace = MeasuresPace()
        self._drawn: Any = None
        self.stage = SceneStage(view) if live else None
        self._layout = self._build(live)

    def _build(self, live: bool) -> pn.Column:
        schedule = card(
            _("Who is in the batch"), self.now, self.canvas, kinds="measured", margin=0,
            hint=_("A row is a slot of the batch, a column a step; below, the tokens that filled each step, and who waited."),
            acts=_("Click a bar to follow its request, double-click to go to that step. Hover for tokens and positions."),
        )  # fmt: skip
        measures = self._measures()
        if not live:
            return pn.Column(schedule, pn.Spacer(height=16), measures, sizing_mode="stretch_width", margin=0)
        self.load = LoadPanel(self.view)
        self.said = pane(css=CSS, margin=(10, 0, 0, 0))
        self.restore = pmui.Button(
            label=_("Restore the knobs"), icon="undo", color="warning", variant="text", size="small", margin=0, visible=False
        )
        self.restore.on_click(lambda _event: self._restore())
        scenes = card(
            _("Scenes"), grid(*scene_buttons(SCENES.values(), self._scene_clicked), min_width=220, gap=16), self.said, self.restore,
            kinds="live", hint=_("Each sets knobs for everybody and sends a seeded load to the running engine."),
        )  # fmt: skip
        load = card(
            _("Load"), self.load, kinds="live", margin=0, hint=_("Random tokens of chosen lengths, the same for the same seed.")
        )
        return pn.Column(
            scenes, grid(schedule, load, columns="minmax(0, 1fr) 330px", margin=(0, 0, 16, 0)), measures,
            sizing_mode="stretch_width", margin=0,
        )  # fmt: skip

    def _measures(self) -> pn.Column:
        small: dict[str, Any] = {"size": "small", "margin": 0, "sizing_mode": "stretch_width"}
        self.scope: Any = pmui.Select(label=_("Of"), options={words.ALL: ""}, value="", **small)
        self.ttft: Any = pmui.IntInput(
            label=_("Limit of TTFT, ms (0: none)"), start=0, end=600_000, value=self.view.ttft_ms, **small
        )
        self.tpot: Any = pmui.IntInput(
            label=_("Limit of TPOT, ms (0: none)"), start=0, end=60_000, value=self.view.tpot_ms, **small
        )
        for widget, name in ((self.ttft, "ttft_ms"), (self.tpot, "tpot_ms")):
            widget.param.watch(lambda event, name=name: setattr(self.view, name, event.new or 0), "value")
            self.view.param.watch(lambda event, widget=widget: setattr(widget, "value", event.new), name)
        legend = "".join(
            f'<span><svg aria-hidden="true"><line x1="0" x2="24" y1="4" y2="4" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="{ {"solid": "0", "dashed": "6 3", "dotted": "2 3"}[dash] }"/></svg>{name}</span>'
            for name, colour, dash in PERCENTILES
        )
        self.full = pn.Column(
            self.line, self.tiles,
            grid(
                self.table,
                pn.Column(
                    pane(f'<div class="bt-lines">{legend}</div>', css=CSS), pn.pane.Bokeh(self.gaps.root, sizing_mode="stretch_width", margin=0),
                    sizing_mode="stretch_width", margin=0,
                ),
                min_width=360, gap=24, columns="minmax(0, 1.1fr) minmax(0, 1fr)",
            ),
            sizing_mode="stretch_width", margin=0, visible=False,
        )  # fmt: skip
        self.none = pane(empty(words.NO_MEASURES))
        return card(
            _("What it is worth"), grid(self.scope, self.ttft, self.tpot, min_width=170, gap=12, columns="minmax(0, 2fr) minmax(0, 1fr) minmax(0, 1fr)", margin=(0, 0, 12, 0)), self.none, self.full,
            kinds="derived", hint=_("From the times of each request and step, up to the step on the screen. Hover a name for its definition."),
        )  # fmt: skip

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what is new ---------------------------------------------------------------------------------------------------------

    def take(self, events: Sequence[Event]) -> None:
        """The view's rows have them."""

    def update(self) -> None:
        view, rows = self.view, self.view.rows
        shown = view.shown_step
        self.feed.update(shown, view.clock.live, bool(getattr(view.store, "replayed", False)))
        self._mark()
        if rows.changed or rows.restarted or self._drawn != self._key or self.pace.late:
            self._draw_measures(shown)
        if self.stage is not None:
            self.load.update()
            self.stage.advance(self.load.start)
            self._draw_said()

    @property
    def _key(self) -> Any:
        return self.view.shown_step, self.scope.value, self.view.ttft_ms, self.view.tpot_ms

    def _mark(self) -> None:
        number = self.view.rows.number_of(self.view.clock.request_id)
        if self.canvas.selected != number:
            self.canvas.selected = number

    def _draw_measures(self, shown: int) -> None:
        chosen = self._drawn is not None and self._drawn[1:] != self._key[1:]
        if not self.pace.due() and self.view.clock.live and not chosen:
            return
        self.pace.late = False
        view, rows = self.view, self.view.rows
        row = rows.at(shown)
        self._draw_now(row)
        self._draw_scope()
        self._drawn = self._key
        step = None if view.clock.live else shown
        load = self.scope.value or None
        measures = view.measures(load, step)
        begun = any(d.count for d in (measures.ttft_s, measures.itl_s))
        show(self.full, begun)
        show(self.none, not begun)
        if not begun:
            return
        set_html(self.line, f'<p class="bt-line">{self._of(load)}{words.requests_line(measures)}</p>')
        set_html(self.tiles, words.tiles_html(measures))
        set_html(self.table, words.latencies_html(measures))
        itl = measures.itl_s
        until = row.end_s if step is not None and row is not None else float("inf")
        self.gaps.show(gaps_ms(rows.records(load, until)), {"p50": 1e3 * itl.p50, "p90": 1e3 * itl.p90, "p99": 1e3 * itl.p99})

    def _of(self, load: str | None) -> str:
        run = self.view.rows.loads.get(load or "")
        if run is None:
            return ""
        more = []
        if run.others:
            more.append(_("{n} of its steps also ran others' requests").format(n=run.others))
        if run.changed:
            more.append(_("moved meanwhile: {knobs}").format(knobs=", ".join(dict.fromkeys(run.changed))))
        return f"<b>{html.escape(words.knobs_line(run.knobs))}</b>. {html.escape('; '.join(more) + '. ' if more else '')}"

    def _draw_now(self, row: Any) -> None:
        if row is None:
            set_html(self.now, "")
            return
        knobs = words.knobs_line(self.view.store.at(self.view.shown_step).knobs)
        text = _("Step {step}: {tokens} of {budget} tokens; after it {running} run and {waiting} wait.").format(
            step=row.step, running=row.running, waiting=row.waiting, tokens=row.num_tokens, budget=row.budget
        )
        set_html(self.now, f'<p class="bt-line"><b>{html.escape(knobs)}</b> · {html.escape(text)}</p>')

    def _draw_scope(self) -> None:
        """The loads there are at this step, the newest first; a load that begins is chosen by itself."""
        shown, loads = self.view.shown_step, self.view.rows.loads
        there = [run for run in reversed(loads.values()) if run.first_step <= shown + 1]
        options = {words.run_label(run): run.name for run in there} | {words.ALL: ""}
        if options == self.scope.options:
            return
        new = there and there[0].name not in self.scope.options.values()
        value = (
            there[0].name if new else self.scope.value if self.scope.value in options.values() else next(iter(options.values()))
        )
        self.scope.param.update(options=options, value=value)

    # -- what the user does ------------------------------------------------------------------------------------------------

    def _selected(self, number: int) -> None:
        self.view.clock.param.update(request_id=self.view.rows.names.get(number), token_index=None)

    def _goto(self, step: int) -> None:
        self.view.clock.goto(step, self.view.store.first_step, self.view.store.last_step)

    def _scene_clicked(self, key: str, _event: Any = None) -> None:
        assert self.stage is not None
        self.view.clock.follow()
        self.stage.play(key)
        self._draw_said()

    def _restore(self) -> None:
        assert self.stage is not None
        self.stage.restore()
        self._draw_said()

    def _draw_said(self) -> None:
        assert self.stage is not None
        kind, text = self.stage.said
        set_html(self.said, words.said(text, kind))
        show(self.restore, bool(self.stage.before))


class SceneStage:
    """Moves a scene's knobs, waits until the engine has them, then sends its load."""

    def __init__(self, view: Any) -> None:
        self.view = view
        self.said = ("", "")
        self.before: dict[str, Any] = {}  # knobs that were moved: name -> value before
        self._waiting: str | None = None  # for which scene's knobs
        self._since = 0.0

    def play(self, key: str) -> None:
        knobs = self.view.store.latest().knobs
        self.before = {**{name: knobs.get(name) for name in MOVED if name in knobs}, **self.before}
        self._waiting, self._since = key, time.monotonic()
        self.said = ("wait", _("Setting the knobs…"))
        self.view.session.loads.stop(self.view.clock.owner)  # one load of a viewer at a time
        self.view.session.reconfigure(self.view.clock.owner, **SCENES[key].knobs)

    def restore(self) -> None:
        back, self.before, self._waiting, self.said = self.before, {}, None, ("", "")
        if back:
            self.view.session.reconfigure(self.view.clock.owner, **back)

    def advance(self, start: Callable[[Any], Any]) -> None:
        """Go on as far as the engine has come."""
        if self._waiting is None:
            return
        scene, state = SCENES[self._waiting], self.view.store.latest()
        load = self.view.session.loads.of(self.view.clock.owner)
        there = not (set(scene.knobs) & set(state.draining)) and all(state.knobs.get(n) == v for n, v in scene.knobs.items())
        if there and (load is None or load.over):
            self._waiting = None
            self.said = ("", scene.look) if start(scene.load) is not None else ("error", _("The load could not be started."))
        elif time.monotonic() - self._since > PATIENCE_S:
            self._waiting = None
            self.said = ("error", _("The engine has not taken the knobs of this scene."))


def show(view: Any, visible: bool) -> None:
    if view.visible != visible:
        view.visible = visible
