"""The Roofline page as a person uses it, in front of the real engine with a tiny model."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.ui.conftest import serve

pytestmark = pytest.mark.ui

LLAMA3 = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def roofline_app(tmp_path_factory: pytest.TempPathFactory, chromium_path: str) -> Iterator[str]:
    server = serve(tmp_path_factory.mktemp("roofline") / "log", "--setup", "tests/ui/roofline_setup.py")
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()


def visit(page: Page, url: str, **query: Any) -> None:
    page.goto(f"{url}?page=roofline" + "".join(f"&{name}={value}" for name, value in query.items()))
    expect(page.get_by_role("status").first).to_have_text("Running")


def test_roofs_are_measured_steps_become_points_and_the_transport_moves(page: Page, roofline_app: str) -> None:
    visit(page, roofline_app)
    expect(page.get_by_text("Press Measure this device")).to_be_visible()
    page.get_by_role("button", name="Measure this device").click()
    expect(page.locator(".rf-now")).to_contain_text("ridge in float32")
    expect(page.get_by_role("button", name="Measure again")).to_be_enabled()
    page.get_by_role("button", name="Decode, batch 8").click()
    expect(page.locator(".rf-said", has_text="weights are read once for all eight")).to_be_visible()
    expect(page.get_by_text("8 tokens of 8 requests").first).to_be_visible()
    expect(page.locator(".rf-said", has_text="Bound by")).to_be_visible()
    visit(page, roofline_app, step=1)
    expect(page.locator(".rf-line", has_text="Step 1, ")).to_contain_text("prefill")


def test_a_what_if_knob_moves_the_table_and_the_address(page: Page, roofline_app: str) -> None:
    visit(page, roofline_app, gpu="h200")
    row = page.locator(".rf-table tr", has_text="H200 SXM, decode")
    expect(row).to_contain_text("memory")
    before = row.inner_text()
    page.get_by_role("slider", name="Batch (what if)").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile(r"batch=2(&|$)"))
    expect(page.get_by_text("one token for each of 2 requests")).to_be_visible()
    assert row.inner_text() != before


def test_a_pasted_config_is_planned_and_the_engine_is_looked_into(page: Page, roofline_app: str) -> None:
    visit(page, roofline_app, tab="planner", gpu="l4")
    box = page.get_by_role("textbox", name="A config.json instead of the running model")
    box.fill('{"model_type": "gpt2"}')
    box.blur()
    expect(page.locator(".rf-said.error")).to_contain_text("model_type must be one of")
    box.fill(json.dumps(LLAMA3))
    box.blur()
    expect(page.locator(".rf-said", has_text="pasted config.json (llama) fits")).to_contain_text("20.1 GiB that are planned with")
    page.get_by_role("button", name="Back to the running model").click()
    expect(page.locator(".rf-said", has_text="pasted config.json")).to_have_count(0)
    page.get_by_role("button", name="Look into the engine").click()
    expect(page.locator(".rf-table", has_text="KV pool")).to_contain_text("1.000")


def test_every_tab_fits_a_phone(page: Page, roofline_app: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, roofline_app, theme="dark")
    for title, slug in (("Memory planner", "planner"), ("Rules of thumb", "rules"), ("Roofline", None)):
        page.get_by_role("tab", name=title).click()
        expect(page.get_by_role("tab", name=title)).to_have_attribute("aria-selected", "true")
        expect(page).to_have_url(re.compile(f"tab={slug}") if slug else re.compile(r"page=roofline(?!.*tab=)"))
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, title
