"""The transport bar: buttons, slider and keys that move a Clock."""

import math
from typing import Any

import param

from explorer.base import Clock
from explorer.canvas.base import HERE, Canvas
from explorer.i18n import _
from explorer.theme import BADGES

TEXTS = {
    "bar": _("Time: which step this browser shows"),
    "back": _("One step back (left arrow). Pauses this view; the engine runs on."),
    "step": _("One step forward (right arrow). Shows the next recorded step; the engine runs on."),
    "play": _("Play from here (Space) until the newest step is reached."),
    "pause": _("Pause the view (Space). Only this browser stops; the engine and everybody else go on."),
    "slider": _("Step shown"),
    "speed": _("Speed of playing, in steps per second"),
    "per_second": _("{n} steps/s"),
    "one_per_second": _("1 step/s"),
    "live": _("Follow live: always show the newest step"),
    "live_label": _("Live"),
    "none": _("No steps yet"),
    "step_of": _("step {step} of {last}"),
    "all_kept": _("Every step since the engine started is kept."),
    "kept": _("Steps from {first} on are kept; older ones made room."),
}


RECORDED = {  # what is said otherwise of a recorded run
    "back": _("One step back (left arrow)."),
    "step": _("One step forward (right arrow)."),
    "play": _("Play from here (Space) until the end of the recorded run."),
    "pause": _("Pause (Space)."),
    "live": _("Go to the end of the recorded run"),
    "live_label": _("End"),
    "all_kept": _("Every step of the recorded run is here."),
}


def replayed() -> dict[str, str]:
    """The badge of a step in the past: what was measured then is read back from the record, on every card of the page."""
    sign, colour, _meaning = BADGES["replayed"]
    hint = _("You look at a step in the past: what the page calls measured was measured then and is read back from the record.")
    return {"sign": sign, "colour": colour, "word": _("replayed"), "hint": hint}


class Transport(Canvas):
    """Moves ``clock``; mirrors it and the range of recorded steps. ``sync`` is called whenever the store may have grown."""

    _esm = HERE / "transport.js"
    kinds = ("back", "step", "play", "pause", "follow", "goto", "speed")

    first = param.Integer(default=0)
    last = param.Integer(default=0)
    step = param.Integer(default=0)
    live = param.Boolean(default=True)
    playing = param.Boolean(default=False)
    speed = param.Number(default=5.0)
    past = param.Dict(default={}, doc="The badge of what shows, while that is a step in the past of a running engine.")
    texts = param.Dict(default=TEXTS)

    def __init__(self, clock: Clock, recorded: bool = False, **params: Any) -> None:
        """``recorded``: the steps are those of a saved run, and no engine makes new ones."""
        super().__init__(sizing_mode="stretch_width", margin=0, texts=TEXTS | RECORDED if recorded else TEXTS, **params)
        self._clock = clock
        self._recorded = recorded
        clock.param.watch(self._mirror, ["step", "live", "playing", "speed"])
        self._mirror()

    def sync(self, first: int, last: int) -> None:
        if (first, last) != (self.first, self.last):
            self.param.update(first=first, last=last)

    def _mirror(self, *_events: Any) -> None:
        clock = self._clock
        past = {} if clock.live or self._recorded else replayed()
        self.param.update(step=clock.step, live=clock.live, playing=clock.playing, speed=clock.speed, past=past)

    def on_back(self, action: dict[str, Any]) -> None:
        self._clock.move(-1, self.first, self.last)

    def on_step(self, action: dict[str, Any]) -> None:
        self._clock.move(1, self.first, self.last)

    def on_play(self, action: dict[str, Any]) -> None:
        self._clock.play(self.last)

    def on_pause(self, action: dict[str, Any]) -> None:
        self._clock.pause(self.last)

    def on_follow(self, action: dict[str, Any]) -> None:
        self._clock.follow()

    def on_goto(self, action: dict[str, Any]) -> None:
        value = _number(action.get("value"))
        if value is not None:
            self._clock.goto(int(value), self.first, self.last)

    def on_speed(self, action: dict[str, Any]) -> None:
        low, high = self._clock.param.speed.bounds
        value = _number(action.get("value"))
        if value is not None:
            self._clock.speed = min(max(value, low), high)


def _number(value: Any) -> float | None:
    """What a browser sent, if it is a number to reckon with: JSON as Bokeh writes it has NaN and infinities."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
