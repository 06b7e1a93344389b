"""Recorded runs in a real browser: shown, left, opened from a file, and everything that can be taken out."""

import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Download, Locator, Page, TimeoutError, expect

from engine.events.log import EventLog
from tests.engine.events.simulate import simulate

pytestmark = pytest.mark.ui


def open_run(page: Page, app: str, query: str = "?run=shared-prefix") -> None:
    page.goto(app + query)
    expect(page.get_by_role("heading", name="Six questions about one text")).to_be_visible()


def taken(page: Page, label: str, path: Path) -> Path:
    """Choose an item of the Download menu; the file it gave."""
    page.get_by_role("button", name="Download").click()
    with page.expect_download() as info:
        page.get_by_role("menuitem", name=label).click()
    download: Download = info.value
    to = path / download.suggested_filename
    download.save_as(to)
    return to


def tooltip_of(page: Page, button: Locator) -> Locator:
    """Hover over it until its tooltip is there: a button that is drawn anew under a mouse that rests does not notice the mouse."""
    tooltip = page.get_by_role("tooltip")
    for _ in range(12):
        button.hover()
        try:
            tooltip.wait_for(timeout=5000)
            return tooltip
        except TimeoutError:
            page.mouse.move(800, 400)
    raise AssertionError("no tooltip came")


def test_a_recorded_run_plays_is_labelled_and_can_be_left(page: Page, app: str) -> None:
    open_run(page, app)
    expect(page.get_by_role("status").first).to_have_text("Replayed")
    expect(page.locator("article .chip").first).to_be_visible()  # it plays from its beginning
    expect(page.get_by_text("Pause engine")).to_be_hidden()
    expect(page.get_by_role("button", name="Send", exact=True)).to_have_count(0)
    page.get_by_role("button", name="Go live").click()
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
    expect(page.get_by_text("Pause engine")).to_be_visible()
    assert "run=" not in page.url
    page.go_back()
    expect(page.get_by_role("heading", name="Six questions about one text")).to_be_visible()


def test_what_a_recorded_run_shows_is_told_inside_the_sidebar(page: Page, app: str) -> None:
    page.goto(app)
    for title in ("Six questions about one text", "More requests than the pool can hold"):
        box = tooltip_of(page, page.get_by_text(title).first).bounding_box()
        assert box is not None and box["x"] >= 0
        assert box["x"] + box["width"] <= 268  # the width of the sidebar, which cuts off what is beyond
        page.mouse.move(800, 400)
        expect(page.get_by_role("tooltip")).to_have_count(0)


def test_a_file_is_opened_and_a_damaged_one_is_refused(
    page: Page, app: str, tmp_path: Path, well_behaved: list[str], make_run: Callable[[int], Path]
) -> None:
    page.goto(app)
    choose = page.get_by_role("button", name="Open a saved run")
    (tmp_path / "bad.cutaway").write_bytes(b"<script>alert(1)</script>" * 50)
    for path, then in (
        (tmp_path / "bad.cutaway", page.get_by_role("alert").filter(has_text="not a recorded run")),
        (make_run(400), page.get_by_role("heading", name="made.cutaway")),
    ):
        with page.expect_file_chooser() as chooser:
            choose.click()
        chooser.value.set_files(path)
        expect(then).to_be_visible()


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[[int], Path]:
    def make(steps: int) -> Path:
        log = EventLog()
        log.extend(simulate(steps))
        log.save(tmp_path / "made.cutaway")
        return tmp_path / "made.cutaway"

    return make


def test_everything_can_be_taken_out(page: Page, app: str, tmp_path: Path) -> None:
    open_run(page, app, "?run=shared-prefix&step=30")
    run = EventLog.load(taken(page, "This run (.cutaway)", tmp_path), check=True)
    assert run.last_step > 30 and run.started is not None
    trace = json.loads(taken(page, "Trace for Perfetto", tmp_path).read_text())
    assert len(trace["traceEvents"]) > 100
    with zipfile.ZipFile(taken(page, "Tables as CSV", tmp_path)) as archive:
        assert set(archive.namelist()) == {"requests.csv", "steps.csv", "runs.csv", "tokens.csv"}
        assert archive.read("steps.csv").count(b"\n") == run.last_step + 1
    drawing = taken(page, "figures as drawings", tmp_path).read_text()
    assert drawing.startswith("<svg") and "<path" in drawing
    picture = taken(page, "This page as a picture", tmp_path).read_bytes()
    width, height = struct.unpack(">II", picture[16:24])
    page.get_by_role("button", name="Download").click()
    page.get_by_role("menuitem", name="One card as a picture").click()
    outline = page.locator("body > div[style*='z-index: 9999']")
    for _ in range(60):  # the page may take a while to begin to choose
        page.mouse.move(5, 5)
        page.get_by_text("Requests over steps").first.hover()
        if outline.count() and outline.is_visible():
            break
        page.wait_for_timeout(500)
    with page.expect_download() as info:
        page.get_by_text("Requests over steps").first.click()
    info.value.save_as(tmp_path / "card.png")
    card = struct.unpack(">II", (tmp_path / "card.png").read_bytes()[16:24])
    assert 300 < card[0] < width and 100 < card[1] < height
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and width > 600 and height > 600 and len(picture) > 30_000


@pytest.mark.long
def test_the_run_as_one_html_file(page: Page, app: str, tmp_path: Path, well_behaved: list[str]) -> None:
    open_run(page, app, "?run=shared-prefix&step=30")
    whole, one = (taken(page, label, tmp_path) for label in ("The whole run as HTML", "This page as HTML"))
    assert whole.suffix == one.suffix == ".html" and 300_000 < one.stat().st_size < whole.stat().st_size < 2_000_000
    page.goto(whole.as_uri())
    expect(page.get_by_role("button", name="KV cache")).to_be_visible()
    assert well_behaved == [f"asked another host: {whole.as_uri()}"]  # itself, and nothing else
    well_behaved.clear()


@pytest.mark.long
def test_a_run_is_repeated_or_it_is_said_what_is_missing(page: Page, app: str, make_run: Callable[[int], Path]) -> None:
    page.goto(app)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Open a saved run").click()
    chooser.value.set_files(make_run(30))
    page.get_by_text("Re-run and verify").click()
    expect(page.locator(".rp-report")).to_contain_text("The model of this run is not here: simulated")
