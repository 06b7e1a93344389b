"""The part of the Sampling page that sends requests: scenes, a prompt of one's own, the same again with other settings."""

import html
from collections.abc import Callable
from pathlib import Path
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.request import SamplingParams
from explorer.base import Clock
from explorer.canvas.prompt import LIMIT, PromptBox
from explorer.i18n import _
from explorer.sampling.rows import Track
from explorer.sampling.scenes import LOGITS, SCENES, SHARP
from explorer.scenes import scene_buttons
from explorer.theme import card, grid, pane

CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
MAX_TOKENS = 64  # of a prompt of one's own


class Asking(pn.viewable.Viewer):
    """``settings`` gives the values of the sliders that were moved; ``began`` is called when a scene starts, ``show_beams`` when
    somebody wants to see the card of the beams. ``sent`` is filled: request that repeats another one with other settings -> that one."""

    def __init__(
        self,
        session: Any,
        clock: Clock,
        settings: Callable[[], dict[str, Any]],
        began: Callable[[str], None],
        show_beams: Callable[[], None],
        sent: dict[str, str],
        **params: Any,
    ) -> None:
        super().__init__(**params)
        self.session, self.clock, self._settings, self._began, self.sent = session, clock, settings, began, sent
        self.said = pane(css=CSS, margin=(10, 0, 0, 0), visible=False)
        self.to_beams = pmui.Button(
            label=_("Show the beams"), icon="south", size="small", variant="outlined", margin=(8, 0, 0, 0), visible=False
        )
        self.to_beams.on_click(lambda _event: show_beams())
        buttons = scene_buttons(SCENES.values(), self._scene_clicked)
        self.prompt = PromptBox(
            self._send, self._too_long, label=_("Or a prompt of your own, with the settings below"), value=SHARP, rows=2,
            hint=_("Ctrl+Enter sends it"),
        )  # fmt: skip
        self.send = pmui.Button(label=_("Send"), icon="send", color="primary", variant="contained", margin=0)
        self.send.on_click(lambda _event: self.prompt.ask())
        own = grid(self.prompt, self.send, columns="minmax(0, 1fr) 120px", gap=12, margin=(18, 0, 0, 0))
        hint = _("Real requests to the running engine. Their full logits are kept, so that every what-if on them is exact.")
        self._card = card(_("Scenes"), grid(*buttons, min_width=210), self.said, self.to_beams, own, kinds="live", hint=hint)

    def __panel__(self) -> pn.Column:
        return self._card

    def submit(self, prompt: Any, params: SamplingParams) -> str | None:
        """Send one request, and have its logits kept. None when it cannot be sent (this browser is told why)."""
        request_id: str | None = self.session.submit(prompt, params, self.clock.owner)
        if request_id is not None and params.beam_width is None:
            self.session.watch_logits(request_id, self.clock.owner, min(LOGITS, params.max_tokens))
        return request_id

    def look_at(self, request_id: str | None) -> None:
        """Follow a request that was just sent."""
        if request_id is not None:
            self.clock.follow()
            self.clock.param.update(request_id=request_id, token_index=None)

    def again(self, track: Track, changes: dict[str, Any]) -> None:
        """The same prompt and seed as a new request, with these values changed."""
        facts = {name: value for name, value in track.sampling.items() if name in SamplingParams.__dataclass_fields__}
        request_id = self.submit(track.prompt_token_ids, SamplingParams(**{**facts, **changes, "n": 1}))
        if request_id is not None:
            self.sent[request_id] = track.request_id
        self.look_at(request_id)

    def branch(self, track: Track, position: int, token_id: int) -> None:
        """Force a token at ``position`` of a request and go on from there as a new one."""
        request_id = self.session.branch(track.request_id, position, token_id, self.clock.owner)
        if request_id is not None:
            self.session.watch_logits(request_id, self.clock.owner, LOGITS)
        self.look_at(request_id)

    def _scene_clicked(self, key: str, _event: Any = None) -> None:
        scene = SCENES[key]
        self._began(key)
        sent = [self.submit(prompt, params) for prompt, params in scene.requests()]
        if None not in sent:
            self.look_at(sent[0])
            self.said.param.update(object=f'<div class="sa-said" role="status">{html.escape(scene.look)}</div>', visible=True)
            self.to_beams.visible = scene.far

    def _send(self, text: str) -> None:
        if not text.strip():
            self.session.notify(self.clock.owner, _("The prompt is empty: write something, then press Send."))
            return
        self.look_at(self.submit(text, SamplingParams(max_tokens=MAX_TOKENS, **self._settings())))

    def _too_long(self, length: int) -> None:
        message = _("The text has {n} characters, more than the {limit} that this box takes. Nothing was inserted.")
        self.session.notify(self.clock.owner, message.format(n=f"{length:,}", limit=f"{LIMIT:,}"))
