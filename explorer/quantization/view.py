"""The Quantisation page: which bits the weights really have, and what that does, from a weight to a token."""

import html
from pathlib import Path
from typing import Any

import panel as pn
import panel_material_ui as pmui
import param

from engine.events.types import EngineStarted, Event
from explorer.base import Clock
from explorer.i18n import _
from explorer.quantization import words
from explorer.quantization.kv import KvPanel
from explorer.quantization.labels import CSS, said, set_html
from explorer.quantization.matrices import KNOBS, MatricesPanel
from explorer.quantization.probe import ProbePanel
from explorer.quantization.rows import MATRICES, QUANTITIES, Change, QuantizationRows, cancelled, failed
from explorer.quantization.scenes import SCENES
from explorer.quantization.search import SearchPanel
from explorer.quantization.trade import TradePanel
from explorer.quantization.whatif import BITS, GROUP_SIZES, LEVELS
from explorer.scenes import scene_buttons
from explorer.tabs import TabbedView
from explorer.theme import card, empty, grid, pane

TABS = {
    "matrices": _("Matrices"), "token": _("From error to token"), "trade": _("The trade"), "kv": _("KV cache"),
    "search": _("How GPTQ and AWQ choose"),
}  # fmt: skip
PANELS: dict[str, Any] = {"token": ProbePanel, "trade": TradePanel, "kv": KvPanel, "search": SearchPanel}
HEAD_CSS = (Path(__file__).parent / "matrices.css").read_text(encoding="utf-8")


class QuantizationView(TabbedView):
    live_knobs = ("quantization", "quantization_group_size", "kv_cache_dtype")
    url_params = ("tab", "quantity", "layer", "matrix", *KNOBS)

    tab: Any = param.Selector(default="matrices", objects=list(TABS), doc="Which tab is open.")
    quantity: Any = param.Selector(default="sqnr", objects=list(QUANTITIES), doc="What the map shows.")
    layer = param.Integer(default=0, bounds=(0, 1023), doc="Of the matrix that is looked into.")
    matrix: Any = param.Selector(default="down_proj", objects=list(MATRICES), doc="The matrix that is looked into.")
    levels: Any = param.Selector(default="int", objects=list(LEVELS), doc="What if: the kind of levels.")
    bits = param.Integer(default=4, bounds=(BITS[0], BITS[-1]), doc="What if: bits of a code, of even levels.")
    group_size: Any = param.Selector(
        default=32, objects=list(GROUP_SIZES), doc="What if: columns that share a scale; 0: a whole row."
    )
    symmetric = param.Boolean(default=False, doc="What if: even levels about 0.")

    def __init__(self, store: Any, session: Any = None, clock: Clock | None = None, **params: Any) -> None:
        super().__init__(store, session, clock, **params)
        self.rows = QuantizationRows()
        self._asked: Any = None  # of which run the weights were asked for
        self._scene = ""  # the scene that was pressed last here
        self._shown: Any = None
        self._build()
        self.update()

    # -- what stands where -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        live = self.session is not None
        self.now = pane(empty(words.NO_ENGINE if live else words.NOT_RECORDED), css=CSS + HEAD_CSS)
        self.progress = pane(css=CSS, margin=(10, 0, 0, 0))
        self.cancel = pmui.Button(label=_("Cancel"), icon="close", variant="text", size="small", margin=0, visible=False)
        self.cancel.on_click(lambda _event: self.session.cancel_quantization(self.clock.owner))
        self.said = pane(css=CSS, margin=(10, 0, 0, 0))
        scenes = (
            [grid(*scene_buttons(SCENES.values(), self._scene_clicked), min_width=190, gap=16, margin=(14, 0, 0, 0))]
            if live
            else []
        )
        head = card(
            _("What runs now"), self.now, self.progress, *([self.cancel] if live else []), *scenes, self.said,
            kinds=("measured", "live") if live else "measured",
            hint=_("The weights that really multiply, for everybody who is here. Method and group are among the live knobs.") if live else "",
        )  # fmt: skip
        self.matrices = MatricesPanel(self, HEAD_CSS)
        self.panels: dict[str, Any] = {"matrices": self.matrices}  # the others when they are opened
        self._make_tabs(TABS)
        self.slots["matrices"][:] = [self.matrices]
        self._layout = pn.Column(head, self.tabs, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    def _panel(self) -> Any:
        """That of the open tab; built when it is opened, and told what has been so far."""
        panel = self.panels.get(self.tab)
        if panel is None:
            panel = self.panels[self.tab] = PANELS[self.tab](self)
            events, after, _missed = self.store.since(0)
            panel.take(events[: max(0, len(events) - (after - self.cursor))])
            self.slots[self.tab][:] = [panel]
        return panel

    # -- what is new ---------------------------------------------------------------------------------------------------------

    @property
    def change(self) -> Change | None:
        """The weights that ran at the step on the screen; None where that is not known."""
        return self.rows.at(self.shown_step)

    @property
    def num_layers(self) -> int:
        return self.rows.num_layers

    def update(self) -> None:
        with self.lock:
            self._update()

    def _update(self) -> None:
        events: list[Event] = self.new_events()
        if events:
            self.rows.feed(events)
            if any(isinstance(event, EngineStarted) for event in events):
                self._asked, self._scene = None, ""
            for name, panel in self.panels.items():
                if name != "matrices":
                    panel.take(events)
        self._watch()
        shown = (self.shown_step, self._status)
        if self.rows.changed or shown != self._shown:
            self._shown = shown
            self._draw_head()
        self._panel().update()
        self.rows.taken()

    @property
    def _status(self) -> str:
        return self.session.status if self.session is not None else "recorded"

    def _watch(self) -> None:
        """Ask once a run for what rounding did, unless somebody else has."""
        if (
            self.session is None
            or self._status not in ("running", "paused")
            or self.store.started is None
            or self._asked == self.store.run
        ):
            return
        self._asked = self.store.run
        if not self.rows.changes or not self.rows.changes[-1].layers:
            self.session.watch_weights(self.clock.owner)

    def _draw_head(self) -> None:
        change, making = self.change, self.rows.making(self.shown_step)
        if change is not None:
            set_html(self.now, words.now_html(change, self.num_layers))
        elif self.session is None:
            set_html(self.now, empty(words.NOT_RECORDED))
        else:
            set_html(self.now, empty(words.NO_WATCH if self._status in ("running", "paused") else words.NO_ENGINE))
        set_html(self.progress, words.progress_html(making))
        going = making is not None and not failed(making) and not cancelled(making)
        if self.cancel.visible != going:
            self.cancel.visible = going
        scene = SCENES.get(self._scene)
        if scene is not None and change is not None:
            there = (scene.knobs["quantization"] or "") == change.event.method
            same = there and (scene.knobs["quantization_group_size"] or 0) == change.event.group_size
            set_html(self.said, said(html.escape(scene.look)) if same else "")
        else:
            set_html(self.said, "")

    def _scene_clicked(self, key: str, _event: Any) -> None:
        self._scene, self._shown = key, None
        self.session.reconfigure(self.clock.owner, **SCENES[key].knobs)
