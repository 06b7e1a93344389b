"""Live knobs: they change the running engine for everybody, and show what the engine has, whoever moved them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.config import DRAINING_KNOBS
from engine.events.state import State
from explorer.i18n import _
from explorer.theme import CSS

SETTLE_S = 1.0  # how long a knob just moved here waits for the engine's answer before it falls back to what the engine has


@dataclass(frozen=True)
class Knob:
    name: str  # vLLM's
    label: str
    hint: str
    options: tuple[int, ...] = ()  # empty: a switch


KNOBS = {
    knob.name: knob
    for knob in (
        Knob("max_num_seqs", _("Batch size"), _("Most requests in one step (max_num_seqs)."), (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)),
        Knob(
            "max_num_batched_tokens",
            _("Token budget"),
            _("Most tokens in one step (max_num_batched_tokens): decodes take one each, prefill chunks share the rest."),
            (16, 32, 64, 128, 256, 512, 1024, 2048),
        ),
        Knob("block_size", _("Block size"), _("Tokens a KV block holds. Changes once the running requests have finished."), (1, 2, 4, 8, 16, 32, 64, 128)),
        Knob(
            "num_kv_blocks",
            _("Pool size"),
            _("KV blocks in the pool (num_kv_blocks). Changes once the running requests have finished."),
            (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
        ),
        Knob("enable_prefix_caching", _("Prefix caching"), _("Requests that begin alike share the KV blocks of their common beginning.")),
        Knob("enable_chunked_prefill", _("Chunked prefill"), _("Long prompts are computed in chunks between the others' decodes.")),
    )
}  # fmt: skip


class KnobPanel(pn.viewable.Viewer):
    """The knobs ``names`` of the session's engine, moved in the name of ``owner``."""

    def __init__(self, session: Any, owner: str, names: Sequence[str], **params: Any) -> None:
        super().__init__(**params)
        self.session, self.owner = session, owner
        self.widgets: dict[str, Any] = {name: _widget(KNOBS[name]) for name in names}
        self._moved: dict[str, float] = {}  # knob -> when it was moved here, the engine's answer still to come
        self._engine: dict[str, Any] = {}
        self._syncing = False
        self._note = pn.pane.HTML("", stylesheets=[CSS], sizing_mode="stretch_width", margin=0, visible=False)
        for name, widget in self.widgets.items():
            widget.param.watch(lambda event, name=name: self._move(name, event.new), "value")
        self._layout = pn.Column(
            *self.widgets.values(), self._note, sizing_mode="stretch_width", margin=0, styles={"gap": "10px"}
        )

    def __panel__(self) -> pn.Column:
        return self._layout

    def _move(self, name: str, value: Any) -> None:
        if self._syncing or value == self._engine.get(name):
            return
        self._moved[name] = time.monotonic()
        self.session.reconfigure(self.owner, **{name: value})

    @property
    def unsettled(self) -> bool:
        """Whether a knob moved here still waits for the engine's answer."""
        return bool(self._moved)

    def sync(self, state: State) -> None:
        """Show what the engine has (or will have, once drained). Another browser may have moved it; the engine may have refused."""
        now = time.monotonic()
        self._engine = {name: state.draining.get(name, state.knobs.get(name)) for name in self.widgets}
        self._syncing = True
        try:
            for name, widget in self.widgets.items():
                value = self._engine[name]
                if widget.disabled != (value is None):  # no engine yet: nothing to show, nothing to move
                    widget.disabled = value is None
                if value is None or value == widget.value:
                    self._moved.pop(name, None)
                elif now - self._moved.get(name, 0.0) >= SETTLE_S:
                    self._moved.pop(name, None)
                    if KNOBS[name].options:
                        widget.options = _options(KNOBS[name], value)
                    widget.value = value
        finally:
            self._syncing = False
        waiting = [KNOBS[name].label for name in DRAINING_KNOBS if name in state.draining and name in self.widgets]
        text = _("{knobs}: waits until the running requests have finished.").format(knobs=", ".join(waiting)) if waiting else ""
        if bool(text) != self._note.visible:
            self._note.param.update(object=f'<p class="ct-small ct-muted">{text}</p>', visible=bool(text))


def _widget(knob: Knob) -> Any:
    common = {"label": knob.label, "description": knob.hint, "size": "small", "margin": 0, "sizing_mode": "stretch_width"}
    if not knob.options:
        return pmui.Switch(value=True, **common)
    slider: Any = pmui.DiscreteSlider(options=list(knob.options), value=knob.options[0], formatter="%d", **common)
    slider._debounce = 30  # ms; Panel's 50 would be felt
    return slider


def _options(knob: Knob, value: int) -> list[int]:
    """The slider's stops; the engine's own value is one of them."""
    return sorted({*knob.options, value})
