"""The tree of a draft with the path that was accepted, and who attends to whom in the pass that verified it."""

from typing import Any

import param

from explorer.canvas.base import Canvas, parts
from explorer.i18n import _

TEXTS = {
    "tree": _("The draft as a tree, from the request's last token"),
    "mask": _("Attention mask of the pass: a row attends to the filled columns"),
    "root": _("last token"),
    "root_short": _("last"),
    "before": _("all before"),
    "accepted": _("accepted"),
    "rejected": _("rejected"),
    "not reached": _("not looked at"),
    "corrected": _("corrected, by the target"),
    "bonus": _("bonus, by the target"),
    "chain": _("A chain is a tree in which everyone has one child: its mask is the ordinary triangle."),
    "sees": _("{row} attends to {column}"),
    "not": _("{row} does not attend to {column}: it is no ancestor"),
    "p": _("p, target"),
    "q": _("q, drafter"),
    "place": _("depth"),
}


class DraftTree(Canvas):
    """Draws ``data`` (``explorer.speculation.picture.tree_data``; {} shows ``empty``). Nothing comes back to Python."""

    _esm = parts("drafttree.js")

    data = param.Dict(default={})
    empty = param.String(default="")
    texts = param.Dict(default=TEXTS)

    def __init__(self, **params: Any) -> None:
        super().__init__(sizing_mode="stretch_width", margin=0, **params)
