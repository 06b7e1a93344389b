"""One verification, stage by stage, with the values it really had: a play and step control inside the view."""

from typing import Any

import param

from explorer.canvas.base import Canvas, parts
from explorer.i18n import _

TEXTS = {
    "play": _("Play the verification"),
    "pause": _("Pause"),
    "back": _("One stage back"),
    "next": _("One stage on"),
    "stage": _("stage {n} of {all}"),
    "stages": _("Stage of the verification; arrow keys move it"),
    "drafted": _("q, drafter"),
    "target": _("p, target"),
    "accepted": _("accepted"),
    "rejected": _("rejected"),
    "not reached": _("not looked at"),
    "corrected": _("corrected"),
    "bonus": _("bonus"),
    "last": _("so far"),
    "accept": _("accepted below {a}"),
    "own_draw": _("the target's own draw decides: it falls here with p = {a}"),
    "residual": _("residual: positive part of p - q, normalised (its mass was {mass})"),
    "place": _("what follows here"),
    "node": _("drafted"),
}


class Verification(Canvas):
    """Plays ``data`` (``explorer.speculation.picture.verification_data``; {} shows ``empty``). Nothing comes back to Python."""

    _esm = parts("verification.js")

    data = param.Dict(default={})
    empty = param.String(default="")
    texts = param.Dict(default=TEXTS)

    def __init__(self, **params: Any) -> None:
        super().__init__(sizing_mode="stretch_width", margin=0, **params)
