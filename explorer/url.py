"""The page's address: which page, step, selection and what-if knobs. Live knobs are not in it: a link must not reconfigure
an engine that others use.

Panel's own Location does not hear Back, so a small component mirrors ``location.search`` and listens to popstate.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import param

from explorer.canvas.base import Canvas

MAX_QUERY = 4096  # characters read of an address


class Url(Canvas):
    """``write`` gives the browser a query; ``arrived`` is called with the browser's query and width when the page was opened, and
    when Back or Forward was pressed."""

    _esm = Path(__file__).parent / "url.js"
    kinds = ("arrived",)

    # One parameter: two would reach the browser one after the other.
    target = param.Dict(
        default={"search": "", "push": False, "seen": 0},
        doc="The query, whether it makes an entry in the history, and the last action before it.",
    )

    def __init__(self, arrived: Callable[[dict[str, Any]], None], **params: Any) -> None:
        super().__init__(width=0, height=0, margin=0, **params)
        self._arrived = arrived
        self._seen = 0

    def write(self, search: str, push: bool = False) -> None:
        """``push``: Back returns to the address before; otherwise this one takes its place."""
        if search != self.search:
            self.target = {"search": search, "push": push, "seen": self._seen}

    @property
    def search(self) -> str:
        return self.target["search"]

    @property
    def push(self) -> bool:
        return self.target["push"]

    def on_arrived(self, action: dict[str, Any]) -> None:
        seq = action.get("seq")
        self._seen = seq if isinstance(seq, int) else self._seen
        self._arrived(action)


def format_query(values: Mapping[str, Any]) -> str:
    """A query of the values that are not None; "" when there are none. ``format_query({"page": "run"})`` is "?page=run"."""
    query = urlencode({name: _plain(value) for name, value in values.items() if value is not None})
    return f"?{query}" if query else ""


def parse_query(search: str) -> dict[str, str]:
    """The values of a query; of a name given twice the last one. Whatever a visitor types gives a dict, never an error."""
    return dict(parse_qsl(search[:MAX_QUERY].lstrip("?"), keep_blank_values=False, errors="replace"))


def integer(text: str | None) -> int | None:
    """A count or an index out of an address; None when it is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 16 else None


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return f"{value:g}" if isinstance(value, float) else str(value)


def write_param(view: param.Parameterized, name: str) -> Any:
    """A what-if knob for the address; None (left out) while it has its default."""
    value = getattr(view, name)
    return None if value == view.param[name].default else value


def read_param(view: param.Parameterized, name: str, text: str | None) -> None:
    """Set a what-if knob from an address. Absent, or not a value that the knob takes: its default."""
    kind = view.param[name]
    try:
        setattr(view, name, kind.default if text is None else _parsed(kind, text))
    except (ValueError, OverflowError):
        setattr(view, name, kind.default)


def _parsed(kind: param.Parameter, text: str) -> Any:
    if isinstance(kind, param.Boolean):
        return text == "1"
    if isinstance(kind, param.Integer):
        return int(text)
    if isinstance(kind, param.Number):
        return float(text)
    if isinstance(kind, param.Selector):
        return next((value for value in kind.objects if _plain(value) == text), kind.default)
    return text
