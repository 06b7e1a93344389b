"""A JupyterLab of its own for tests: no settings of the user, no token, nothing fetched; and a notebook in it, driven cell by cell."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import TimeoutError

from tests.ui.conftest import ROOT, free_port

START_S = 90
OPTIONS = (
    "--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--IdentityProvider.token=", "--ServerApp.password=",
    "--ServerApp.disable_check_xsrf=True",
    "--LabApp.news_url=", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--LabApp.expose_app_in_browser=True",
)  # fmt: skip
SETTINGS = {
    "apputils-extension/notification.jupyterlab-settings": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker.jupyterlab-settings": {"autoSaveInterval": 3600},
}


class Lab:
    """The server. ``url`` is its root; ``stop`` ends it and its kernels."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
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
        command = [sys.executable, "-m", "jupyter", "lab", *OPTIONS, f"--port={port}", f"--ServerApp.root_dir={self.notebooks}"]
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
        raise RuntimeError(f"JupyterLab did not start:\n{self.log.read_text()[-3000:]}")

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
    """An open notebook whose last cell is always empty: ``run`` writes code there and executes it."""

    def __init__(self, lab: Lab, page: Any, name: str) -> None:
        self.lab, self.page = lab, page
        lab.write(name, [""])
        page.goto(f"{lab.url}/doc/tree/{name}")
        page.locator(".jp-NotebookPanel .jp-CodeCell").first.wait_for()
        self.idle()
        self.count = 0

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
