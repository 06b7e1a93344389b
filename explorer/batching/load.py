"""The form from which a load is started, watched, made faster or slower, and stopped."""

from pathlib import Path
from typing import Any

import panel as pn
import panel_material_ui as pmui

from explorer.batching import words
from explorer.batching.load_settings import ARRIVALS, RATES, SHAPES, Settings, to_load
from explorer.i18n import _
from explorer.pace import Pace, quick
from explorer.quantization.labels import set_html
from explorer.theme import grid, pane

CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
_WIDE: dict[str, Any] = {"size": "small", "margin": 0, "sizing_mode": "stretch_width"}


class LoadForm(pn.viewable.Viewer):
    """What is to be sent. ``settings`` reads it, ``fill`` writes it; ``rate`` may be watched while a load runs."""

    def __init__(self, start: Settings | None = None, **params: Any) -> None:
        super().__init__(**params)
        start = start if start is not None else Settings()
        self.arrivals: Any = pmui.Select(
            label=_("Arrivals"), options={title: key for key, title in ARRIVALS.items()}, value=start.arrivals, **_WIDE
        )
        self.rate: Any = quick(
            pmui.DiscreteSlider(
                label=_("Arrival rate, requests a second"), options=list(RATES), value=start.rate, formatter="%g",
                description=_("May be moved while the load runs: from the next arrival on."), **_WIDE,
            )
        )  # fmt: skip
        self.num_requests: Any = pmui.IntInput(
            label=_("Requests"), start=1, end=2000, value=start.num_requests, description=_("Conversations, where they have several turns."), **_WIDE
        )  # fmt: skip
        shapes = {title: key for key, title in SHAPES.items()}
        self.prompt_tokens: Any = pmui.IntInput(label=_("Prompt, tokens"), start=1, end=8000, value=start.prompt_tokens, **_WIDE)
        self.prompt_shape: Any = pmui.Select(label=_("Prompt lengths"), options=shapes, value=start.prompt_shape, **_WIDE)
        self.output_tokens: Any = pmui.IntInput(label=_("Output, tokens"), start=1, end=4000, value=start.output_tokens, **_WIDE)
        self.output_shape: Any = pmui.Select(label=_("Output lengths"), options=shapes, value=start.output_shape, **_WIDE)
        self.prefix_share: Any = quick(
            pmui.FloatSlider(
                label=_("Share that begins with a common prefix"), start=0.0, end=1.0, step=0.1, value=start.prefix_share, **_WIDE
            )
        )
        self.prefix_tokens: Any = pmui.IntInput(label=_("Prefix, tokens"), start=1, end=4000, value=start.prefix_tokens, **_WIDE)
        self.turns: Any = pmui.IntInput(label=_("Turns"), start=1, end=8, value=start.turns, **_WIDE)
        self.queue_limit: Any = pmui.IntInput(
            label=_("Queue limit, 0: none"), start=0, end=2000, value=start.queue_limit,
            description=_("A request that finds so many waiting for their first token is refused: queue full."), **_WIDE,
        )  # fmt: skip
        self.seed: Any = pmui.IntInput(label=_("Seed"), start=0, end=1_000_000, value=start.seed, **_WIDE)
        self._layout = pn.Column(
            self.rate,
            grid(
                self.arrivals, self.num_requests, self.prompt_tokens, self.prompt_shape, self.output_tokens, self.output_shape,
                self.prefix_tokens, self.turns, self.queue_limit, self.seed, min_width=125, gap=10,
            ),
            self.prefix_share, sizing_mode="stretch_width", margin=0, styles={"gap": "12px"},
        )  # fmt: skip

    def __panel__(self) -> pn.Column:
        return self._layout

    @property
    def settings(self) -> Settings:
        return Settings(**{name: getattr(self, name).value for name in Settings.__dataclass_fields__})

    def fill(self, settings: Settings) -> None:
        for name in Settings.__dataclass_fields__:
            widget, value = getattr(self, name), getattr(settings, name)
            if widget.value != value:
                widget.value = value


class LoadPanel(pn.viewable.Viewer):
    """Starts a load in the name of the view's viewer. ``view``: the page's view."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.form = LoadForm()
        self.form.rate.param.watch(self._rate_moved, "value")
        self.start_button = pmui.Button(
            label=_("Start"), icon="play_arrow", variant="contained", color="primary", size="small", margin=0
        )
        self.stop_button = pmui.Button(label=_("Stop"), icon="stop", variant="outlined", size="small", margin=0, disabled=True)
        self.start_button.on_click(self._start_clicked)
        self.stop_button.on_click(lambda _event: self.view.session.loads.stop(self.view.clock.owner))
        self.state, self.said = pane(css=CSS, margin=(12, 0, 0, 0)), pane(css=CSS)
        self.pace = Pace()
        buttons = pn.Row(self.start_button, self.stop_button, margin=(12, 0, 0, 0), styles={"gap": "8px"})
        self._layout = pn.Column(self.form, buttons, self.state, self.said, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    def start(self, settings: Settings | None = None, name: str | None = None) -> str | None:
        """Returns the load's name; None where it could not be started, which the page says."""
        if settings is not None:
            self.form.fill(settings)
        set_html(self.said, "")
        try:
            return send(self.view, self.form.settings, name)
        except ValueError as error:
            set_html(self.said, words.said(str(error), "error"))
            return None

    def _start_clicked(self, _event: Any) -> None:
        self.view.clock.follow()
        self.start()

    def _rate_moved(self, event: Any) -> None:
        self.view.session.loads.set_rate(self.view.clock.owner, event.new)

    def update(self) -> None:
        if not self.pace.due():
            return
        state = self.view.session.loads.of(self.view.clock.owner)
        set_html(self.state, words.load_html(state))
        running = state is not None and not state.over
        ready = self.view.session.status in ("running", "paused") and self.view.store.started is not None
        for button, disabled in ((self.start_button, running or not ready), (self.stop_button, not running)):
            if button.disabled != disabled:
                button.disabled = disabled


def send(view: Any, settings: Settings, name: str | None = None) -> str | None:
    """Start a load of the view's viewer; its name. ValueError for one that cannot be made for this engine."""
    started = view.store.started
    if started is None:
        raise ValueError(words.NO_ENGINE)
    load = to_load(settings, started.model, int(started.config.get("max_model_len") or 2048))
    found: str | None = view.session.start_load(
        view.clock.owner, load, rate=settings.rate, name=name, max_waiting=settings.queue_limit or None
    )
    return found
