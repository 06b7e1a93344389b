"""The KV cache page, as a person uses it."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from explorer.canvas.blockmap import CACHED, FREE, HELD, SHARED
from tests.ui.conftest import serve

pytestmark = pytest.mark.ui


@pytest.fixture(scope="module")
def kv_app(tmp_path_factory: pytest.TempPathFactory, chromium_path: str) -> Iterator[str]:
    server = serve(tmp_path_factory.mktemp("kv") / "log", "--setup", "tests/ui/kv_setup.py")
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()


def visit(page: Page, url: str, **query: Any) -> Locator:
    """Open the page; returns the map, once it has blocks."""
    page.goto(f"{url}?page=kv-cache" + "".join(f"&{name}={value}" for name, value in query.items()))
    canvas = page.locator("canvas.map")
    expect(canvas).to_be_visible(timeout=60_000)
    wait_until(page, lambda: len(kinds(canvas)) > 0)
    return canvas


def kinds(canvas: Locator) -> list[int]:
    return canvas.evaluate("c => Array.from(c.cutaway.codes, code => code & 255)")


def wait_until(page: Page, condition: Any, seconds: float = 20) -> None:
    """Playwright delivers events only inside its own calls, so this must not sleep."""
    for _ in range(int(seconds * 10)):
        if condition():
            return
        page.wait_for_timeout(100)
    raise AssertionError("it did not happen")


def idle(page: Page, canvas: Locator) -> None:
    """What earlier tests sent has finished, and the pool is as it was."""
    wait_until(page, lambda: not {HELD, SHARED} & set(kinds(canvas)) and len(kinds(canvas)) == 128, 60)


def click_block(canvas: Locator, block: int) -> None:
    x, y, size = canvas.evaluate("(c, b) => c.cutaway.place(b)", block)
    canvas.click(position={"x": x + size / 2, "y": y + size / 2})


def test_shared_prefix_is_stored_once_and_its_lookups_are_told(page: Page, kv_app: str) -> None:
    canvas = visit(page, kv_app)
    idle(page, canvas)
    page.get_by_role("button", name="Shared prefix").click()
    expect(page.locator(".kv-said.look")).to_contain_text("The other five hit its blocks", timeout=30_000)
    wait_until(page, lambda: canvas.evaluate("c => c.cutaway.codes.some(code => (code & 255) === 3 && (code >> 16 & 255) === 6)"))
    seen = kinds(canvas)
    label = canvas.get_attribute("aria-label") or ""
    assert re.search(r"128 KV blocks of 16 tokens", label)
    expect(page.locator(".ctw-row")).to_have_count(6)
    expect(page.locator(".ctw-chip.shared").first).to_contain_text("×6")
    expect(page.locator(".kv-lookup").first).to_contain_text(re.compile(r"[1-9]\d+ of \d+ tokens"))
    assert seen.count(SHARED) > 5
    wait_until(page, lambda: sum(int(n) for n in page.locator(".ctw-key b").all_inner_texts()) == 128)  # drawn twice a second
    idle(page, canvas)
    assert CACHED in kinds(canvas)


def test_a_click_lights_up_map_table_and_address(page: Page, kv_app: str) -> None:
    canvas = visit(page, kv_app)
    idle(page, canvas)
    page.get_by_role("button", name="Copy-on-write").click()
    expect(page.locator(".ctw-row")).to_have_count(4)
    page.get_by_role("button", name=re.compile("Pause the view")).click()  # the view stands still, the engine goes on
    own = next(i for i, kind in enumerate(kinds(canvas)) if kind == HELD)
    click_block(canvas, own)
    chip = page.locator(".ctw-chip.on")
    expect(chip).to_have_attribute("data-block", str(own))
    expect(page.locator(".ctw-head[aria-pressed=true]")).to_have_count(1)
    expect(page.locator(".ctw-row.faded")).to_have_count(3)
    expect(page).to_have_url(re.compile(rf"request=.*block={own}\b"))
    assert own in canvas.evaluate("c => [...c.cutaway.marked]")
    other = page.locator(".ctw-row.faded .ctw-chip:not(.shared)").first
    block = other.get_attribute("data-block")
    other.click()
    expect(page.locator(".ctw-chip.on")).to_have_attribute("data-block", str(block))
    wait_until(page, lambda: canvas.evaluate("c => c.cutaway.model.get('selected')") == int(block or -1))


def test_hover_tells_who_holds_a_block(page: Page, kv_app: str) -> None:
    canvas = visit(page, kv_app)
    x, y, size = canvas.evaluate("c => c.cutaway.place(127)")
    canvas.hover(position={"x": x + size / 2, "y": y + size / 2})
    tip = page.locator(".ctw-tip")
    expect(tip).to_contain_text("block 127")
    expect(tip).to_contain_text("free, nothing to find in it")


def test_the_keyboard_reaches_every_block_and_the_time_bar_does_not_hear_it(page: Page, kv_app: str) -> None:
    canvas = visit(page, kv_app)
    canvas.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert canvas.evaluate("c => c.cutaway.cursor") == 2  # the first press puts the cursor on block 0
    expect(page.locator(".ctw-sr")).to_contain_text("block 2: ref_count")
    page.keyboard.press("Space")
    expect(page).to_have_url(re.compile("block=2"))
    assert "step=" not in page.url  # Space pauses the view everywhere else
    page.keyboard.press("End")
    assert canvas.evaluate("c => c.cutaway.cursor") == 127
    page.keyboard.press("Escape")
    expect(page).not_to_have_url(re.compile("block="))


def test_zoom_keeps_the_blocks_and_comes_back(page: Page, kv_app: str) -> None:
    canvas = visit(page, kv_app)
    fit = canvas.evaluate("c => c.cutaway.cell")
    page.get_by_role("button", name="Zoom in").click()
    assert canvas.evaluate("c => c.cutaway.cell") == pytest.approx(1.5 * fit)
    page.get_by_role("button", name="Show all blocks").click()
    assert canvas.evaluate("c => c.cutaway.cell") == fit


@pytest.mark.long
def test_a_small_pool_preempts_and_the_knob_goes_back(page: Page, kv_app: str) -> None:
    canvas = visit(page, kv_app)
    idle(page, canvas)
    page.get_by_role("button", name="Pool too small").click()
    expect(page.locator(".kv-said.look")).to_contain_text("preempted", timeout=30_000)
    wait_until(page, lambda: len(kinds(canvas)) == 15)
    expect(page.locator(".ctw-head", has_text="preempted").first).to_be_visible(timeout=30_000)
    page.get_by_role("button", name="Restore the knobs").click()
    wait_until(page, lambda: len(kinds(canvas)) == 128, 60)
    expect(page.get_by_role("button", name="Restore the knobs")).to_have_count(0)


@pytest.mark.long
def test_the_map_takes_the_pages_dark_colours(page: Page, kv_app: str) -> None:
    canvas = visit(page, kv_app)
    light = canvas.evaluate("c => [c.cutaway.painter.dark, c.cutaway.painter.paper]")
    page.locator("header button").last.click()
    wait_until(page, lambda: canvas.evaluate("c => c.cutaway.painter.dark"))
    assert light[0] is False and canvas.evaluate("c => c.cutaway.painter.paper") != light[1]


@pytest.mark.long
def test_an_earlier_step_shows_what_was_held_then(page: Page, kv_app: str) -> None:
    canvas = visit(page, kv_app)
    idle(page, canvas)
    canvas = visit(page, kv_app, step=0)
    wait_until(page, lambda: set(kinds(canvas)) == {FREE})
    expect(page.locator(".ctw-row")).to_have_count(0)


def test_the_times_with_and_without_the_cache_are_drawn(page: Page, kv_app: str) -> None:
    visit(page, kv_app)
    page.get_by_role("button", name="Measure now").click()
    expect(
        page.get_by_text(re.compile(r"At 512 tokens the next token takes 5\.0 ms with the cache and 56\.2 ms without"))
    ).to_be_visible()


def test_a_phone_scrolls_in_one_direction_only(page: Page, kv_app: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    canvas = visit(page, kv_app)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert canvas.evaluate("c => c.getBoundingClientRect().right") <= 390
    box = page.locator(".kv-formula").bounding_box()
    assert box is not None and box["x"] + box["width"] <= 390
