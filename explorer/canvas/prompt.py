"""A box for a text that may be long, with a limit that is told and not silently applied."""

from collections.abc import Callable
from typing import Any

import param

from explorer.canvas.base import HERE, Canvas

LIMIT = 1_000_000  # characters: beyond any context that is run here, below what a browser takes long to lay out


class PromptBox(Canvas):
    """``value`` is the text once the box was left. ``submit(text)`` is called on Ctrl+Enter and after ``ask``, ``too_long(characters)`` when a text
    longer than ``limit`` was refused; the box then keeps what it had."""

    _esm = HERE / "prompt.js"
    kinds = ("submit", "too_long")

    value = param.String(default="")
    label = param.String(default="")
    hint = param.String(default="")
    rows = param.Integer(default=4, bounds=(1, 40))
    limit = param.Integer(default=LIMIT)

    def __init__(self, submit: Callable[[str], None], too_long: Callable[[int], None], **params: Any) -> None:
        super().__init__(sizing_mode="stretch_width", margin=0, **params)
        self._submit, self._too_long = submit, too_long

    def ask(self) -> None:
        """Have the browser submit what stands in the box now."""
        self.send({"ask": "submit"})

    def on_submit(self, action: dict[str, Any]) -> None:
        if isinstance(action.get("text"), str):
            self._submit(action["text"])

    def on_too_long(self, action: dict[str, Any]) -> None:
        if isinstance(action.get("length"), int):
            self._too_long(action["length"])
