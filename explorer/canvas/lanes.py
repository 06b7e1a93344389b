"""A tree of tokens: columns are positions, lanes are requests or beams. It can be walked with a mouse or the arrow keys."""

from collections.abc import Callable
from typing import Any

import param

from explorer.canvas.base import Canvas, parts
from explorer.i18n import _

TEXTS = {
    "walk": _("A tree of tokens; arrow keys walk it, Enter chooses"),
    "left_out": _("{n} columns in front are not drawn."),
    "best": _("on the way to the best sequence"),
    "dead": _("dead: no beam went on from here"),
    "ended": _("complete"),
    "forced": _("forced: here this branch begins"),
}


class TokenLanes(Canvas):
    """Draws ``data`` (``explorer.sampling.lanes.Lanes.data()``; {} shows ``empty``); a click gives the node's key."""

    _esm = parts("lanes.js")
    kinds = ("choose",)

    data = param.Dict(default={})
    selected = param.List(default=[], doc="Key of the node that is looked at; []: none.")
    look = param.Integer(default=0, doc="Counted up: the browser scrolls to where this is.")
    empty = param.String(default="")
    texts = param.Dict(default=TEXTS)

    def __init__(self, choose: Callable[[list[Any]], None], **params: Any) -> None:
        super().__init__(sizing_mode="stretch_width", margin=0, **params)
        self._choose = choose

    def on_choose(self, action: dict[str, Any]) -> None:
        if isinstance(action.get("key"), list):
            self._choose(action["key"])
