"""The Attention page as a person uses it, in front of a stand-in engine; the kernel really runs and is really compiled."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from tests.ui.conftest import serve

pytestmark = pytest.mark.ui
# The canvas stands in shadow roots: the first player that is found.
PLAYER = """((walk) => walk(walk, document)?.cutaway)((walk, node) => { for (const child of node.querySelectorAll('*')) {
  if (child.cutaway?.grid) return child; const found = child.shadowRoot && walk(walk, child.shadowRoot); if (found) return found; } return null; })"""
FIND = f"""() => {{ const player = {PLAYER}; return player ? [player.data.count, player.pos, player.frames, player.meta.clock, player.softSaid.textContent] : null; }}"""


@pytest.fixture(scope="module")
def attention_app(tmp_path_factory: pytest.TempPathFactory, chromium_path: str) -> Iterator[str]:
    server = serve(tmp_path_factory.mktemp("attention") / "log", "--setup", "tests/ui/attention_setup.py")
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()


def visit(page: Page, url: str, **query: Any) -> None:
    page.goto(f"{url}?page=attention" + "".join(f"&{name}={value}" for name, value in query.items()))
    expect(page.get_by_role("status").first).to_have_text("Running")
    expect(page.get_by_text("What is tried")).to_be_visible()


def until(page: Page, condition: str) -> Any:
    page.wait_for_function(f"({condition})(({FIND})())", timeout=60_000)
    return page.evaluate(FIND)


def test_tiles_play_step_and_are_clicked_and_the_softmax_ends_whole(page: Page, attention_app: str) -> None:
    visit(page, attention_app, seq_len=128)
    until(page, "(p) => p && p[0] === 3")
    page.get_by_role("button", name="To the beginning").click()
    assert until(page, "(p) => p[1] === 0")[3] == "order"
    page.get_by_role("button", name="One tile on").click()
    until(page, "(p) => p[1] === 1")
    page.get_by_role("button", name="To the end").click()
    until(page, "(p) => p[1] === 3 && p[4].startsWith('Equal to the full softmax')")
    grid = page.get_by_role("application", name="Score matrix by tiles")
    box = grid.bounding_box()
    assert box is not None
    grid.click(position={"x": 0.25 * box["width"], "y": 0.75 * box["height"]})
    until(page, "(p) => p[1] === 0")
    grid.press("ArrowRight")
    until(page, "(p) => p[1] === 1")
    # The same schedule comes again, as when the kernel has run and its record takes the derived one's place: nothing is reset.
    assert page.evaluate(f"{PLAYER}.take() ?? {PLAYER}.pos") == 1
    page.get_by_role("button", name="Play", exact=True).click()
    assert page.evaluate(f"{PLAYER}.take() ?? {PLAYER}.timer") != 0
    until(page, "(p) => p[1] === 3")
    expect(page.get_by_text("Recorded by the kernel itself")).to_be_visible()  # meanwhile it ran under the interpreter


def test_a_step_of_the_engine_is_traced(page: Page, attention_app: str) -> None:
    visit(page, attention_app, tab="engine")
    for _ in range(6):  # a button that is pressed while the page is still being built does nothing
        page.get_by_role("button", name="Trace the next step").click()
        try:
            page.get_by_text("order, not time. The step itself ran").wait_for(timeout=10_000)
        except PlaywrightTimeout:
            continue
        break
    expect(page.get_by_text("order, not time. The step itself ran")).to_be_visible()
    expect(page.get_by_text("7, 1, 12, 5, 8")).to_be_visible()
    assert until(page, "(p) => p && p[0] === 48")[3] == "order"


def test_a_phone_has_no_sideways_scroll_and_every_tab_opens(page: Page, attention_app: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, attention_app, theme="dark", seq_len=128)
    for title, slug in (
        ("Compiled", "compile"),
        ("Traffic", "traffic"),
        ("Decode", "decode"),
        ("From the engine", "engine"),
        ("Tiles", None),
    ):
        page.get_by_role("tab", name=title).click()
        expect(page.get_by_role("tab", name=title)).to_have_attribute("aria-selected", "true")
        expect(page).to_have_url(re.compile(f"tab={slug}") if slug else re.compile(r"page=attention(?!.*tab=)"))
        page.wait_for_timeout(300)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, title
