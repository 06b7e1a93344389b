"""Files between the app and a browser: a saved run comes in piece by piece, what is asked for goes out, pictures are made there."""

import base64
import binascii
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import param

from explorer.canvas.base import Canvas
from explorer.i18n import _

HERE = Path(__file__).parent
LIMIT = 256 << 20  # bytes of a file that is taken in
PIECE = 512 << 10  # bytes a message: far below what a web socket takes

TEXTS = {
    "open": _("Open a saved run…"),
    "hint": _(
        "A file that was saved here before (.cutaway). It is looked at by this browser only; the engine and everybody else go on."
    ),
    "reading": _("Reading {percent} %"),
    "too_large": _("This file has {size} MiB; up to {limit} MiB can be opened here. Larger ones: in a notebook."),
    "no_figures": _("There is no figure on this page."),
    "failed": _("The picture could not be made: {error}"),
}


class Files(Canvas):
    """A button that takes a saved run, and the way out for files and pictures.

    ``received(name, path)`` is called with the file once it is whole; the path is gone when it returns. ``said(text)`` gets what
    went wrong in the browser.
    """

    _esm = (HERE / "pictures.js").read_text(encoding="utf-8") + (HERE / "files.js").read_text(encoding="utf-8")
    kinds = ("piece", "said")

    texts = param.Dict(default=TEXTS)
    limit = param.Integer(default=LIMIT)
    piece = param.Integer(default=PIECE)

    def __init__(self, received: Callable[[str, Path], None], said: Callable[[str], None], **params: Any) -> None:
        super().__init__(sizing_mode="stretch_width", margin=0, **params)
        self._received, self._said = received, said
        self._folder: Path | None = None
        self._name, self._size = "", 0  # of what is coming in

    # -- in ----------------------------------------------------------------------------------------------------------------

    def on_piece(self, action: dict[str, Any]) -> None:
        """One piece of a file: {name, offset, data (base64), last}. Answers with how far it is, upon which the next one comes."""
        name, offset, text = action.get("name"), action.get("offset"), action.get("data")
        if not (isinstance(name, str) and isinstance(offset, int) and isinstance(text, str) and len(text) <= 2 * self.piece):
            return
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            return
        if offset == 0:
            if self._folder is not None:
                self._said(
                    _("{first} was not opened: {second} was chosen meanwhile.").format(first=self._name, second=name[:200])
                )
            self.close()
            self._name = name[:200]
            self._folder = Path(tempfile.mkdtemp(prefix="cutaway-run-"))
        if self._folder is None or offset != self._size or offset + len(data) > self.limit:
            return
        path = self._folder / "run.cutaway"
        with open(path, "ab") as file:
            file.write(data)
        self._size += len(data)
        self.send({"taken": self._size})
        if action.get("last") is True:
            try:
                self._received(name[:200], path)
            finally:
                self.close()

    def on_said(self, action: dict[str, Any]) -> None:
        if isinstance(action.get("text"), str):
            self._said(action["text"][:500])

    def close(self) -> None:
        """Remove what was taken in."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._size = None, 0

    # -- out ---------------------------------------------------------------------------------------------------------------

    def give(self, name: str, data: bytes, mime: str = "application/octet-stream") -> None:
        """Have the browser save these bytes as a file."""
        self.send({"save": name, "mime": mime, "data": data})

    def png(self, name: str) -> None:
        """Have the browser draw the page into a PNG and save it."""
        self.send({"png": name})

    def card(self, name: str) -> None:
        """The same of one card, which is chosen with the pointer."""
        self.send({"card": name})

    def svg(self, name: str) -> None:
        """Have the browser save each Bokeh figure of the page as an SVG."""
        self.send({"svg": name})

    def copy_link(self) -> None:
        """Put the page's address into the browser's clipboard."""
        self.send({"link": True})
