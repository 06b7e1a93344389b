"""What must be read now: the engine loading or dead, and messages to this browser."""

import html
from typing import Any

import panel as pn
import panel_material_ui as pmui

from explorer.i18n import _
from explorer.shell_style import BANNER_CSS
from explorer.theme import pane

_STYLE = {
    "position": "sticky", "top": "8px", "z-index": "9", "align-items": "center", "gap": "8px", "border-radius": "12px",
    "padding": "10px 14px", "background": "var(--panel-surface-color)", "border": "1px solid var(--panel-primary-color)",
    "box-shadow": "0 2px 14px rgb(0 0 0 / .12)", "box-sizing": "border-box",
}  # fmt: skip


class Banner:
    """``root`` goes on top of the page; it shows while there is something to read."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._said = ""
        self._drawn: tuple[str, str, str] | None = None
        self.text = pane("", css=BANNER_CSS)
        self.dismiss = pmui.IconButton(icon="close", size="small", description=_("Dismiss"), margin=0, visible=False)
        self.restart = pmui.Button(
            label=_("Restart the engine"), icon="restart_alt", color="primary", variant="contained", margin=0, visible=False
        )
        self.dismiss.on_click(lambda _e: self.say(""))
        self.restart.on_click(lambda _e: session.restart())
        self.root = pn.Row(
            self.text, self.restart, self.dismiss, sizing_mode="stretch_width", margin=(0, 0, 16, 0), visible=False, styles=_STYLE
        )

    def say(self, text: str) -> None:
        """Show a message in place of the last one; "" takes it away."""
        self._said = text
        self._draw()

    def draw(self, owner: str) -> None:
        """Called at every tick. ``owner``: this browser, whose notices are taken from the session and said."""
        notices = self._session.take_notices(owner)
        if notices:
            self._said = " ".join(dict.fromkeys(notices))
        self._draw()

    def _draw(self) -> None:
        key = status, message, said = (self._session.status, self._session.message, self._said)
        if key == self._drawn:
            return
        self._drawn = key
        parts = [(status, message)] if message else []
        parts += [("notice", said)] if said else []
        self.text.object = "".join(f'<div role="alert" class="{kind}">{html.escape(text)}</div>' for kind, text in parts)
        self.restart.visible = status == "died"
        self.dismiss.visible = bool(said)
        self.root.visible = bool(parts)
