"""The Attention page: how a kernel goes over the score matrix by tiles, what that takes of a GPU, and what it saves."""

import html
import time
from typing import Any

import panel as pn
import panel_material_ui as pmui
import param

from engine.events.types import Event
from engine.hardware.gpus import gpus
from explorer.attention import lab, words
from explorer.attention.compiled import CompiledPanel
from explorer.attention.decode import DecodePanel
from explorer.attention.engine import EnginePanel
from explorer.attention.labels import CSS, said, set_html
from explorer.attention.rows import derived_tiles
from explorer.attention.scenes import SCENES
from explorer.attention.shape import GROUPS, HEAD_DIMS, LENGTHS, STAGES, TILES, WARPS, WINDOWS, Shape
from explorer.attention.steps import AttentionSteps
from explorer.attention.tiles import TilesPanel, places
from explorer.attention.traffic import TrafficPanel
from explorer.base import Clock
from explorer.i18n import _
from explorer.scenes import scene_buttons
from explorer.tabs import TabbedView
from explorer.theme import card, grid, in_file, pane

TABS = {
    "tiles": _("Tiles"), "compile": _("Compiled"), "traffic": _("Traffic"), "decode": _("Decode"), "engine": _("From the engine"),
}  # fmt: skip
PANELS: dict[str, Any] = {
    "tiles": TilesPanel, "compile": CompiledPanel, "traffic": TrafficPanel, "decode": DecodePanel, "engine": EnginePanel,
}  # fmt: skip
KNOBS = (
    "block_m", "block_n", "num_stages", "num_warps", "head_dim", "seq_len", "causal", "window", "group", "gpu",
)  # fmt: skip
SETTLED_S = 0.3  # after which a knob is taken as set: until then nothing is run or compiled


class AttentionView(TabbedView):
    url_params = ("tab", *KNOBS)

    tab: Any = param.Selector(default="tiles", objects=list(TABS), doc="Which tab is open.")
    block_m: Any = param.Selector(default=64, objects=list(TILES), doc="What if: query rows of a tile.")
    block_n: Any = param.Selector(default=64, objects=list(TILES), doc="What if: keys of a tile.")
    num_stages: Any = param.Selector(default=2, objects=list(STAGES), doc="What if: stages of the pipeline over K and V tiles.")
    num_warps: Any = param.Selector(default=4, objects=list(WARPS), doc="What if: warps of a program.")
    head_dim: Any = param.Selector(default=64, objects=list(HEAD_DIMS), doc="What if: numbers of a head.")
    seq_len: Any = param.Selector(default=512, objects=list(LENGTHS), doc="What if: tokens.")
    causal = param.Boolean(default=True, doc="What if: a token sees the past alone.")
    window: Any = param.Selector(default=0, objects=list(WINDOWS), doc="What if: keys that a query sees; 0: all.")
    group: Any = param.Selector(default=1, objects=list(GROUPS), doc="What if: query heads that share a KV head.")
    gpu: Any = param.Selector(default="h100-sxm", objects=list(gpus()), doc="What if: the GPU that it is compiled for.")

    def __init__(self, store: Any, session: Any = None, clock: Clock | None = None, **params: Any) -> None:
        super().__init__(store, session, clock, **params)
        self.in_file = in_file.get()
        self.steps = AttentionSteps()
        self.who = f"{self.clock.owner} {id(self)}"
        self.run_answer: Any = None  # of the kernel's run for ``shape``; None: not yet
        self.report: Any = None  # of its compilation
        self._shape: Shape | None = None
        self._moved = 0.0
        self._step: Any = None
        self._scene = ""
        self._build()
        self.update()

    # -- what stands where -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self.step_words = pane(css=CSS, margin=(0, 0, 14, 0))
        self.knobs = {name: self._knob(name) for name in KNOBS}
        self.said = pane(css=CSS, margin=(10, 0, 0, 0))
        scenes = grid(*scene_buttons(SCENES.values(), self._scene_clicked), min_width=165, gap=14, margin=(14, 0, 0, 0))
        head = card(
            _("What is tried"), self.step_words, grid(*self.knobs.values(), min_width=118, gap=12), *([] if self.in_file else [scenes]),
            self.said, kinds=("measured", "what-if"),
            hint=_("Above, the attention of the engine’s own step; below, a kernel of your choice, which the engine does not notice."),
        )  # fmt: skip
        self.panels: dict[str, Any] = {}
        self._make_tabs(TABS)
        for key in TABS if self.in_file else (self.tab,):
            self._panel(key)
        self._layout = pn.Column(head, self.tabs, sizing_mode="stretch_width", margin=0)

    def _knob(self, name: str) -> Any:
        titles = {
            "block_m": _("Query rows a tile"), "block_n": _("Keys a tile"), "num_stages": _("Stages"), "num_warps": _("Warps"),
            "head_dim": _("Head size"), "seq_len": _("Tokens"), "window": _("Window"), "group": _("Heads a KV head"), "gpu": _("GPU"),
            "causal": _("Causal"),
        }  # fmt: skip
        wide: dict[str, Any] = {"size": "small", "margin": 0}
        value = getattr(self, name)
        if name == "causal":
            widget: Any = pmui.Switch(label=titles[name], value=value, **wide)
        else:
            objects = self.param[name].objects
            options: Any = {entry.title: key for key, entry in gpus().items()} if name == "gpu" else {str(o): o for o in objects}
            if name == "window":
                options = {_("none") if size == 0 else str(size): size for size in objects}
            widget = pmui.Select(label=titles[name], options=options, value=value, sizing_mode="stretch_width", **wide)

        def take(event: Any) -> None:
            if event.new is not None and getattr(self, name) != event.new:
                setattr(self, name, event.new)

        def show(event: Any) -> None:
            if widget.value != event.new:
                widget.value = event.new

        widget.param.watch(take, "value")
        self.param.watch(show, name)
        return widget

    def __panel__(self) -> pn.Column:
        return self._layout

    def close(self) -> None:
        for each in (lab.INTERPRETER, lab.COMPILER):
            each.forget(self.who)

    # -- what is tried -------------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> Shape:
        return Shape(**{name: getattr(self, name) for name in KNOBS})

    @property
    def too_many(self) -> bool:
        """Whether the interpreter is not given this."""
        return derived_tiles(self.shape) > words.MOST_TILES

    @property
    def good_report(self) -> Any:
        """The compiler's report, where it is no error."""
        return self.report if self.report is not None and "error" not in self.report else None

    @property
    def slots_of_chip(self) -> int:
        return places(self.shape, self.good_report)

    def _ask(self) -> None:
        """Have it run and compiled, once the knobs stand still; ask again until it is there."""
        shape = self.shape
        if shape != self._shape:
            self._moved = time.monotonic() if self._shape is not None else 0.0
            if self._shape is None or shape.run != self._shape.run:
                self.run_answer = None
            if self._shape is None or shape.compiled != self._shape.compiled:
                self.report = None
            self._shape = shape
        if self.in_file or time.monotonic() - self._moved < SETTLED_S:
            return
        if self.run_answer is None and not self.too_many and self.tab in ("tiles", "traffic"):
            self.run_answer = lab.INTERPRETER.ask(self.who, shape.run)
        if self.report is None and self.tab in ("tiles", "compile"):
            self.report = lab.COMPILER.ask(self.who, shape.compiled)

    # -- tabs ------------------------------------------------------------------------------------------------------------------

    def _panel(self, key: str) -> Any:
        """That of a tab; built when it is opened, and told what has been so far."""
        panel = self.panels.get(key)
        if panel is None:
            panel = self.panels[key] = PANELS[key](self)
            self.slots[key][:] = [panel]
        return panel

    def _scene_clicked(self, key: str, _event: Any) -> None:
        scene = SCENES[key]
        self._scene = key
        self.param.update(**scene.knobs, tab=scene.tab)

    # -- what is new ---------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        with self.lock:
            self._update()

    def _update(self) -> None:
        events: list[Event] = self.new_events()
        self.steps.feed(events)
        self._ask()
        step = self.shown_step
        if events or step != self._step:
            self._step = step
            set_html(self.step_words, words.step_html(step, self.steps.at(step), self.session is not None))
        scene = SCENES.get(self._scene)
        there = scene is not None and all(getattr(self, name) == value for name, value in scene.knobs.items())
        set_html(self.said, said(html.escape(scene.look), "look") if there and scene is not None else "")
        for key in TABS if self.in_file else (self.tab,):
            self._panel(key).update()
        self.steps.changed = False
