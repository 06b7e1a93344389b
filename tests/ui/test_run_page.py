"""The frame and the Run page, as a person uses them."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

pytestmark = pytest.mark.ui


def visit(page: Page, url: str) -> Page:
    page.goto(url)
    expect(page.get_by_role("toolbar", name=re.compile("Time"))).to_be_visible(timeout=60_000)
    expect(page.locator("article, .empty").first).to_be_attached()
    return page


def prompt_box(page: Page) -> Locator:
    return page.get_by_label("Prompt", exact=True)


def send(page: Page, text: str) -> None:
    box = prompt_box(page)
    box.fill(text)
    box.blur()
    page.get_by_role("button", name="Send", exact=True).click()


def newest(page: Page) -> Locator:
    return page.locator("article").first


def test_tokens_stream_and_tell_their_numbers(page: Page, app: str) -> None:
    visit(page, app)
    send(page, "a prompt of my own")
    card = newest(page).filter(has_text="a prompt of my own")
    expect(card).to_contain_text("you")
    expect(card.locator(".chip").nth(5)).to_be_visible()
    card.locator(".chip").nth(1).hover()
    tip = page.locator(".tip")
    for label in ("token id", "position", "engine step", "log-probability", "probability", "since the token before"):
        expect(tip).to_contain_text(label)
    expect(tip).to_contain_text(re.compile(r"-?\d+\.\d+ nat"))
    expect(tip).to_contain_text(re.compile(r"\d+\.\d ms"))
    expect(page.locator(".ct-gauges section").first).to_contain_text(re.compile(r"[\d.]+\s+tok/s"))


def test_markup_in_prompt_and_output_is_only_text(page: Page, app: str) -> None:
    visit(page, app)
    evil = '<img src=x onerror="window.evil=1"><script>window.evil=2</script>'
    send(page, evil)
    card = newest(page)
    expect(card.locator(".prompt")).to_have_text(evil)
    expect(card.locator(".chip", has_text="<b>").first).to_be_attached(timeout=30_000)  # the stand-in says it now and then
    assert card.locator("b, img, script").count() == 0
    assert page.evaluate("window.evil") is None


def test_an_empty_prompt_and_a_huge_one_give_one_message(page: Page, app: str) -> None:
    visit(page, app)
    send(page, "  ")
    alert = page.get_by_role("alert")
    expect(alert).to_contain_text("prompt is empty")
    page.get_by_role("button", name="Dismiss").click()
    expect(alert).to_have_count(0)
    # A paste, as the browser makes it, of a million tokens and more; then one that the box takes and the engine does not.
    prompt_box(page).evaluate(
        """(box) => { const data = new DataTransfer(); data.setData("text/plain", "word ".repeat(1000000));
                      box.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })); }"""
    )
    expect(alert).to_contain_text("5,000,000 characters")
    page.get_by_role("button", name="Dismiss").click()
    expect(alert).to_have_count(0)
    prompt_box(page).evaluate("(box, text) => { box.value = text; box.dispatchEvent(new Event('change')); }", "word " * 30_000)
    page.get_by_role("button", name="Send", exact=True).click()
    expect(alert).to_contain_text("150,000 characters")
    expect(alert).to_have_count(1)
    send(page, "still alive")
    expect(newest(page)).to_contain_text("still alive")


@pytest.mark.long
def test_space_and_arrows_move_time_but_not_while_typing(page: Page, app: str) -> None:
    visit(page, app)
    send(page, "to be looked at in peace")
    expect(newest(page).locator(".chip").nth(12)).to_be_attached()
    live = page.get_by_role("button", name="Live", exact=True)
    box = prompt_box(page)
    box.focus()
    page.keyboard.type(" x")
    expect(live).to_have_attribute("aria-pressed", "true")
    page.locator("h1").click()
    page.keyboard.press("Space")
    expect(live).to_have_attribute("aria-pressed", "false")
    shown = page.locator(".ct-transport output")
    expect(shown).to_contain_text(re.compile(r"step [\d,]+ of [\d,]+"))

    def step() -> int:
        return int(re.match(r"step ([\d,]+)", shown.inner_text()).group(1).replace(",", ""))  # type: ignore[union-attr]

    page.wait_for_timeout(500)
    before = step()
    page.keyboard.press("ArrowLeft")
    expect(shown).to_contain_text(f"step {before - 1:,} of")
    page.keyboard.press("ArrowRight")
    expect(shown).to_contain_text(f"step {before:,} of")
    expect(page).to_have_url(re.compile(f"step={before}"))
    live.click()
    expect(live).to_have_attribute("aria-pressed", "true")
    expect(page).not_to_have_url(re.compile("step="))


def test_stepping_back_takes_the_tokens_away(page: Page, app: str) -> None:
    visit(page, app)
    send(page, "going back in time")
    chips = newest(page).filter(has_text="going back in time").locator(".chip")
    expect(chips.nth(8)).to_be_visible()
    page.locator("h1").click()
    page.keyboard.press("Space")
    page.wait_for_timeout(600)
    seen = chips.locator("visible=true").count()
    for _ in range(3):
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(300)
    assert chips.locator("visible=true").count() < seen


def test_the_address_leads_to_a_page_and_back_works(page: Page, app: str) -> None:
    visit(page, app)
    page.get_by_text("KV cache", exact=True).first.click()
    expect(page.locator("h1")).to_have_text("KV cache")
    expect(page).to_have_url(re.compile(r"\?page=kv-cache$"))
    page.go_back()
    expect(page.locator("h1")).to_have_text("Run")
    page.go_forward()
    expect(page.locator("h1")).to_have_text("KV cache")
    page.reload()
    expect(page.locator("h1")).to_have_text("KV cache", timeout=60_000)


def test_two_browsers_share_the_engine_and_its_knobs(page: Page, app: str, browser: Browser) -> None:
    other = browser.new_context().new_page()
    try:
        visit(page, app)
        visit(other, app)
        send(page, "sent by the first")
        theirs = other.locator("article", has_text="sent by the first")
        expect(theirs).to_be_visible()
        expect(theirs).to_contain_text("guest-")
        assert theirs.get_by_role("button", name="Stop").count() == 0
        send(other, "sent by the second")
        mine = page.locator("article", has_text="sent by the second")
        expect(mine).to_be_visible()
        colour: Callable[[Locator], Any] = lambda card: card.locator(".dot").evaluate("e => e.style.background")
        assert colour(mine) != colour(page.locator("article", has_text="sent by the first"))
        here, there = (p.get_by_role("slider", name="Batch size") for p in (page, other))
        here.focus()
        here.press("ArrowRight")
        expect(there).to_have_attribute("aria-valuetext", here.get_attribute("aria-valuetext") or "")
        value = page.get_by_text(re.compile(r"Batch size: \d+")).first.inner_text()
        expect(other.get_by_text(value, exact=True).first).to_be_visible()
        here.press("ArrowLeft")
    finally:
        other.context.close()


def test_a_browser_that_vanishes_takes_its_requests_along(page: Page, app: str, browser: Browser) -> None:
    visit(page, app)
    other = browser.new_context().new_page()
    visit(other, app)
    send(other, "left behind")
    card = page.locator("article", has_text="left behind")
    expect(card.locator(".chip").first).to_be_attached()
    other.context.close()
    expect(card.locator(".status")).to_contain_text("stopped", timeout=15_000)


def test_stop_ends_ones_own_request(page: Page, app: str) -> None:
    visit(page, app)
    send(page, "to be stopped")
    card = page.locator("article", has_text="to be stopped")
    expect(card.locator(".chip").first).to_be_attached()
    card.get_by_role("button", name="Stop").click()
    expect(card.locator(".status")).to_contain_text("stopped")


@pytest.mark.parametrize("theme", ["default", pytest.param("dark", marks=pytest.mark.long)])
def test_a_phone_needs_no_sideways_scroll(page: Page, app: str, theme: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, f"{app}?theme={theme}")
    expect(page.get_by_role("heading", name="Who is here")).to_be_hidden()  # the drawer starts closed
    for slug in ("run", "kv-cache"):
        page.goto(f"{app}?page={slug}&theme={theme}")
        expect(page.locator("h1")).to_be_visible(timeout=60_000)
        page.wait_for_timeout(1000)
        wide = page.evaluate(
            """() => { const out = []; const walk = (root) => { for (const e of root.querySelectorAll('*')) {
                 if (e.shadowRoot) walk(e.shadowRoot);
                 if (e.classList?.contains('main-content')) out.push(e.scrollWidth - e.clientWidth); } };
               walk(document); return [document.documentElement.scrollWidth - innerWidth, ...out]; }"""
        )
        assert max(wide) <= 0 and len(wide) == 2, (slug, wide)


def test_a_dead_engine_says_so_and_can_be_started_again(page: Page, app: str) -> None:
    visit(page, app)
    send(page, "die")
    alert = page.get_by_role("alert")
    expect(alert.first).to_contain_text("signal 9")
    page.wait_for_timeout(1500)  # a recorded run comes up in the engine's place, and the page is laid out anew
    restart, status = page.get_by_role("button", name="Restart the engine"), page.get_by_role("status").first
    for _ in range(12):  # a click may be lost while the page is still laid out
        restart.click()
        try:
            expect(status).not_to_have_text("Engine stopped", timeout=5000)
            break
        except AssertionError:
            continue
    expect(status).to_have_text("Running")
    send(page, "a new life")
    expect(newest(page)).to_contain_text("a new life")
    expect(newest(page).locator(".chip").nth(2)).to_be_attached()


def test_the_keyboard_reads_tokens_one_by_one(page: Page, app: str) -> None:
    visit(page, app)
    send(page, "read me aloud")
    card = page.locator("article", has_text="read me aloud")
    expect(card.locator(".chip").nth(4)).to_be_attached()
    card.get_by_role("listbox").focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".tip")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(r"request=r\d+&token=\d+"))
    expect(page.get_by_role("button", name="Live", exact=True)).to_have_attribute("aria-pressed", "true")
