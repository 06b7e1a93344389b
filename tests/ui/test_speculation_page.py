"""The Speculation page as a person uses it, in front of the real engine with a tiny random model."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.ui.conftest import serve

pytestmark = pytest.mark.ui

SCENE = "Text that repeats itself"


@pytest.fixture(scope="module")
def speculation_app(tmp_path_factory: pytest.TempPathFactory, chromium_path: str) -> Iterator[str]:
    server = serve(tmp_path_factory.mktemp("speculation") / "log", "--setup", "tests/ui/speculation_setup.py")
    try:
        server.wait()
        yield server.url
    finally:
        server.stop()


def visit(page: Page, url: str, **query: Any) -> None:
    page.goto(f"{url}?page=speculation" + "".join(f"&{name}={value}" for name, value in query.items()))
    expect(page.get_by_role("button", name=SCENE)).to_be_visible()
    expect(page.get_by_role("status").first).to_have_text("Running")


def stage(page: Page) -> str:
    """Press the scene and wait for its end; the request that was drafted for."""
    page.get_by_role("button", name=SCENE).click()
    expect(page.locator(".sp-said")).to_contain_text("long green ribbons")
    expect(page).to_have_url(re.compile(r"request=(req|ask)-\d+"))
    match = re.search(r"request=((?:req|ask)-\d+)", page.url)
    assert match
    return match[1]


def pieces(page: Page, kind: str) -> Locator:
    return page.locator(f".ct-ribbon .pieces .piece.{kind}")


def test_a_scene_shows_who_wrote_what_and_what_it_cost(page: Page, speculation_app: str) -> None:
    visit(page, speculation_app)
    expect(page.locator(".ct-ribbon .empty")).to_contain_text("Choose a drafter")  # the first visitor of this server
    stage(page)
    expect(pieces(page, "accepted").first).to_be_attached()
    counts = dict(
        zip(
            ("accepted", "rejected", "unseen", "corrected", "bonus", "plain"),
            page.locator(".ct-ribbon .legend b").all_inner_texts(),
        )
    )
    for kind in ("accepted", "corrected", "bonus", "plain"):
        assert pieces(page, kind).count() == int(counts[kind]), kind
    assert page.locator(".ct-ribbon .pieces .lost.rejected").count() == int(counts["rejected"])
    expect(page.locator(".sp-verdict")).to_contain_text("measured on the same requests")
    expect(page.locator(".sp-table", has_text="n-gram, K = 6")).to_contain_text("1 request")
    pieces(page, "accepted").first.hover()
    tip = page.locator(".ct-ribbon .tip")
    expect(tip).to_contain_text("drafted, accepted")
    expect(tip).to_contain_text("the target's own draw decides")
    page.get_by_role("button", name="Restore the knobs").click()
    expect(page.locator(".sp-line", has_text="Speculation is off")).to_be_visible()


@pytest.mark.long
def test_a_verification_is_stepped_through_by_hand_and_by_keys(page: Page, speculation_app: str) -> None:
    visit(page, speculation_app)
    stage(page)
    pieces(page, "accepted").first.click()
    expect(page).to_have_url(re.compile(r"token=\d+"))
    player = page.locator(".ct-verify")
    expect(player.locator("output")).to_have_text(re.compile("^stage 1 of"))
    expect(player.locator(".box.accepted")).to_have_count(0)
    expect(player.locator("h3")).to_have_text("Draft")
    for _i in range(2):
        player.get_by_role("button", name="One stage on").click()
    expect(player.locator("h3")).to_contain_text("is accepted")
    expect(player.locator(".box.accepted.focus")).to_have_count(1)
    slider = player.get_by_role("slider")
    slider.focus()
    page.keyboard.press("End")
    expect(player.locator("h3")).to_contain_text("Gained")
    gained = int(re.search(r"\d+", player.locator("h3").inner_text())[0])  # type: ignore[index]
    assert player.locator(".box.accepted").count() + player.locator(".box.own").count() == gained
    expect(page.locator(".ct-ribbon .pieces .piece.of")).to_have_count(gained)
    assert page.locator(".ct-tree .node.accepted").count() == gained - player.locator(".box.own").count()
    page.locator(".ct-ribbon .pieces").focus()
    page.keyboard.press("ArrowRight")  # to the next token, not to the next step
    expect(page).not_to_have_url(re.compile("step="))
    expect(page.locator(".ct-ribbon .piece.on")).to_have_count(1)


def test_knobs_move_the_engine_and_a_phone_has_no_sideways_scroll(page: Page, speculation_app: str) -> None:
    visit(page, speculation_app)
    request = stage(page)
    slider = page.get_by_role("slider", name="K", exact=True)
    slider.focus()
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".sp-line", has_text="K = 5")).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 844})
    visit(page, speculation_app, request=request, theme="dark")
    expect(pieces(page, "accepted").first).to_be_attached()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    steps = page.locator(".ct-tree, .ct-verify").evaluate_all("all => all.map(e => e.scrollWidth - e.clientWidth)")
    assert max(steps) <= 1, "a part is wider than its card"
