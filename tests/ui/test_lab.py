"""The widgets in a real JupyterLab: what shows, what comes back, what is said when the kernel or the engine has gone."""

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.ui.lab import Notebook, notebook_in

pytestmark = [pytest.mark.ui, pytest.mark.slow]

BLOCKS = "Array.from(document.querySelector('[data-kind=canvas]') ? [...document.querySelectorAll('[data-kind=canvas]')].map(h => h.shadowRoot.querySelector('canvas.map')).filter(Boolean)[0].cutaway.codes : [])"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[Notebook]:
    """One notebook for all tests: kernels take long to start."""
    with notebook_in("lab", tmp_path_factory.mktemp("lab"), browser) as book:
        yield book


@pytest.fixture(autouse=True)
def nothing_wrong(notebook: Notebook) -> Iterator[None]:
    yield
    notebook.nothing_wrong()


def test_a_view_shows_and_follows_a_run_whose_cell_returns(notebook: Notebook) -> None:
    cell = notebook.run("kv = KVCacheView(engine)\nkv")
    expect(cell.locator(".ctm-root")).to_contain_text("All physical blocks")
    assert len(notebook.page.evaluate(BLOCKS)) == 64
    notebook.run("ids = [engine.add_request('hello there', many) for _ in range(3)]")
    expect(cell.locator(".ctm-root")).to_contain_text("Step 1")
    expect(cell.locator("[data-kind=figure] canvas").first).to_be_visible()
    expect(cell.locator(".ctm-root")).to_contain_text("0 of 64 blocks held")  # they ran to their end by themselves
    assert any(code & 255 == 1 for code in notebook.page.evaluate(BLOCKS))  # and left cached blocks
    assert notebook.value("engine.has_unfinished(), engine.check_integrity()") == [True, None]  # outputs wait for the cell
    assert notebook.value("sum(len(o.new_token_ids) for o in engine.step())") == 300


def test_a_click_in_the_canvas_comes_back_to_python(notebook: Notebook) -> None:
    canvas = notebook.page.locator("canvas.map").first
    box = canvas.evaluate("c => { const [x, y, s] = c.cutaway.place(5); return [x + s / 2, y + s / 2]; }")
    canvas.click(position={"x": box[0], "y": box[1]})
    notebook.page.wait_for_function(
        "[...document.querySelectorAll('[data-kind=canvas]')].some(h => h.shadowRoot.querySelector('canvas.map')?.cutaway.model.get('selected') === 5)"
    )
    assert notebook.value("kv.selection")["block_id"] == 5
    notebook.run("kv.selection = {'block_id': 7}")
    notebook.page.wait_for_function(
        "[...document.querySelectorAll('[data-kind=canvas]')].some(h => h.shadowRoot.querySelector('canvas.map')?.cutaway.model.get('selected') === 7)"
    )


def test_the_step_slider_moves_the_figures(notebook: Notebook) -> None:
    view = notebook.page.locator(".ctm-root").first
    last = notebook.value("kv.step")
    handle = notebook.page.locator(".noUi-handle").first
    handle.focus()
    notebook.page.keyboard.press("ArrowLeft")
    expect(view).to_contain_text(f"Step {last - 1} ·")
    assert notebook.value("kv.live, kv.step") == [False, last - 1]
    notebook.run("kv.step = 3")
    expect(view).to_contain_text("Step 3 ·")
    notebook.run("kv.live = True")
    expect(view).to_contain_text(f"Step {last} ·")


@pytest.mark.long
def test_a_view_that_stood_still_for_long_follows_again(notebook: Notebook) -> None:
    view = notebook.page.locator(".ctm-root").first
    notebook.run("import explorer.notebook.frame as frame\nusual, frame.UNSEEN_S = frame.UNSEEN_S, 8")
    notebook.run("for shown in kv.shown.values():\n    shown.frame._presumed_until = 0")  # its cell ran long ago
    for step in (4, 5):  # two changes at once, and then none until a page that has gone would be forgotten
        notebook.run(f"kv.step = {step}")
        expect(view).to_contain_text(f"Step {step} ·")
    notebook.page.wait_for_timeout(10_000)
    notebook.run("kv.step = 6")
    expect(view).to_contain_text("Step 6 ·")
    notebook.run("frame.UNSEEN_S = usual; kv.live = True")


def test_jslink_moves_a_view_from_another_slider(notebook: Notebook) -> None:
    cell = notebook.run(
        "import ipywidgets as w\nother = w.IntSlider(min=1, max=90, value=50)\nlinked = w.jslink((other, 'value'), (kv, 'step'))\nother"
    )
    view = notebook.page.locator(".ctm-root").first
    cell.locator(".noUi-handle").focus()
    notebook.page.keyboard.press("ArrowRight")
    notebook.page.keyboard.press("ArrowRight")
    expect(view).to_contain_text("Step 52 ·")
    notebook.run("linked.unlink(); kv.live = True")
    assert notebook.value("other.value") == 52


def test_two_views_drive_one_engine_also_while_a_cell_runs(notebook: Notebook) -> None:
    cell = notebook.run("run = RunView(engine)\nrun.max_tokens.value = 64\nrun")
    first = notebook.page.locator(".ctm-root").first
    before = notebook.value("kv.step")
    box, cells = cell.locator("textarea:visible"), notebook.page.locator(".jp-NotebookPanel .jp-CodeCell")
    many = cells.count()
    box.click()
    notebook.page.keyboard.type("add a bad daddy b")  # none of the notebook's commands: d d deletes a cell, a and b make one
    assert cells.count() == many and box.input_value().endswith("add a bad daddy b")
    busy = notebook.start("import time\ntime.sleep(6)\nprint('sl' + 'ept')")
    cell.get_by_role("button", name="Send").click()
    expect(cell.locator(".ctm-root")).to_contain_text("ask-0")
    expect(cell.locator(".ctm-root")).to_contain_text("64 tokens")
    expect(first).not_to_contain_text(f"Step {before} ·")
    assert "slept" not in busy.inner_text(), "the views did not move while the cell ran"
    expect(busy).to_contain_text("slept")
    assert notebook.value("run.step == kv.step, run.source is kv.source or run.source.session is kv.source.session") == [
        True,
        True,
    ]
    again = notebook.run("run")  # shown a second time: the same state
    expect(again.locator(".ctm-root")).to_contain_text("64 tokens")


def test_live_knobs_reach_the_engine_and_the_other_view(notebook: Notebook) -> None:
    notebook.run("run.max_num_seqs.value = 3")
    notebook.run("import time; time.sleep(1)")
    assert notebook.value("engine.config.max_num_seqs, kv.max_num_seqs.value") == [3, 3]


def test_what_goes_wrong_in_a_view_is_shown_below_it(notebook: Notebook) -> None:
    cell = notebook.run("broken = RunView(engine)\nbroken.shown['run'].view.composer.stop.disabled = False\nbroken")
    notebook.run(
        "def fail(*_a): raise RuntimeError('on purpose')\nbroken.shown['run'].view.composer.preset.param.watch(fail, 'value')"
    )
    cell.locator("select:visible").first.select_option(index=1)
    expect(cell.locator(".ctm-error")).to_contain_text("RuntimeError: on purpose")


def test_the_explorer_has_all_pages_in_tabs(notebook: Notebook) -> None:
    cell = notebook.run("all_pages = Explorer(engine)\nall_pages")
    expect(cell.locator(".ctm-root").first).to_contain_text("Answers, token by token")
    cell.get_by_role("tab", name="KV cache").click()
    expect(cell.locator(".ctm-root").nth(1)).to_contain_text("All physical blocks")
    expect(cell.locator(".ctm-root").nth(1).locator("[data-kind=figure] canvas").first).to_be_visible()
    assert notebook.value("all_pages.page") == "kv-cache"


def test_a_closed_engine_is_said(notebook: Notebook) -> None:
    notebook.run("engine.close()")
    for view in (notebook.page.locator(".ctm-root").first, notebook.page.locator(".ctm-root").nth(1)):
        expect(view.get_by_role("alert")).to_contain_text("The engine was closed. What it recorded is still here.")
    cell = notebook.run("try:\n    KVCacheView(engine)\nexcept ValueError as error:\n    print(error)")
    expect(cell).to_contain_text("the engine was closed: make a new one")


def test_a_restarted_kernel_is_said(notebook: Notebook) -> None:
    notebook.restart_kernel()
    for view in (notebook.page.locator(".ctm-root").first, notebook.page.locator(".ctm-root").nth(1)):
        expect(view.locator(".ctm-ended")).to_contain_text("The kernel was restarted: run the cell again.")
        expect(view.locator("h2").first).to_be_visible()  # what it showed last is still there
    notebook.wrong = [what for what in notebook.wrong if "WebSocket" not in what]
