"""The transport of a widget: which step its views show."""

import html
from typing import Any

import ipywidgets as w

from explorer.base import Clock
from explorer.canvas.transport import RECORDED, replayed
from explorer.i18n import _


class TransportBar:
    """Buttons and a slider that move ``clock``; ``slider``, ``live`` are controls that can be linked and observed."""

    def __init__(self, clock: Clock, store: Any) -> None:
        self._clock, self._store = clock, store
        narrow = {"width": "auto"}
        recorded = bool(store.replayed)  # no engine runs on, and the newest step is the last one
        back, play = (
            (RECORDED["back"], _("Pause or play this view."))
            if recorded
            else (_("One step back. Pauses this view; the engine runs on."), _("Pause or play this view; the engine runs on."))
        )
        self.back = w.Button(description="‹", tooltip=back, layout=narrow)
        self.play = w.Button(description=_("Pause"), tooltip=play, layout={"width": "66px"})
        self.forward = w.Button(description="›", tooltip=_("One step forward."), layout=narrow)
        self.slider = w.IntSlider(
            min=0,
            max=1,
            value=0,
            description=_("step"),
            style={"description_width": "36px"},
            layout={"flex": "1 1 160px", "width": "auto", "min_width": "120px"},
        )
        self.live = w.ToggleButton(
            value=True,
            description=RECORDED["live_label"] if recorded else _("Live"),
            tooltip=RECORDED["live"] if recorded else _("Always show the newest step"),
            layout={"width": "66px"},
        )
        past = replayed()
        self.past = w.HTML(  # while the step shown is not the newest of a running engine
            f'<span title="{html.escape(past["hint"])}" style="font-size:12px;white-space:nowrap;padding:1px 8px;border-radius:99px;'
            f'border:1px solid {past["colour"]}">{past["sign"]} {html.escape(past["word"])}</span>',
            layout={"display": "none"},
        )
        self.box = w.Box(
            [self.back, self.play, self.forward, self.slider, self.past, self.live],
            layout={
                "display": "flex",
                "flex_flow": "row wrap",
                "align_items": "center",
                "margin": "0 0 4px 0",
                "flex": "1 1 460px",
            },
        )
        self._showing = False
        self.back.on_click(lambda _b: clock.move(-1, *self.range))
        self.forward.on_click(lambda _b: clock.move(1, *self.range))
        self.play.on_click(lambda _b: self._toggle())
        self.slider.observe(self._slid, "value")
        self.live.observe(self._lived, "value")

    @property
    def range(self) -> tuple[int, int]:
        """The first and the last step that can be shown."""
        return self._store.first_step, self._store.last_step

    def _toggle(self) -> None:
        clock, last = self._clock, self._store.last_step
        if clock.live or clock.playing:
            clock.pause(last)
        else:
            clock.play(last)

    def _slid(self, change: Any) -> None:
        if not self._showing:
            self._clock.goto(change["new"], *self.range)

    def _lived(self, change: Any) -> None:
        if not self._showing and change["new"] != self._clock.live:
            if change["new"]:
                self._clock.follow()
            else:
                self._clock.pause(self._store.last_step)

    def sync(self) -> None:
        """Show the clock and the steps there are; what is the same is not sent."""
        first, last = self.range
        clock = self._clock
        shown = clock.shown(first, last)
        self._showing = True
        try:
            slider, high = self.slider, max(last, first + 1)
            if (slider.min, slider.max) != (first, high):
                with slider.hold_trait_notifications():
                    slider.min, slider.max = first, high
            for widget, name, value in (
                (slider, "value", shown),
                (self.past.layout, "display", "none" if clock.live or self._store.replayed else None),
                (self.live, "value", clock.live),
                (self.play, "description", _("Pause") if clock.live or clock.playing else _("Play")),
                (self.back, "disabled", shown <= first),
                (self.forward, "disabled", shown >= last),
            ):
                if getattr(widget, name) != value:
                    setattr(widget, name, value)
        finally:
            self._showing = False
