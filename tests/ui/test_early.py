"""What is done on a page that is still being drawn: on a slow machine that takes seconds."""

import re

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.ui

# A message of Bokeh's has three frames. The one that says "everything is drawn" is kept back, so that the page stays as it is before that.
NEVER_READY = """
  const send = WebSocket.prototype.send;
  let frames = [];
  WebSocket.prototype.send = function (frame) {
    frames.push(frame);
    if (frames.length < 3) return;
    if (frames.some((one) => typeof one === "string" && one.includes("document_ready"))) window.ctKeptBack = true;
    else frames.forEach((one) => send.call(this, one));
    frames = [];
  };
"""


def test_what_is_pressed_while_the_page_is_still_drawn_is_not_lost(page: Page, app: str) -> None:
    page.add_init_script(NEVER_READY)
    page.goto(f"{app}?page=roofline&gpu=h200")
    page.wait_for_function("window.ctKeptBack")
    page.get_by_role("slider", name="Batch (what if)").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page).to_have_url(re.compile(r"batch=2(&|$)"))
    page.get_by_role("button", name="what would another setting have given").click()
    expect(page.get_by_role("heading", name="Sampling", level=1)).to_be_visible()
    expect(page.get_by_role("button", name="Top-k 10, sharp and flat")).to_be_visible()
    expect(page).to_have_url(re.compile("page=sampling"))
