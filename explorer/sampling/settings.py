"""The sliders of the Sampling page: what-if knobs on a recorded token, which can be made live or given to a new request."""

import threading
from collections.abc import Callable
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.request import SamplingParams
from explorer.i18n import _
from explorer.pace import quick
from explorer.sampling.whatif import KNOBS
from explorer.theme import grid


class Settings(pn.viewable.Viewer):
    """One slider for each of ``KNOBS``. ``changed(name, value)`` is called when a person moves one; ``show_params`` never calls it."""

    def __init__(self, changed: Callable[[str, float], None], **params: Any) -> None:
        super().__init__(**params)
        self._changed = changed
        self._hands = dict.fromkeys(KNOBS, 0)  # moves by hand that are on their way
        self._told: dict[str, float] = {}  # the value that each slider shows, as far as is known here
        self._showing = 0  # the thread that sets sliders: those are not moved by a person
        self.sliders: dict[str, Any] = {
            "temperature": _slider(_("Temperature"), 0.0, 2.0, 0.05, 1.0, _("0: greedy. Divides the logits.")),
            "top_k": _slider(_("Top-k"), 0, 100, 1, 0, _("0: off. Keeps the k likeliest tokens.")),
            "top_p": _slider(_("Top-p"), 0.05, 1.0, 0.01, 1.0, _("1: off. Keeps the fewest tokens that hold this mass.")),
            "min_p": _slider(_("Min-p"), 0.0, 1.0, 0.01, 0.0, _("0: off. Keeps tokens with this share of the likeliest one's probability.")),
            "repetition_penalty": _slider(_("Repetition penalty"), 0.5, 2.0, 0.05, 1.0, _("1: off. Divides positive logits of tokens that were there, and multiplies negative ones.")),
            "presence_penalty": _slider(_("Presence penalty"), -2.0, 2.0, 0.1, 0.0, _("0: off. Taken off the logit of every token of the output.")),
            "frequency_penalty": _slider(_("Frequency penalty"), -2.0, 2.0, 0.1, 0.0, _("0: off. Taken off once for each time the token is in the output.")),
        }  # fmt: skip
        for name, slider in self.sliders.items():
            slider.param.watch(lambda _event, name=name: self._moved(name), "value")
        self._layout = grid(*self.sliders.values(), min_width=150, gap=10, margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    def _moved(self, name: str) -> None:
        if self._showing != threading.get_ident():
            value = self.sliders[name].value  # the newest: callbacks of one browser may overtake each other
            self._told[name] = value = int(value) if name == "top_k" else round(float(value), 4)
            self._hands[name] += 1
            try:
                self._changed(name, value)
            finally:
                self._hands[name] -= 1

    def show_params(self, params: SamplingParams, disabled: set[str]) -> None:
        """Set the sliders; ``disabled``: those that cannot be recomputed from what was recorded."""
        self._showing = threading.get_ident()
        try:
            for name in KNOBS:
                slider, value = self.sliders[name], getattr(params, name)
                value = max(value, slider.start)
                if value > slider.end:  # a request may ask for more than the slider offers
                    slider.end = value
                # A slider that a person moves is left alone: it may be further already than what was heard of it.
                if self._told.get(name) != value and not self._hands[name]:
                    self._told[name] = value
                    slider.value = value
                if slider.disabled != (name in disabled):
                    slider.disabled = name in disabled
        finally:
            self._showing = 0


def _slider(label: str, start: float, end: float, step: float, value: float, hint: str) -> Any:
    kind: Any = pmui.IntSlider if isinstance(step, int) else pmui.FloatSlider
    slider = kind(
        label=label,
        start=start,
        end=end,
        step=step,
        value=value,
        description=hint,
        size="small",
        margin=0,
        sizing_mode="stretch_width",
    )
    return quick(slider)
