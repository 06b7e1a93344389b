"""A text as ribbons: what was drafted and accepted, what was struck out, and what the target put there itself."""

from collections.abc import Callable
from typing import Any

import param

from explorer.canvas.base import Canvas, parts
from explorer.i18n import _

TEXTS = {
    "pieces_of": _("The text of {id} as it was drafted and verified; arrow keys go from token to token"),
    "dropped": _("The first {n} tokens are not drawn."),
    "waiting": _("No token yet."),
    "kinds": {
        "plain": _("the target's own, no draft"),
        "accepted": _("drafted, accepted"),
        "rejected": _("drafted, rejected"),
        "corrected": _("corrected: in place of a rejected one"),
        "bonus": _("bonus: all before it were accepted"),
        "unseen": _("drafted behind a rejected one, not looked at"),
    },
    "position": _("position"),
    "p": _("p, target"),
    "q": _("q, drafter"),
    "u": _("u, drawn"),
    "accept": _("accept line min(1, p / q)"),
    "draw": _("no accept line: the target's own draw decides"),
    "typical": _("no accept line: typical acceptance decides"),
    "instead": _("in place of"),
    "residual": _("the residual it was drawn from"),
    "more": _("+{n} not looked at"),
}


class Ribbon(Canvas):
    """Draws ``data`` (``explorer.speculation.picture.ribbon_data``; {} shows ``empty``); a click gives a position."""

    _esm = parts("ribbon.js")
    kinds = ("select",)

    data = param.Dict(default={})
    selected = param.Integer(default=-1, doc="Position of the token that is looked at; -1: none.")
    round = param.Integer(default=-1, doc="First position of the round that is shown below; -1: none.")
    empty = param.String(default="")
    texts = param.Dict(default=TEXTS)

    def __init__(self, select: Callable[[int | None], None], **params: Any) -> None:
        super().__init__(sizing_mode="stretch_width", margin=0, **params)
        self._select = select

    def on_select(self, action: dict[str, Any]) -> None:
        position = action.get("position")
        if position is None or (isinstance(position, int) and not isinstance(position, bool) and position >= 0):
            self._select(position)
