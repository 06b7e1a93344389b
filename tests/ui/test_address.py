"""The address follows what a person does, a moment later; Back returns to what was there."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.ui

URL_JS = Path(__file__).parents[2] / "explorer" / "url.js"

# url.js with a model of our own, on a page whose history only writes down what is asked of it.
STAND_IN = """async (source) => {
  const { default: { render } } = await import(URL.createObjectURL(new Blob([source], { type: "text/javascript" })));
  const handlers = {}, written = [];
  let target = { search: "", push: false, seen: 0 };
  const model = { get: (name) => (name === "target" ? target : undefined), set() {}, save_changes() {}, on: (name, f) => { handlers[name] = f; }, off() {} };
  for (const name of ["pushState", "replaceState"]) History.prototype[name] = (_state, _title, url) => { written.push(`${name} ${url.split("?")[1]}`); };
  render({ model, el: document.createElement("div") });
  const say = (search, push) => { target = { search, push, seen: 9 }; handlers["change:target"](); };
  const until = (ms) => new Promise((done) => setTimeout(done, ms));
  const seen = [];
  say("?a=1", false);
  say("?a=2", false);
  seen.push([...written]);
  say("?page=b", true);
  seen.push([...written]);
  say("?page=b&c=1", false);
  say("?page=b&c=2", false);
  await until(500);
  seen.push([...written]);
  return seen;
}"""


def test_moves_are_written_once_and_before_a_page_is_left(page: Page, app: str) -> None:
    page.goto(app)
    first = ["replaceState a=2", "pushState page=b"]
    assert page.evaluate(STAND_IN, URL_JS.read_text(encoding="utf-8")) == [[], first, [*first, "replaceState page=b&c=2"]]


@pytest.mark.long
def test_back_returns_to_a_page_as_it_was_left(page: Page, app: str) -> None:
    """A knob is moved and the page is left at once."""
    page.goto(f"{app}?page=sampling")
    slider = page.get_by_role("slider", name="Top-k", exact=True)
    expect(slider).to_be_visible()
    expect(page.get_by_role("status").first).to_have_text("Running")
    slider.focus()
    for _press in range(3):
        page.keyboard.press("ArrowRight")
    page.get_by_text("KV cache", exact=True).first.click()
    expect(page).to_have_url(re.compile("page=kv-cache$"))
    page.go_back()
    expect(page).to_have_url(re.compile("page=sampling.*top_k=3"))
    expect(page.get_by_role("slider", name="Top-k", exact=True)).to_have_value("3")
