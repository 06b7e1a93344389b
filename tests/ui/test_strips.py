"""Sampling's strip and Speculation's ribbon on their own: what did not change keeps its element, so that a click on it counts."""

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from explorer.canvas import ribbon, strip

pytestmark = pytest.mark.ui

# A model as a page's or a notebook's is to a view.
_SHOW = """([texts, data]) => {
  const state = { texts, data, selected: -1, round: -1, empty: "empty", alternatives: {} };
  const heard = {};
  window.model = {
    get: (name) => state[name],
    set: (name, value) => { state[name] = value; heard[`change:${name}`]?.(); },
    on: (name, react) => { heard[name] = react; },
    save_changes: () => {},
  };
  window.render({ model: window.model, el: document.body });
}"""


def shown(page: Page, view: Any, data: dict[str, Any]) -> None:
    page.set_content("<!doctype html><title>a view</title><body></body>")
    page.add_script_tag(type="module", content=view._esm.replace("export default { render };", "window.render = render;"))
    page.wait_for_function("window.render !== undefined")
    page.evaluate(_SHOW, [view.texts, data])


def token(position: int, text: str, entropy: float = 1.0) -> list[object]:
    return [position, text, 3 + position, -0.5, 1, entropy, 4]


def strip_of(tokens: list[list[object]], id_: str = "r") -> dict[str, Any]:
    return {"id": id_, "prompt": "a prompt", "inherited": "", "dropped": 0, "tokens": tokens}


def piece(position: int, text: str, kind: str = "accepted", p: float = 0.5) -> list[object]:
    return [position, text, kind, position // 3, [p, 0.5, 0.2, 1.0, "accept"], [], []]


def ribbon_of(pieces: list[list[object]], id_: str = "r") -> dict[str, Any]:
    counts = dict.fromkeys(("accepted", "rejected", "unseen", "corrected", "bonus", "plain"), 1)
    return {"id": id_, "prompt": "a prompt", "cut": False, "dropped": 0, "pieces": pieces, "counts": counts}


@pytest.mark.parametrize(
    ("view", "of", "made", "chip", "fact"),
    [
        (strip.TokenStrip(lambda *_: None, lambda *_: None), strip_of, token, ".chips .chip", 2.5),
        (ribbon.Ribbon(lambda *_: None), ribbon_of, piece, ".pieces .piece", "bonus"),
    ],
    ids=["strip", "ribbon"],
)
def test_only_what_changed_is_made_anew(page: Page, view: Any, of: Any, made: Any, chip: str, fact: object) -> None:
    shown(page, view, of([made(0, "a"), made(1, "b"), made(2, "\ufffd")]))
    chips = page.locator(chip)
    page.evaluate("chip => document.querySelectorAll(chip).forEach((e, i) => { e.mark = i; })", chip)

    def told(data: dict[str, Any]) -> list[int | None]:
        page.evaluate("data => window.model.set('data', data)", data)
        marks: list[int | None] = page.evaluate("chip => [...document.querySelectorAll(chip)].map((e) => e.mark ?? null)", chip)
        return marks

    assert told(of([made(0, "a"), made(1, "b"), made(2, "é"), made(3, "c")])) == [0, 1, None, None]  # a character is whole
    expect(chips).to_have_text(["a", "b", "é", "c"])
    chips.nth(1).click()  # on an element that has been there all along
    assert page.evaluate("window.model.get('action')") == {"seq": 1, "kind": "select", "position": 1}
    # The same text with another fact, which its colour and what is said of it come from.
    assert told(of([made(0, "a"), made(1, "b", fact), made(2, "é"), made(3, "c")])) == [0, None, None, None]
    assert told(of([made(0, "a")])) == [0]
    assert told(of([made(0, "a")], "another")) == [None]
