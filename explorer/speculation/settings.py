"""The live knobs of the Speculation page: drafter, K, tree and acceptance of the engine that everybody shares, and the temperature."""

import time
from collections.abc import Callable
from typing import Any

import panel as pn
import panel_material_ui as pmui

from explorer.i18n import _
from explorer.knobs import SETTLE_S
from explorer.pace import quick
from explorer.speculation import drafters
from explorer.theme import grid

ACCEPTANCES = {
    _("rejection (textbook)"): "rejection",
    _("coupled draws"): "coupled",
    _("typical, not lossless"): "typical",
}
TREE_LABELS = {"chain": _("a chain"), "narrow": _("tree, 2 at each depth"), "wide": _("tree, 4 at each depth")}


class Settings(pn.viewable.Viewer):
    """``move`` is called with the engine's new ``speculative``; ``heat`` with the temperature for requests. ``show_facts`` calls neither."""

    def __init__(self, move: Callable[[dict[str, Any] | None], None], heat: Callable[[float], None], **params: Any) -> None:
        super().__init__(**params)
        self._move, self._facts = move, None  # type: Callable[[dict[str, Any] | None], None], dict[str, Any] | None
        self._moved_at, self._syncing = -1e9, False
        wide: dict[str, Any] = {"size": "small", "margin": 0, "sizing_mode": "stretch_width"}
        self.drafter = pmui.Select(
            label=_("Drafter"), options={drafters.CHOICES[drafters.NONE]: drafters.NONE}, value=drafters.NONE, **wide,
            description=_("What proposes tokens. Those that were trained for another model are not offered."),
        )  # fmt: skip
        self.k = pmui.DiscreteSlider(
            label=_("K"), options={str(k): k for k in drafters.K_VALUES}, value=drafters.DEFAULT_K, **wide,
            description=_("Tokens proposed in a row (num_speculative_tokens). 0: none; auto: as many as pay."),
        )  # fmt: skip
        self.tree = pmui.Select(
            label=_("Shape"), options={label: name for name, label in TREE_LABELS.items()}, value="chain", **wide,
            description=_("A tree proposes several tokens for each place. Medusa and EAGLE only; K is its depth."),
        )  # fmt: skip
        self.acceptance = pmui.Select(
            label=_("Acceptance"), options=ACCEPTANCES, value="rejection", **wide,
            description=_("Of drafts that are drawn at random. Others are accepted when the target's own draw equals them."),
        )  # fmt: skip
        self.lookup = pmui.Checkbox(
            label=_("Look the text up first"), value=False, size="small", margin=(10, 0, 0, 0), sizing_mode="stretch_width",
            description=_("Copy what followed the last tokens before (as n-gram does); the drafter proposes where nothing is found."),
        )  # fmt: skip
        self.temperature = pmui.FloatSlider(
            label=_("Temperature"), start=0, end=2, step=0.05, value=0.0, **wide,
            description=_("Of the requests sent from here, and of yours that run."),
        )  # fmt: skip
        sliders: list[Any] = [self.k, self.temperature]
        for slider in sliders:
            quick(slider, 30)
        watched = {"choice": self.drafter, "k": self.k, "tree": self.tree, "acceptance": self.acceptance, "lookup": self.lookup}
        for name, widget in watched.items():
            widget.param.watch(lambda event, name=name: self._changed(name, event.new), "value")
        self.temperature.param.watch(lambda event: heat(round(float(event.new), 4)), "value")
        self._layout = grid(
            self.drafter, self.k, self.tree, self.acceptance, self.temperature, self.lookup, min_width=190, gap=14, margin=0
        )

    def __panel__(self) -> pn.Column:
        return self._layout

    @property
    def unsettled(self) -> bool:
        """Whether a knob moved here still waits for the engine's answer."""
        return time.monotonic() - self._moved_at < 2 * SETTLE_S

    def _changed(self, name: str, value: Any) -> None:
        if self._syncing:
            return
        new = drafters.wanted(self._facts, **{name: value})
        if name == "choice" and self._facts is None and new is not None:
            new["num_speculative_tokens"] = self.k.value or drafters.DEFAULT_K
        if new != self._facts:
            self._moved_at = time.monotonic()
            self._move(new)
            self._facts = new

    def show_facts(self, facts: dict[str, Any] | None, model: dict[str, Any]) -> None:
        """What the engine has. Another browser may have moved it; the engine may have refused."""
        if time.monotonic() - self._moved_at < SETTLE_S:
            return
        self._facts = facts
        self._syncing = True
        try:
            options = drafters.fitting(model)
            choice = drafters.choice_of(facts)
            if choice not in options.values():  # by a path of its own
                options = {**options, drafters.CHOICES.get(choice, choice): choice}
            if self.drafter.options != options:
                self.drafter.param.update(options=options, value=choice)
            tree = drafters.tree_of(facts)
            names = {label: name for name, label in TREE_LABELS.items()}
            if not tree:
                names[", ".join(map(str, (facts or {}).get("tree") or ()))] = ""
            if self.tree.options != names:
                self.tree.param.update(options=names, value=tree)
            self._set(self.drafter, choice, False)
            k = (facts or {}).get("num_speculative_tokens", self.k.value)
            if k not in self.k.options.values():
                self.k.options = {**self.k.options, str(k): k}
            self._set(self.k, k, facts is None)
            method = (facts or {}).get("method", "")
            self._set(self.tree, tree, method not in drafters.TREE_METHODS)
            self._set(self.lookup, bool((facts or {}).get("prompt_lookup")), method not in drafters.TRAINED)
            self._set(self.acceptance, (facts or {}).get("acceptance", "rejection"), facts is None)
        finally:
            self._syncing = False

    @staticmethod
    def _set(widget: Any, value: Any, disabled: bool) -> None:
        if widget.value != value:
            widget.value = value
        if widget.disabled != disabled:
            widget.disabled = disabled
