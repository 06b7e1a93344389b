"""The Sampling page as a person uses it, in front of the real engine with a tiny random model."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.ui.conftest import serve

pytestmark = pytest.mark.ui


@pytest.fixture(scope="module")
def sampling_app(tmp_path_factory: pytest.TempPathFactory, chromium_path: str) -> Iterator[str]:
    server = serve(tmp_path_factory.mktemp("sampling") / "log", "--setup", "tests/ui/sampling_setup.py")
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()


def visit(page: Page, url: str, **query: Any) -> None:
    page.goto(f"{url}?page=sampling" + "".join(f"&{name}={value}" for name, value in query.items()))
    expect(page.get_by_role("button", name="Top-k 10, sharp and flat")).to_be_visible()
    expect(page.get_by_role("status").first).to_have_text("Running")


def stage(page: Page, scene: str) -> str:
    """Press a scene and wait until its first request has all its tokens; its id."""
    before = re.search(r"request=(req|ask)-\d+", page.url)
    page.get_by_role("button", name=scene).click()
    page.wait_for_function(
        "b => { const m = location.search.match(/request=((req|ask)-\\d+)/); return m && m[0] !== b }", arg=before and before[0]
    )
    match = re.search(r"request=((?:req|ask)-\d+)", page.url)
    assert match
    return match[1]


def rows(page: Page) -> list[dict[str, Any]]:
    """The candidates as they stand there."""
    return page.locator(".ct-choice tr[data-id]").evaluate_all(
        "all => all.map(r => ({id: r.dataset.id, gone: r.classList.contains('gone'), lands: r.classList.contains('lands'), chosen: r.classList.contains('chosen'),"
        " why: r.querySelector('.why').textContent, shares: [...r.querySelectorAll('.share span')].map(s => s.textContent)}))"
    )  # fmt: skip


def tokens(page: Page, at_least: int) -> Locator:
    chips = page.locator(".ct-strip .chips .chip")
    expect(chips.nth(at_least - 1)).to_be_attached()
    return chips


def look_at(page: Page, index: int) -> None:
    """Click a token, and wait until its candidates stand there."""
    chip = tokens(page, 32).nth(index)
    chip.click()
    expect(page).to_have_url(re.compile(r"token=\d+"))
    expect(chip).to_have_class(re.compile(r"\bon\b"))
    before: list[dict[str, Any]] = []
    while (now := rows(page)) != before:
        before = now
        page.wait_for_timeout(300)


def slide(page: Page, name: str, key: str, times: int) -> Locator:
    slider = page.get_by_role("slider", name=name, exact=True)
    slider.focus()
    for _ in range(times):
        page.keyboard.press(key)
    return slider


def test_the_dart_falls_on_the_token_that_was_chosen(page: Page, sampling_app: str) -> None:
    visit(page, sampling_app)
    stage(page, "Temperature 0.2, 1, 2, same darts")
    expect(page.locator(".sa-said")).to_contain_text("The dart does not move")
    look_at(page, 4)
    expect(page.locator(".ct-choice th").nth(2)).to_have_text("temperature 0.2")
    found = [row for row in rows(page) if row["chosen"]]
    assert len(found) == 1 and found[0]["lands"] and not found[0]["gone"] and found[0]["why"] == "u lands here"
    piece = page.locator(".ct-choice .piece.lands")
    expect(piece).to_have_count(1)
    dart, box = page.locator(".ct-choice .dart").bounding_box(), piece.bounding_box()
    assert dart and box and box["x"] - 2 <= dart["x"] <= box["x"] + box["width"] + 1
    if piece.get_attribute("data-id"):  # not among the many that are drawn as one
        assert piece.get_attribute("data-id") == found[0]["id"]
    expect(page.locator(".sa-line").first).to_contain_text("fell on")


def test_a_slider_changes_the_bars_and_greys_what_is_removed(page: Page, sampling_app: str) -> None:
    visit(page, sampling_app)
    stage(page, "Temperature 0.2, 1, 2, same darts")
    look_at(page, 4)
    before = rows(page)
    assert not any(row["gone"] for row in before)
    slide(page, "Top-k", "ArrowRight", 3)
    expect(page.locator(".ct-choice th").nth(3)).to_have_text("top-k 3")
    after = rows(page)
    assert [row["id"] for row in after[:8]] == [row["id"] for row in before[:8]]  # nobody is hidden
    kept = [row for row in after if not row["gone"]]
    assert len(kept) == 3 and all(row["shares"][-1] not in ("0", "–") for row in kept)
    assert all(row["shares"][-1] == "0" and row["why"] == "✕ top-k" for row in after if row["gone"])
    expect(page.locator("h2", has_text="was chosen")).to_contain_text("what-if")
    expect(page.locator(".sa-line").first).to_contain_text("Recomputed from all")
    expect(page).to_have_url(re.compile("top_k=3"))
    page.reload()  # the address says it all
    expect(page.locator(".ct-choice th").nth(3)).to_have_text("top-k 3")
    page.get_by_role("button", name="As recorded").click()
    expect(page.locator(".ct-choice th")).to_have_count(4)  # token, raw, temperature 0.2, why
    assert rows(page) == before
    expect(page).not_to_have_url(re.compile("top_k"))


def test_an_alternative_becomes_a_branch_and_the_tree_can_be_walked(page: Page, sampling_app: str) -> None:
    visit(page, sampling_app)
    source = stage(page, "Top-k 10, sharp and flat")
    chip = tokens(page, 24).nth(6)
    chip.click()
    expect(page).to_have_url(re.compile(r"token=\d+"))
    position = int(re.search(r"token=(\d+)", page.url)[1])  # type: ignore[index]
    chosen = (chip.text_content() or "").replace(" ", "·").replace("\n", "")
    expect(page.locator(".ct-strip .others > span b")).to_have_text(chosen)  # the alternatives are this token's by now
    alternative = page.locator(".ct-strip .others button").first
    text = alternative.locator("b").inner_text()
    alternative.click()
    page.wait_for_function("s => !location.search.includes(`request=${s}`)", arg=source)
    expect(page.locator(".ct-strip .inherited")).not_to_be_empty()
    lanes = page.locator(".ct-lanes").first
    expect(lanes.locator(".names div")).to_have_count(2)
    forced = lanes.locator(".node.forced")
    expect(forced).to_have_count(1)
    assert (forced.locator("text").text_content() or "")[:6] == text[:6]
    lanes.locator(".scroll").focus()
    page.keyboard.press("ArrowRight")  # the first token of the source
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"request={source}&token={position - 5}"))
    expect(lanes.locator(".node.on")).to_have_count(1)
    expect(page.locator(".sa-pair")).to_be_visible()
    expect(page.locator(".sa-line", has_text="was forced to this token")).to_be_visible()


@pytest.mark.long
def test_a_running_request_goes_on_with_what_was_tried(page: Page, sampling_app: str) -> None:
    visit(page, sampling_app)
    stage(page, "A loop, and a penalty")
    tokens(page, 1)
    live = page.get_by_role("button", name="Make live")
    expect(live).to_be_disabled()
    recorded = page.get_by_role("slider", name="Temperature", exact=True)
    expect(recorded).to_have_value("0")  # before it is moved
    slide(page, "Temperature", "ArrowRight", 2)
    expect(live).to_be_enabled()
    live.click()
    tokens(page, 72).last.click()
    page.get_by_role("button", name="As recorded").click()
    expect(page.locator(".ct-choice th").nth(2)).to_have_text("temperature 0.1")  # the last token was really drawn so
    expect(page.locator("h2", has_text="was chosen")).to_contain_text("measured")
    expect(live).to_be_disabled()  # it has ended


def test_beams_die_and_the_best_is_laid_beside_greedy(page: Page, sampling_app: str) -> None:
    visit(page, sampling_app)
    stage(page, "Beam search against greedy")
    table = page.locator(".sa-sums")
    expect(table).to_contain_text("best beam", timeout=60_000)
    expect(table).to_contain_text("greedy")
    lanes = page.locator(".ct-lanes").last
    assert lanes.locator(".node.best").count() >= 2
    assert lanes.locator(".names div").first.inner_text() == "beam 0"
    best = [float(x) for x in re.findall(r"-\d+\.\d{3}", table.inner_text())]
    assert best
    lanes.locator(".node.best rect").first.hover()
    expect(lanes.locator(".tip")).to_contain_text("sum so far")


@pytest.mark.long
def test_a_button_leads_to_the_beams_far_below(page: Page, sampling_app: str) -> None:
    visit(page, sampling_app)
    stage(page, "Beam search against greedy")
    expect(page.locator(".sa-sums")).to_contain_text("best beam", timeout=60_000)
    lanes = page.locator(".ct-lanes").last
    expect(lanes).not_to_be_in_viewport()
    page.get_by_role("button", name="Show the beams").click()
    expect(lanes).to_be_in_viewport()


@pytest.mark.long
def test_the_same_again_with_another_setting_tells_the_first_difference(page: Page, sampling_app: str) -> None:
    visit(page, sampling_app)
    first = stage(page, "Temperature 0.2, 1, 2, same darts")
    tokens(page, 32)
    slide(page, "Temperature", "ArrowRight", 20)
    expect(page).to_have_url(re.compile("temperature=1.2"))
    page.get_by_role("button", name="Run again so").click()
    page.wait_for_function("s => !location.search.includes(`request=${s}`)", arg=first)
    expect(page.locator(".sa-pair .sa-name").first).to_have_text(first)
    expect(page.locator(".sa-line", has_text="temperature: 0.2 → 1.2").first).to_be_visible()
    expect(page.locator(".sa-line", has_text="the distribution moved")).to_be_visible()


def test_time_goes_back_and_a_phone_has_no_sideways_scroll(page: Page, sampling_app: str) -> None:
    visit(page, sampling_app)
    request = stage(page, "Top-k 10, sharp and flat")
    tokens(page, 24)
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, sampling_app, request=request, theme="dark")
    chips = tokens(page, 24)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    steps = page.locator(".ct-strip .chip[data-position]").evaluate_all("all => all.map(c => c.ctToken[2])")
    page.goto(f"{sampling_app}?page=sampling&request={request}&step={steps[9]}")
    expect(page.locator(".ct-strip .chip[data-position]")).to_have_count(10)
    expect(chips.nth(9)).to_have_class(re.compile(r"\bon\b"))
