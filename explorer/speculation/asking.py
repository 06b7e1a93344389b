"""The part of the Speculation page that sends requests: scenes, a prompt of one's own, the same requests again with other K."""

import html
from pathlib import Path
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.request import SamplingParams
from explorer.base import Clock
from explorer.canvas.prompt import LIMIT, PromptBox
from explorer.i18n import _
from explorer.scenes import scene_buttons
from explorer.speculation.drafters import best_choice
from explorer.speculation.rows import SpeculationRows, Track
from explorer.speculation.scenes import CODE, SCENES, Act, Ask
from explorer.speculation.settings import Settings
from explorer.speculation.stage import Stage
from explorer.theme import card, grid, pane

CSS = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")
MAX_TOKENS = 96  # of a prompt of one's own
SWEPT = (0, 1, 2, 4, 8)  # values of K
SWEEP_LOOK = _(
    "Each square on the curve is the same requests once more. Where they lie off the dashed line, the model left something out."
)
AGAIN_LOOK = _("The clock now has the same requests both ways.")


class Asking(pn.viewable.Viewer):
    """Everything here asks ``session``; None of it is made for a recorded run."""

    def __init__(self, session: Any, clock: Clock, store: Any, rows: SpeculationRows, **params: Any) -> None:
        super().__init__(**params)
        self.session, self.clock, self.store, self.rows = session, clock, store, rows
        self.stage = Stage(session, lambda: self.clock.owner, rows)
        self.settings = Settings(self._move, self._heat)
        self.said = pane(css=CSS, margin=(10, 0, 0, 0), visible=False)
        self._said: tuple[str, str] = ("", "")
        self._turned_to: str | None = None  # the request of a scene that the page has turned to
        self.restore = pmui.Button(
            label=_("Restore the knobs"), icon="undo", color="warning", variant="text", margin=(6, 0, 0, 0), visible=False
        )
        self.restore.on_click(lambda _event: self.stage.restore())
        self.prompt = PromptBox(
            self._send, self._too_long, label=_("Or a prompt of your own"), value=CODE, rows=3, hint=_("Ctrl+Enter sends it")
        )
        self.send = pmui.Button(label=_("Send"), icon="send", color="primary", variant="contained", margin=0)
        self.send.on_click(lambda _event: self.prompt.ask())
        small = {"size": "small", "variant": "outlined", "margin": 0, "disabled": True}
        self.plain = pmui.Button(label=_("Run again with K = 0"), icon="replay", **small)
        self.sweep = pmui.Button(label=_("Run again with K = 0, 1, 2, 4, 8"), icon="stacked_line_chart", **small)
        self.plain.on_click(lambda _event: self._again((0,), AGAIN_LOOK))
        self.sweep.on_click(lambda _event: self._again(SWEPT, SWEEP_LOOK))
        own = grid(self.prompt, self.send, columns="minmax(0, 1fr) 120px", gap=12, margin=(18, 0, 0, 0))
        self.scenes_card = card(
            _("Scenes"), grid(*scene_buttons(SCENES.values(), self._scene_clicked), min_width=230), self.said, self.restore, own,
            kinds="live", hint=_("Real requests to the running engine. A scene sets drafter and K for everybody; a button puts them back."),
        )  # fmt: skip
        self.knobs_card = card(
            _("Speculation"), self.settings, kinds="live", margin=(0, 0, 16, 0),
            hint=_("The engine's own knobs, for everybody who is here, from the next step on. The batch size is among the engine's knobs."),
        )  # fmt: skip
        self.buttons = pn.Row(self.plain, self.sweep, margin=(0, 0, 12, 0), styles={"gap": "8px", "flex-wrap": "wrap"})
        self._layout = pn.Column(self.scenes_card, self.knobs_card, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- kept up to date ---------------------------------------------------------------------------------------------------

    @property
    def unsettled(self) -> bool:
        return self.stage.busy or self.settings.unsettled

    def update(self, track: Track | None) -> None:
        """``track``: the request that is looked at."""
        latest = self.store.at(self.store.last_step)
        model = self.store.started.model if self.store.started is not None else {}
        self.settings.show_facts(self.rows.facts, model)
        self.stage.advance(self._knobs(latest))
        if self.stage.first is not None and self.stage.first != self._turned_to:
            self._turned_to = self.stage.first
            self._look_at(self.stage.first)
        if self.stage.said != self._said:
            self._said = kind, text = self.stage.said
            self.said.param.update(
                object=f'<div class="sp-said {kind}" role="status">{html.escape(text)}</div>', visible=bool(text)
            )
        changed = bool(self.stage.changed) and not self.stage.busy
        off = track is None or self.stage.busy or not self.rows.facts or track.finished_step is None
        for widget, name, value in (
            (self.restore, "visible", changed), (self.plain, "disabled", off), (self.sweep, "disabled", off),
        ):  # fmt: skip
            if getattr(widget, name) != value:
                setattr(widget, name, value)

    def _knobs(self, state: Any) -> dict[str, Any]:
        config = state.engine.config if state.engine is not None else {}
        return {**config, **state.knobs, "speculative": self.rows.facts}

    def _look_at(self, request_id: str) -> None:
        self.clock.follow()
        self.clock.param.update(request_id=request_id, token_index=None)

    # -- what the user does --------------------------------------------------------------------------------------------------

    def _scene_clicked(self, key: str, _event: Any = None) -> None:
        scene = SCENES[key]
        model = self.store.started.model if self.store.started is not None else {}
        knobs = self._knobs(self.store.at(self.store.last_step))
        self.stage.play(scene.acts(knobs, best_choice(model)), knobs, scene.look)

    def _move(self, speculative: dict[str, Any] | None) -> None:
        self.session.reconfigure(self.clock.owner, speculative=speculative)

    def _heat(self, temperature: float) -> None:
        for track in list(self.rows.tracks.values()):
            if track.owner == self.clock.owner and track.finished_step is None:
                self.session.update_sampling(track.group_id, self.clock.owner, temperature=temperature)

    def _send(self, text: str) -> None:
        if not text.strip():
            self.session.notify(self.clock.owner, _("The prompt is empty: write something, then press Send."))
            return
        params = SamplingParams(temperature=round(float(self.settings.temperature.value), 4), max_tokens=MAX_TOKENS)
        request_id = self.session.submit(text, params, self.clock.owner)
        if request_id is not None:
            self._look_at(request_id)

    def _too_long(self, length: int) -> None:
        message = _("The text has {n} characters, more than the {limit} that this box takes. Nothing was inserted.")
        self.session.notify(self.clock.owner, message.format(n=f"{length:,}", limit=f"{LIMIT:,}"))

    def _again(self, ks: tuple[int, ...], look: str) -> None:
        track = self.rows.tracks.get(self.clock.request_id or "") or self.followed
        facts = self.rows.facts
        if track is None or not facts or self.stage.busy:
            return
        asks = same_asks(track, self.rows)
        acts = [
            Act(
                {"speculative": {**facts, "num_speculative_tokens": k}},
                asks,
                _("The same with K = {k}…").format(k=k),
                follow=False,
            )
            for k in ks
        ]
        self.stage.play(acts, self._knobs(self.store.at(self.store.last_step)), look, restore=True)

    followed: Track | None = None  # what is looked at without a choice


def same_asks(track: Track, rows: SpeculationRows) -> list[Ask]:
    """The request, and those that were sent together with it, as they were asked."""
    together = [
        t for t in rows.tracks.values()
        if t.owner == track.owner and t.arrived_step == track.arrived_step and "#" not in t.request_id and not t.changed_sampling
    ]  # fmt: skip
    return [(list(t.prompt_token_ids), params_of(t)) for t in (together if track in together else [track])]


def params_of(track: Track) -> SamplingParams:
    facts = {name: value for name, value in track.sampling.items() if name in SamplingParams.__dataclass_fields__}
    return SamplingParams(**{**facts, "n": 1})
