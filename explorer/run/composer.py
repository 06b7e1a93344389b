"""The prompt box: what to ask, how many times, and how the answers' tokens are drawn."""

from collections.abc import Callable
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.request import SamplingParams
from explorer.base import Clock
from explorer.canvas.prompt import LIMIT, PromptBox
from explorer.i18n import _
from explorer.pace import quick
from explorer.run.presets import PRESETS, Preset
from explorer.theme import card

COUNTS = (1, 4, 16)
MAX_TOKENS = (16, 32, 64, 128, 256, 512, 1024)


class Composer(pn.viewable.Viewer):
    """``running`` gives the ids of this browser's unfinished requests: temperature and top-p reach them too."""

    def __init__(self, session: Any, clock: Clock, running: Callable[[], list[str]], **params: Any) -> None:
        super().__init__(**params)
        self.session, self.clock, self._running = session, clock, running
        wide = {"sizing_mode": "stretch_width", "margin": 0}
        self.preset = pmui.Select(
            label=_("Start from"), options={p.label: key for key, p in PRESETS.items()}, value="complete", size="small", **wide
        )
        self.mode = pmui.RadioButtonGroup(
            label=_("Form of the prompt"), options={_("Plain text"): "plain", _("Chat"): "chat"}, value="plain", size="small",
            description=_("Plain text is continued as it stands. Chat wraps it in the model's own chat template."), **wide,
        )  # fmt: skip
        self.prompt = PromptBox(
            self._submit_text, self._too_long, label=_("Prompt"), value=PRESETS["complete"].text, hint=_("Ctrl+Enter sends it")
        )
        self.system = PromptBox(self._submit_system, self._too_long, label=_("System prompt"), rows=2, visible=False)
        self.count = pmui.RadioButtonGroup(
            label=_("Send how many at once"), options={f"× {n}": n for n in COUNTS}, value=1, size="small",
            description=_("They share one batch. With a fixed seed, copy k uses seed + k."), **wide,
        )  # fmt: skip
        self._build_sampling(wide)
        self.send = pmui.Button(label=_("Send"), icon="send", color="primary", variant="contained", margin=0)
        self.stop = pmui.Button(label=_("Stop mine"), icon="stop", variant="outlined", margin=0, disabled=True)
        self.preset.param.watch(lambda event: self._take_preset(PRESETS[event.new]), "value")
        self.mode.param.watch(lambda event: self.system.param.update(visible=event.new == "chat"), "value")
        self.send.on_click(lambda _event: self.prompt.ask())
        self.stop.on_click(lambda _event: self.stop_mine())
        self._card = self._build()

    def _build_sampling(self, wide: dict[str, Any]) -> None:
        self.temperature = pmui.FloatSlider(
            label=_("Temperature"), start=0, end=2, step=0.05, value=0.8, size="small", **wide,
            description=_("0 always takes the likeliest token; higher flattens the distribution. Also reaches your running requests."),
        )  # fmt: skip
        self.top_p = pmui.FloatSlider(
            label=_("Top-p"), start=0.05, end=1, step=0.05, value=0.95, size="small", **wide,
            description=_("Keeps the fewest tokens whose probabilities reach this sum; 1 keeps all. Also reaches your running requests."),
        )  # fmt: skip
        self.max_tokens = pmui.DiscreteSlider(label=_("Max tokens"), options=list(MAX_TOKENS), value=128, size="small", **wide)
        self.seed = pmui.TextInput(
            label=_("Seed"), value="", placeholder=_("chosen by the engine"), size="small", **wide,
            description=_("The same seed and prompt give the same tokens, whatever else is in the batch."),
        )  # fmt: skip
        sliders: list[Any] = [self.temperature, self.top_p]
        for slider in sliders:
            quick(slider, 30)
        self.temperature.param.watch(lambda event: self._update_running(temperature=float(event.new)), "value")
        self.top_p.param.watch(lambda event: self._update_running(top_p=float(event.new)), "value")

    def _build(self) -> pn.Column:
        knobs = pn.Column(
            self.temperature, self.top_p, self.max_tokens, self.seed, sizing_mode="stretch_width", margin=0,
            stylesheets=[":host { display: grid !important; grid-template-columns: 1fr 1fr; gap: 10px 22px; align-items: end; }"],
        )  # fmt: skip
        self.send.sizing_mode = "stretch_width"
        buttons = pn.Row(self.send, self.stop, sizing_mode="stretch_width", margin=0, styles={"gap": "10px"})
        gap = {"gap": "14px"}
        return card(
            _("Ask"),
            pn.Column(
                self.preset,
                self.mode,
                self.system,
                self.prompt,
                knobs,
                self.count,
                buttons,
                sizing_mode="stretch_width",
                margin=0,
                styles=gap,
            ),
            kinds="live",
            margin=0,
        )

    def __panel__(self) -> pn.Column:
        return self._card

    def update(self) -> None:
        nothing = not self._running()
        if self.stop.disabled != nothing:
            self.stop.disabled = nothing

    def _take_preset(self, preset: Preset) -> None:
        self.prompt.value = preset.text
        self.system.value = preset.system
        self.mode.value = "chat" if preset.chat else "plain"
        self.count.value = preset.count

    # -- actions -------------------------------------------------------------------------------------------------------------

    def params(self, copy: int = 0) -> SamplingParams:
        """The sampling parameters of the ``copy``-th of the requests to send. ValueError for a seed that is none."""
        text = self.seed.value.strip()
        if text and not (text.isascii() and text.isdigit()):
            raise ValueError(_("The seed must be a whole number from 0 on, or empty; got {seed!r}.").format(seed=text[:40]))
        return SamplingParams(
            temperature=round(float(self.temperature.value), 4),
            top_p=round(float(self.top_p.value), 4),
            max_tokens=int(self.max_tokens.value),
            seed=int(text) + copy if text else None,
        )

    def submit(self) -> None:
        """Send what stands in the box, as often as asked. Whatever is wrong with it is told to this browser."""
        owner, text = self.clock.owner, self.prompt.value
        if not text.strip():
            self.session.notify(owner, _("The prompt is empty: write something, or choose a preset, then press Send."))
            return
        try:
            for copy, each in enumerate(PRESETS[self.preset.value].texts(text, self.count.value)):
                self._submit_one(each, self.params(copy), owner)
        except ValueError as error:
            self.session.notify(owner, str(error))

    def _submit_text(self, text: str) -> None:
        self.prompt.value = text  # the action may come before the value
        self.submit()

    def _submit_system(self, text: str) -> None:
        self.system.value = text
        self.submit()

    def _too_long(self, length: int) -> None:
        message = _("The text has {n} characters, more than the {limit} that this box takes. Nothing was inserted.")
        self.session.notify(self.clock.owner, message.format(n=f"{length:,}", limit=f"{LIMIT:,}"))

    def _submit_one(self, text: str, params: SamplingParams, owner: str) -> None:
        if self.mode.value == "plain":
            self.session.submit(text, params, owner)
            return
        system = self.system.value.strip()
        messages = [{"role": "system", "content": system}] if system else []
        self.session.chat([*messages, {"role": "user", "content": text}], params, owner)

    def stop_mine(self) -> None:
        for request_id in self._running():
            self.session.abort(request_id, self.clock.owner)

    def _update_running(self, **changes: float) -> None:
        for request_id in self._running():
            self.session.update_sampling(request_id, self.clock.owner, **changes)
