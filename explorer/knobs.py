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
from explorer.pace import quick
from explorer.quantization.labels import GROUPED, KV_TITLES, TITLES
from explorer.theme import CSS

METHODS = tuple(method for method in TITLES if method)
SETTLE_S = 1.0  # how long a knob just moved here waits for the engine's answer before it falls back to what the engine has


@dataclass(frozen=True)
class Knob:
    name: str  # vLLM's
    label: str
    hint: str
    options: tuple[int, ...] = ()  # of a slider
    choices: tuple[tuple[str, Any], ...] = ()  # of a drop-down: (label, value). Neither: a switch

    def shown(self, value: Any) -> Any:
        """The widget's value for the engine's. Those of a drop-down are text: None is a value of the engine's, and of no widget's."""
        return value if not self.choices else "" if value is None else str(value)

    def meant(self, shown: Any) -> Any:
        """The engine's value for the widget's."""
        return next((value for _label, value in self.choices if self.shown(value) == shown), shown)

    def labels(self, value: Any) -> dict[str, str]:
        """Of a drop-down: label -> the widget's value; the engine's own ``value`` is one of them."""
        found = {label: self.shown(choice) for label, choice in self.choices}
        return found if self.shown(value) in found.values() else {**found, str(value): self.shown(value)}


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
        Knob(
            "quantization",
            _("Weights"),
            _("How the linear layers' weights are rounded (quantization). Running requests are computed again under the new ones."),
            choices=((_("not rounded"), None), *((TITLES[method], method) for method in METHODS)),
        ),
        Knob(
            "quantization_group_size",
            _("Group size"),
            _("Columns of a weight that share a scale (quantization_group_size), of the methods that have groups."),
            choices=((_("the method's own"), None), *((str(size), size) for size in (16, 32, 64, 128, 192, 576))),
        ),
        Knob(
            "kv_cache_dtype",
            _("KV cache"),
            _("How keys and values are held (kv_cache_dtype). Changes once the running requests have finished."),
            choices=tuple((title, name) for name, title in KV_TITLES.items()),
        ),
        Knob("enable_prefix_caching", _("Prefix caching"), _("Requests that begin alike share the KV blocks of their common beginning.")),
        Knob("enable_chunked_prefill", _("Chunked prefill"), _("Long prompts are computed in chunks between the others' decodes.")),
        Knob(
            "batching",
            _("Policy"),
            _("Who may join the batch, and when (batching). Continuous: whoever finds a place, at every step. Static: a batch starts together and ends together, padded. Dynamic: static, but it waits for more first."),
            choices=((_("continuous"), "continuous"), (_("static"), "static"), (_("dynamic"), "dynamic")),
        ),
        Knob("batching_timeout_ms", _("Wait for a batch"), _("Milliseconds that a dynamic batch waits to be full (batching_timeout_ms)."), (0, 10, 25, 50, 100, 250, 500, 1000)),
        Knob(
            "scheduling_policy",
            _("Order of the queue"),
            _("Who is admitted first (scheduling_policy): by arrival, or by priority, where waiting counts too so that nobody starves."),
            choices=((_("by arrival"), "fcfs"), (_("by priority"), "priority")),
        ),
        Knob(
            "preemption_mode",
            _("When the pool runs out"),
            _("What becomes of a request that has to give its blocks back (preemption_mode): it is computed again, or its KV waits in host memory."),
            choices=((_("compute again"), "recompute"), (_("swap out"), "swap")),
        ),
        Knob(
            "swap_space",
            _("Host memory for swapping"),
            _("How much KV may wait there (swap_space, GiB). Where it is full, a request is computed again."),
            choices=((_("none"), 0), ("16 MiB", 2**-6), ("64 MiB", 2**-4), ("256 MiB", 2**-2), ("1 GiB", 1), ("4 GiB", 4)),
        ),
        Knob(
            "prefix_index",
            _("Prefix index"),
            _("How cached prefixes are found (prefix_index): by a chain of hashes over whole blocks, or in a radix tree, to the token."),
            choices=((_("hash chain"), "hash"), (_("radix tree"), "radix")),
        ),
        Knob(
            "max_num_waiting",
            _("Queue limit"),
            _("A request that finds so many waiting is refused (max_num_waiting)."),
            choices=((_("none"), None), *((str(n), n) for n in (1, 4, 8, 16, 32, 64, 128, 256))),
        ),
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
        value = KNOBS[name].meant(value)
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
                knob, value, there = KNOBS[name], self._engine[name], has(state, name)
                fixed = not there or not movable(state, name)
                if widget.disabled != fixed:  # no engine yet: nothing to show, nothing to move
                    widget.disabled = fixed
                if not there or knob.shown(value) == widget.value:
                    self._moved.pop(name, None)
                elif now - self._moved.get(name, 0.0) >= SETTLE_S:
                    self._moved.pop(name, None)
                    if knob.options:
                        widget.options = _options(knob, value)
                    elif knob.choices:
                        widget.options = knob.labels(value)
                    widget.value = knob.shown(value)
        finally:
            self._syncing = False
        waiting = [KNOBS[name].label for name in DRAINING_KNOBS if name in state.draining and name in self.widgets]
        text = _("{knobs}: waits until the running requests have finished.").format(knobs=", ".join(waiting)) if waiting else ""
        if "quantization" in self.widgets and "quantization" in state.draining:
            text = f"{text} {_('Weights are being made; the old ones run until then.')}".strip()
        if bool(text) != self._note.visible:
            self._note.param.update(object=f'<p class="ct-small ct-muted">{text}</p>', visible=bool(text))


def has(state: State, name: str) -> bool:
    """Whether there is an engine with this knob. None is a value where it is one of the knob's choices."""
    value = state.draining.get(name, state.knobs.get(name))
    return value is not None or (name in state.knobs and any(choice is None for _label, choice in KNOBS[name].choices))


def movable(state: State, name: str) -> bool:
    """Whether moving it means anything: a method without groups has no group size, and only a dynamic batch waits."""
    if name == "batching_timeout_ms":
        return bool(state.knobs.get("batching") == "dynamic")
    if name == "swap_space":
        return bool(state.knobs.get("preemption_mode") == "swap")
    return name != "quantization_group_size" or state.draining.get("quantization", state.knobs.get("quantization")) in GROUPED


def _widget(knob: Knob) -> Any:
    common = {"label": knob.label, "description": knob.hint, "size": "small", "margin": 0, "sizing_mode": "stretch_width"}
    if knob.choices:
        return pmui.Select(options=knob.labels(knob.choices[0][1]), value=knob.shown(knob.choices[0][1]), **common)
    if not knob.options:
        return pmui.Switch(value=True, **common)
    slider: Any = pmui.DiscreteSlider(options=list(knob.options), value=knob.options[0], formatter="%d", **common)
    quick(slider, 30)
    return slider


def _options(knob: Knob, value: int) -> list[int]:
    """The slider's stops; the engine's own value is one of them."""
    return sorted({*knob.options, value})
