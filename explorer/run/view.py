"""The Run page: prompts in, tokens out, and what the engine does in every step meanwhile."""

import html
from typing import Any

import panel as pn
from bokeh.events import DoubleTap, Tap

from explorer.base import Clock, ExplorerView
from explorer.canvas.gauges import KEEP, Gauge, Gauges, Point
from explorer.i18n import _, ngettext
from explorer.pace import Pace
from explorer.run.answers import Answers
from explorer.run.composer import Composer
from explorer.run.figure import PHASES, ROLLOVER, WINDOW, gantt, gantt_columns, ranges
from explorer.run.rows import Bar, RunRows
from explorer.status import COST_STEPS
from explorer.theme import card, grid, number, pane

GAUGES = [
    Gauge(
        "tokens_per_second",
        _("Tokens/s"),
        _("Tokens sampled for all requests over the newest second of steps, divided by the time of those steps."),
        "derived",
    ),
    Gauge("step_ms", _("Step time"), _("Wall time of one engine step: schedule, run the model, sample, commit."), "measured"),
    Gauge(
        "batch",
        _("In the batch"),
        _("Requests that ran during this step; the model processes all of them in one pass. Also those that finished in it."),
        "measured",
    ),
    Gauge(
        "kv_use",
        _("KV in use"),
        _("KV blocks that requests hold after this step, as a share of all blocks of the pool. What finished in it holds none."),
        "derived",
        top=100.0,
    ),
    Gauge(
        "watching",
        _("Cost of watching"),
        _(
            "Share of this one step's time that recording for this screen took; what stands at the top of the page is the average of "
            "the newest {n} steps. With nobody here an event costs one branch."
        ).format(n=COST_STEPS),
        "derived",
    ),
]
UNITS = {"tokens_per_second": "tok/s", "step_ms": "ms", "batch": "requests", "kv_use": "%", "watching": "%"}


class RunView(ExplorerView):
    live_knobs = ("max_num_seqs", "max_num_batched_tokens")

    def __init__(self, store: Any, session: Any = None, clock: Clock | None = None, **params: Any) -> None:
        super().__init__(store, session, clock, **params)
        self.rows = RunRows()
        self._shown: tuple[int, bool] = (-1, True)
        self._pace = Pace()
        self._undrawn: list[Bar] = []  # new bars that are not in the figure yet
        self.gauges = Gauges(GAUGES)
        self.answers = Answers(self.rows, store, session, self.clock)
        self.sources, self.plot, self._here = gantt()
        self.plot.on_event(Tap, self._tapped)
        self.plot.on_event(DoubleTap, self._double_tapped)
        self.composer = Composer(session, self.clock, self._my_running) if session is not None else None
        self._layout = self._build()
        self.update()

    def _build(self) -> pn.Column:
        steps = card(
            _("Requests over steps"),
            pane(_legend(), margin=(0, 0, 6, 0)),
            pn.pane.Bokeh(self.plot, sizing_mode="stretch_width", margin=0),
            kinds="measured",
            hint=_("One row a request, one column a step of the engine."),
            acts=_("Click a bar to select it, double-click to go to that step."),
            margin=0,
        )
        right = pn.Column(self.gauges, pn.Spacer(height=14), steps, sizing_mode="stretch_width", margin=0)
        top = grid(self.composer, right, columns="minmax(330px, 400px) minmax(0, 1fr)") if self.composer is not None else right
        answers = card(_("Answers, token by token"), self.answers.cards, kinds="measured", margin=(12, 0, 0, 0))
        return pn.Column(top, answers, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    @property
    def drawn(self) -> bool:
        return self.answers.cards.ready and self.gauges.ready

    def controls(self) -> dict[str, Any]:
        if self.composer is None:
            return {}
        return {name: getattr(self.composer, name) for name in ("temperature", "top_p", "max_tokens", "seed")}

    def _my_running(self) -> list[str]:
        """The ids of this browser's unfinished requests."""
        with self.lock:
            rows = self.rows.requests.values()
            return list(dict.fromkeys(r.group_id for r in rows if r.owner == self.clock.owner and r.finished_step is None))

    # -- what is new -------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        with self.lock:
            self._update()

    def _update(self) -> None:
        events = self.new_events()
        shown = (self.shown_step, self.clock.live)
        if not events and shown == self._shown and not self.answers.cards.due and not self.gauges.due:
            if self._pace.late:
                self._draw_gantt(False)
            return
        self.rows.feed(events)
        # While live the newest step is shown and only differences travel; a jump in time redraws.
        moved = shown != self._shown and not (self.clock.live and self._shown[1])
        self._shown = shown
        again = moved or self.rows.restarted
        self.answers.update(moved)
        self._draw_gantt(again)
        if again or self.gauges.due:
            self.gauges.due = False
            self.gauges.add(self._all_points(), reset=True)
        elif self.clock.live:
            self.gauges.add({name: _points(name, points) for name, points in self.rows.new_points.items()})
        if self.composer is not None:
            self.composer.update()
        self.rows.taken()

    # -- gauges --------------------------------------------------------------------------------------------------------------

    def _all_points(self) -> dict[str, list[Point]]:
        return {name: _points(name, self.rows.points_until(name, self.shown_step, KEEP)) for name in UNITS}

    # -- Gantt ---------------------------------------------------------------------------------------------------------------

    def _draw_gantt(self, again: bool) -> None:
        """Stream the new bars, at a pace while live; draw the window again when the view moved to where they are not."""
        self._undrawn += self.rows.new_bars
        if not self._pace.due() and self.clock.live and not again:
            return
        new, self._undrawn, self._pace.late = self._undrawn, [], False
        shown, last = self.shown_step, self.store.last_step
        newest = last if self.clock.live else max(min(last, shown + WINDOW // 2), min(last, WINDOW))
        bars = list(self.rows.steps_between(newest - WINDOW + 1, newest))
        if again or len(new) > ROLLOVER:
            for phase, columns in gantt_columns(bars).items():
                self.sources[phase].data = columns
        elif self.clock.live and new:
            for phase, columns in gantt_columns(new).items():
                if columns["step"]:
                    self.sources[phase].stream(columns, ROLLOVER)
        x_range, y_range, labelled = ranges(bars, newest)
        if self.plot.yaxis.ticker.ticks != list(labelled):
            self.plot.yaxis.major_label_overrides = labelled
            self.plot.yaxis.ticker.ticks = list(labelled)
        for span, (start, end) in ((self.plot.x_range, x_range), (self.plot.y_range, y_range)):
            if (span.start, span.end) != (start, end):
                span.update(start=start, end=end)
        if (self._here.location, self._here.visible) != (shown, not self.clock.live):
            self._here.update(location=shown, visible=not self.clock.live)

    def _bar_at(self, x: float, y: float) -> Bar | None:
        step, ordinal = round(x), round(y)
        with self.lock:
            return next((bar for bar in self.rows.steps_between(step, step) if bar.ordinal == ordinal), None)

    def _tapped(self, event: Any) -> None:
        if event.x is not None and event.y is not None:
            bar = self._bar_at(event.x, event.y)
            self.answers.select(bar.request_id if bar is not None else None, None)

    def _double_tapped(self, event: Any) -> None:
        if event.x is not None and self.store.last_step:
            self.clock.goto(round(event.x), self.store.first_step, self.store.last_step)


def _points(name: str, points: list[tuple[int, float]]) -> list[Point]:
    whole = name == "batch"
    return [
        (step, value, number(int(value), ngettext("request", "requests", int(value))) if whole else number(value, UNITS[name]))
        for step, value in points
    ]


def _legend() -> str:
    """HTML: the sample of each phase, drawn as the figure draws it."""
    css = {
        "waiting": "height:3px;background:currentColor;opacity:.5",
        "prefill": "background:repeating-linear-gradient(135deg,currentColor 0 1.5px,transparent 1.5px 5px);outline:1px solid currentColor;outline-offset:-1px;opacity:.75",
        "decode": "background:currentColor;opacity:.75",
        "preempted": "background:repeating-linear-gradient(45deg,currentColor 0 1px,transparent 1px 4px),repeating-linear-gradient(135deg,currentColor 0 1px,transparent 1px 4px);opacity:.7",
    }
    meaning = {
        "waiting": _("in the queue: no place in the batch, or no blocks, or no token budget left"),
        "prefill": _("computing keys and values of the prompt, a chunk a step"),
        "decode": _("one new token a step"),
        "preempted": _("the pool ran out of blocks: it gave its own back and starts again later"),
    }
    parts = [
        f'<span title="{html.escape(meaning[phase])}" style="display:inline-flex;align-items:center;gap:6px;cursor:help">'
        f'<span style="display:inline-block;width:20px;height:11px;border-radius:2px;{css[phase]}"></span>{html.escape(label)}</span>'
        for phase, (*_drawn, label) in PHASES.items()
    ]
    note = html.escape(_("colour: who sent it"))
    return f'<div class="ct-small ct-muted" style="display:flex;flex-wrap:wrap;gap:3px 18px">{"".join(parts)}<span>{note}</span></div>'
