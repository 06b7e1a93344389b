"""The Batching page's further tabs as a person uses them, in front of the real engine with a tiny random model."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.ui.conftest import serve

pytestmark = pytest.mark.ui


@pytest.fixture(scope="module")
def tabs_app(tmp_path_factory: pytest.TempPathFactory, chromium_path: str) -> Iterator[str]:
    server = serve(tmp_path_factory.mktemp("batching-tabs") / "log", "--setup", "tests/ui/batching_tabs_setup.py")
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()


def visit(page: Page, url: str, tab: str, more: str = "") -> None:
    page.goto(f"{url}?page=batching&tab={tab}{more}")
    expect(page.get_by_role("status").first).to_have_text("Running")


@pytest.mark.long
def test_bursts_are_measured_then_asked_what_if_and_run_with_that(page: Page, tabs_app: str) -> None:
    visit(page, tabs_app, "sweep")
    expect(page.get_by_text("Nothing has decoded yet")).to_be_visible()
    page.get_by_role("button", name="Measure the padding").click()
    expect(page.locator(".qp-table tr", has_text="what its lengths say").locator("xpath=following-sibling::tr")).to_have_count(3)
    expect(page.get_by_text("The pool has room for")).to_be_visible()
    visit(page, tabs_app, "whatif", "&if_chunked=off")
    row = page.locator(".qp-table tr", has_text="what if")
    expect(row).to_contain_text("dynamic, batch 4, budget 512, not chunked")
    for _ in range(10):  # a key that comes while the page is still being built is lost
        page.get_by_role("slider", name="Batch size").last.focus()  # the first is the engine's own
        page.keyboard.press("Home")
        try:
            expect(row).to_contain_text("dynamic, batch 1, budget 512, not chunked", timeout=4000)
            break
        except AssertionError:
            continue
    expect(page).to_have_url(re.compile("if_batch=1"))
    page.get_by_role("button", name="Run it").click()
    expect(page.locator(".qp-said", has_text="Done: the last row")).to_be_visible()
    again = page.locator(".qp-table tr", has_text="the same requests")
    expect(again.filter(has_text="dynamic, batch 1, budget 512, not chunked")).to_contain_text("measured")


def test_the_stall_and_the_prefix_cache_are_measured(page: Page, tabs_app: str) -> None:
    visit(page, tabs_app, "prefix")
    page.get_by_role("button", name="Measure it").click()
    expect(page.locator(".qp-said", has_text="the formula says")).to_be_visible()
    expect(page.get_by_text("blocks are cached")).to_be_visible()
    expect(page.locator(".px-rows")).to_contain_text("no such prefix")
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, tabs_app, "stall", "&theme=dark")
    page.get_by_role("button", name="Run it with four budgets").click()
    expect(page.locator(".qp-said", has_text="Done: the squares")).to_be_visible()
    expect(page.locator(".qp-table tr", has_text="no chunks")).not_to_contain_text("–")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
