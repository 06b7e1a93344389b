"""How one token was chosen: candidates as bars through every processor, the dart on the bar of what was kept, the cut of top-p."""

import json
from typing import Any

import param

from explorer.canvas.base import Canvas, parts
from explorer.i18n import _

TEXTS = {
    "token": _("token"),
    "removed": _("removed by {name}"),
    "chosen": _("was chosen"),
    "lands": _("u lands here"),
    "others": _("{n} other tokens"),
    "rest": _("{n} more"),
    "unknown": _("not known"),
    "token_id": _("token id {id}"),
    "bar": _("What was kept, likeliest first. The dart u = {u} falls on {token}."),
    "bar_greedy": _("No dart: temperature 0 takes the likeliest token."),
    "rank": _("rank (logarithmic)"),
    "curve": _("Mass of the r likeliest tokens, as top-p sees it"),
    "cut": _("p = {p}: {n} tokens"),
    "cut_beyond": _("p = {p}: more tokens than are known"),
    "no_cut": _("top-p is off: no cut"),
    "unseen": _("a token further down"),
}


class ChoicePicture(Canvas):
    """Draws ``data``, as ``explorer.sampling.picture.choice_data`` makes it: {} shows ``empty``."""

    _esm = parts("choice.js")

    told = param.String(default="{}", doc="``data`` as JSON: of a dict Bokeh looks at every number four times before it is sent.")
    empty = param.String(default="")
    texts = param.Dict(default=TEXTS)

    def __init__(self, **params: Any) -> None:
        self._data: dict[str, Any] = {}
        super().__init__(sizing_mode="stretch_width", margin=0, **params)

    @property
    def data(self) -> dict[str, Any]:
        return self._data

    @data.setter
    def data(self, data: dict[str, Any]) -> None:
        self._data = data
        self.told = json.dumps(data)
