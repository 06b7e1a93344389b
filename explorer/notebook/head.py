"""The line above a view that says what is running, and what must be read now."""

import html
import time
from typing import Any

import panel as pn
import panel_material_ui as pmui

from explorer.i18n import _
from explorer.status import facts, status_line
from explorer.theme import badge, pane

NOTICE_S = 20.0  # how long a message stays
COST_S = 0.5  # how often the cost of watching, which changes with every step, is told anew
CSS = """
.line { display: flex; flex-wrap: wrap; align-items: center; gap: 2px 16px; font-size: 13px; }
.line .state::before { content: ""; display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 7px; background: var(--c); }
[role=alert] { margin-top: 8px; padding: 8px 12px; border-radius: 8px; border: 1px solid var(--panel-primary-color); white-space: pre-wrap; overflow-wrap: anywhere; }
"""


class Head:
    """``layout`` is what shows; ``update`` brings it up to date."""

    def __init__(self, store: Any, session: Any, owner: str) -> None:
        self.store, self.session, self.owner = store, session, owner
        self.text = pane("", css=CSS)
        self.restart = pmui.Button(
            label=_("Restart the engine"), icon="restart_alt", variant="outlined", margin=(8, 0, 0, 0), visible=False
        )
        self.layout = pn.Column(self.text, sizing_mode="stretch_width", margin=(0, 0, 12, 0))
        if session is not None and getattr(session.process, "can_restart", True):
            self.restart.on_click(lambda _event: session.restart())
            self.layout.append(self.restart)
        self._notice, self._until = "", 0.0
        self._drawn: Any = None
        self._step, self._when = -1, 0.0

    def update(self) -> None:
        session = self.session
        if session is not None:
            notices = session.take_notices(self.owner)
            if notices:
                self._notice, self._until = " ".join(dict.fromkeys(notices)), time.monotonic() + NOTICE_S
            elif self._notice and time.monotonic() > self._until:
                self._notice = ""
        key = (self._notice, session and (session.status, session.message))
        now, step = time.monotonic(), self.store.last_step
        if key == self._drawn and (step == self._step or now - self._when < COST_S):
            return
        self._drawn, self._step, self._when = key, step, now
        if session is None:
            self.text.object = _replayed(self.store)
            return
        alerts = [text for text in (session.message, self._notice) if text]
        self.text.object = status_line(session) + "".join(f'<div role="alert">{html.escape(text)}</div>' for text in alerts)
        self.restart.visible = session.status == "died"


def _replayed(store: Any) -> str:
    started = store.started
    words = [badge("replayed"), html.escape(_("A recorded run; no engine is needed to look at it."))]
    if started is not None:
        model, rest, why = facts(started)
        words += [f'<b title="{html.escape(why)}">{html.escape(model)}</b>', html.escape(rest)]
    return f'<div class="line">{"".join(f"<span>{word}</span>" for word in words)}</div>'
