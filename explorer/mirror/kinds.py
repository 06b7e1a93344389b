"""What each Panel object is to a mirror: its kind, its properties, the parameters that change them, what an action does."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import panel as pn
import panel_material_ui as pmui
from panel.custom import AnyWidgetComponent

from explorer.mirror import layout

Act = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Kind:
    name: str
    classes: tuple[type, ...]
    watched: tuple[str, ...]  # besides layout.PARAMS
    read: Callable[[Any], dict[str, Any]]
    act: Act | None = None


def _label(obj: Any) -> str:
    return str(getattr(obj, "label", "") or "")


def _widget(obj: Any, **more: Any) -> dict[str, Any]:
    return {"label": _label(obj), "hint": str(getattr(obj, "description", "") or ""), "disabled": bool(obj.disabled), **more}


# -- options: a list, or a dict from label to value -------------------------------------------------------------------


def options(obj: Any) -> tuple[list[str], list[Any]]:
    """(labels, values) of a widget's options."""
    if isinstance(obj.options, dict):
        return [str(label) for label in obj.options], list(obj.options.values())
    return [str(value) for value in obj.options], list(obj.options)


def _index(obj: Any, value: Any) -> int:
    values = options(obj)[1]
    return values.index(value) if value in values else -1


def _chosen(obj: Any, index: Any) -> Any:
    values = options(obj)[1]
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(values):
        raise ValueError(f"choice of {_label(obj) or type(obj).__name__} must be in [0, {len(values)}), got {index!r}")
    return values[index]


def _choice(obj: Any) -> dict[str, Any]:
    return _widget(obj, options=options(obj)[0], value=_index(obj, obj.value))


def _choices(obj: Any) -> dict[str, Any]:
    return _widget(obj, options=options(obj)[0], value=[_index(obj, each) for each in obj.value or []])


def _choose(obj: Any, name: str, value: Any) -> None:
    obj.value = _chosen(obj, value)


def _choose_some(obj: Any, name: str, value: Any) -> None:
    if not isinstance(value, list):
        raise ValueError(f"choices of {_label(obj)} must be a list, got {value!r}")
    obj.value = [_chosen(obj, index) for index in value]


# -- other widgets ------------------------------------------------------------------------------------------------------


def _button(obj: Any) -> dict[str, Any]:
    look = {name: str(getattr(obj, name, "") or "") for name in ("icon", "color", "variant")}
    return _widget(obj, **look)


def _click(obj: Any, name: str, value: Any) -> None:
    obj.clicks += 1


def _slider(obj: Any) -> dict[str, Any]:
    return _widget(obj, start=obj.start, end=obj.end, step=obj.step or "any", value=obj.value)


def _slide(obj: Any, name: str, value: Any) -> None:
    whole = isinstance(obj, (pmui.IntSlider, pmui.IntInput, pn.widgets.IntSlider, pn.widgets.IntInput))
    obj.value = round(_number(obj, value)) if whole else _number(obj, value)


def _slide_both(obj: Any, name: str, value: Any) -> None:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{_label(obj)} takes two numbers, got {value!r}")
    low, high = sorted(_number(obj, each) for each in value)
    whole = isinstance(obj, (pmui.IntRangeSlider, pn.widgets.IntRangeSlider))
    obj.value = (round(low), round(high)) if whole else (low, high)


def _number(obj: Any, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
        raise ValueError(f"{_label(obj)} takes a number, got {value!r}")
    if (obj.start is not None and value < obj.start) or (obj.end is not None and value > obj.end):
        raise ValueError(f"{_label(obj)} must lie in [{obj.start}, {obj.end}], got {value!r}")
    return value


def _switch(obj: Any, name: str, value: Any) -> None:
    obj.value = bool(value)


def _write(obj: Any, name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{_label(obj)} takes text, got {type(value).__name__}")
    obj.value = value


def _text(obj: Any) -> dict[str, Any]:
    lines = obj.rows if isinstance(obj, (pmui.TextAreaInput, pn.widgets.TextAreaInput)) else 0
    return _widget(obj, value=str(obj.value or ""), placeholder=str(obj.placeholder or ""), lines=lines or 0)


def _number_input(obj: Any) -> dict[str, Any]:
    return _widget(obj, value=obj.value, start=obj.start, end=obj.end, step=obj.step)


def _read_html(obj: Any) -> dict[str, Any]:
    return {"html": str(obj.object or "")}


def _read_text(obj: Any) -> dict[str, Any]:
    return {"text": str(obj.object or "")}


def _tabs(obj: Any) -> dict[str, Any]:
    return {"titles": [str(title) for title in obj._names], "value": obj.active}


def _open_tab(obj: Any, name: str, value: Any) -> None:
    if not isinstance(value, int) or not 0 <= value < len(obj):
        raise ValueError(f"tab must be in [0, {len(obj)}), got {value!r}")
    obj.active = value


def _nothing(obj: Any) -> dict[str, Any]:
    return {}


_LABELLED = ("label", "description", "disabled")
_VALUE = (*_LABELLED, "value")
W = pn.widgets
# The first whose classes fit is it, so that a kind stands before those that it derives from.
KINDS: tuple[Kind, ...] = (
    Kind("canvas", (AnyWidgetComponent,), (), _nothing),
    Kind("html", (pn.pane.HTML,), ("object",), _read_html),
    Kind("pre", (pn.pane.Str,), ("object",), _read_text),
    Kind("figure", (pn.pane.Bokeh,), (), _nothing),
    Kind("button", (pmui.IconButton, pmui.Button, W.Button), (*_LABELLED, "icon", "color", "variant"), _button, _click),
    Kind("switch", (pmui.Switch, pmui.Checkbox, pmui.Toggle, W.Switch, W.Checkbox, W.Toggle), _VALUE,
         lambda obj: _widget(obj, value=bool(obj.value)), _switch),
    Kind("range", (pmui.RangeSlider, pmui.IntRangeSlider, W.RangeSlider, W.IntRangeSlider), (*_VALUE, "start", "end", "step"), _slider, _slide_both),
    Kind("steps", (pmui.DiscreteSlider, W.DiscreteSlider), (*_VALUE, "options"), _choice, _choose),
    Kind("slider", (pmui.FloatSlider, pmui.IntSlider, W.FloatSlider, W.IntSlider), (*_VALUE, "start", "end", "step"), _slider, _slide),
    Kind("radio", (pmui.RadioButtonGroup, pmui.RadioBoxGroup, W.RadioButtonGroup, W.RadioBoxGroup), (*_VALUE, "options"), _choice, _choose),
    Kind("checks", (pmui.CheckButtonGroup, pmui.CheckBoxGroup, pmui.MultiSelect, W.CheckButtonGroup, W.CheckBoxGroup, W.MultiSelect, W.MultiChoice),
         (*_VALUE, "options"), _choices, _choose_some),
    Kind("select", (pmui.Select, W.Select), (*_VALUE, "options"), _choice, _choose),
    Kind("number", (pmui.IntInput, pmui.FloatInput, W.IntInput, W.FloatInput), (*_VALUE, "start", "end", "step"), _number_input, _slide),
    Kind("text", (pmui.TextInput, pmui.TextAreaInput, W.TextInput, W.TextAreaInput), (*_VALUE, "placeholder"), _text, _write),
    Kind("tabs", (pmui.Tabs, pn.Tabs), ("objects", "active"), _tabs, _open_tab),
    Kind("row", (pn.Row, pmui.Row), ("objects",), _nothing),
    Kind("box", (pn.Column, pmui.Column, pn.FlexBox, pn.WidgetBox), ("objects",), _nothing),
    Kind("box", (pn.Spacer,), (), _nothing),
)  # fmt: skip
BOXES = ("box", "row", "tabs")


def kind_of(obj: Any) -> Kind:
    """ValueError for an object that cannot be mirrored yet, with those that can."""
    for kind in KINDS:
        if isinstance(obj, kind.classes):
            return kind
    names = sorted({cls.__name__ for kind in KINDS for cls in kind.classes})
    raise ValueError(f"a view may be made of {', '.join(names)}; got {type(obj).__module__}.{type(obj).__name__}")


def watched(obj: Any, kind: Kind) -> list[str]:
    """The parameters of ``obj`` that a mirror has to watch."""
    return [name for name in (*layout.PARAMS, *kind.watched) if name in obj.param]


def children(obj: Any, kind: Kind) -> Iterable[Any]:
    return list(obj) if kind.name in BOXES and not isinstance(obj, pn.Spacer) else ()


def state_params(canvas: AnyWidgetComponent) -> list[str]:
    """The parameters that a canvas shares with its script."""
    return [name for name in canvas.param if name not in AnyWidgetComponent.param]


def module_text(canvas: AnyWidgetComponent) -> str:
    """The ES module of a canvas."""
    esm = canvas._esm
    return esm if isinstance(esm, str) else Path(esm).read_text(encoding="utf-8")
