"""The Quantisation page as a person uses it, in front of a stand-in engine with real rounding."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from tests.ui.conftest import serve

pytestmark = pytest.mark.ui


@pytest.fixture(scope="module")
def quantization_app(tmp_path_factory: pytest.TempPathFactory, chromium_path: str) -> Iterator[str]:
    server = serve(tmp_path_factory.mktemp("quantization") / "log", "--setup", "tests/ui/quantization_setup.py")
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()


def visit(page: Page, url: str, **query: Any) -> None:
    page.goto(f"{url}?page=quantization" + "".join(f"&{name}={value}" for name, value in query.items()))
    expect(page.get_by_role("status").first).to_have_text("Running")
    expect(page.get_by_text("per weight of the linear layers")).to_be_visible()


def choose(page: Page, label: str, option: str) -> None:
    item = page.get_by_role("menuitem", name=option, exact=True)
    for _ in range(10):  # a list that opens while the page is still being built closes again
        page.get_by_role("combobox", name=label).first.click()
        try:
            item.click(timeout=5000)
        except PlaywrightTimeout:
            page.keyboard.press("Escape")
        else:
            return
    item.click()


def test_a_live_knob_changes_the_weights_and_the_page_says_what_runs(page: Page, quantization_app: str) -> None:
    visit(page, quantization_app)
    choose(page, "Weights", "int4")
    expect(page.locator(".qm-now").first).to_contain_text("groups of 32 columns")
    expect(page.locator(".qm-how")).to_contain_text("packed kernel")
    page.get_by_role("button", name="int4 in groups of 128").click()
    expect(page.locator(".qm-now").first).to_contain_text("groups of 128 columns")
    expect(page.locator(".qp-said", has_text="One outlier stretches the grid")).to_be_visible()
    expect(page.get_by_text("Loses most:")).to_be_visible()


def test_a_cell_is_clicked_and_its_grid_is_moved_and_made_live(page: Page, quantization_app: str) -> None:
    visit(page, quantization_app)
    page.get_by_role("button", name="int8: nothing to see").click()
    expect(page.locator(".qm-now").first).to_contain_text("a scale for each output channel")
    expect(page.get_by_text("Loses most:")).to_be_visible()
    page.locator("canvas").first.scroll_into_view_if_needed()
    box = page.locator("canvas").first.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + 0.3 * box["height"])
    expect(page).to_have_url(re.compile(r"layer=\d+.*matrix=[kvo]_proj"))
    expect(page.locator(".qp-said", has_text="GGUF Q4_1")).to_contain_text("costs almost nothing here")
    numbers = page.locator(".qm-now").nth(1)
    expect(numbers).to_contain_text("5.000 bits")
    first = numbers.inner_text()
    slider = page.get_by_role("slider", name="Bits")
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(numbers).to_contain_text("4.000 bits")
    assert numbers.inner_text() != first
    expect(page).to_have_url(re.compile("bits=3"))
    expect(page.locator(".qm-now").first).to_contain_text("a scale for each output channel")  # the engine did not notice
    page.keyboard.press("ArrowRight")
    expect(numbers).to_contain_text("5.000 bits")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_text("no method with 5 bits")).to_be_visible()
    run = page.get_by_role("button", name="Run the model with this")
    expect(run).to_be_disabled()
    page.keyboard.press("ArrowLeft")
    expect(run).to_be_enabled()
    run.click()
    expect(page.locator(".qm-now").first).to_contain_text("groups of 32 columns")
    expect(run).to_be_disabled()


def test_gptq_shows_how_far_it_is_and_can_be_cancelled(page: Page, quantization_app: str) -> None:
    visit(page, quantization_app)
    choose(page, "Weights", "GPTQ")
    expect(page.get_by_role("progressbar", name="GPTQ")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator(".qp-said", has_text="GPTQ was cancelled")).to_be_visible()
    expect(page.get_by_role("button", name="Cancel")).to_have_count(0)


def test_every_tab_opens_and_a_phone_has_no_sideways_scroll(page: Page, quantization_app: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, quantization_app, theme="dark", layer=2, matrix="o_proj")
    expect(page.locator(".qm-now").nth(1)).to_contain_text("bits")
    for title, slug in (
        ("From error to token", "token"), ("The trade", "trade"), ("KV cache", "kv"), ("How GPTQ and AWQ choose", "search"), ("Matrices", None),
    ):  # fmt: skip
        page.get_by_role("tab", name=title).click()
        expect(page.get_by_role("tab", name=title)).to_have_attribute("aria-selected", "true")
        expect(page).to_have_url(re.compile(f"tab={slug}") if slug else re.compile(r"page=quantization(?!.*tab=)"))
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, title
