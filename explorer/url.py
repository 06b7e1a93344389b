"""The page's address: which page, step, selection and what-if knobs. Live knobs are not in it: a link must not reconfigure
an engine that others use.

Panel's own Location does not hear Back, so a small component mirrors ``location.search`` and listens to popstate.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import param
from panel.custom import JSComponent

MAX_QUERY = 4096  # characters read of an address


class Url(JSComponent):
    """``set`` writes the query; ``arrived`` tells that the browser is at another one (Back, Forward, or the page was opened)."""

    _esm = Path(__file__).parent / "url.js"

    search = param.String(default="", doc="The query that the address should have, with its question mark.")
    push = param.Boolean(default=False)
    arrived = param.Dict(default={}, doc="{search, width}: the browser's query and its width in pixels.")

    def set(self, values: Mapping[str, Any], push: bool = False) -> None:
        self.param.update(push=push, search=format_query(values))


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
