"""The tuner: trials in processes beside the engine, the front of throughput against latency, and the configuration to copy."""

import html
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.types import EngineStarted, Event
from engine.measures import Limits
from engine.tuning.result import Trial, Tuning
from engine.tuning.search import Budget
from engine.tuning.space import as_text
from explorer.batching.tuner_figure import FrontFigure
from explorer.batching.tuner_rows import LATENCIES, LOADS, THROUGHPUTS, config_of, limit_ms, live_knobs, load_of, points_of
from explorer.batching.tuner_words import legend_html, progress_html, trial_html, trials_table, verdict_html
from explorer.batching.whatif_rows import History
from explorer.i18n import _
from explorer.quantization.labels import CSS, said, set_html
from explorer.theme import card, empty, grid, pane

STYLE = CSS + (Path(__file__).parent / "tuner.css").read_text(encoding="utf-8")
RATES = (0.5, 1, 2, 4, 8, 16, 32)
REQUESTS = (4, 8, 16, 24, 32, 48, 64)
TTFT_MS = (100, 200, 500, 1000, 2000, 5000, 10000, 0)  # 0: no limit
TPOT_MS = (10, 20, 50, 100, 200, 500, 1000, 0)
TRIALS = (3, 6, 12, 24, 48, 96)
MINUTES = (1, 2, 5, 10, 20, 40)


def _options(values: Iterable[Any], unit: str = "") -> dict[str, Any]:
    return {_("no limit") if not v else f"{v:,} {unit}".strip(): v for v in values}


class TunerPanel(pn.viewable.Viewer):
    """``view``: the page's view. The search itself is the session's (``explorer.tuner``): it is everybody's to see."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.tuner: Any = None if view.session is None else view.session.tuner
        self.history = History()
        self.refused = ""  # why the newest search could not begin
        self._seed = 0
        self._selected: int | None = None  # a trial that was tapped
        self._found: Tuning | None = None  # as drawn
        self._drawn: Any = None
        self._showing = False
        wide = {"size": "small", "margin": 0, "sizing_mode": "stretch_width"}
        small = {"size": "small", "margin": 0}
        self.load: Any = pmui.Select(label=_("Load"), options={title: key for key, title in LOADS.items()}, value="chat", **wide)
        self.rate: Any = pmui.Select(label=_("Arrivals a second"), options=_options(RATES), value=4, **wide)
        self.requests: Any = pmui.Select(label=_("Requests"), options=_options(REQUESTS), value=16, **wide)
        self.ttft: Any = pmui.Select(label=_("Limit on TTFT"), options=_options(TTFT_MS, "ms"), value=1000, **wide)
        self.tpot: Any = pmui.Select(label=_("Limit on TPOT"), options=_options(TPOT_MS, "ms"), value=100, **wide)
        self.trials: Any = pmui.Select(label=_("Trials at most"), options=_options(TRIALS), value=12, **wide)
        self.minutes: Any = pmui.Select(label=_("Minutes at most"), options=_options(MINUTES), value=5, **wide)
        self.begin: Any = pmui.Button(label=_("Search"), icon="tune", color="primary", variant="contained", **small)
        self.begin.on_click(lambda _event: self._begin())
        self.cancel: Any = pmui.Button(label=_("Cancel"), icon="close", variant="text", visible=False, **small)
        self.cancel.on_click(lambda _event: self.tuner.cancel(self.view.clock.owner))
        self.state = pane(css=STYLE, margin=(10, 0, 0, 0))
        self.latency: Any = pmui.Select(label=_("Latency"), options={v: k for k, v in LATENCIES.items()}, value="itl_p99", **wide)
        self.throughput: Any = pmui.Select(
            label=_("Throughput"), options={v: k for k, v in THROUGHPUTS.items()}, value="output_throughput", **wide
        )
        for widget in (self.latency, self.throughput):
            widget.param.watch(lambda _event: self._redraw(), "value")
        self.figure = FrontFigure()
        self.figure.source.selected.on_change("indices", lambda _attr, _old, new: self._tapped(new))
        self.told, self.text, self.rows = pane(css=STYLE), pane(css=STYLE), pane(css=STYLE)
        self.live: Any = pmui.Button(label=_("Make it live"), icon="bolt", variant="outlined", **small)
        self.live.on_click(lambda _event: self._make_live())
        self.made = pane(css=STYLE, margin=(8, 0, 0, 0))
        self._build()

    def _build(self) -> None:
        hint = _(
            "Each trial is an engine of its own in a fresh process, driven with the whole load. It uses this machine beside the running engine, so that both are slower meanwhile."
        )  # fmt: skip
        first = card(
            _("What is to be served, and how fast"),
            grid(self.load, self.rate, self.requests, columns="minmax(0, 2fr) minmax(0, 1fr) minmax(0, 1fr)", min_width=200, gap=14),
            grid(self.ttft, self.tpot, self.trials, self.minutes, columns="repeat(4, minmax(0, 1fr))", min_width=130, gap=14, margin=(12, 0, 0, 0)),
            pn.Row(self.begin, self.cancel, margin=(12, 0, 0, 0), styles={"gap": "8px", "flex-wrap": "wrap"}), self.state, kinds="measured", hint=hint,
        )  # fmt: skip
        nothing = (
            _("Nothing was searched yet. The first trial measures the configuration as it is; the others look for a better one.")
            if self.tuner is not None
            else _("A search runs engines on this machine, beside one that runs: a recorded run has none. From a terminal: python -m engine.tuning")
        )  # fmt: skip
        self.nothing = pane(empty(nothing))
        front = card(
            _("Throughput against latency"), grid(self.latency, self.throughput, min_width=150, gap=14), pane(legend_html(), css=STYLE, margin=(10, 0, 0, 0)),
            pn.pane.Bokeh(self.figure.plot, sizing_mode="stretch_width", margin=0), kinds="measured",
            hint=_("A point is a trial: up and to the left is better. The line is the front in these two measures alone."), acts=_("Tap a point for its configuration."),
        )  # fmt: skip
        config = card(
            _("The configuration to copy"), self.told, self.text, *([pn.Column(self.live, margin=(10, 0, 0, 0)), self.made] if self.tuner is not None else []),
            kinds=("measured", "live"), hint=_("The one with the most goodput, or the one that you tapped."),
        )  # fmt: skip
        rows = card(
            _("All trials"), self.rows, kinds="measured", margin=0,
            hint=_("Trial 0 is the configuration as it is. ★ chosen, ● on the front of output tokens/s, p99 TTFT and p99 ITL together."),
        )  # fmt: skip
        self.drawn = pn.Column(front, config, rows, sizing_mode="stretch_width", margin=0, visible=False)
        self._layout = pn.Column(
            *([first] if self.tuner is not None else []), self.nothing, self.drawn, sizing_mode="stretch_width", margin=0
        )

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what comes in -----------------------------------------------------------------------------------------------------

    def take(self, events: Iterable[Event]) -> None:
        """New events of the store, in order."""
        events = list(events)
        if any(isinstance(event, EngineStarted) for event in events):
            self.refused = ""
        self.history.feed(events)

    def update(self) -> None:
        if self.tuner is None:
            return
        found, busy = self.tuner.found, self.tuner.busy
        self._draw_state(found, busy)
        if found is None or found.trials == (self._found.trials if self._found is not None else ()):
            return
        self._found = found
        self._redraw()

    def _draw_state(self, found: Tuning | None, busy: bool) -> None:
        mine = self.tuner.owner == self.view.clock.owner
        for button, shown in ((self.begin, not busy), (self.cancel, busy and mine)):
            if button.visible != shown:
                button.visible = shown
        if self.refused and not busy:
            body = said(html.escape(self.refused), "error")
        elif found is None:
            body = ""
        else:
            body = progress_html(found, self.tuner.budget, mine) if busy else verdict_html(found, self.tuner.error)
        set_html(self.state, body)

    @property
    def trial(self) -> Trial | None:
        """Whose configuration is shown: the tapped one, or the chosen."""
        found = self._found
        if found is None:
            return None
        tapped = next((t for t in found.measured if t.number == self._selected), None)
        return tapped if tapped is not None else found.chosen

    def _redraw(self) -> None:
        found = self._found
        if found is None:
            return
        some = bool(found.measured)
        if self.drawn.visible != some:
            self.drawn.visible, self.nothing.visible = some, not some
        if not some:
            return
        latency, throughput = self.latency.value, self.throughput.value
        points = points_of(found, latency, throughput)
        self._showing = True  # new data take the selection away
        self.figure.show(points, LATENCIES[latency], THROUGHPUTS[throughput], limit_ms(found.limits, latency))
        self.figure.mark(self._selected)
        self._showing = False
        set_html(self.rows, trials_table(found))
        self._draw_trial()

    def _draw_trial(self) -> None:
        trial = self.trial
        assert trial is not None and self._found is not None
        set_html(self.told, trial_html(self._found, trial))
        set_html(self.text, f'<pre class="tn-config">{html.escape(as_text(trial.config))}</pre>')

    # -- what a user does ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        limits = Limits(*(None if not ms else ms / 1e3 for ms in (self.ttft.value, self.tpot.value)))
        budget = Budget(trials=self.trials.value, seconds=60.0 * self.minutes.value)
        usable = self.history.usable()
        records = self.history.records(usable[-1]) if usable else []
        try:
            load = load_of(self.load.value, self.rate.value, self.requests.value, self._seed, records)
            self.refused = self.tuner.start(
                self.view.clock.owner, load, limits, config_of(self.history.knobs), budget, seed=self._seed
            )
        except ValueError as error:
            self.refused = str(error)
        if not self.refused:
            self._selected, self._found = None, None
            self._seed += 1  # another search draws another load, and other proposals
            set_html(self.made, "")
        self.update()

    def _tapped(self, indices: list[int]) -> None:
        if not self._showing and self._found is not None and self._found.measured:
            self._selected = self.figure.number_at(indices[0]) if indices else None
            set_html(self.made, "")
            self._draw_trial()

    def _make_live(self) -> None:
        trial = self.trial
        if trial is None:
            return
        knobs = live_knobs(trial, self.history.knobs)
        if not knobs:
            set_html(self.made, said(html.escape(_("The engine runs so already.")), "mind"))
            return
        self.view.session.reconfigure(self.view.clock.owner, **knobs)
        names = ", ".join(f"{name}={value!r}" for name, value in knobs.items())
        set_html(self.made, said(html.escape(_("Sent to the engine, for everybody who is here: {knobs}.").format(knobs=names))))
