"""The widgets in a real kernel, without a page: cells return while the engine runs, interrupts and restarts leave nothing behind."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

ROOT = Path(__file__).parents[3]
VIEW = "application/vnd.jupyter.widget-view+json"
SETUP = """
import time
from engine import SamplingParams
from explorer import Explorer, KVCacheView, RunView, explore
from tests.engine.engines import tiny_engine
engine = tiny_engine(max_num_seqs=4)
long = SamplingParams(max_tokens=100, ignore_eos=True)
def until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)
"""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _kernels_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))))


@pytest.mark.long
def test_a_notebook_drives_a_view_while_the_engine_runs(tmp_path: Path) -> None:
    cells = [
        SETUP,
        "view = KVCacheView(engine)\nview",
        "ids = [engine.add_request(f'request {i}', long) for i in range(6)]\nassert engine.has_unfinished()",
        "until(lambda: not engine.scheduler.running and not engine.scheduler.waiting)\nuntil(lambda: view.source.store.last_step >= 100)",
        "view.refresh()\nassert view.step == view.step_slider.max == view.source.store.last_step",
        "view.step = 50\nassert not view.live and 'Step 50</b>' in view.shown['kv-cache'].view.used_now.object",
        "view.selection = {'request_id': ids[0]}\nassert view.shown['kv-cache'].view.table.selected_request == ids[0]",
        "view.max_num_seqs.value = 2\nuntil(lambda: engine.config.max_num_seqs == 2)",
        "with engine.record() as log:\n    engine.generate('recorded', long)\nExplorer(log)",
        "view.save('run.cutaway')\nExplorer.load('run.cutaway')",
        "engine.check_integrity()\nengine.close()\nuntil(lambda: view.source.session.status == 'died')\nview.refresh()",
        "assert 'The engine was closed' in view.shown['kv-cache'].head.text.object",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    views = [i for i, cell in enumerate(notebook.cells) for output in cell.outputs if VIEW in output.get("data", ())]
    assert [i for i in views if i] == [1, 8, 9]  # the first cell's own is a progress bar
    assert all(output.output_type != "error" for cell in notebook.cells for output in cell.outputs)


class Kernel:
    """A kernel, spoken to message by message."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel(kernel_name="python3", startup_timeout=120)

    def start(self, code: str) -> str:
        return str(self.client.execute(code))

    def end(self, message_id: str) -> dict[str, Any]:
        """The reply to a cell."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                reply: dict[str, Any] = self.client.get_shell_msg(timeout=1)
            except Empty:
                continue
            if reply["parent_header"].get("msg_id") == message_id:
                return dict(reply["content"])
        raise AssertionError("the cell did not end")

    def run(self, code: str) -> None:
        content = self.end(self.start(code))
        while content["status"] == "aborted":  # a kernel refuses what comes right behind an error
            time.sleep(0.2)
            content = self.end(self.start(code))
        assert content["status"] == "ok", "\n".join(content.get("traceback", [content.get("evalue", "")]))


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    made = Kernel()
    yield made
    made.client.stop_channels()
    made.manager.shutdown_kernel(now=True)


def test_an_interrupted_cell_leaves_engine_and_views_whole(kernel: Kernel) -> None:
    kernel.run(
        SETUP + "run = RunView(engine)\nfor _ in range(5):\n    run.source.session.submit('from the view', long, run.clock.owner)"
    )
    cell = kernel.start("while True:\n    engine.generate(['never ends', 'nor this'], long)")
    time.sleep(1.5)
    kernel.manager.interrupt_kernel()
    content = kernel.end(cell)
    assert content["status"] == "error" and content["ename"] == "KeyboardInterrupt"
    kernel.run(
        "engine.check_integrity()\n"
        "until(lambda: run.source.session.process.unfinished == [])\n"
        "assert engine.pool.num_used == 0 and not engine.scheduler.running\n"
        "assert len(engine.generate('it goes on', long)[0].token_ids) == 100\n"
        "until(lambda: {r.finish_reason for r in run.source.store.latest().requests.values()} == {'length', 'abort'})"
    )


@pytest.mark.long
def test_a_restarted_kernel_leaves_no_engine_behind(kernel: Kernel, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    kernel.run(
        SETUP
        + "shown = explore(model=engine.config.model, prompt='x', params=long, dtype='float32', device='cpu', num_kv_blocks=64, max_model_len=128)\n"
        "until(lambda: shown.source.store.last_step >= 100)\n"
        f"open({str(note)!r}, 'w').write(str(shown.source.session.process.pid))"
    )
    process = psutil.Process(int(note.read_text()))
    assert process.is_running()
    kernel.manager.restart_kernel(now=True)
    process.wait(30)
    assert not process.is_running()
