"""ipywidgets' controls for what the pages have in Panel's: live knobs, and the widgets that steer what a page sends."""

import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import ipywidgets as w
import traitlets as t

from engine.events.state import State
from explorer.knobs import KNOBS, SETTLE_S, Knob, has, movable
from explorer.mirror import kinds

LAYOUT = {"width": "auto", "min_width": "250px", "flex": "1 1 250px", "max_width": "440px"}
STYLE = {"description_width": "92px"}


class Steps(w.SelectionSlider):
    """A slider over numbers; code may set a number between its stops, which becomes one of them."""

    @t.validate("value")
    def _validate_value(self, proposal: Any) -> Any:
        value = proposal["value"]
        known = list(self._options_values)
        if value not in known:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise t.TraitError(f"{self.description} must be a number, got {value!r}")
            self.options = sorted([*known, value])
        return value


def control(panel_widget: Any) -> w.Widget:
    """An ipywidgets control that stands for one of Panel's widgets; both keep the same value. ValueError for a kind without one."""
    kind = kinds.kind_of(panel_widget).name
    made = _MAKERS[kind](panel_widget) if kind in _MAKERS else None
    if made is None:
        raise ValueError(f"a control may be one of {', '.join(_MAKERS)}; got {type(panel_widget).__name__}")
    busy: list[bool] = []

    def take(change: Any) -> None:
        if not busy:
            panel_widget.value = change["new"]

    def show(event: Any) -> None:
        busy.append(True)
        try:
            made.value = event.new
        finally:
            busy.pop()

    made.observe(take, "value")
    panel_widget.param.watch(show, "value")
    return made


def _common(widget: Any) -> dict[str, Any]:
    return {"description": widget.label, "tooltip": getattr(widget, "description", "") or "", "layout": LAYOUT, "style": STYLE}


def _slider(widget: Any) -> w.Widget:
    whole = all(isinstance(x, int) for x in (widget.start, widget.end, widget.value))
    cls = w.IntSlider if whole else w.FloatSlider
    return cls(min=widget.start, max=widget.end, step=widget.step, value=widget.value, **_common(widget))


def _options(widget: Any) -> list[tuple[str, Any]]:
    return list(zip(*kinds.options(widget), strict=True))


def _steps(widget: Any) -> w.Widget:
    return Steps(options=kinds.options(widget)[1], value=widget.value, **_common(widget))


_MAKERS: dict[str, Callable[[Any], w.Widget]] = {
    "slider": _slider,
    "steps": _steps,
    "text": lambda widget: w.Text(value=widget.value, placeholder=widget.placeholder, continuous_update=False, **_common(widget)),
    "switch": lambda widget: w.Checkbox(value=widget.value, indent=False, **_common(widget)),
    "select": lambda widget: w.Dropdown(options=_options(widget), value=widget.value, **_common(widget)),
    "radio": lambda widget: w.ToggleButtons(options=_options(widget), value=widget.value, **_common(widget)),
}


class WhatIf(w.Widget):
    """A what-if knob of a page: its ``value`` can be read, set, observed and linked. It shows nothing, the page has a control for it."""

    value = t.Any(None, allow_none=True).tag(sync=True)

    def __init__(self, view: Any, name: str) -> None:
        self._view, self._name = view, name
        super().__init__(value=getattr(view, name))
        view.param.watch(lambda event: setattr(self, "value", event.new), name)

    @t.validate("value")
    def _take(self, proposal: Any) -> Any:
        if proposal["value"] != getattr(self._view, self._name):
            try:
                setattr(self._view, self._name, proposal["value"])
            except ValueError as error:
                raise t.TraitError(str(error)) from None
        return getattr(self._view, self._name)


def _knob(knob: Knob) -> w.Widget:
    common = {"description": knob.label, "tooltip": knob.hint, "layout": LAYOUT, "style": STYLE, "disabled": True}
    if knob.choices:
        first = knob.choices[0][1]
        return w.Dropdown(options=list(knob.labels(first).items()), value=knob.shown(first), **common)
    if not knob.options:
        return w.Checkbox(value=True, indent=False, **common)
    return Steps(options=list(knob.options), value=knob.options[0], continuous_update=False, **common)


class Knobs:
    """Controls of the engine's live knobs ``names``: moved here they change the engine, moved elsewhere they show it."""

    def __init__(self, names: list[str], move: Callable[[str, Any], None]) -> None:
        self.widgets = {name: _knob(KNOBS[name]) for name in names}
        self._move = move
        self._engine: dict[str, Any] = {}
        self._moved: dict[str, float] = {}  # knob -> when it was moved here, the engine's answer still to come
        self.showing = False  # the engine's values are being shown: nobody moved anything
        for name, widget in self.widgets.items():
            widget.observe(lambda change, name=name: self._changed(name, change["new"]), "value")

    def _changed(self, name: str, value: Any) -> None:
        value = KNOBS[name].meant(value)
        if not self.showing and value != self._engine.get(name):
            self._moved[name] = time.monotonic()
            self._move(name, value)

    @property
    def unsettled(self) -> bool:
        return bool(self._moved)

    def sync(self, state: State, running: bool) -> None:
        """Show what the engine has, or will have once the running requests have drained."""
        now = time.monotonic()
        self._engine = {name: state.draining.get(name, state.knobs.get(name)) for name in self.widgets}
        with self._shown():
            for name, widget in self.widgets.items():
                knob, value, there = KNOBS[name], self._engine[name], has(state, name)
                disabled = not there or not running or not movable(state, name)
                if widget.disabled != disabled:
                    widget.disabled = disabled
                if not there or knob.shown(value) == widget.value:
                    self._moved.pop(name, None)
                elif now - self._moved.get(name, 0.0) >= SETTLE_S:
                    self._moved.pop(name, None)
                    if knob.choices:
                        widget.options = list(knob.labels(value).items())
                    widget.value = knob.shown(value)

    @contextmanager
    def _shown(self) -> Any:
        self.showing = True
        try:
            yield
        finally:
            self.showing = False
