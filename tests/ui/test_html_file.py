"""The self-contained HTML in a browser that is offline: opened from disk, played, stepped, stepped back; both pages."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from explorer.export.html import write_html
from explorer.runs import SHIPPED
from explorer.store import EventStore

pytestmark = pytest.mark.ui
STEP = "footer output"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("html") / "run.html"
    write_html(EventStore.load(SHIPPED["full-pool"].path), path, "More requests than the pool can hold")
    return path


@pytest.fixture
def player(page: Page, file: Path, well_behaved: list[str]) -> Iterator[Page]:
    """The page from disk; whatever it asked for other than the file itself makes the test fail."""
    asked: list[str] = []
    page.context.set_offline(True)
    page.on("request", lambda r: None if r.url.startswith(("blob:", "data:", file.as_uri())) else asked.append(r.url))
    # The file itself is no other host.
    page.goto(file.as_uri())
    well_behaved[:] = [line for line in well_behaved if file.as_uri() not in line]
    expect(page.locator(STEP)).to_have_text("step 0 of 137")
    yield page
    assert asked == [] and page.get_by_role("alert").count() == 0


def text_of(page: Page) -> str:
    """All text in the view, in whichever shadow root, and the block map's codes; once what draws with the next frames has drawn. (The
    map's legend follows half a second later.)"""
    return page.evaluate(
        """async () => {
          const frame = () => new Promise((resolve) => requestAnimationFrame(resolve));
          for (let i = 0; i < 4; i++) await frame();
          const walk = (node) => node.nodeType === 3 ? node.data : node.nodeName === "STYLE" || node.className === "ctw-bar" ? "" : node.cutaway?.codes ? node.cutaway.codes.join(" ") : [...(node.shadowRoot ?? node).childNodes, ...(node.shadowRoot ? node.childNodes : [])].map(walk).join(" ");
          return walk(document.querySelector("main section:not([hidden])")).replace(/\\s+/g, " ");
        }"""
    )


def go(page: Page, step: int) -> None:
    slider = page.locator("footer input[type=range]")
    slider.evaluate(
        "(el, value) => { el.value = value; el.dispatchEvent(new Event('input')); el.dispatchEvent(new Event('change')); }",
        str(step),
    )
    expect(page.locator(STEP)).to_have_text(f"step {step} of 137")


def test_it_steps_and_plays(player: Page) -> None:
    for expected in (1, 2, 3):
        player.keyboard.press("ArrowRight")
        expect(player.locator(STEP)).to_have_text(f"step {expected} of 137")
    player.keyboard.press("ArrowLeft")
    expect(player.locator(STEP)).to_have_text("step 2 of 137")
    expect(player.locator("article .chip:visible").first).to_be_visible()
    player.locator("footer select").select_option("100")
    player.keyboard.press(" ")
    expect(player.locator(STEP)).to_have_text("step 137 of 137")
    expect(player.locator("article")).to_have_count(9)
    assert player.locator("canvas").count() > 0


def test_the_plots_of_sampling_are_drawn(player: Page) -> None:
    """What is drawn by evaluating code is forbidden in this file, and would be an alert."""
    player.get_by_role("button", name="Sampling", exact=True).click()
    go(player, 40)
    for step in range(41, 46):
        player.keyboard.press("ArrowRight")
        expect(player.locator(STEP)).to_have_text(f"step {step} of 137")
    expect(player.locator("canvas:visible").nth(3)).to_be_visible()
    expect(player.get_by_role("alert")).to_have_count(0)


@pytest.mark.parametrize("title", ["Run", pytest.param("KV cache", marks=pytest.mark.long)])
def test_a_step_is_the_same_whichever_way_it_is_reached(player: Page, title: str) -> None:
    player.get_by_role("button", name=title, exact=True).click()
    player.wait_for_timeout(1500)
    forward: dict[int, str] = {}
    for step in range(0, 138, 6):
        go(player, step)
        forward[step] = text_of(player)
    assert len(set(forward.values())) > 15
    back = {step: (go(player, step), text_of(player))[1] for step in reversed(forward)}
    assert back == forward
    for step in random.Random(1).sample(list(forward), 8):
        go(player, step)
        assert text_of(player) == forward[step]


def test_figures_and_map_show_the_step(player: Page) -> None:
    """The line that marks the step in the Gantt, and the blocks that are held."""
    go(player, 60)
    here: Any = player.evaluate(
        "() => { const pages = globalThis.cutawayPlayer.pages; const doc = [...pages[0].drawn.page.nodes.values()].find((n) => n.doc).doc; return [...doc.roots()[0].references()].filter((m) => m.type === 'Span').map((m) => [m.location, m.visible]); }"
    )
    assert [60, True] in here
    player.get_by_role("button", name="KV cache").click()
    expect(player.get_by_text("of 18 blocks held").first).to_be_visible()
    state = EventStore.load(SHIPPED["full-pool"].path).at(60)
    expect(player.get_by_text("of 18 blocks held").first).to_contain_text(f"{state.num_used_blocks} of 18 blocks held")
