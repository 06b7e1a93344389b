"""Cards of token chips on their own: a request whose tokens become others, as a beam's do."""

from collections.abc import Iterator

import panel as pn
import pytest
from panel.tests.util import serve_component
from playwright.sync_api import Page, expect

from explorer.canvas.tokens import TokenCards

pytestmark = pytest.mark.ui


def chips(first: int, texts: list[str]) -> list[list[object]]:
    return [[i, text, -0.5, first + i, 1 + i, 3.0, 1] for i, text in enumerate(texts)]


@pytest.fixture
def _served() -> Iterator[None]:
    """The server runs in a thread of this process, which would never end by itself."""
    yield
    pn.state.kill_all_servers()


@pytest.mark.usefixtures("_served")
def test_tokens_are_told_again(page: Page) -> None:
    cards = TokenCards(select=lambda *_: None, stop=lambda _id: None)
    serve_component(page, cards)
    expect(page.locator(".empty")).to_be_visible(timeout=60_000)
    for _ in range(600):  # its answer is on the way
        if cards.ready:
            break
        page.wait_for_timeout(100)
    card = {"id": "r#1", "label": "r#1", "who": "you", "mine": True, "colour": "#0072b2", "prompt": "a prompt", "before": ""}
    cards.ops([["request", card], ["tokens", "r#1", chips(3, ["a", "b", "c"])], ["step", 2]])
    shown = page.locator("article .chip")
    expect(shown).to_have_text(["a", "b", "c"])
    expect(shown.nth(2)).to_be_hidden()  # of a later step
    cards.ops([["retell", "r#1", chips(3, ["a", "x"])], ["tokens", "r#1", [[9, "y", None, 5, 3, 2.0, 2]]]])
    expect(shown).to_have_text(["a", "x", "y"])
    expect(shown.nth(1)).to_be_visible()
    expect(shown.nth(2)).to_be_hidden()
    shown.nth(1).hover()
    expect(page.locator(".tip")).to_contain_text("position")
    cards.ops([["select", "r#1", 4], ["retell", "r#1", chips(3, ["a", "z"])], ["retell", "gone", []]])
    expect(page.locator("article .chip.on")).to_have_text(["z"])  # the position stays selected
