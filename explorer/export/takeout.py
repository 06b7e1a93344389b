"""The part of the sidebar where recorded runs come in and everything goes out."""

import io
import logging
import re
import tempfile
import time
import zipfile
from collections.abc import Callable
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
        self._makers = {
            _("This run (.cutaway)"): ("save", self._save_run),
            _("Trace for Perfetto (.json)"): ("timeline", self._save_trace),
            _("Tables as CSV (.zip)"): ("table_rows", lambda: self._save_tables("csv", csv_bytes)),
            _("Tables as Parquet (.zip)"): ("table_rows", lambda: self._save_tables("parquet", parquet_bytes)),
            _("The whole run as HTML (.html)"): ("play_circle", lambda: self._save_html(whole=True)),
            _("This page as HTML (.html)"): ("html", lambda: self._save_html(whole=False)),
            _("This page as a picture (.png)"): ("image", lambda: self.files.png(self._name(page=True))),
            _("One card as a picture: click it (.png)"): ("crop", lambda: self.files.card(f"{self._name(page=True)}-card")),
            _("Its figures as drawings (.svg)"): ("polyline", lambda: self.files.svg(self._name(page=True))),
            _("Link to what is shown"): ("link", self.files.copy_link),
        }
        self.menu = pmui.MenuButton(
            label=_("Download"), icon="download", variant="outlined", size="small", margin=0,
            items=[{"label": label, "icon": icon} for label, (icon, _make) in self._makers.items()],
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
        if label in self._makers:
            self._try(self._makers[label][1])

    def _try(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except (ValueError, OSError) as error:
            self._told(str(error))
        except Exception as error:  # a fault of ours: still, somebody waits for a file
            _log.exception("a file could not be made")
            self._told(_("The file could not be made: {kind}: {error}").format(kind=type(error).__name__, error=error))

    def _name(self, page: bool = False) -> str:
        _store, name, slug = self._looking_at()
        name = re.sub(r"[^\w.-]+", "-", name.removesuffix(".cutaway")).strip("-.")[:80] or "run"
        return f"{name}-{slug}" if page else name

    def _save_run(self) -> None:
        store = self._looking_at()[0]
        facts = {} if store.replayed else {"saved_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        with tempfile.TemporaryDirectory(prefix="cutaway-save-") as folder:
            path = Path(folder) / "run.cutaway"
            store.save(path, facts)
            self.files.give(f"{self._name()}.cutaway", path.read_bytes())

    def _save_trace(self) -> None:
        with tempfile.TemporaryDirectory(prefix="cutaway-save-") as folder:
            path = Path(folder) / "trace.json"
            self._looking_at()[0].to_chrome_trace(path)
            self.files.give(f"{self._name()}-trace.json", path.read_bytes(), "application/json")

    def _save_tables(self, ending: str, make: Callable[[Any, str], bytes]) -> None:
        log, out = self._looking_at()[0].log, io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in TABLES:
                archive.writestr(f"{name}.{ending}", make(log, name))
        self.files.give(f"{self._name()}-{ending}.zip", out.getvalue(), "application/zip")

    def _save_html(self, whole: bool) -> None:
        store, name, slug = self._looking_at()
        title = (
            SHIPPED[name].title
            if name in SHIPPED
            else _("A run of {model}").format(model=_model(store))
            if name == "run"
            else name
        )
        self._say(_("Stepping through the run; the file comes when that is done."))
        data = run_html(at_rest(store), title, None if whole else [slug])
        self.files.give(f"{self._name(page=not whole)}.html", data, "text/html")
        self._say(_("{name}.html: {size:.1f} MiB.").format(name=self._name(page=not whole), size=len(data) / 2**20))

    def close(self) -> None:
        self.files.close()


def _model(store: EventStore) -> str:
    return "?" if store.started is None else str(store.started.model.get("name", "?")).rstrip("/").rsplit("/", 1)[-1]
