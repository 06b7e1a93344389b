"""A strip of one request's tokens, each with its alternatives: click one to look at it, click an alternative to branch."""

from collections.abc import Callable
from typing import Any

import param

from explorer.canvas.base import Canvas, parts
from explorer.i18n import _

TEXTS = {
    "legend": _("Shade: entropy, how open the choice was"),
    "tokens_of": _("Tokens of {id}; arrow keys choose one"),
    "dropped": _("The first {n} tokens are not drawn."),
    "inherited": _("taken over from the request it branched from"),
    "instead": _("Instead of {token}:"),
    "branch": _("Branch: force {token} here and go on from it, as a new request"),
    "none": _("Nothing was recorded of this token's alternatives."),
    "waiting": _("No token yet."),
    "position": _("position"),
    "step": _("engine step"),
    "prob": _("raw probability"),
    "rank": _("rank"),
    "entropy": _("entropy"),
    "nucleus": _("tokens kept"),
}
RECORDED = {  # what is said otherwise of a recorded run
    "branch": _("{token} was not taken; only a running engine can go on from it"),
    "waiting": _("No token yet at this step."),
}


class TokenStrip(Canvas):
    """Draws ``data`` (``explorer.sampling.picture.strip_data``; {} shows ``empty``)."""

    _esm = parts("strip.js")
    kinds = ("select", "branch")

    data = param.Dict(default={})
    selected = param.Integer(default=-1, doc="Position of the token that is looked at; -1: none.")
    alternatives = param.Dict(default={}, doc="{position, token: text, items: [[token id, text, p], ...], branch: bool}")
    empty = param.String(default="")
    texts = param.Dict(default=TEXTS)

    def __init__(
        self, select: Callable[[int], None], branch: Callable[[int, int], None], recorded: bool = False, **params: Any
    ) -> None:
        """``recorded``: the tokens are those of a saved run, which nothing can go on from."""
        super().__init__(sizing_mode="stretch_width", margin=0, texts=TEXTS | RECORDED if recorded else TEXTS, **params)
        self._select, self._branch = select, branch

    def on_select(self, action: dict[str, Any]) -> None:
        position = action.get("position")
        if isinstance(position, int) and not isinstance(position, bool) and position >= 0:
            self._select(position)

    def on_branch(self, action: dict[str, Any]) -> None:
        position, token = action.get("position"), action.get("token")
        if isinstance(position, int) and isinstance(token, int) and position >= 0 and token >= 0:
            self._branch(position, token)
