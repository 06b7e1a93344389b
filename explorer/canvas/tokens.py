"""Token chips: the answers of requests as they stream, each token shaded by how surprising it was."""

from collections.abc import Callable
from typing import Any

import param

from explorer.canvas.base import Canvas, parts
from explorer.i18n import _

TEXTS = {
    "empty": _("No request yet. Choose a preset or write a prompt, then press Send: every token appears here as it is chosen."),
    "legend": _("Shade: how likely the model found the token before temperature and filters (strong = surprising)"),
    "select": _("Select this request everywhere"),
    "stop": _("Stop"),
    "stop_hint": _("Abort this request now; its KV blocks come back at once"),
    "prompt": _("The prompt; click to unfold"),
    "tokens_of": _("Tokens of {request}; arrow keys read them one by one"),
    "dropped": _("The first {n} tokens are no longer drawn."),
    "id": _("token id"),
    "position": _("position"),
    "step": _("engine step"),
    "logprob": _("log-probability"),
    "prob": _("probability"),
    "rank": _("rank"),
    "ms": _("since the token before"),
}
RECORDED = {  # what is said otherwise of a recorded run
    "empty": _("No request yet at this step of the recorded run: step forward, or play on."),
}


class TokenCards(Canvas):
    """Cards of token chips. The owner of the data calls ``ops``, and sends everything when ``due``: a browser has (re)drawn."""

    _esm = parts("tokens.js")
    kinds = ("ready", "select", "stop")

    texts = param.Dict(default=TEXTS)

    def __init__(
        self,
        select: Callable[[str | None, int | None], None],
        stop: Callable[[str], None],
        recorded: bool = False,
        **params: Any,
    ) -> None:
        """``recorded``: the requests are those of a saved run, and nobody can send another."""
        super().__init__(sizing_mode="stretch_width", margin=0, texts=TEXTS | RECORDED if recorded else TEXTS, **params)
        self._select, self._stop = select, stop
        self.ready = False  # until the browser has drawn, nothing is sent
        self.due = False  # it has drawn and waits for everything

    def ops(self, ops: list[list[Any]]) -> None:
        """Send operations, each [name, arguments...]; see tokens.js. One message, however many operations."""
        if ops and self.ready:
            self.send({"ops": ops})

    def on_ready(self, action: dict[str, Any]) -> None:
        # Only noted: sent from here, from another thread, it could overtake or be overtaken by what update() sends.
        self.ready = self.due = True

    def on_select(self, action: dict[str, Any]) -> None:
        request_id, index = action.get("id"), action.get("index")
        if isinstance(request_id, str | None) and isinstance(index, int | None):
            self._select(request_id, index)

    def on_stop(self, action: dict[str, Any]) -> None:
        if isinstance(action.get("id"), str):
            self._stop(action["id"])
