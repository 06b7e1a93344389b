"""A JupyterLab or Notebook 7 of its own for tests: no settings of the user, no token, nothing fetched; and a notebook in it, driven
cell by cell and watched for what it must not do."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbformat
from playwright.sync_api import TimeoutError, expect

from tests.ui.conftest import ROOT, WAIT_MS, free_port

START_S = 90
DOCUMENTS = {"lab": "/doc/tree/", "notebook": "/notebooks/"}  # where each application has a notebook alone
OPTIONS = (
    "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--IdentityProvider.token=", "--ServerApp.password=",
    "--ServerApp.disable_check_xsrf=True",
    "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.expose_app_in_browser=True",
)  # fmt: skip
SETTINGS = {
    "apputils-extension/notification.jupyterlab-settings": {"fetchNews": "false", "checkForUpdates": False},
    "docmanager-extension/plugin.jupyterlab-settings": {"autosave": False},
}
# What the applications themselves write to the console, and throw: Notebook 7 when it loads its settings.
THEIR_OWN = ("/api/workspaces", "/lab/api/", "jupyterlab", "favicon", "/api/me", "translations", "(reading 'schema')")
SETUP = """
from explorer import Explorer, KVCacheView, RunView
from engine import SamplingParams
from tests.engine.engines import tiny_engine
engine = tiny_engine(max_num_seqs=4)
many = SamplingParams(max_tokens=100, ignore_eos=True)
"""


class Lab:
    """The server. ``url`` is its root; ``stop`` ends it and its kernels."""

    def __init__(self, folder: Path, app: str = "lab") -> None:
        self.folder, self.app = folder, app
        self.notebooks = folder / "notebooks"
        self.notebooks.mkdir()
        for name, values in SETTINGS.items():
            path = folder / "settings" / "@jupyterlab" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(values))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        private = {
            "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
            "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython",
        }  # fmt: skip
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {
            **os.environ,
            **{name: str(folder / sub) for name, sub in private.items()},
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "jupyter", app, *OPTIONS, f"--port={port}", f"--ServerApp.root_dir={self.notebooks}"]
        self.log = folder / "log"
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                urllib.request.urlopen(self.url + "/api", timeout=30).read()
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"jupyter {self.app} did not start:\n{self.log.read_text()[-3000:]}")

    def ask(self, path: str, method: str = "GET") -> Any:
        with urllib.request.urlopen(urllib.request.Request(self.url + path, method=method), timeout=60) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def write(self, name: str, cells: list[str]) -> None:
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        made = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata={"kernelspec": kernel}
        )
        nbformat.write(made, self.notebooks / name)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Notebook:
    """An open notebook whose last cell is always empty: ``run`` writes code there and executes it.

    ``wrong`` is what the browser did that it must not do."""

    def __init__(self, lab: Lab, page: Any, name: str) -> None:
        self.lab, self.page = lab, page
        self.wrong: list[str] = []
        page.context.on("request", self._requested)
        page.context.on("console", self._said)
        page.context.on("weberror", self._thrown)
        lab.write(name, [""])
        # Before there is a kernel, the indicator says idle too.
        with page.expect_websocket(lambda socket: "/api/kernels/" in socket.url):
            page.goto(lab.url + DOCUMENTS[lab.app] + name)
        page.locator(".jp-NotebookPanel .jp-CodeCell").first.wait_for()
        self.idle()
        self.count = 0

    def _requested(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob", "about") and parts.hostname not in ("127.0.0.1", "localhost"):
            self.wrong.append(f"asked another host: {request.url}")

    def _said(self, message: Any) -> None:
        where = message.location.get("url", "") if message.location else ""
        if message.type == "error" and not any(own in message.text + where for own in THEIR_OWN):
            self.wrong.append(f"console: {message.text} ({where})")

    def _thrown(self, error: Any) -> None:
        if not any(own in str(error.error) for own in THEIR_OWN):
            self.wrong.append(f"script: {error.error}")

    def nothing_wrong(self) -> None:
        found, self.wrong = self.wrong, []
        assert not found, "\n".join(found)

    def idle(self) -> None:
        self.page.locator(".jp-NotebookPanel-toolbar [data-status=idle]").wait_for()

    def start(self, code: str) -> Any:
        """Execute code in a new cell; returns the cell at once, while it runs."""
        page, cell = self.page, self._cell(self.count)
        cell.locator(".cm-content").click()
        page.keyboard.insert_text(code)
        page.keyboard.press("Shift+Enter")
        self._cell(self.count + 1).wait_for()
        asked = cell.locator(".jp-InputPrompt").filter(has_not_text="[ ]")
        for _ in range(10):
            try:  # at times JupyterLab does nothing at first
                asked.wait_for(timeout=4000)
                break
            except TimeoutError:
                cell.locator(".cm-content").click()
                page.keyboard.press("Control+Enter")
        self.count += 1
        return cell

    def _cell(self, number: int) -> Any:
        return self.page.locator(".jp-NotebookPanel .jp-CodeCell").nth(number)

    def run(self, code: str) -> Any:
        """Execute code in a new cell and wait for its end. An error is an AssertionError."""
        cell = self.start(code)
        cell.locator(".jp-InputPrompt", has_text="[").filter(has_not_text="[*]").filter(has_not_text="[ ]").wait_for()
        assert not cell.locator("[data-mime-type='application/vnd.jupyter.stderr']", has_text="Traceback").count(), (
            cell.inner_text()
        )
        assert not cell.locator(".jp-RenderedText[data-mime-type*=error]").count(), cell.inner_text()
        return cell

    def value(self, expression: str) -> Any:
        """What a plain expression is in the kernel."""
        cell = self.run(f"import json\nprint('value:' + json.dumps(({expression})))")
        text = cell.locator(".jp-OutputArea-output", has_text="value:").inner_text()
        return json.loads(text.split("value:", 1)[1])

    def restart_kernel(self) -> None:
        """As the server does it when somebody presses Restart."""
        [kernel] = [session["kernel"]["id"] for session in self.lab.ask("/api/sessions")]
        self.lab.ask(f"/api/kernels/{kernel}/restart", "POST")


@contextmanager
def notebook_in(app: str, folder: Path, browser: Any) -> Iterator[Notebook]:
    """A notebook that has run SETUP. The screen is high, so that all cells are drawn."""
    lab = Lab(folder, app)
    context = browser.new_context(viewport={"width": 1300, "height": 7000})
    context.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    try:
        book = Notebook(lab, context.new_page(), "views.ipynb")
        book.run(SETUP)
        yield book
    finally:
        context.close()
        lab.stop()
