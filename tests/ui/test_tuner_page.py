"""The Tuner tab of the Batching page as a person uses it, with trials that are a formula."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.ui.conftest import serve

pytestmark = pytest.mark.ui


@pytest.fixture(scope="module")
def tuner_app(tmp_path_factory: pytest.TempPathFactory, chromium_path: str) -> Iterator[str]:
    server = serve(tmp_path_factory.mktemp("tuner") / "log", "--setup", "tests/ui/tuner_setup.py")
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()


@pytest.mark.long
def test_a_search_is_started_watched_and_made_live(page: Page, tuner_app: str) -> None:
    page.goto(f"{tuner_app}?page=batching&tab=tuner")
    expect(page.get_by_text("Nothing was searched yet")).to_be_visible()
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.get_by_text(re.compile(r"of at most 12 trials"))).to_be_visible()
    expect(page.get_by_role("button", name="Cancel", exact=True)).to_be_visible()
    expect(page.get_by_text("All trials were run.")).to_be_visible()
    expect(page.locator(".tn-config")).to_contain_text("EngineConfig(")
    expect(page.locator(".tn-trials tr")).to_have_count(13)
    page.get_by_role("button", name="Make it live", exact=True).click()
    expect(page.get_by_text("Sent to the engine, for everybody who is here")).to_be_visible()
    page.get_by_role("button", name="Make it live", exact=True).click()
    expect(page.get_by_text("The engine runs so already.")).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 800})
    expect(page.locator(".tn-config")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
