"""A view that draws for itself: one ESM file of anywidget's form, so that the same file serves Panel and notebooks."""

from pathlib import Path
from typing import Any

import param
from panel.custom import AnyWidgetComponent

HERE = Path(__file__).parent


def parts(*names: str) -> str:
    """The ESM of a view: what all views share (dom.js), then these files of this folder, in order. (As text it has nothing to
    import from.)"""
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in ("dom.js", *names))


class Canvas(AnyWidgetComponent):
    """Python sends messages (``send``); the browser answers through ``action``, a dict with ``seq`` (so that two equal
    actions are two changes) and ``kind``. Subclasses set ``_esm`` and write ``on_<kind>(action)``; an unknown kind is ignored,
    since what a browser sends is input, not code.

    Do not put a ``JSComponent`` on the same page: Panel 1.9 keeps one render function for both kinds, whichever came first."""

    __abstract = True

    action = param.Dict(default={}, doc="What the browser asked for last.")

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self.param.watch(self._dispatch, "action")

    @classmethod
    def _process_importmap(cls) -> dict[str, Any]:
        """Nothing is imported. (Panel's default names addresses of a CDN; none is fetched, but the browser warns about them.)"""
        return {}

    def _dispatch(self, event: Any) -> None:
        kind = event.new.get("kind")
        if kind in self.kinds:
            getattr(self, f"on_{kind}")(event.new)

    kinds: tuple[str, ...] = ()  # the actions this view answers
