"""The part of the sidebar where recorded runs come in and everything goes out."""

import io
import logging
import re
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import panel as pn
import panel_material_ui as pmui

from explorer.export.files import Files
from explorer.export.html import run_html
from explorer.export.tables import TABLES, csv_bytes, parquet_bytes
from explorer.i18n import _
from explorer.replay import Replay, at_rest
from explorer.runs import SHIPPED
from explorer.shell_style import TIP_BELOW
from explorer.store import EventStore

_log = logging.getLogger(__name__)

Say = Callable[[str], None]


class TakeOut:
    """``root`` goes into the sidebar. ``open_run`` gets what somebody opened; ``looking_at()`` gives (store, a name for files, the
    page's slug); ``say`` shows one browser a message."""

    def __init__(
        self, open_run: Callable[[Replay], None], looking_at: Callable[[], tuple[EventStore, str, str]], say: Say
    ) -> None:
        self._open_run, self._looking_at, self._say = open_run, looking_at, say
        self.files = Files(self._received, self._told)
        self._refused = False  # whether the last thing said is that something could not be opened
        self._closed = False
        self.runs = []
        for run in SHIPPED.values():
            button = pmui.Button(
                label=run.title,
                icon="replay",
                variant="text",
                size="small",
                margin=0,
                description=run.what,
                stylesheets=[TIP_BELOW],
            )
            button.on_click(partial(self._shipped, run.name))
            self.runs.append(button)
        stepping = _("Stepping through the run; the file comes when that is done.")
        self._makers: dict[str, tuple[str, Callable[[EventStore, str, str], File], str]] = {
            _("This run (.cutaway)"): ("save", _run_file, ""),
            _("Trace for Perfetto (.json)"): ("timeline", _trace_file, ""),
            _("Tables as CSV (.zip)"): ("table_rows", partial(_tables_file, "csv", csv_bytes), ""),
            _("Tables as Parquet (.zip)"): ("table_rows", partial(_tables_file, "parquet", parquet_bytes), ""),
            _("The whole run as HTML (.html)"): ("play_circle", partial(_html_file, True), stepping),
            _("This page as HTML (.html)"): ("html", partial(_html_file, False), stepping),
        }
        self._drawn: dict[str, tuple[str, Callable[[str], None]]] = {  # by the browser
            _("This page as a picture (.png)"): ("image", self.files.png),
            _("One card as a picture: click it (.png)"): ("crop", lambda name: self.files.card(f"{name}-card")),
            _("Its figures as drawings (.svg)"): ("polyline", self.files.svg),
            _("Link to what is shown"): ("link", lambda _name: self.files.copy_link()),
        }
        self.menu = pmui.MenuButton(
            label=_("Download"), icon="download", variant="outlined", size="small", margin=0,
            items=[{"label": label, "icon": what[0]} for label, what in (self._makers | self._drawn).items()],
        )  # fmt: skip
        self.menu.on_click(self._chosen)
        self.root = pn.Column(
            *self.runs,
            self.files,
            self.menu,
            sizing_mode="stretch_width",
            margin=0,
            styles={"gap": "8px", "align-items": "flex-start"},
        )

    # -- in ----------------------------------------------------------------------------------------------------------------

    def _shipped(self, name: str, _event: Any = None) -> None:
        self._open(lambda: Replay.shipped(name))

    def _received(self, name: str, path: Path) -> None:
        self._open(lambda: Replay.of_file(name, path))

    def _open(self, read: Callable[[], Replay]) -> None:
        """What was wrong with the one before is no longer said once another one is opened."""
        try:
            replay = read()
        except (ValueError, OSError) as error:
            self._told(str(error))
            self._refused = True
            return
        if self._refused:
            self._told("")
        self._open_run(replay)

    def _told(self, text: str) -> None:
        self._refused = False
        self._say(text)

    # -- out ---------------------------------------------------------------------------------------------------------------

    def _chosen(self, item: Any) -> None:
        label = item.get("label") if isinstance(item, dict) else None
        if label not in self._makers and label not in self._drawn:
            return
        try:
            looking = self._looking_at()
        except Exception as error:
            return self._told(_wrong(error))
        if label in self._drawn:
            return self._drawn[label][1](_name(looking[1], looking[2]))
        _icon, make, before = self._makers[label]
        if before:
            self._say(before)
        self._beside(lambda: make(*looking))

    def _beside(self, make: Callable[[], "File"]) -> None:
        """Make a file in a thread, since that takes seconds in which everybody's page would stand still; give it where the document may be
        changed."""
        document = pn.state.curdoc
        if document is None or document.session_context is None:
            return self._give(_made(make))

        def work() -> None:
            made = _made(make)
            if not self._closed:
                document.add_next_tick_callback(partial(self._give, made))

        threading.Thread(target=work, name="a file to take along", daemon=True).start()

    def _give(self, made: "File | str") -> None:
        if isinstance(made, str):
            return self._told(made)
        self.files.give(made.name, made.data, made.mime)
        if made.said:
            self._say(made.said)

    def close(self) -> None:
        self._closed = True
        self.files.close()


@dataclass(frozen=True)
class File:
    name: str
    data: bytes
    mime: str = "application/octet-stream"
    said: str = ""  # when it is given


def _made(make: Callable[[], File]) -> File | str:
    """The file, or what went wrong."""
    try:
        return make()
    except Exception as error:
        return _wrong(error)


def _wrong(error: Exception) -> str:
    if isinstance(error, (ValueError, OSError)):
        return str(error)
    _log.error("a file could not be made", exc_info=error)  # a fault of ours: still, somebody waits for a file
    return _("The file could not be made: {kind}: {error}").format(kind=type(error).__name__, error=error)


def _name(name: str, slug: str = "") -> str:
    name = re.sub(r"[^\w.-]+", "-", name.removesuffix(".cutaway")).strip("-.")[:80] or "run"
    return f"{name}-{slug}" if slug else name


def _run_file(store: EventStore, name: str, _slug: str) -> File:
    facts = {} if store.replayed else {"saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    with tempfile.TemporaryDirectory(prefix="cutaway-save-") as folder:
        path = Path(folder) / "run.cutaway"
        store.save(path, facts)
        return File(f"{_name(name)}.cutaway", path.read_bytes())


def _trace_file(store: EventStore, name: str, _slug: str) -> File:
    with tempfile.TemporaryDirectory(prefix="cutaway-save-") as folder:
        path = Path(folder) / "trace.json"
        store.to_chrome_trace(path)
        return File(f"{_name(name)}-trace.json", path.read_bytes(), "application/json")


def _tables_file(ending: str, make: Callable[[Any, str], bytes], store: EventStore, name: str, _slug: str) -> File:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for table in TABLES:
            archive.writestr(f"{table}.{ending}", make(store.log, table))
    return File(f"{_name(name)}-{ending}.zip", out.getvalue(), "application/zip")


def _html_file(whole: bool, store: EventStore, name: str, slug: str) -> File:
    title = (
        SHIPPED[name].title if name in SHIPPED else _("A run of {model}").format(model=_model(store)) if name == "run" else name
    )
    data = run_html(at_rest(store), title, None if whole else [slug])
    file = _name(name, "" if whole else slug)
    return File(f"{file}.html", data, "text/html", _("{name}.html: {size:.1f} MiB.").format(name=file, size=len(data) / 2**20))


def _model(store: EventStore) -> str:
    return "?" if store.started is None else str(store.started.model.get("name", "?")).rstrip("/").rsplit("/", 1)[-1]
