"""Two schedulers on the same requests: two schedules on one axis, and what each was worth."""

import html
from collections.abc import Sequence
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.types import EngineStarted, Event
from explorer.batching import words
from explorer.batching.compare_stage import PairStage
from explorer.batching.feed import show_whole
from explorer.batching.load import CSS, LoadForm, send
from explorer.batching.load_settings import Settings
from explorer.batching.now import show
from explorer.batching.rows import LoadRun, StepRow
from explorer.canvas.schedule import Schedule
from explorer.i18n import _, ngettext
from explorer.pace import Pace
from explorer.quantization.labels import set_html
from explorer.theme import card, empty, grid, pane

_WIDE: dict[str, Any] = {"size": "small", "margin": 0, "sizing_mode": "stretch_width"}
NO_PAIR = _(
    "Choose two schedulers and press Run both: the same requests, with the same seeds at the same times, under one and then under the other."
)
NO_PAIR_RECORDED = _("This recorded run holds no two loads to compare at this step.")
START = Settings(num_requests=24, rate=8.0, prompt_tokens=48, output_tokens=20, seed=1)
SIDES: dict[str, dict[str, Any]] = {
    "A": {"batching": "static", "max_num_seqs": 8, "max_num_batched_tokens": 512, "enable_chunked_prefill": True, "preemption_mode": "recompute"},
    "B": {"batching": "continuous", "max_num_seqs": 8, "max_num_batched_tokens": 512, "enable_chunked_prefill": True, "preemption_mode": "recompute"},
}  # fmt: skip


class SideForm(pn.viewable.Viewer):
    """The scheduler of one side."""

    def __init__(self, letter: str, knobs: dict[str, Any], **params: Any) -> None:
        super().__init__(**params)
        self.policy: Any = pmui.Select(
            label=_("Policy"), options={title: key for key, title in words.POLICIES.items()}, value=knobs["batching"], **_WIDE
        )
        self.batch: Any = pmui.IntInput(label=_("Batch size"), start=1, end=64, value=knobs["max_num_seqs"], **_WIDE)
        self.budget: Any = pmui.IntInput(
            label=_("Token budget"), start=1, end=8192, step=16, value=knobs["max_num_batched_tokens"], **_WIDE
        )
        self.chunked: Any = pmui.Switch(label=_("Chunked prefill"), value=knobs["enable_chunked_prefill"], size="small", margin=0)
        self.mode: Any = pmui.Select(
            label=_("When the pool runs out"), options={_("compute again"): "recompute", _("swap out, 256 MiB"): "swap"}, value=knobs["preemption_mode"], **_WIDE
        )  # fmt: skip
        self._layout = pn.Column(
            pane(f'<p class="bt-side">{letter}</p>', css=CSS),
            grid(self.policy, self.batch, self.budget, self.mode, min_width=160, gap=10), self.chunked,
            sizing_mode="stretch_width", margin=0, styles={"gap": "8px"},
        )  # fmt: skip

    def __panel__(self) -> pn.Column:
        return self._layout

    @property
    def knobs(self) -> dict[str, Any]:
        swaps = self.mode.value == "swap"
        return {
            "batching": self.policy.value, "max_num_seqs": self.batch.value, "max_num_batched_tokens": self.budget.value,
            "enable_chunked_prefill": self.chunked.value, "preemption_mode": self.mode.value, **({"swap_space": 0.25} if swaps else {}),
        }  # fmt: skip


class ComparePanel(pn.viewable.Viewer):
    """``view``: the page's view."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        live = view.session is not None
        self.stage = PairStage(view, lambda settings, name: send(view, settings, name)) if live else None
        self.pace = Pace()
        self._shown: Any = None
        self._followed = ""  # the pair that was turned to
        self.sides: dict[str, Any] = {}
        self.heads: dict[str, Any] = {}
        for letter in "AB":
            canvas = self.sides[letter] = Schedule(self._selected, self._goto, empty=_("Not run yet."), axis="time", live=False)
            canvas.param.watch(lambda event: self._turn(event.new), "axis")
            self.heads[letter] = pane(css=CSS, margin=(10, 0, 6, 0))
        view.clock.param.watch(lambda _event: self._mark(), "request_id")
        self.choice: dict[str, Any] = {
            letter: pmui.Select(label=letter, options={_("none yet"): ""}, value="", **_WIDE) for letter in "AB"
        }
        self.verdict, self.table = pane(css=CSS, margin=(0, 0, 10, 0)), pane(css=CSS)
        self.none = pane(empty(NO_PAIR if live else NO_PAIR_RECORDED))
        self._layout = pn.Column(*([self._asking()] if live else []), self._result(), sizing_mode="stretch_width", margin=0)

    def _asking(self) -> pn.Column:
        self.forms = {letter: SideForm(letter, knobs) for letter, knobs in SIDES.items()}
        self.load = LoadForm(START)
        self.start = pmui.Button(
            label=_("Run both"), icon="compare_arrows", variant="contained", color="primary", size="small", margin=0
        )
        self.stop = pmui.Button(label=_("Stop"), icon="stop", variant="outlined", size="small", margin=0, disabled=True)
        self.start.on_click(lambda _event: self._run())
        self.stop.on_click(lambda _event: self.stage.stop() if self.stage is not None else None)
        self.said = pane(css=CSS, margin=(10, 0, 0, 0))
        buttons = pn.Row(self.start, self.stop, margin=(14, 0, 0, 0), styles={"gap": "8px"})
        requests = pn.Column(
            pane(f'<p class="bt-side">{html.escape(_("The requests"))}</p>', css=CSS),
            self.load,
            sizing_mode="stretch_width",
            margin=0,
        )
        return card(
            _("Run the same load under A and under B"),
            grid(pn.Column(*self.forms.values(), sizing_mode="stretch_width", margin=0, styles={"gap": "18px"}), requests, min_width=320, gap=32,
                 columns="minmax(0, 1fr) minmax(0, 1fr)"),
            buttons, self.said, kinds="live",
            hint=_("Really run, one after the other, on the engine that everybody shares; each finds none of the other's prefixes. The knobs go back afterwards."),
        )  # fmt: skip

    def _result(self) -> pn.Column:
        self.full = pn.Column(
            self.verdict, self.heads["A"], self.sides["A"], self.heads["B"], self.sides["B"], self.table,
            sizing_mode="stretch_width", margin=0, visible=False,
        )  # fmt: skip
        return card(
            _("Two schedules on one axis"), grid(self.choice["A"], self.choice["B"], min_width=240, gap=12, columns="minmax(0, 1fr) minmax(0, 1fr)", margin=(0, 0, 12, 0)), self.none, self.full,
            kinds=("measured", "derived"),
            hint=_("Both begin at the arrival of their first request. Any two loads that were run can be put here."),
            acts=_("Click a bar to follow its request."),
        )  # fmt: skip

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what is new ---------------------------------------------------------------------------------------------------------

    def take(self, events: Sequence[Event]) -> None:
        if self.stage is not None and any(isinstance(event, EngineStarted) for event in events):
            self.stage.forget()

    def advance(self) -> None:
        """Also while another tab is open."""
        if self.stage is not None:
            self.stage.advance()

    def update(self) -> None:
        self.advance()
        if self.stage is not None:
            self._draw_asking(self.stage)
        if self.pace.due():
            self._draw_choices()
            self._draw()

    def _draw_asking(self, stage: PairStage) -> None:
        set_html(self.said, words.said(stage.said[1], stage.said[0]))
        ready = self.view.session.status in ("running", "paused") and self.view.store.started is not None
        for button, disabled in ((self.start, stage.busy or not ready), (self.stop, not stage.busy)):
            if button.disabled != disabled:
                button.disabled = disabled

    def _draw_choices(self) -> None:
        """The loads there are; a pair that has begun is turned to."""
        runs = [run for run in reversed(self.view.rows.loads.values()) if run.first_step <= self.view.shown_step + 1]
        options = {words.run_label(run): run.name for run in runs} | {_("none") if runs else _("none yet"): ""}
        names = list(options.values())
        pair = next((name[:-1] for name in names if name.endswith("A")), "")
        for letter, choice in self.choice.items():
            value = choice.value if choice.value in names else ""
            if not value or pair != self._followed:
                value = (
                    f"{pair}{letter}"
                    if f"{pair}{letter}" in names
                    else ""
                    if pair
                    else names[min(len(runs), 1) if letter == "A" else 0]
                )
            if options != choice.options or value != choice.value:
                choice.param.update(options=options, value=value)
        if f"{pair}B" in names or not pair:
            self._followed = pair

    def _draw(self) -> None:
        rows, last = self.view.rows, self.view.shown_step
        runs = {letter: rows.loads.get(choice.value) for letter, choice in self.choice.items()}
        limits = self.view.limits
        key = (
            [(r.name, min(r.last_step, last), r.num_ended) if r else None for r in runs.values()],
            limits,
            last if not self.view.clock.live else -1,
        )
        if key == self._shown:
            return
        self._shown = key
        there = [r for r in runs.values() if r is not None and r.last_step and r.first_step <= last]
        show(self.full, bool(there))
        show(self.none, not there)
        if not there:
            return
        steps = {
            letter: rows.between(run.first_step, min(run.last_step, last)) if run is not None else []
            for letter, run in runs.items()
        }
        self._draw_sides(runs, steps)
        a, b = runs["A"], runs["B"]
        if a is None or b is None or not steps["A"] or not steps["B"] or a is b:
            set_html(self.table, "")
            set_html(self.verdict, "")
            return
        until = None if self.view.clock.live else last
        measures = [self.view.measures(run.name, until) for run in (a, b)]
        names = [words.knobs_line(run.knobs) for run in (a, b)]
        set_html(self.table, words.compared_html(*measures, *names))
        text = (
            words.verdict(*measures, *names) if a.over and b.over and min(last, 1 << 60) >= max(a.last_step, b.last_step) else ""
        )
        set_html(self.verdict, words.said(" ".join([text, *self._disturbed(a, b)])) if text else "")

    def _disturbed(self, *runs: LoadRun) -> list[str]:
        found = []
        for run in runs:
            if run.others:
                found.append(
                    ngettext(
                        "{n} step of {name} also ran others' requests, so the two are not quite alike.",
                        "{n} steps of {name} also ran others' requests, so the two are not quite alike.",
                        run.others,
                    ).format(n=run.others, name=run.name)
                )
            if run.changed:
                found.append(
                    _("Knobs moved while {name} ran: {knobs}.").format(name=run.name, knobs=", ".join(dict.fromkeys(run.changed)))
                )
        return found

    def _draw_sides(self, runs: dict[str, LoadRun | None], steps: dict[str, list[StepRow]]) -> None:
        most = max((len(s) for s in steps.values()), default=1)
        ends = [s[-1].end_s - run.begin_s for run, s in zip(runs.values(), steps.values(), strict=True) if run is not None and s]
        seconds = max(ends, default=1.0) * 1.01
        for letter, run in runs.items():
            for part in (self.heads[letter], self.sides[letter]):
                show(part, run is not None)
            if run is None:
                continue
            extent = [most, seconds, run.begin_s]
            if self.sides[letter].extent != extent:
                self.sides[letter].extent = extent
            show_whole(self.sides[letter], self.view.rows, steps[letter])
            took = f"{steps[letter][-1].end_s - run.begin_s:.2f} s" if steps[letter] else "–"
            text = _("{n} steps, {time}").format(n=len(steps[letter]), time=took)
            set_html(
                self.heads[letter],
                f'<p class="bt-line"><b>{letter} · {html.escape(words.run_label(run))}</b> · {html.escape(text)}</p>',
            )
        self._mark()

    # -- what the user does ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self.stage is not None
        self.view.clock.follow()
        self.stage.run(self.forms["A"].knobs, self.forms["B"].knobs, self.load.settings)

    def _turn(self, axis: str) -> None:
        for canvas in self.sides.values():
            if canvas.axis != axis:
                canvas.axis = axis

    def _mark(self) -> None:
        """The request, and the one of the same place in the other run."""
        chosen = self.view.clock.request_id or ""
        for letter, canvas in self.sides.items():
            number = self.view.rows.number_of(f"{self.choice[letter].value}-{chosen.rpartition('-')[2]}" if chosen else None)
            if canvas.selected != number:
                canvas.selected = number

    def _selected(self, number: int) -> None:
        self.view.clock.param.update(request_id=self.view.rows.names.get(number), token_index=None)

    def _goto(self, step: int) -> None:
        self.view.clock.goto(step, self.view.store.first_step, self.view.store.last_step)

    def close(self) -> None:
        if self.stage is not None:
            self.stage.stop()
