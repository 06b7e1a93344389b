"""Nothing sticks out of its frame or is cut to nothing where there is little room. The parts stand alone in a browser, no server."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from engine.events.state import State
from explorer.base import Clock
from explorer.canvas.base import parts
from explorer.canvas.transport import Transport
from explorer.kv_cache.arithmetic import card_html
from explorer.run.answers import status_text
from explorer.run.view import GAUGES
from explorer.theme import CSS
from tests.explorer.kv_cache.pool_events import PoolSim

pytestmark = pytest.mark.ui

EXPLORER = Path(__file__).parents[2] / "explorer"
DRAW = """async ([source, values, width, message]) => {
  document.body.style.width = `${width}px`;
  let receive;
  const model = { get: (name) => values[name], set() {}, save_changes() {}, off() {}, on(name, f) { receive = f; } };
  const { default: { render } } = await import(`data:text/javascript;charset=utf-8,${encodeURIComponent(source)}`);
  render({ model, el: document.body });
  receive(message);
}"""
STICKS_OUT = """(frames, parts) => [...document.querySelectorAll(frames)].flatMap((frame) => {
  const box = frame.getBoundingClientRect();
  return [...frame.querySelectorAll(parts)].filter((part) => part.getBoundingClientRect().right > box.right - 4).map((part) => frame.textContent);
})"""


def draw(page: Page, canvas: str, width: int, values: dict[str, Any], message: dict[str, Any]) -> None:
    page.set_content("<!doctype html><body style='margin:0'></body>")
    page.evaluate(DRAW, [parts(f"{canvas}.js"), values, width, message])


@pytest.mark.parametrize("width", [340, 366, 640, 668])
def test_the_badge_of_a_gauge_stays_in_its_tile(page: Page, width: int) -> None:
    points = {g.key: [[1, 1.0, "1 x"]] for g in GAUGES}
    draw(page, "gauges", width, {"gauges": [g.facts() for g in GAUGES]}, {"points": points})
    assert page.locator(".sign").count() == len(GAUGES)
    assert page.evaluate(f"({STICKS_OUT})('section', '.sign, .label')") == []
    tops = page.evaluate(
        "[...document.querySelectorAll('.ct-gauges .value')].map((v) => [v.closest('section').offsetTop, v.offsetTop])"
    )
    assert len({tuple(pair) for pair in tops}) == len({section for section, _value in tops})  # the values of a row are level


def test_who_sent_a_waiting_request_is_told(page: Page) -> None:
    sim = PoolSim()
    sim.add("req-12", [1, 2, 3])
    waiting = status_text(State().apply_all(sim.events).requests["req-12"])
    texts = {"empty": "", "legend": "", "tokens_of": "", "stop": "Stop"}
    ops = [
        [
            "request",
            {"id": "req-12", "label": "req-12", "who": "you", "mine": True, "colour": "#0072b2", "prompt": "p", "before": ""},
        ],
        ["status", "req-12", waiting, True, False, True],
    ]
    draw(page, "tokens", 342, {"texts": texts}, {"ops": ops})
    cut = "(part) => part.scrollWidth > part.clientWidth"
    for part in (".who", ".status"):
        assert page.locator(f"header {part}").inner_text() and not page.locator(f"header {part}").evaluate(cut), part
    long = "preempted: gave its blocks back, and waits"
    page.evaluate("(text) => { document.querySelector('header .status').textContent = text; }", long)
    assert not page.locator("header .who").evaluate(cut)
    assert page.evaluate(f"({STICKS_OUT})('article', '.stop')") == []


@pytest.mark.parametrize("width", [300, 420])
@pytest.mark.parametrize("size", [13, 16])
def test_the_name_of_a_kind_of_attention_keeps_off_its_bar(page: Page, width: int, size: int) -> None:
    started: Any = PoolSim().events[0]
    body = card_html(started, None, 32, 4, None)
    style = (
        CSS + (EXPLORER / "kv_cache" / "style.css").read_text(encoding="utf-8") + f".kv-head {{ font-size: {size}px !important }}"
    )
    page.set_content(f"<!doctype html><style>{style}</style><body style='margin:0;width:{width}px'>{body}</body>")
    gaps = page.evaluate("""[...document.querySelectorAll('.kv-head')].map((row) => {
      const range = document.createRange();
      range.selectNodeContents(row.children[0]);
      return row.children[1].getBoundingClientRect().left - range.getBoundingClientRect().right;
    })""")
    assert len(gaps) == 3 and min(gaps) >= 8, gaps


@pytest.mark.parametrize("width", [370, 1100])
def test_the_bar_shows_the_badge_of_a_step_in_the_past(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width + 20, "height": 600})  # the style asks for the window's width
    clock = Clock()
    bar = Transport(clock)
    bar.sync(1, 472)
    for past in (False, True):
        if past:
            clock.goto(468, 1, 472)
        names = ("texts", "first", "last", "step", "live", "playing", "speed", "past")
        draw(page, "transport", width, {name: getattr(bar, name) for name in names}, {})
        assert page.locator(".past").inner_text() == ("↺ replayed" if past else "")
        assert page.locator(".past").is_visible() == past
    assert page.locator("output").inner_text() == "step 468 of 472"
    assert page.evaluate(f"({STICKS_OUT})('.ct-transport', 'button, .past, output')") == []
