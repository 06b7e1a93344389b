"""The Roofline page: what bounds each step, what would bound another one elsewhere, and what fits into a GPU."""

import html
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import panel as pn
import panel_material_ui as pmui
import param

from engine.events.hardware import RoofsMeasured
from engine.events.types import EngineStarted, Event
from engine.hardware.gpus import gpus
from explorer.base import Clock
from explorer.delivery import as_one
from explorer.i18n import _
from explorer.roofline import words
from explorer.roofline.knobs import TENSOR_PARALLEL
from explorer.roofline.planning import PlannerPanel
from explorer.roofline.points import PointsPanel
from explorer.roofline.rows import RooflineRows
from explorer.roofline.rules import RulesPanel
from explorer.roofline.scenes import SCENES
from explorer.roofline.whatif import BATCHES, BITS, CONTEXTS, KV_DTYPES
from explorer.scenes import scene_buttons
from explorer.tabs import TabbedView
from explorer.theme import card, empty, grid, pane

CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
TABS = {"points": _("Roofline"), "planner": _("Memory planner"), "rules": _("Rules of thumb")}
PANELS: dict[str, Any] = {"points": PointsPanel, "planner": PlannerPanel, "rules": RulesPanel}
KNOBS = ("gpu", "batch", "context", "weight_bits", "kv_heads", "kv_dtype", "tp")
PATIENCE_S = 60.0  # after which a measurement that was asked for is taken as never to come


class RooflineView(TabbedView):
    live_knobs = ("max_num_seqs", "max_num_batched_tokens", "quantization", "kv_cache_dtype")
    url_params = ("tab", *KNOBS)

    tab: Any = param.Selector(default="points", objects=list(TABS), doc="Which tab is open.")
    gpu: Any = param.Selector(default="h100-sxm", objects=list(gpus()), doc="What if: on which GPU.")
    batch: Any = param.Selector(default=1, objects=list(BATCHES), doc="What if: requests that decode together.")
    context: Any = param.Selector(default=1024, objects=list(CONTEXTS), doc="What if: tokens of each request.")
    weight_bits: Any = param.Selector(default=0, objects=list(BITS), doc="What if: bits of a linear weight; 0: as they run.")
    kv_heads = param.Integer(default=0, bounds=(0, 4096), doc="What if: KV heads; 0: the model's own.")
    kv_dtype: Any = param.Selector(default="auto", objects=list(KV_DTYPES), doc="What if: number format of the KV cache.")
    tp: Any = param.Selector(default=1, objects=list(TENSOR_PARALLEL), doc="What if: GPUs that share the model.")

    def __init__(self, store: Any, session: Any = None, clock: Clock | None = None, **params: Any) -> None:
        super().__init__(store, session, clock, **params)
        self.rows = RooflineRows()
        self.method: str | None = None  # of the weights that ran at the step on the screen
        self.kv_running = "auto"  # the KV cache's dtype there
        self._asked: Any = None  # of which run the kept roofs were asked for
        self._pressed = 0.0  # when a measurement was asked for; 0: none is awaited
        self._scene = ""  # the scene that was pressed last here
        self._shown: Any = None
        self._drawing = False
        self._build()
        self.param.watch(lambda *_events: self._draw_fresh(), list(KNOBS))
        self.update()

    # -- what stands where -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        live = self.session is not None
        self.device = pane(empty(words.NO_ENGINE if live else words.NOT_RECORDED), css=CSS)
        self.said = pane(css=CSS, margin=(10, 0, 0, 0))
        self.measure = pmui.Button(label=_("Measure this device"), icon="speed", variant="outlined", margin=(8, 0, 0, 0))
        self.measure.on_click(lambda _event: self._measure())
        scenes = (
            [grid(*scene_buttons(SCENES.values(), self._scene_clicked), min_width=190, gap=16, margin=(14, 0, 0, 0))]
            if live
            else []
        )
        head = card(
            _("What this device can do"), self.device, *([self.measure] if live else []), *scenes, self.said,
            kinds=("measured", "live") if live else "measured",
            hint=_("Bytes a second and operations a second of torch, multiplied as the engine does, in the engine's own process with its own threads: the roofs of this device."),
        )  # fmt: skip
        self.panels: dict[str, Any] = {}
        self._make_tabs(TABS)
        self._panel()
        self._layout = pn.Column(head, self.tabs, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    def _panel(self) -> Any:
        """That of the open tab; built when it is opened."""
        panel = self.panels.get(self.tab)
        if panel is None:
            panel = self.panels[self.tab] = PANELS[self.tab](self, CSS)
            self.slots[self.tab][:] = [panel]
        return panel

    @property
    def what_if_values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in KNOBS)

    # -- what is new ---------------------------------------------------------------------------------------------------------

    def _draw_fresh(self) -> None:
        """A knob moved: drawn at once, not with the next look at the engine, and sent as one."""
        document = pn.state.curdoc
        if document is None or not self.lock.acquire(blocking=False):  # the view is at it, or comes by soon
            return
        try:
            if self._drawing:  # what is being drawn has moved a knob
                document.add_next_tick_callback(self._draw_fresh)
            else:
                with as_one():
                    self._draw(self._panel().update)
        finally:
            self.lock.release()

    def update(self) -> None:
        with self.lock:
            self._draw(self._update)

    def _draw(self, draw: Callable[[], None]) -> None:
        self._drawing = True
        try:
            draw()
        finally:
            self._drawing = False

    def _update(self) -> None:
        events: list[Event] = self.new_events()
        if events:
            self.rows.feed(events)
            if any(isinstance(event, EngineStarted) for event in events):
                self._pressed, self._scene = 0.0, ""
            if any(isinstance(event, RoofsMeasured) for event in events):
                self._pressed = 0.0
        knobs = self.state().knobs if events or self._shown is None or self._shown[0] != self.shown_step else None
        if knobs is not None:
            self.method, self.kv_running = knobs.get("quantization"), str(knobs.get("kv_cache_dtype") or "auto")
        self._ask_for_kept()
        waiting = bool(self._pressed) and time.monotonic() - self._pressed < PATIENCE_S
        shown = (self.shown_step, self._status, waiting, self._scene, len(self.rows.roofs), self.rows.started)
        if shown != self._shown:
            self._shown = shown
            self._draw_head(waiting)
        self._panel().update()
        self.rows.changed = False

    @property
    def _status(self) -> str:
        return self.session.status if self.session is not None else "recorded"

    @property
    def running(self) -> bool:
        """Whether an engine is there that takes commands."""
        return self._status in ("running", "paused") and self.store.started is not None

    def _ask_for_kept(self) -> None:
        """Once a run: roofs that were measured before are told without a measurement."""
        if self.session is None or not self.running or self._asked == self.store.run or self.rows.roofs:
            return
        self._asked = self.store.run
        self.session.measure_roofs(self.clock.owner, only_kept=True)

    def _measure(self) -> None:
        self._pressed = time.monotonic()
        self.session.measure_roofs(self.clock.owner, again=bool(self.rows.roofs))

    def _draw_head(self, waiting: bool) -> None:
        roofs, live = self.rows.device_roofs, self.session is not None
        if roofs is not None:
            body = words.roofs_html(self.rows.roofs[-1], roofs, self.rows.dtype)
        elif not live:
            body = empty(words.NOT_RECORDED)
        else:
            body = empty(words.MEASURE if self.running else words.NO_ENGINE)
        if waiting:
            body += words.said(html.escape(words.MEASURING), "wait")
        self._set(self.device, body)
        label = _("Measure again") if roofs is not None else _("Measure this device")
        disabled = not self.running or waiting
        if (self.measure.label, self.measure.disabled) != (label, disabled):
            self.measure.param.update(label=label, disabled=disabled)
        scene = SCENES.get(self._scene)
        self._set(self.said, words.said(html.escape(scene.look)) if scene is not None else "")

    @staticmethod
    def _set(target: pn.pane.HTML, body: str) -> None:
        if target.object != body:
            target.object = body

    def _scene_clicked(self, key: str, _event: Any = None) -> None:
        self.clock.follow()
        for prompt, params in SCENES[key].asks:
            if self.session.submit(prompt, params, self.clock.owner) is None:
                return  # the viewer was told why
        self._scene = key
