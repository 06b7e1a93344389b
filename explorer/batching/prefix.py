"""Prefix caching: what is cached, as a tree, what look-ups found and why not more, and the time that it saves. ``PrefixPanel`` is the tab."""

import html
import math
import random
import time
from collections.abc import Iterable
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.batching import PrefixTree
from engine.events.types import Event
from explorer.batching.prefix_figure import GAIN_LINES, GainFigure, TreeFigure
from explorer.batching.prefix_rows import (
    BINS,
    REASONS,
    Group,
    LookupRows,
    Lookups,
    gain,
    groups,
    placed,
    served_alone,
    tree_columns,
)
from explorer.batching.whatif_rows import Fitted, History, fitted
from explorer.batching.whatif_run import Ask, Sender, Stage, exactly, state_html
from explorer.i18n import _, ngettext
from explorer.kv_cache.figure import legend_html
from explorer.pace import quick
from explorer.quantization.labels import CSS, bar, line, said, set_html, share
from explorer.theme import badge, card, empty, grid, number, pane

PROMPTS = (64, 128, 256, 384, 512, 1024, 2048)
OUTPUTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SHARES = (0.0, 0.25, 0.5, 0.75, 0.97)
REPEATS = 2
LOOK_S = 1.0  # at most so often is the tree asked for
MODEL = _("modelled, from the sliders")
TREE_CSS = """
.px-legend { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 12px; margin: 0 0 6px; }
.px-legend i { display: inline-block; width: 22px; height: 12px; border-radius: 2px; vertical-align: -1px; margin-right: 6px; }
.px-rows { display: grid; grid-template-columns: fit-content(38%) minmax(40px, 1fr) fit-content(42%); gap: 4px 12px; align-items: center; font-size: 13px; font-variant-numeric: tabular-nums; }
.px-rows h3 { grid-column: 1 / -1; font-size: 12.5px; font-weight: 620; margin: 6px 0 0; }
"""


def tree_words(tree: PrefixTree) -> str:
    """What the tree says of itself, as HTML."""
    kind = {
        "hash": _("A hash chain over whole blocks: a prefix is found in steps of {n} tokens, and a node here is a run of blocks that nothing leaves."),
        "radix": _("A radix tree over tokens: a prefix is found to the token, and a node splits where two prompts part. Its blocks hold {n} tokens."),
    }.get(tree.index, "{n}").format(n=tree.block_size)  # fmt: skip
    share_found = tree.num_hit_tokens / tree.num_asked_tokens if tree.num_asked_tokens else math.nan
    text = _(
        "<b>{cached:,}</b> of {blocks:,} blocks are cached, {free:,} of them held by nobody, so they may be evicted. {lookups:,} look-ups found {found} of the tokens that they asked for."
    ).format(
        cached=tree.num_cached_blocks,
        blocks=tree.num_blocks,
        free=tree.num_evictable_blocks,
        lookups=tree.num_lookups,
        found=share(share_found),
    )
    out = line(f"{text} {html.escape(kind)}")
    if tree.num_nodes > len(tree.nodes):
        out += line(
            html.escape(_("Of {n:,} nodes, the {k:,} that were used most are drawn.").format(n=tree.num_nodes, k=len(tree.nodes)))
        )
    if not tree.enabled:
        out += said(html.escape(_("Prefix caching is off: nothing new enters, and nothing is looked up.")), "mind")
    return out


def tree_legend() -> str:
    looks = (
        ("#e69f00", _("a request holds blocks of it")), ("#0072b2", _("cached, nobody holds it")),
        ("repeating-linear-gradient(135deg, #8a8f98 0 2px, transparent 2px 5px)", _("cached, but not reachable: what is before it was evicted")),
    )  # fmt: skip
    parts = "".join(
        f'<span><i aria-hidden="true" style="background:{ground}"></i>{html.escape(name)}</span>' for ground, name in looks
    )
    return (
        f'<div class="px-legend">{parts}<span>{html.escape(_("the fuller its colour, the more often it was used"))}</span></div>'
    )


def lookups_html(seen: Lookups) -> str:
    """Shares that were found, and why not more."""
    out = [f"<h3>{html.escape(_('Share of a prompt that was found'))}</h3>"]
    most = max(seen.shares)
    for i, n in enumerate(seen.shares):
        if n:
            low = "0" if i == 0 else f"> {100 * i // BINS}"
            out.append(f"<span>{low} – {100 * (i + 1) // BINS} %</span>{bar(n / most)}<span>{n:,}</span>")
    out.append(f"<h3>{html.escape(_('Why not more'))}</h3>")
    most = max(n for _reason, n, _missed in seen.reasons)
    for reason, n, missed in seen.reasons:
        told = REASONS.get(reason, reason)
        many = ngettext("{n:,} look-up", "{n:,} look-ups", n).format(n=n)
        tokens = _("{n:,} tokens to compute").format(n=missed)
        out.append(
            f"<span>{html.escape(told)}</span>{bar(n / most, 'other')}<span>{html.escape(many)}, {html.escape(tokens)}</span>"
        )
    head = line(
        _(
            "<b>{found}</b> of {asked:,} prompt tokens were found in {n:,} look-ups; those of preempted requests that came back do not count."
        ).format(found=share(seen.hit_share), asked=seen.asked, n=seen.count)
    )
    return head + f'<div class="px-rows">{"".join(out)}</div>'


class PrefixPanel(pn.viewable.Viewer):
    """``view``: the page's view."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.history, self.rows = History(), LookupRows()
        self.sender: Sender | None = None
        self._changed = True
        self._stale = True  # the cache may be another than the tree that is drawn
        self._asked_at = -1e9
        self._fit: tuple[Any, Fitted | None] = (None, None)
        self._showing = False
        live = view.session is not None
        small = {"size": "small", "margin": 0}
        wide = {**small, "sizing_mode": "stretch_width"}
        self.group: Any = pmui.Select(label=_("P and D"), options={MODEL: ""}, value="", **wide)
        self.prompt: Any = pmui.DiscreteSlider(label=_("Tokens of the prompt"), options=list(PROMPTS), value=512, **wide)
        self.output: Any = pmui.DiscreteSlider(label=_("Tokens of the answer"), options=list(OUTPUTS), value=16, **wide)
        for widget in (self.group, self.prompt, self.output):
            quick(widget, 20)
            widget.param.watch(lambda _event: self._mark(), "value")
        self.run: Any = pmui.Button(label=_("Measure it"), icon="play_arrow", color="primary", variant="contained", **small)
        self.run.on_click(lambda _event: self._run())
        self.stop: Any = pmui.Button(label=_("Stop"), icon="stop", variant="text", visible=False, **small)
        self.stop.on_click(lambda _event: self.close())
        self.state = pane(css=CSS, margin=(10, 0, 0, 0))
        self.tree, self.gained = TreeFigure(), GainFigure()
        self.tree_told, self.lookups = pane(css=CSS, margin=(8, 0, 0, 0)), pane(css=CSS + TREE_CSS)
        self.gain_told = pane(css=CSS, margin=(10, 0, 0, 0))
        self._build(live)

    def _build(self, live: bool) -> None:
        def drawn(figure: Any) -> Any:
            return pn.pane.Bokeh(figure, sizing_mode="stretch_width", margin=0)

        self.no_tree = pane(
            empty(_("Nothing is cached yet. Send a prompt of more than a block (16 tokens) twice, and look again.") if live else _("In this recorded run nobody looked at the tree of what is cached."))
        )  # fmt: skip
        self.tree_part = pn.Column(
            pane(tree_legend(), css=TREE_CSS),
            drawn(self.tree.plot),
            self.tree_told,
            sizing_mode="stretch_width",
            margin=0,
            visible=False,
        )
        first = card(
            _("What is cached, as a tree"), self.no_tree, self.tree_part, kinds="measured",
            hint=_("Every prefix that a new prompt could find, from left to right; a fork is where prompts part. Hover for its text and its hits."),
        )  # fmt: skip
        second = card(
            _("Look-ups"), self.lookups, kinds="measured",
            hint=_("What new requests found when they were admitted, and the reason where it was less than everything."),
        )  # fmt: skip
        formula = _(
            "With the prompt taking P seconds, the answer D, and a share h of the prompt found, a request is done (P + D) / ((1 − h) P + D) times faster."
        )
        row = pn.Row(self.run, self.stop, margin=(10, 0, 0, 0), styles={"gap": "8px", "flex-wrap": "wrap"})
        third = card(
            _("The time that it saves"), grid(self.group, self.prompt, self.output, min_width=190, gap=18), *([row, self.state] if live else []),
            pane(legend_html(GAIN_LINES), css=CSS, margin=(12, 0, 0, 0)), drawn(self.gained.plot), self.gain_told,
            kinds=("modelled", "measured", "what-if", *(["live"] if live else [])), margin=0, hint=formula,
        )  # fmt: skip
        self._layout = pn.Column(first, second, third, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what comes in -----------------------------------------------------------------------------------------------------

    def take(self, events: Iterable[Event]) -> None:
        """New events of the store, in order."""
        events = list(events)
        before = self.rows.tree
        self.rows.feed(events)
        if self.history.feed(events):
            self._changed = True
            self._stale = self._stale or any(type(e).__name__ in _CHANGES for e in events)
        if self.rows.tree is not before:
            self._changed = True

    def update(self) -> None:
        self._look()
        if self.sender is not None:
            self._draw_state(self.sender)
        if not self._changed:
            return
        self._changed = False
        self._draw_tree()
        seen = self.rows.seen()
        nothing = _("No request was looked up yet.")
        set_html(self.lookups, lookups_html(seen) if seen.count else empty(nothing))
        self._draw_gain()

    def _look(self) -> None:
        """Ask for the tree when the cache may have changed."""
        session = self.view.session
        if session is None or not self._stale or session.status not in ("running", "paused") or self.view.store.started is None:
            return
        now = time.monotonic()
        if now - self._asked_at >= LOOK_S:
            self._asked_at, self._stale = now, False
            session.observe_prefix(self.view.clock.owner)

    # -- what is drawn ------------------------------------------------------------------------------------------------------

    def _draw_tree(self) -> None:
        tree = self.rows.tree
        there = tree is not None and bool(tree.nodes)
        if there != self.tree_part.visible:
            self.tree_part.visible, self.no_tree.visible = there, not there
        if tree is not None and tree.nodes:
            self.tree.show(tree_columns(tree), [place.node.reachable for place in placed(tree.nodes)])
            set_html(self.tree_told, tree_words(tree))

    def _groups(self) -> list[Group]:
        return groups(served_alone(self.history))

    def _draw_gain(self) -> None:
        found = self._groups()
        options = {
            MODEL: "",
            **{
                _("measured: {title}").format(title=g.title): f"{g.num_prompt_tokens}/{g.num_output_tokens}"
                for g in reversed(found)
            },
        }
        if options != self.group.options:
            new = [v for v in options.values() if v not in self.group.options.values()]
            value = new[0] if new else self.group.value if self.group.value in options.values() else ""
            self._showing = True
            self.group.param.update(options=options, value=value)
            self._showing = False
        group = next((g for g in found if f"{g.num_prompt_tokens}/{g.num_output_tokens}" == self.group.value), None)
        times = (group.prefill_s, group.decode_s) if group is not None else self._modelled()
        for widget in (self.prompt, self.output):
            if widget.disabled != (group is not None) and self.view.session is None:
                widget.disabled = group is not None
        if times is None:
            set_html(
                self.gain_told, empty(_("What a prompt and an answer take is not known yet: send a request, or measure it here."))
            )
            return
        self.gained.show(*times, group)
        set_html(self.gain_told, self._gain_words(*times, group))

    def _modelled(self) -> tuple[float, float] | None:
        """P and D of the sliders' lengths, alone in the batch, from the fitted cost of a step."""
        steps = [s for load in self.history.usable() for s in load.steps][-4000:]
        if not steps:
            return None
        key = (self.view.store.run, len(steps), steps[-1].step)
        if self._fit[0] != key:
            self._fit = key, fitted(steps)
        cost = self._fit[1].cost if self._fit[1] is not None else None
        if cost is None:
            return None
        n, m = int(self.prompt.value), int(self.output.value)
        return cost(n, n * (n + 1) / 2), sum(cost(1, n + i) for i in range(1, m))

    def _gain_words(self, prefill_s: float, decode_s: float, group: Group | None) -> str:
        kind = badge("measured" if group is not None else "modelled")
        text = _("{kind} P = <b>{p}</b>, D = <b>{d}</b>: however much of the prompt is found, a request is done at most {most:.2f} times faster.").format(
            kind=kind, p=number(1e3 * prefill_s, "ms"), d=number(1e3 * decode_s, "ms"), most=gain(prefill_s, decode_s, 1.0) if decode_s else math.inf,
        )  # fmt: skip
        if group is not None and group.warm:
            best = max(group.warm, key=lambda s: s.share)
            text += " " + _("With {h} found it took {t} instead of {whole}: {gain:.2f} times faster; the formula says {formula:.2f}.").format(
                h=share(best.share), t=number(1e3 * best.total_s, "ms"), whole=number(1e3 * (prefill_s + decode_s), "ms"), gain=group.gained(best),
                formula=gain(prefill_s, decode_s, best.share),
            )  # fmt: skip
        text += " " + _(
            "It saves prefill, and prefill only: the longer the answer, the less it is worth; the time to the first token is where it shows."
        )
        return said(text, "mind")

    def _draw_state(self, sender: Sender) -> None:
        busy = sender.busy
        set_html(self.state, state_html(sender))
        if self.stop.visible != busy:
            self.stop.visible = self.run.disabled = busy
            self._changed = True

    # -- what a user does ----------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        if not self._showing:
            self._changed = True

    def _run(self) -> None:
        if self.sender is None or not self.sender.busy:
            self.sender = Sender(self.view.session, self.view.clock.owner, self.stages(), {}).start()

    def stages(self) -> list[Stage]:
        """One request that leaves its prompt in the cache, then others that share more and more of it; each alone."""
        started = self.view.store.started
        vocab = int((started.model if started is not None else {}).get("vocab_size") or 1000)
        m = max(2, int(self.output.value))
        n = max(2, min(int(self.prompt.value), (self.history.max_model_len or 2048) - m))
        draw = random.Random(f"{n}-{m}")

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(draw.randrange(min(256, vocab - 1), vocab) for _i in range(count))

        common = tokens(n)
        asks = [Ask(common, exactly(1), after=True)]
        for h in SHARES * REPEATS:
            kept = round(h * n)
            asks.append(Ask(common[:kept] + tokens(n - kept), exactly(m), after=True))
        title = _("{k} requests of {n:,} tokens, one after the other, that share more and more …").format(k=len(asks), n=n)
        return [Stage(title, {}, tuple(asks))]

    def close(self) -> None:
        """Stop what is being sent."""
        if self.sender is not None:
            self.sender.stop()


_CHANGES = (
    "BlockCached",
    "BlockEvicted",
    "BlockShared",
    "BlockFreed",
    "PrefixLookup",
    "PoolResized",
    "EngineStarted",
    "Snapshot",
)
