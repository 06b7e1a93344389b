"""The what-if: the recorded requests under another batch size, budget or policy, and then really run. ``WhatIfPanel`` is the tab."""

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.types import Event
from engine.load.replay import POLICIES, ReplayedStep, Timeline
from engine.measures import Measures
from explorer.batching.whatif_figure import GanttFigure, longest, phases_legend
from explorer.batching.whatif_rows import (
    Fitted,
    History,
    Load,
    Setting,
    duration,
    fitted,
    gantt,
    idle_share,
    load_title,
    measured_steps,
    padding_share,
    replayed,
    requests_of,
    signed,
    slots_of,
)
from explorer.batching.whatif_run import Ask, Sender, Stage, exactly, state_html
from explorer.i18n import _
from explorer.pace import quick
from explorer.quantization.labels import CSS, line, said, set_html, share, table
from explorer.theme import badge, card, empty, grid, number, pane

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
BUDGETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
NEWEST = _("the newest")
ADDRESS = ("if_policy", "if_batch", "if_budget", "if_chunked")  # parameters of the view
AS_IT_RAN = "as it ran"


def measures_row(m: Measures, base: Measures, padding: float) -> list[str]:
    """Cells of one row of the table; small print: in comparison with ``base``."""
    same = m is base

    def cell(value: float, other: float, unit: str, scale: float = 1.0) -> str:
        if math.isnan(value):
            return "–"
        times = "" if same or not other or math.isnan(other) else f"<small>× {value / other:.2f}</small>"
        return html.escape(number(scale * value, unit)) + times

    return [
        cell(m.output_throughput, base.output_throughput, "tokens/s"), cell(m.ttft_s.p50, base.ttft_s.p50, "ms", 1e3),
        cell(m.ttft_s.p99, base.ttft_s.p99, "ms", 1e3), cell(m.itl_s.p50, base.itl_s.p50, "ms", 1e3),
        cell(m.itl_s.p99, base.itl_s.p99, "ms", 1e3), cell(m.e2e_s.p50, base.e2e_s.p50, "ms", 1e3), share(padding, 1),
        number(m.num_preemptions),
    ]  # fmt: skip


HEAD = (
    _("how"), _("output"), _("TTFT p50"), _("TTFT p99"), _("ITL p50"), _("ITL p99"), _("E2E p50"), _("padding"), _("preempted"),
)  # fmt: skip


def model_words(measured: Measures, modelled: Measures, fit_: Fitted) -> str:
    """How well the model tells what was measured, as HTML."""
    cost = fit_.cost
    parts = [
        _("A step is taken to last {base} + {token} for each token + {context} for each pair of a token and one that it attends to (fitted to {n:,} steps; mean error {error}).").format(
            base=duration(cost.base_s), token=duration(cost.per_token_s), context=duration(cost.per_context_s),
            n=cost.num_steps, error=share(cost.error_share),
        )
    ]  # fmt: skip
    if fit_.left_out:
        parts.append(_("{n} steps that took far longer than their tokens explain are left out of it.").format(n=fit_.left_out))
    if measured.duration_s > 0:
        off = modelled.duration_s / measured.duration_s - 1
        parts.append(
            _("With the setting that it ran under, the model is off by <b>{off}</b> in time, and by {itl} in the median ITL: trust differences that are larger.").format(
                off=signed(off), itl=signed(modelled.itl_s.p50 / measured.itl_s.p50 - 1 if measured.itl_s.p50 > 0 else 0.0)
            )
        )  # fmt: skip
    return line(" ".join(parts))


class WhatIfPanel(pn.viewable.Viewer):
    """``view``: the page's view."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.history = History()
        self.load: Load | None = None
        self.sender: Sender | None = None
        self._changed = True
        self._facts: Any = None  # of which load the widgets were set
        self._as_it_ran: tuple[Any, Any] = (None, None)
        self._showing = self._writing = False
        live = view.session is not None
        small = {"size": "small", "margin": 0}
        wide = {**small, "sizing_mode": "stretch_width"}
        self.chosen: Any = pmui.Select(label=_("Recorded load"), options={NEWEST: 0}, value=0, **wide)
        self.policy: Any = pmui.Select(label=_("Policy"), options=list(POLICIES), value="continuous", **wide)
        self.batch: Any = pmui.DiscreteSlider(label=_("Batch size"), options=list(BATCHES), value=8, **wide)
        self.budget: Any = pmui.DiscreteSlider(label=_("Token budget"), options=list(BUDGETS), value=512, **wide)
        self.chunked: Any = pmui.Checkbox(label=_("Chunked prefill"), value=True, **small)
        for widget in (self.chosen, self.policy, self.batch, self.budget, self.chunked):
            quick(widget, 20)
            widget.param.watch(lambda _event: self._mark(), "value")
        self.run: Any = pmui.Button(label=_("Run it"), icon="play_arrow", color="primary", variant="contained", **small)
        self.run.on_click(lambda _event: self._run())
        self.stop: Any = pmui.Button(label=_("Stop"), icon="stop", variant="text", visible=False, **small)
        self.stop.on_click(lambda _event: self._stop())
        self.state = pane(css=CSS, margin=(10, 0, 0, 0))
        self.before, self.after = GanttFigure(), GanttFigure()
        self.before_head, self.after_head = pane(css=CSS), pane(css=CSS, margin=(6, 0, 0, 0))
        self.rows, self.words = pane(css=CSS), pane(css=CSS, margin=(12, 0, 0, 0))
        self._build(live)
        if all(name in view.param for name in ADDRESS):  # the page's address has the knobs
            view.param.watch(lambda _event: self._take_address(), list(ADDRESS))

    def _build(self, live: bool) -> None:
        nothing = (
            _("No request has ended yet. Start a load on the first tab, or send a few prompts: their lengths and arrival times are what is replayed here.")
            if live
            else _("In this recorded run no request came to its end.")
        )  # fmt: skip
        self.nothing = pane(empty(nothing))
        buttons = [pn.Row(self.run, self.stop, margin=(10, 0, 0, 0), styles={"gap": "8px", "flex-wrap": "wrap"}), self.state]
        knobs = grid(self.chosen, self.policy, self.batch, self.budget, self.chunked, min_width=170, gap=16)
        self.ask = card(
            _("What if"), knobs, *(buttons if live else []), kinds=("what-if", "live") if live else "what-if",
            hint=_("The recorded requests through the scheduler's rules, with another setting. Only “Run it” asks the engine: it moves these knobs for everybody, sends the same requests at the same times, and puts the knobs back.") if live else _("The recorded requests through the scheduler's rules, with another setting."),
        )  # fmt: skip
        slots = card(
            _("Slots over time"), pane(phases_legend(), css=CSS), self.before_head, pn.pane.Bokeh(self.before.plot, sizing_mode="stretch_width", margin=0),
            self.after_head, pn.pane.Bokeh(self.after.plot, sizing_mode="stretch_width", margin=0), kinds=("measured", "modelled"),
            hint=_("The same requests, on the same time axis."),
        )  # fmt: skip
        told = card(_("What it is worth"), self.rows, self.words, kinds=("measured", "modelled"), margin=0)
        self.drawn = pn.Column(slots, told, sizing_mode="stretch_width", margin=0, visible=False)
        self._layout = pn.Column(self.ask, self.nothing, self.drawn, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what comes in -----------------------------------------------------------------------------------------------------

    def take(self, events: Iterable[Event]) -> None:
        """New events of the store, in order."""
        if self.history.feed(events):
            self._changed = True

    @property
    def setting(self) -> Setting:
        """The what-if's."""
        base = self.load.setting if self.load is not None else self.history.setting
        return base.changed(
            batching=self.policy.value, max_num_seqs=int(self.batch.value), max_num_batched_tokens=int(self.budget.value),
            enable_chunked_prefill=bool(self.chunked.value),
        )  # fmt: skip

    def update(self) -> None:
        if self.sender is not None:
            self._draw_state()
        busy = self.sender is not None and self.sender.busy
        if not self._changed or busy:  # what is sent would be the newest load, half done
            return
        self._changed = False
        usable = self.history.usable()
        self._draw_choice(usable)
        self.load = next((load for load in reversed(usable) if self.chosen.value in (0, load.number)), None)
        there = self.load is not None
        if there != self.drawn.visible:
            self.drawn.visible, self.nothing.visible = there, not there
        if self.run.disabled == there:
            self.run.disabled = not there
        if self.load is not None:
            self._follow(self.load)
            self._draw(self.load)

    def _follow(self, load: Load) -> None:
        """The knobs begin as the load ran."""
        if self._facts == (self.view.store.run, load.number):
            return
        self._facts, s = (self.view.store.run, load.number), load.setting
        self._showing = True
        for widget, options, value in ((self.batch, BATCHES, s.max_num_seqs), (self.budget, BUDGETS, s.max_num_batched_tokens)):
            widget.param.update(options=sorted({*options, value}), value=value)
        self.policy.value, self.chunked.value = s.batching, s.enable_chunked_prefill
        self._showing = False
        self._take_address()

    # -- what is drawn ------------------------------------------------------------------------------------------------------

    def _draw_choice(self, usable: Sequence[Load]) -> None:
        options = {NEWEST: 0}
        for load in reversed(usable):
            options[load_title(load, self.history.records(load))] = load.number
        if options != self.chosen.options:
            value = self.chosen.value if self.chosen.value in options.values() else 0
            self._showing = True
            self.chosen.param.update(options=options, value=value)
            self._showing = False

    def _ran(self, load: Load) -> tuple[list[Any], Fitted, Timeline, list[ReplayedStep], list[str], Measures]:
        """Of what was recorded: computed once."""
        key = (self.view.store.run, load.number, len(load.steps), load.steps[-1].step, len(self.history.records(load)))
        if self._as_it_ran[0] != key:
            records = self.history.records(load)
            requests = requests_of(records, cached=load.setting.enable_prefix_caching)
            cost = fitted(list(load.steps))
            first = min(r.arrival_s for r in records)
            steps, names = measured_steps(list(load.steps), round(1e9 * first) + self._origin(), {r.request_id for r in records})
            self._as_it_ran = (
                key,
                (requests, cost, replayed(requests, load.setting, cost.cost), steps, names, self.history.measures(load)),
            )
        found: tuple[list[Any], Fitted, Timeline, list[ReplayedStep], list[str], Measures] = self._as_it_ran[1]
        return found

    def _origin(self) -> int:
        """The records' zero on the events' clock."""
        return -round(1e9 * self.history.collector.seconds(0))

    def _draw(self, load: Load) -> None:
        requests, cost, as_ran, steps, names, measured = self._ran(load)
        setting = self.setting
        other = replayed(requests, setting, cost.cost)
        would = other.measures()
        was, will = gantt(steps, names), gantt(other.steps, [r.request_id for r in requests])
        end = 1.02 * longest(was["right"], will["right"])
        self.before.show(was, slots_of(was), end)
        self.after.show(will, slots_of(will), end)
        self._draw_heads(load, setting, steps, other)
        model = as_ran.measures()
        rows = [
            ("base", [_said("measured", _("as it ran"), load.setting), *measures_row(measured, measured, padding_share(steps))]),
            ("", [_said("modelled", _("as it ran"), load.setting), *measures_row(model, model, padding_share(as_ran.steps))]),
            ("now", [_said("modelled", _("what if"), setting), *measures_row(would, model, padding_share(other.steps))]),
        ]
        for again in self.history.same(load):
            ran = measured_steps(list(again.steps), 0)[0]
            rows.append(
                ("", [_said("measured", _("the same requests"), again.setting), *measures_row(self.history.measures(again), measured, padding_share(ran))])
            )  # fmt: skip
        set_html(self.rows, table(list(HEAD), rows))
        words = model_words(measured, model, cost)
        if load.mixed:
            words = (
                said(html.escape(_("A knob was moved while these requests ran: no single setting explains them.")), "mind")
                + words
            )
        if load.num_requests > len(requests):
            words += line(
                _("Of {n:,} requests, the newest {k} are shown and replayed.").format(n=load.num_requests, k=len(requests))
            )
        set_html(self.words, words)

    def _draw_heads(self, load: Load, setting: Setting, steps: Sequence[ReplayedStep], other: Timeline) -> None:
        for target, kind, name, s, ran in (
            (self.before_head, "measured", _("As it ran"), load.setting, steps),
            (self.after_head, "modelled", _("What if"), setting, other.steps),
        ):
            told = _("{setting}: {n:,} steps, padding {padding}, empty places {idle}").format(
                setting=s.label, n=len(ran), padding=share(padding_share(ran)), idle=share(idle_share(ran, s.max_num_seqs)),
            )  # fmt: skip
            set_html(target, f'<p class="qp-what">{badge(kind)} <b>{html.escape(name)}</b> {html.escape(told)}</p>')

    def _draw_state(self) -> None:
        sender = self.sender
        assert sender is not None
        busy = sender.busy
        set_html(
            self.state, state_html(sender, _("Done: the last row of the table is what was measured. The knobs are as they were."))
        )
        if self.stop.visible != busy:
            self.stop.visible = busy
            self.run.disabled = busy
            self._changed = True

    # -- what a user does ----------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        if not self._showing:
            self._changed = True
            self._write_address()

    def _take_address(self) -> None:
        """What the address says stands; the rest is as the load ran."""
        view, load = self.view, self.load
        if load is None or self._writing or not all(name in view.param for name in ADDRESS):
            return
        s = load.setting
        values = (
            (self.policy, s.batching if view.if_policy == AS_IT_RAN else view.if_policy),
            (self.batch, view.if_batch or s.max_num_seqs), (self.budget, view.if_budget or s.max_num_batched_tokens),
            (self.chunked, s.enable_chunked_prefill if view.if_chunked == AS_IT_RAN else view.if_chunked == "on"),
        )  # fmt: skip
        self._showing = True
        for widget, value in values:
            if widget in (self.batch, self.budget) and value not in widget.options:
                widget.options = sorted({*widget.options, value})
            widget.value = value
        self._showing, self._changed = False, True

    def _write_address(self) -> None:
        view, load = self.view, self.load
        if load is None or not all(name in view.param for name in ADDRESS):
            return
        s, now = load.setting, self.setting
        chunked = "on" if now.enable_chunked_prefill else "off"
        self._writing = True
        view.param.update(
            if_policy=AS_IT_RAN if now.batching == s.batching else now.batching,
            if_batch=0 if now.max_num_seqs == s.max_num_seqs else min(now.max_num_seqs, BATCHES[-1]),
            if_budget=0 if now.max_num_batched_tokens == s.max_num_batched_tokens else min(now.max_num_batched_tokens, BUDGETS[-1]),
            if_chunked=AS_IT_RAN if now.enable_chunked_prefill == s.enable_chunked_prefill else chunked,
        )  # fmt: skip
        self._writing = False

    def _run(self) -> None:
        load, session = self.load, self.view.session
        if load is None or (self.sender is not None and self.sender.busy):
            return
        if self.chosen.value == 0:
            self._showing = True
            self.chosen.value = load.number  # the newest will be what is run now
            self._showing = False
        now, wanted = self.history.setting, self.setting
        stage = Stage(_("Running the same {n} requests: {setting}").format(n=len(self.history.records(load)), setting=wanted.label),
                      wanted.knobs(now), self.asks(load))  # fmt: skip
        self.sender = Sender(session, self.view.clock.owner, [stage], now.knobs(wanted)).start()

    def asks(self, load: Load) -> tuple[Ask, ...]:
        """Its requests as they came, with as many tokens as they got."""
        records = self.history.records(load)
        first = min(r.arrival_s for r in records)
        asked = self.history.asked
        return tuple(
            Ask(asked[r.request_id].prompt_token_ids, exactly(r.num_output_tokens, asked[r.request_id].sampling), r.arrival_s - first)
            for r in sorted(records, key=lambda r: r.arrival_s)
        )  # fmt: skip

    def _stop(self) -> None:
        if self.sender is not None:
            self.sender.stop()

    def close(self) -> None:
        """The page is gone: what it had sent ends."""
        self._stop()


def _said(kind: str, name: str, setting: Setting) -> str:
    return f"{badge(kind)} {html.escape(name)}<small>{html.escape(setting.label)}</small>"
