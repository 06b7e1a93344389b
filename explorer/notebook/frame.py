"""The widget that shows a mirror: its spec goes out with the widget, operations follow as messages, actions come back."""

import logging
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets as t

from explorer.i18n import _
from explorer.mirror import Mirror, bokeh_source, runtime_source, to_message
from explorer.notebook.hub import LOCK

_log = logging.getLogger(__name__)

PRESUMED_S = 20.0  # a cell that shows a widget is followed at once, though its page is heard only when the kernel is free
UNSEEN_S = 30.0  # a page that says nothing for so long while it is sent things, and the kernel is free to hear it, has gone
TEXTS = {
    "restarted": _("The kernel was restarted: run the cell again. What you see is the last state of this view."),
}


class BokehJS(ipywidgets.Widget):
    """BokehJS for all frames of a kernel; it shows nothing. Sent once, when the first frame is made."""

    source = t.Unicode().tag(sync=True)


_loader: BokehJS | None = None


def _bokeh() -> str:
    """The reference to the kernel's one BokehJS."""
    global _loader
    if _loader is None or _loader.comm is None:  # closed with all other widgets
        _loader = BokehJS(source=bokeh_source())
    return f"IPY_MODEL_{_loader.model_id}"


class _Page:
    """A frame in a browser."""

    def __init__(self) -> None:
        self.unseen_since: float | None = None  # when it was sent something, of which it has said nothing yet


class Frame(anywidget.AnyWidget):
    """``acted`` is called after something a page did, to bring views up to date. Call ``flush`` to send what is new."""

    _esm = runtime_source() + (Path(__file__).parent / "frame.js").read_text(encoding="utf-8")
    _spec = t.Dict().tag(sync=True)  # made when it is asked for: see get_state
    _bokeh = t.Unicode().tag(sync=True)
    _texts = t.Dict().tag(sync=True)
    _key = t.Unicode().tag(sync=True)

    def __init__(self, mirror: Mirror, acted: Callable[[], None], **options: Any) -> None:
        self._mirror, self._acted = mirror, acted
        self._pages: dict[str, _Page] = {}
        self._presumed_until = time.monotonic() + PRESUMED_S / 4
        self._resting = False
        self._told_error = ""
        super().__init__(_bokeh=_bokeh(), _texts=TEXTS, _key=uuid.uuid4().hex, **options)
        self.on_msg(self._heard)

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> Any:
        state = super().get_state(key, drop_defaults)
        if "_spec" in state:
            with LOCK:
                self.flush()
                state["_spec"] = self._spec_now()
        return state

    def _spec_now(self) -> dict[str, Any]:
        self._resting = False
        return self._mirror.spec()

    # -- out ----------------------------------------------------------------------------------------------------------------

    @property
    def looked_at(self) -> bool:
        return bool(self._pages) or time.monotonic() < self._presumed_until

    def shown(self) -> None:
        """A cell shows it."""
        self._presumed_until = time.monotonic() + PRESUMED_S

    def flush(self) -> None:
        """Send what has changed; with nobody there, let the mirror rest."""
        with LOCK:
            if not self.looked_at:
                if not self._resting:
                    self._mirror.rest()
                    self._resting = True
                return
            before = self._mirror.version
            ops = self._mirror.drain()
            if not ops:
                return
            content, buffers = to_message(ops)
            self.send({"kind": "ops", "from": before, "to": self._mirror.version, "ops": content}, buffers)
            now = time.monotonic()
            for page in self._pages.values():
                page.unseen_since = page.unseen_since or now

    def forget_the_gone(self, free_since: float) -> None:
        """Pages that were closed without a word (a reload, a crash). ``free_since``: when the kernel began to be able to hear."""
        limit = time.monotonic() - UNSEEN_S
        with LOCK:
            gone = [
                name for name, page in self._pages.items() if page.unseen_since and max(page.unseen_since, free_since) < limit
            ]
            for name in gone:
                del self._pages[name]

    def fail(self, error: BaseException, page: str | None = None) -> None:
        """Show an error below the view; the same one once."""
        text = f"{type(error).__name__}: {error}"
        if text == self._told_error:
            return
        self._told_error = text
        _log.error("in a view", exc_info=error)
        self.send({"kind": "error", "page": page, "text": text})

    # -- in -----------------------------------------------------------------------------------------------------------------

    def _heard(self, _widget: Any, content: Any, _buffers: Any) -> None:
        kind, name = (content.get("kind"), content.get("page")) if isinstance(content, dict) else (None, None)
        if not isinstance(name, str):
            return
        with LOCK:
            if kind == "close":
                self._pages.pop(name, None)
            elif kind in ("open", "seen", "act"):
                known = name in self._pages
                self._pages.setdefault(name, _Page()).unseen_since = None
                if kind == "open" or not known:
                    self._opened(name, content.get("version"))
                if kind == "act":
                    self._act(name, content.get("action"))

    def _opened(self, name: str, version: Any) -> None:
        self._told_error = ""
        self.flush()  # to those who are there
        if self._resting or version != self._mirror.version:
            content, buffers = to_message(self._spec_now())
            self.send({"kind": "spec", "page": name, "spec": content}, buffers)
        self._acted()

    def _act(self, name: str, action: Any) -> None:
        try:
            self._mirror.apply(action, name)
        except Exception as error:  # of a callback, or no action: the one who acted is told, below the view
            self._told_error = ""
            self.fail(error, name)
        self._acted()

    def close(self) -> None:
        with LOCK:
            self._pages.clear()
            self._mirror.close()
        super().close()

    def __del__(self) -> None:
        """As for ``Desk``: nothing at the end of the kernel."""
