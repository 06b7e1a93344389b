"""The schedule on a canvas: slots of the batch over steps or wall time, what filled each step's token budget, the queue.

Steps come as bytes (``explorer.batching.figure.pack``): all that are drawn in ``steps``, and while a run is followed those that are new in
``more``. Both carry sequence numbers, so that a browser that missed one asks for the whole.
"""

from collections.abc import Callable
from typing import Any

import param

from explorer.canvas.base import Canvas, parts
from explorer.i18n import _
from explorer.theme import BLUE, GREY, ORANGE, PURPLE, SKY, VERMILLION

AXES = ("steps", "time")
COLOURS = {  # phase -> [in light, in dark]
    "prefill": [ORANGE, ORANGE], "decode": [BLUE, SKY], "padding": [GREY, GREY], "preempted": [VERMILLION, VERMILLION],
    "swapped": [PURPLE, PURPLE], "stalled": [BLUE, SKY],
}  # fmt: skip
TEXTS = {
    "phases": {
        "prefill": _("prefill"),
        "decode": _("decode"),
        "padding": _("padding"),
        "preempted": _("preempted"),
        "swapped": _("swapped out"),
        "stalled": _("no token in this step"),
    },
    "idle": _("idle"),
    "steps": _("steps"),
    "time": _("wall time"),
    "axis": _("Across"),
    "fewer": _("Show fewer steps"),
    "more": _("Show more steps"),
    "slots": _("Slots of the batch"),
    "tokens": _("Tokens of each step"),
    "queue": _("Queue"),
    "waiting": _("waiting"),
    "running": _("running"),
    "budget": _("token budget"),
    "beyond": _("token budget {n}: beyond the top"),
    "step": _("step"),
    "slot": _("slot"),
    "took": _("took {ms} ms"),
    "of_budget": _("{n} of {budget} tokens"),
    "positions": _("positions {first}–{last}, {n} tokens"),
    "position": _("position {first}"),
    "decodes": _("{n} requests decode one token or a draft each"),
    "padded": _("{n} tokens computed for nobody"),
    "padded_one": _("a token computed for nobody"),
    "and_more": _("and {n} more"),
    "what": _("Schedule: {slots} slots, steps {first} to {last}. Arrow keys move, Enter selects a request, plus and minus change how much is shown."),
}  # fmt: skip


class Schedule(Canvas):
    """Draws what it is given; ``select`` gets a request's number (-1: none), ``goto`` a step."""

    _esm = parts("schedule_paint.js", "schedule_draw.js", "schedule.js")
    kinds = ("select", "goto")

    steps = param.Bytes(default=b"")
    more = param.Bytes(default=b"")
    resync = param.Integer(default=0, doc="Raised by the browser when it missed something.")
    at = param.Integer(default=-1, doc="The step on the screen; -1: none.")
    live = param.Boolean(default=True, doc="Whether the newest step is followed.")
    axis: Any = param.Selector(default="steps", objects=list(AXES), doc="What runs across.")
    selected = param.Integer(default=-1, doc="Number of the request that is looked at; -1: none.")
    extent = param.List(
        default=[], doc="[steps, seconds, begin in seconds] of an axis that does not move; []: it follows the run."
    )
    empty = param.String(default="")
    colours = param.Dict(default=COLOURS)
    texts = param.Dict(default=TEXTS)

    def __init__(self, select: Callable[[int], None], goto: Callable[[int], None], **params: Any) -> None:
        super().__init__(sizing_mode="stretch_width", margin=0, **params)
        self._select, self._goto = select, goto

    def on_select(self, action: dict[str, Any]) -> None:
        number = action.get("request")
        if isinstance(number, int) and not isinstance(number, bool) and number >= -1:
            self._select(number)

    def on_goto(self, action: dict[str, Any]) -> None:
        step = action.get("step")
        if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
            self._goto(step)
