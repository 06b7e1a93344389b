"""The KV cache page: every physical block, whose it is, what it cost, and what it would have cost without pages."""

import html
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.state import ReqView, State
from engine.events.types import CacheTimed, EngineStarted, Event, PoolResized, PrefixLookup
from explorer.base import Clock, ExplorerView
from explorer.canvas.blockmap import BlockMap
from explorer.canvas.blocktable import BlockTable
from explorer.i18n import _, ngettext
from explorer.kv_cache import arithmetic, rows, usage, words
from explorer.kv_cache.figure import TIMING_LINES, USAGE_LINES, Line, legend_html, timing_figure, usage_figure
from explorer.kv_cache.scenes import SCENES, Director
from explorer.scenes import scene_buttons
from explorer.theme import card, empty, grid, pane, request_colour

CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
LOOKUPS = 200  # look-ups remembered
LOOKUPS_SHOWN = 40
HINT_MAP = _("Each square is one physical block. Its height of colour is how full it is.")


class KVCacheView(ExplorerView):
    live_knobs = ("max_num_seqs", "block_size", "num_kv_blocks", "enable_prefix_caching")

    def __init__(self, store: Any, session: Any = None, clock: Clock | None = None, **params: Any) -> None:
        super().__init__(store, session, clock, **params)
        self.mapper = rows.PoolMapper()
        self.usage = usage.UsageRows()
        self.words = words.LIVE if session is not None else words.RECORDED
        self.texts = rows.TokenTexts(getattr(session, "token_text", None))
        self.lookups: deque[usage.Lookup] = deque(maxlen=LOOKUPS)
        self.timed: CacheTimed | None = None
        self.last_row: dict[str, float] = {}
        self._rows_by_step: dict[int, dict[str, float]] = {}
        self._measured: list[arithmetic.Measured] = []  # of every pool there was
        self._palette: dict[str, int] = {}  # colour -> index
        self._shown: tuple[Any, ...] = ()
        self._missed = 0
        self._build()
        self.clock.param.watch(lambda *_events: self._selection_moved(), ["request_id", "block_id"])
        self._selection_moved()
        self.update()

    # -- what stands where ---------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self.director = Director(self.session, lambda: self.clock.owner) if self.session is not None else None
        self.map = BlockMap()
        self.map.param.watch(self._block_clicked, "selected")
        self.map.param.watch(lambda _event: self._describe(), "hovered")
        self.table = BlockTable(message=self.words["tables"])
        self.table.param.watch(self._table_clicked, ["selected_request", "selected_block"])
        self.now = pane(css=CSS, margin=(0, 0, 8, 0))
        self.used = usage_figure()
        self.used_now = pane(css=CSS, margin=(0, 0, 8, 0))
        self.found = pane(css=CSS)
        self.sums = pane(css=CSS)
        self.timing = timing_figure()
        self.timing_words = pane(css=CSS, margin=(6, 0, 0, 0))
        self.used_plot = _plot(USAGE_LINES, self.used.root)
        self.timing_plot = _plot(TIMING_LINES, self.timing.root)
        self._draw_timing()
        left = [
            card(_("Block tables"), self.table, kinds="measured", margin=0,
                 hint=_("For each request: logical block (small) → physical block. Striped ones are shared."),
                 acts=_("Click one to find it on the map.")),
            card(_("Prefix look-ups"), self.found, kinds="measured", margin=0,
                 hint=_("What each request asked of the prefix cache when it was admitted, and what it got.")),
        ]  # fmt: skip
        right = [
            card(_("What this cache weighs"), self.sums, kinds=("derived", "measured"), margin=0,
                 hint=_("The formula of every KV cache, with the numbers of the model that is running.")),
            card(_("One more token, with the cache and without"), *self._timing_controls(),
                 self.timing_plot, self.timing_words, kinds=("measured", "modelled"), margin=0,
                 hint=_("The same short request at several lengths, really run both ways. The curves scale counted operations to the points.")),
        ]  # fmt: skip
        self._layout = pn.Column(
            *([self._scene_card()] if self.director is not None else []),
            card(_("All physical blocks"), self.now, self.map, kinds="measured", hint=HINT_MAP,
                 acts=_("Hover or use the arrow keys; click to select.")),
            grid(*left, min_width=420, margin=(0, 0, 16, 0)),
            card(_("Tokens, blocks, and a reservation of the maximum"), self.used_now, self.used_plot,
                 kinds="derived", margin=(0, 0, 16, 0),
                 hint=_("Pages waste at most the end of each request's last block. Contiguous reservation wastes what is not written yet.")),
            grid(*right, min_width=420),
            sizing_mode="stretch_width", margin=0,
        )  # fmt: skip

    def _scene_card(self) -> pn.Column:
        self.said = pane(css=CSS, margin=(10, 0, 0, 0), visible=False)
        self.said_by = ("", "")
        buttons = scene_buttons(SCENES.values(), self._scene_clicked)
        self.restore = pmui.Button(
            label=_("Restore the knobs"), icon="undo", color="warning", variant="text", margin=0, visible=False
        )
        self.restore.on_click(lambda _event: self._restore())
        hint = _("Real requests to the running engine, chosen so that something happens in the pool.")
        return card(_("Scenes"), grid(*buttons, min_width=230), self.said, self.restore, kinds="live", hint=hint)

    def _timing_controls(self) -> list[Any]:
        if self.session is None:
            return []
        self.measure = pmui.Button(label=_("Measure now"), icon="timer", variant="outlined", margin=(0, 0, 8, 0))
        self.measure.on_click(lambda _event: self._measure())
        return [self.measure]

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what is new ---------------------------------------------------------------------------------------------------

    def update(self) -> None:
        events = self.new_events()
        if events:
            self._take(events)
        shown = (self.shown_step, self.clock.live)
        if not events and shown == self._shown:
            if self.used.pace.late:
                self.used.look_at(shown[0], self.store.last_step, shown[1])
            return
        moved, self._shown = shown != self._shown, shown
        state = self.state()
        self._draw_pool(state)
        self.used.look_at(shown[0], self.store.last_step, shown[1])
        self._draw_usage(state)
        if moved or any(isinstance(e, PrefixLookup | EngineStarted) for e in events):
            self._draw_lookups()
        self._draw_sums(state)
        if self.director is not None:
            self.director.advance(self.store.at(self.store.last_step))
            self._draw_said()

    def _take(self, events: list[Event]) -> None:
        if self.missed > self._missed:  # the ring buffer has dropped what came before
            self._missed = self.missed
            self._begin_late()
        for i, event in enumerate(events):
            if isinstance(event, EngineStarted):  # a new engine: what the old one did is over
                self._restart(event)
                events = events[i:]
        emptied, new = self.usage.emptied, self.usage.rows(events)
        self.used.add(new)
        for values in zip(*new.values(), strict=True):
            self.last_row = dict(zip(usage.COLUMNS, values, strict=True))
            self._rows_by_step[int(self.last_row["step"])] = self.last_row
        while len(self._rows_by_step) > 20_000:
            del self._rows_by_step[next(iter(self._rows_by_step))]
        self.lookups.extend(usage.lookups(events, self.usage.block_size, emptied))
        self.texts.learn(events)
        for event in events:
            if isinstance(event, PoolResized):
                self._measured.append(arithmetic.Measured.of(event))
            elif isinstance(event, CacheTimed):
                self.timed = event
                self._draw_timing()

    def _begin_late(self) -> None:
        """Go on from the first state that is still known; its events are those after it."""
        started = self.store.started
        if started is not None:
            self._restart(started)
            self.usage.resume(started, self.store.at(self.store.first_step))

    def _restart(self, started: EngineStarted) -> None:
        if self.director is not None:
            self.director.forget()
        self.lookups.clear()
        self._rows_by_step.clear()
        self.last_row = {}
        self.used.clear()
        self.timed = None
        self._measured = [arithmetic.Measured.of(started)]
        self._draw_timing()

    # -- the pool --------------------------------------------------------------------------------------------------------

    def _colour(self, view: ReqView) -> list[str]:
        colour = request_colour(view.owner, rows.number_of(view))
        return [colour, colour]

    def _colour_index(self, view: ReqView) -> int:
        pair = self._colour(view)
        if pair[0] not in self._palette:
            self._palette[pair[0]] = len(self._palette)
            self.map.palette = [*self.map.palette, pair]
        return self._palette[pair[0]]

    def _draw_pool(self, state: State) -> None:
        pool = self.mapper.map(state)
        _show(self.map, state.num_blocks > 0)
        self.map.draw(rows.block_codes(pool, self._colour_index), state.block_size)
        n = rows.counts(pool)
        parts = [
            _("<b>{used:,}</b> of {all:,} blocks held ({share:.0f} %)").format(
                used=pool.num_held, all=state.num_blocks, share=100 * pool.num_held / max(1, state.num_blocks)
            )
        ]
        if n.shared:
            parts.append(
                ngettext(
                    "<b>{n:,}</b> shared, which spares {saved:,} block",
                    "<b>{n:,}</b> shared, which spares {saved:,} blocks",
                    n.saved,
                ).format(n=n.shared, saved=n.saved)
            )
        if n.cached:
            parts.append(_("<b>{n:,}</b> free but still findable by their prefix").format(n=n.cached))
        if state.draining:
            waiting = ", ".join(f"{name} = {value}" for name, value in state.draining.items())
            parts.append(
                _("<b>draining</b>: {knobs} takes effect when the running requests have finished").format(
                    knobs=html.escape(waiting)
                )
            )
        line = f'<p class="kv-line">{" · ".join(parts)}</p>' if state.num_blocks else empty(_("No engine has started yet."))
        self._set(self.now, line)
        self._draw_tables(state)
        self._describe(state)

    def _draw_tables(self, state: State) -> None:
        selected = self.clock.request_id
        table, omitted = rows.table_rows(state, self._colour, selected=selected)
        if table != self.table.rows:
            self.table.rows = table
        self.table.omitted = omitted
        self.map.mark(rows.blocks_of(state, selected))

    def _describe(self, state: State | None = None) -> None:
        """Answer the block under the pointer."""
        block = self.map.hovered
        state = self.state() if state is None else state
        if not 0 <= block < state.num_blocks:
            self.map.detail = {}  # so that the same answer is one again
            return
        detail = {"block_id": block, "lines": rows.describe_block(state, block, self.texts)}
        if detail != self.map.detail:
            self.map.detail = detail

    # -- the selection, both ways ------------------------------------------------------------------------------------------

    def _block_clicked(self, event: Any) -> None:
        block = event.new if event.new >= 0 else None
        if block == self.clock.block_id:
            return
        who = rows.holders(self.state(), block) if block is not None else []
        names = [view.request_id for view, _index in who]
        keep = self.clock.request_id if self.clock.request_id in names else (names[0] if names else None)
        self.clock.param.update(block_id=block, request_id=keep)

    def _table_clicked(self, *events: Any) -> None:
        block = self.table.selected_block if self.table.selected_block >= 0 else None
        self.clock.param.update(block_id=block, request_id=self.table.selected_request or None)

    def _selection_moved(self) -> None:
        block = -1 if self.clock.block_id is None else self.clock.block_id
        self.map.selected = block
        self.table.param.update(selected_block=block, selected_request=self.clock.request_id or "")
        state = self.state()
        self._draw_tables(state)
        self._draw_lookups()
        self._draw_sums(state)

    # -- the cards below -----------------------------------------------------------------------------------------------------

    def _draw_usage(self, state: State) -> None:
        row = self.last_row if self.clock.live else self._rows_by_step.get(self.shown_step)
        _show(self.used_plot, bool(self._rows_by_step))
        if not row:
            self._set(self.used_now, empty(self.words["usage"]))
            return
        told = usage.summary(row, self.usage.max_model_len, state.block_size)
        step = _("Step {n}").format(n=int(row["step"]))
        self._set(self.used_now, f'<p class="kv-line"><b>{step}</b> · {html.escape(told)}</p>')

    def _draw_lookups(self) -> None:
        shown = [row for row in self.lookups if row.step <= self.shown_step]
        if not shown:
            self._set(self.found, empty(self.words["lookups"]))
            return
        share = usage.hit_share(shown)
        head = _("{share:.0f} % of the tokens of the last {n} look-ups were hit.").format(share=100 * (share or 0), n=len(shown))
        body = "".join(
            _lookup_html(row, row.request_id == self.clock.request_id) for row in list(shown)[: -LOOKUPS_SHOWN - 1 : -1]
        )
        left = len(shown) - LOOKUPS_SHOWN
        more = (
            f'<p class="ct-muted ct-small">{html.escape(_("{n} older ones are not listed.").format(n=left))}</p>'
            if left > 0
            else ""
        )
        self._set(self.found, f'<p class="kv-line">{head}</p><div class="kv-scroll" tabindex="0">{body}</div>{more}')

    def _draw_sums(self, state: State) -> None:
        started = self.store.started
        if started is None:
            self._set(self.sums, empty(_("No engine has started yet.")))
            return
        pool = (state.num_blocks, state.block_size)
        measured = next((m for m in reversed(self._measured) if (m.num_blocks, m.block_size) == pool), None)
        view = state.requests.get(self.clock.request_id or "")
        chosen = (view.request_id, view.num_computed_tokens) if view is not None and view.block_ids else None
        try:
            kv_dtype = str(state.knobs.get("kv_cache_dtype") or "auto")
            body = arithmetic.card_html(started, measured, state.num_blocks, state.block_size, chosen, kv_dtype)
        except ValueError as error:  # a saved run of something this arithmetic does not know
            body = empty(str(error))
        self._set(self.sums, body)

    def _draw_timing(self) -> None:
        started = self.store.started
        _show(self.timing_plot, self.timed is not None)
        if self.timed is None or started is None:
            self.timing.show(None)
            what = _("Press Measure now: it takes a few seconds, during which other requests wait.")
            self._set(self.timing_words, empty(what if self.session is not None else _("This run holds no such measurement.")))
            return
        try:
            curves = arithmetic.cache_curves(self.timed, started.model)
            said = arithmetic.in_words(curves, started.model)
        except ValueError as error:  # a saved run that says too little of its model
            curves, said = None, str(error)
        self.timing.show(curves)
        self._set(self.timing_words, f'<p class="kv-line">{html.escape(said)}</p>')

    @staticmethod
    def _set(target: pn.pane.HTML, body: str) -> None:
        if target.object != body:
            target.object = body

    # -- what the user does -----------------------------------------------------------------------------------------------

    def _scene_clicked(self, key: str, _event: Any = None) -> None:
        assert self.director is not None
        self.clock.follow()
        self.director.start(key, self.store.at(self.store.last_step))
        self._draw_said()

    def _restore(self) -> None:
        assert self.director is not None
        self.director.restore()
        self._draw_said()

    def _draw_said(self) -> None:
        assert self.director is not None
        if self.director.said != self.said_by:
            self.said_by = kind, text = self.director.said
            self.said.param.update(
                object=f'<div class="kv-said {kind}" role="status">{html.escape(text)}</div>', visible=bool(text)
            )
        changed = bool(self.director.changed)
        if self.restore.visible != changed:
            self.restore.visible = changed

    def _measure(self) -> None:
        longest = int(self.usage.max_model_len or 0) or arithmetic.LENGTHS[-1]
        try:
            self.session.measure_cache(self.clock.owner, [t for t in arithmetic.LENGTHS if t <= longest] or [longest])
        except (ValueError, RuntimeError) as error:
            self._set(self.timing_words, f'<div class="kv-said error" role="status">{html.escape(str(error))}</div>')


def _plot(lines: Sequence[Line], root: Any) -> pn.Column:
    """A legend and its figure, not shown until there is something to draw."""
    figure = pn.pane.Bokeh(root, sizing_mode="stretch_width", margin=0)
    return pn.Column(pane(legend_html(lines), css=CSS), figure, sizing_mode="stretch_width", margin=0, visible=False)


def _show(view: Any, visible: bool) -> None:
    if view.visible != visible:
        view.visible = visible


def _lookup_html(row: usage.Lookup, lit: bool) -> str:
    share = 100 * row.hit / row.asked if row.asked else 0
    blocks = (
        _("blocks {ids}").format(ids=", ".join(map(str, row.blocks[:12])) + (" …" if len(row.blocks) > 12 else ""))
        if row.blocks
        else ""
    )
    return (
        f'<div class="kv-lookup{" kv-lit" if lit else ""}"><div class="kv-top"><b>{html.escape(row.request_id)}</b>'
        f'<span class="ct-muted">{_("step")} {row.step}</span><span class="ct-muted">{blocks}</span>'
        f'<span class="kv-hit">{_("{hit} of {asked} tokens").format(hit=row.hit, asked=row.asked)}'
        f'<span class="kv-bar" title="{share:.1f} %"><span style="width:{share:.1f}%"></span></span></span></div>'
        f"<p>{html.escape(row.words)}</p></div>"
    )
