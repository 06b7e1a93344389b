"""The Batching page as a person uses it, in front of the real engine with a tiny random model."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.ui.conftest import serve

pytestmark = pytest.mark.ui

STATIC = "Static: together in, together out"
WAIT_MS = 60_000


@pytest.fixture(scope="module")
def batching_app(tmp_path_factory: pytest.TempPathFactory, chromium_path: str) -> Iterator[str]:
    server = serve(tmp_path_factory.mktemp("batching") / "log", "--setup", "tests/ui/batching_setup.py")
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()


def visit(page: Page, url: str, **query: Any) -> None:
    page.goto(f"{url}?page=batching" + "".join(f"&{name}={value}" for name, value in query.items()))
    expect(page.get_by_role("tab", name="The schedule")).to_be_visible()
    expect(page.get_by_role("status").first).to_have_text("Running")


def canvas_has(page: Page, script: str) -> None:
    """Wait until this holds of the schedule's data."""
    page.wait_for_function(f"""() => {{
      const all = (root) => [...root.querySelectorAll("canvas.map"), ...[...root.querySelectorAll("*")].filter((e) => e.shadowRoot).flatMap((e) => all(e.shadowRoot))];
      const found = all(document).find((e) => e.cutaway && e.cutaway.steps);
      const view = found && found.cutaway;
      return Boolean(view && view.l && ({script}));
    }}""", timeout=WAIT_MS)  # fmt: skip


def test_a_scene_fills_the_slots_and_the_measures(page: Page, batching_app: str) -> None:
    visit(page, batching_app)
    expect(page.locator(".ct-sched .none")).to_contain_text("Nothing has run yet")  # the first visitor of this server
    page.get_by_role("button", name=STATIC).click()
    expect(page.locator(".bt-said", has_text="dotted is padding")).to_be_visible()
    canvas_has(page, "view.bars.flat().some((bar) => bar.phase === 2) && view.bars.length === 8")
    expect(page.locator(".bt-line", has_text="finished").filter(has_text="over")).to_be_visible()
    expect(page.locator(".bt-tile", has_text="Padding")).not_to_contain_text("0.0 %")
    expect(page.locator(".bt-table tr", has_text="ITL")).to_contain_text("ms")
    canvas = page.locator(".ct-sched canvas.map")
    canvas.focus()
    page.keyboard.press("ArrowLeft")  # to the step before, not the transport's
    expect(page.locator(".ct-sched .tip")).to_contain_text("slot 0")
    expect(page).not_to_have_url(re.compile("step="))
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"request=load\d+-\d+"))
    page.get_by_role("button", name="Across: wall time").click()
    expect(page).to_have_url(re.compile("axis=time"))
    canvas_has(page, "view.l.time")
    page.get_by_role("button", name="Restore the knobs").click()
    expect(page.get_by_role("button", name="Restore the knobs")).to_be_hidden()


@pytest.mark.long
def test_two_schedulers_stand_on_one_axis_and_a_phone_shows_them(page: Page, batching_app: str) -> None:
    visit(page, batching_app, tab="compare")
    page.get_by_role("button", name="Run both").click()
    expect(page.locator(".bt-said", has_text="The same requests took")).to_be_visible(timeout=WAIT_MS)
    assert page.locator(".ct-sched canvas.map").count() == 2
    expect(page.locator(".bt-table", has_text="B against A").locator("tr", has_text="Padding")).to_contain_text("better")
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, batching_app, tab="now", theme="dark")
    canvas_has(page, "view.steps.length > 10 && view.paint.dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    wide = page.locator(".ct-sched").evaluate_all("all => all.map(e => e.scrollWidth - e.clientWidth)")
    assert max(wide) <= 1, "the schedule is wider than its card"
