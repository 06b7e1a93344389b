"""The app as it ships, with the default model in the engine's own process."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Page, expect

from tests.ui.conftest import Server, serve

pytestmark = [pytest.mark.ui, pytest.mark.model, pytest.mark.slow]
LOADING_MS = 180_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, chromium_path: str, model_path: Path) -> Iterator[Server]:
    server = serve(tmp_path_factory.mktemp("real") / "log")
    yield server
    server.stop()


def engine_process(server: Server) -> psutil.Process:
    children = psutil.Process(server.process.pid).children(recursive=True)
    return next(child for child in children if "engine.process" in child.cmdline())


def test_first_token_then_a_killed_engine_comes_back(page: Page, server: Server) -> None:
    start = time.monotonic()
    server.wait()
    page.goto(server.url)
    page.get_by_role("button", name="Send", exact=True).click(timeout=60_000)  # while the model loads
    chip = page.locator("article .chip").first
    expect(chip).to_be_visible(timeout=LOADING_MS)
    print(f"from `panel serve apps/` to the first token on the page: {time.monotonic() - start:.1f} s")
    expect(page.get_by_role("status").first).to_have_text("Running")
    expect(page.locator("article .prompt").first).to_have_text("The capital of France is")
    expect(page.locator("article .status").first).to_contain_text(re.compile("done|stopped"), timeout=LOADING_MS)

    os.kill(engine_process(server).pid, signal.SIGKILL)
    expect(page.get_by_role("alert").first).to_contain_text("signal 9")
    page.get_by_role("button", name="Restart the engine").click()
    expect(page.get_by_role("status").first).to_have_text("Running", timeout=LOADING_MS)
    page.get_by_role("button", name="Send", exact=True).click()
    expect(page.locator("article .chip").first).to_be_visible(timeout=LOADING_MS)
