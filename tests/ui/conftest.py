"""Pages in a real browser: a server in a process of its own, and a browser that must not look beyond this machine.

Every test here fails when the page asks another host for anything, when a script throws, or when the console shows an error.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect

ROOT = Path(__file__).parents[2]
START_S = 60
WAIT_MS = 60_000  # machines that run tests are slow at times


class Server:
    """A child process that serves the app, and what it printed."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}/apps"
        self.log = log
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with log.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(self.url, timeout=30).read()
                return
            except OSError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.1)
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def serve(log: Path, *more: str) -> Server:
    """``panel serve apps/`` as ``make app`` calls it, on a free port, quick to notice that a browser has gone."""
    port = free_port()
    quick = ["--check-unused-sessions", "500", "--unused-session-lifetime", "1500"]
    command = [sys.executable, "-m", "panel", "serve", "apps/", "--address", "127.0.0.1", "--port", str(port), *quick, *more]
    return Server(command, port, log)


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory, chromium_path: str) -> Iterator[str]:
    """The app's address, with the stand-in engine behind it. One server for all tests: they see each other's requests."""
    server = serve(tmp_path_factory.mktemp("app") / "log", "--setup", "tests/ui/fake_setup.py")
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()


@pytest.fixture(autouse=True)
def well_behaved(context: Any) -> Iterator[list[str]]:
    """What the browser did that it must not do; the test fails when that is anything. A test that provokes it clears the list."""
    wrong: list[str] = []

    def requested(request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob", "about") and parts.hostname not in ("127.0.0.1", "localhost"):
            wrong.append(f"asked another host: {request.url}")

    def said(message: Any) -> None:
        if message.type == "error":
            wrong.append(f"console: {message.text}")

    context.on("request", requested)
    context.on("console", said)
    context.on("weberror", lambda error: wrong.append(f"script: {error.error}"))
    context.set_default_timeout(WAIT_MS)
    expect.set_options(timeout=WAIT_MS)
    yield wrong
    assert not wrong, "\n".join(wrong)
