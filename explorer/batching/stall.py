"""The stall: a long prompt among requests that are being answered, over token budgets. ``StallPanel`` is the tab."""

import html
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.types import Event
from explorer.batching.stall_figure import STRIP_LINES, TRADE_LINES, StripFigure, TradeFigure
from explorer.batching.stall_rows import Modelled, Stall, alike, curve, stalls_of
from explorer.batching.whatif_rows import Fitted, History, Load, duration, fitted
from explorer.batching.whatif_run import Ask, Sender, Stage, exactly, state_html
from explorer.i18n import _
from explorer.kv_cache.figure import legend_html
from explorer.pace import quick
from explorer.quantization.labels import CSS, line, said, set_html, share, table
from explorer.theme import badge, card, empty, grid, number, pane

PROMPTS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 4096)
READERS = (1, 2, 4, 8, 16, 32)
CONTEXT = 24  # tokens of a reader's prompt
MEASURED = (None, 256, 64, 32)  # budgets that the button runs, where they make a difference
_LEAD_TOKENS = 8  # that each reader has when the prompt is sent,
_REST_S = 0.8
_REST_TOKENS = 16  # and those for when it takes longer than it should


def words(points: Sequence[Modelled], measured: Sequence[Stall], fit: Fitted) -> str:
    """What the curve says, as HTML."""
    whole = next((p for p in points if p.budget is None), None)
    if whole is None:
        return ""
    text = _(
        "In one go, the prompt keeps everybody else waiting for <b>{stall}</b>, where a token usually takes {usual}; its own first token comes after {ttft}."
    ).format(
        stall=number(1e3 * whole.itl_max_s, "ms"), usual=number(1e3 * whole.usual_s, "ms"), ttft=number(1e3 * whole.ttft_s, "ms")
    )
    small = next((p for p in points if p.budget is not None), None)
    if small is not None:
        text += " " + _(
            "With a budget of {budget:,} nobody waits longer than <b>{stall}</b> for a token, and the prompt's first token takes {ttft}: {times:.2f} times as long."
        ).format(
            budget=small.budget, stall=number(1e3 * small.itl_max_s, "ms"), ttft=number(1e3 * small.ttft_s, "ms"), times=small.ttft_s / whole.ttft_s,
        )  # fmt: skip
    text += " " + _(
        "A budget does not remove the stall, it bounds it; the price is one more fetch of the weights for each chunk."
    )
    cost = line(
        _("Cost of a step, fitted to {n:,} measured steps (mean error {error}): {base} + {token} a token + {context} a pair that attends.").format(
            n=fit.cost.num_steps, error=share(fit.cost.error_share), base=duration(fit.cost.base_s),
            token=duration(fit.cost.per_token_s), context=duration(fit.cost.per_context_s),
        )
    )  # fmt: skip
    return said(text, "mind") + cost


def points_table(points: Sequence[Modelled], measured: Sequence[Stall]) -> str:
    """One row a budget: modelled, and the newest measured one."""
    head = [
        _("token budget"),
        _("TTFT, modelled"),
        _("measured"),
        _("p99 ITL, modelled"),
        _("measured"),
        _("longest, modelled"),
        _("measured"),
    ]
    budgets = [p.budget for p in points] + [m.budget for m in measured if m.budget not in [p.budget for p in points]]
    budgets = sorted(set(budgets), key=lambda b: math.inf if b is None else b)
    rows = []
    for budget in budgets:
        model = next((p for p in points if p.budget == budget), None)
        real = next((m for m in reversed(measured) if m.budget == budget), None)
        cells = [html.escape((model or real).label)]  # type: ignore[union-attr]
        for name in ("ttft_s", "itl_p99_s", "itl_max_s"):
            cells += [number(1e3 * getattr(s, name), "ms") if s is not None else "–" for s in (model, real)]
        rows.append(("", cells))
    return table(head, rows)


class StallPanel(pn.viewable.Viewer):
    """``view``: the page's view."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.history = History()
        self.sender: Sender | None = None
        self._changed = True
        self._known: dict[tuple[int, int], list[Stall]] = {}  # (load, its ended requests) -> its stalls
        self._fit: tuple[Any, Fitted | None] = (None, None)
        self._showing = False
        self._followed: Any = None  # the stall that the knobs were set to
        live = view.session is not None
        small = {"size": "small", "margin": 0}
        wide = {**small, "sizing_mode": "stretch_width"}
        self.prompt: Any = pmui.DiscreteSlider(label=_("Tokens of the long prompt"), options=list(PROMPTS), value=512, **wide)
        self.readers: Any = pmui.DiscreteSlider(
            label=_("Requests that are being answered"), options=list(READERS), value=4, **wide
        )
        for widget in (self.prompt, self.readers):
            quick(widget, 20)
            widget.param.watch(lambda _event: self._mark(), "value")
        self.run: Any = pmui.Button(
            label=_("Run it with four budgets"), icon="play_arrow", color="primary", variant="contained", **small
        )
        self.run.on_click(lambda _event: self._run())
        self.stop: Any = pmui.Button(label=_("Stop"), icon="stop", variant="text", visible=False, **small)
        self.stop.on_click(lambda _event: self.close())
        self.state = pane(css=CSS, margin=(10, 0, 0, 0))
        self.trade, self.strip = TradeFigure(), StripFigure()
        self.told, self.rows = pane(css=CSS, margin=(10, 0, 0, 0)), pane(css=CSS, margin=(12, 0, 0, 0))
        self._build(live)

    def _build(self, live: bool) -> None:
        nothing = (
            _("Nothing has been measured yet: a few requests are enough to know what a step costs. Send some, start a load, or run the scene here.")
            if live
            else _("In this recorded run nothing was computed from which the cost of a step could be told.")
        )  # fmt: skip
        self.nothing = pane(empty(nothing))
        buttons = [pn.Row(self.run, self.stop, margin=(10, 0, 0, 0), styles={"gap": "8px", "flex-wrap": "wrap"}), self.state]
        ask = card(
            _("A long prompt comes"), grid(self.prompt, self.readers, min_width=220, gap=24), *(buttons if live else []),
            kinds=("what-if", "live") if live else "what-if",
            hint=_("Others are reading their answers when it arrives. “Run it” sends just that to the engine, once for each budget, and puts the knobs back.") if live else _("Others are reading their answers when it arrives."),
        )  # fmt: skip

        def drawn(figure: Any) -> Any:
            return pn.pane.Bokeh(figure, sizing_mode="stretch_width", margin=0)

        what = pane(
            f'<p class="qp-what">{badge("modelled")} {html.escape(_("When one reader gets its tokens, for each budget"))}</p>',
            css=CSS,
            margin=(14, 0, 0, 0),
        )
        shown = card(
            _("Who waits, and for how long"), pane(legend_html(TRADE_LINES), css=CSS), drawn(self.trade.plot), self.told, what,
            pane(legend_html(STRIP_LINES), css=CSS), drawn(self.strip.plot), self.rows, kinds=("modelled", "measured"), margin=0,
            hint=_("Each point is a token budget. Down is good for those who read, left for the one who waits for a first token."),
        )  # fmt: skip
        self.drawn = pn.Column(shown, sizing_mode="stretch_width", margin=0, visible=False)
        self._layout = pn.Column(ask, self.nothing, self.drawn, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what comes in -----------------------------------------------------------------------------------------------------

    def take(self, events: Iterable[Event]) -> None:
        """New events of the store, in order."""
        if self.history.feed(events):
            self._changed = True

    def update(self) -> None:
        if self.sender is not None:
            self._draw_state(self.sender)
        if not self._changed:
            return
        self._changed = False
        usable = self.history.usable()
        fit = self._fitted(usable)
        if (fit is not None) != self.drawn.visible:
            self.drawn.visible, self.nothing.visible = fit is not None, fit is None
        if fit is None:
            return
        stalls = self._stalls(usable)
        self._follow(stalls)
        prompt, readers = self.num_tokens, int(self.readers.value)
        points, measured = curve(fit.cost, prompt, readers, CONTEXT + _LEAD_TOKENS), alike(stalls, prompt, readers)
        self.trade.show(points, measured)
        self.strip.show(points)
        told = words(points, measured, fit)
        if prompt < int(self.prompt.value):
            told += line(html.escape(_("The model takes no more than that: the prompt has {n:,} tokens here.").format(n=prompt)))
        set_html(self.told, told)
        set_html(self.rows, points_table(points, measured))

    @property
    def most_tokens(self) -> int:
        """Of a prompt that leaves room for an answer."""
        return (self.history.max_model_len or 2048) - 8

    @property
    def num_tokens(self) -> int:
        """Of the long prompt: what was chosen, as far as the model takes it."""
        return min(int(self.prompt.value), self.most_tokens)

    def _stalls(self, usable: Sequence[Load]) -> list[Stall]:
        known = {}
        for load in usable:
            key = (load.number, len(self.history.records(load)))
            known[key] = self._known[key] if key in self._known else stalls_of(self.history, load)
        self._known = known
        return [stall for found in known.values() for stall in found]

    def _fitted(self, usable: Sequence[Load]) -> Fitted | None:
        """From the newest steps: those of a continuous batch if there are any, with a long prompt among them if there is one."""
        steps = [s for load in usable if load.setting.batching == "continuous" for s in load.steps][-4000:]
        steps = steps or [s for load in usable for s in load.steps][-4000:]
        if not steps:
            return None
        key = (self.view.store.run, len(steps), steps[-1].step)
        if self._fit[0] != key:
            self._fit = key, fitted(steps)
        return self._fit[1]

    def _follow(self, stalls: Sequence[Stall]) -> None:
        """The knobs begin at the newest long prompt that was measured, unless somebody has moved them."""
        if not stalls or self._followed is not None:
            return
        newest = self._followed = stalls[-1]
        self._showing = True
        self.prompt.value = min(PROMPTS, key=lambda n: abs(math.log(n / newest.prompt_tokens)))
        self.readers.value = min(READERS, key=lambda n: abs(math.log(n / newest.readers)))
        self._showing = False

    def _draw_state(self, sender: Sender) -> None:
        busy = sender.busy
        set_html(self.state, state_html(sender, _("Done: the squares are what was measured. The knobs are as they were.")))
        if self.stop.visible != busy:
            self.stop.visible = self.run.disabled = busy
            self._changed = True

    # -- what a user does ----------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        if not self._showing:
            self._changed, self._followed = True, self._followed or True

    def _run(self) -> None:
        if self.sender is not None and self.sender.busy:
            return
        self._mark()
        stages = self.stages()
        now = self.history.setting
        restore = {name: getattr(now, name) for name in sorted({name for stage in stages for name in stage.knobs})}
        self.sender = Sender(self.view.session, self.view.clock.owner, stages, restore).start()

    def stages(self) -> list[Stage]:
        """One a budget: readers, and the long prompt as soon as they have a few tokens."""
        started = self.view.store.started
        model = started.model if started is not None else {}
        most = self.most_tokens
        prompt, readers = self.num_tokens, int(self.readers.value)
        vocab = int(model.get("vocab_size") or 1000)
        draw = random.Random(f"{prompt}-{readers}")
        tokens = [tuple(draw.randrange(min(256, vocab - 1), vocab) for _i in range(n)) for n in (*[CONTEXT] * readers, prompt)]
        fit = self._fitted(self.history.usable())
        rest = _REST_TOKENS  # more where tokens come fast: the prompt is sent when the screen's side knows of the readers' tokens
        if fit is not None:
            rest = max(rest, math.ceil(_REST_S / fit.cost(readers, readers * CONTEXT)))
        now, out = self.history.setting, []
        for budget in MEASURED:
            if budget is not None and not readers < budget < prompt + readers:
                continue
            knobs: dict[str, Any] = {
                "max_num_seqs": max(now.max_num_seqs, readers + 1), "enable_chunked_prefill": budget is not None,
                "max_num_batched_tokens": prompt + readers if budget is None else budget, "batching": "continuous",
            }  # fmt: skip
            steps = 1 if budget is None else math.ceil(prompt / (budget - readers))
            length = min(_LEAD_TOKENS + steps + rest, most - CONTEXT)
            asks = [Ask(t, exactly(length)) for t in tokens[:-1]] + [Ask(tokens[-1], exactly(2), once=_LEAD_TOKENS)]
            title = (
                _("Without chunks: a prompt of {n:,} tokens among {k} readers …")
                if budget is None
                else _("Budget {budget:,}: a prompt of {n:,} tokens among {k} readers …")
            )
            out.append(Stage(title.format(budget=budget, n=prompt, k=readers), knobs, tuple(asks)))
        return out

    def close(self) -> None:
        """Stop what is being sent."""
        if self.sender is not None:
            self.sender.stop()
