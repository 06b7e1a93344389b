"""Reading, tidying and running the notebooks. ``python -m tests.notebooks.books`` makes them ready to be committed.

Cells say by tags (metadata, "tags") what they are: "question", "prediction" (the reader writes a number there), "view", "taught"
(what is commonly taught wrong), "exercise" (a cell to fill in), "check" (says whether it is solved, and never raises; folded), "solution" (text
with the solved exercise as its one Python block), "answer" (what was measured here).
"""

import copy
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
OFFLINE = Path(__file__).resolve().parent / "offline"
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_TIMEOUT_S = 300


def paths() -> list[Path]:
    """The notebooks, in teaching order."""
    return sorted(FOLDER.glob("*.ipynb"))


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def tidy(book: Any) -> Any:
    """A copy as it is committed: no outputs, no counts, nothing of the machine that ran it."""
    book = copy.deepcopy(book)
    book.metadata = nbformat.from_dict(METADATA)
    book.nbformat, book.nbformat_minor = 4, 5
    for cell in book.cells:
        tags = cell.metadata.get("tags", [])
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if "view" in tags:
            cell.metadata["scrolled"] = False  # Notebook 7 would cut a tall view to a box of its own
        if "check" in tags:
            cell.metadata["jupyter"] = {"source_hidden": True}  # its hints would give the answer away
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return book


def written(book: Any) -> str:
    return nbformat.writes(book) + "\n"


def tagged(book: Any, tag: str) -> list[Any]:
    return [cell for cell in book.cells if tag in cell.metadata.get("tags", [])]


def solution(cell: Any) -> str:
    """The Python of a "solution" cell. ValueError unless it has exactly one block."""
    blocks = re.findall(r"```python\n(.*?)```", cell.source, re.S)
    if len(blocks) != 1:
        raise ValueError(f"a solution needs one Python block, got {len(blocks)} in {cell.id}")
    return blocks[0]


def said(cell: Any) -> str:
    """What a code cell printed and showed, as plain text."""
    parts = []
    for output in cell.outputs:
        if output.output_type == "stream":
            parts.append(output.text)
        elif output.output_type in ("execute_result", "display_data"):
            parts.append(output.data.get("text/plain", ""))
        else:
            parts.append("\n".join(output.traceback))
    return "\n".join(parts)


class Running:
    """A notebook in a kernel of its own that reaches nothing but this machine; its cells are run one by one."""

    def __init__(self, book: Any, folder: Path) -> None:
        self.book = copy.deepcopy(book)
        self.folder = folder
        self.client = NotebookClient(
            self.book, timeout=CELL_TIMEOUT_S, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
        )
        self.seconds = 0.0  # for its cells, the first time through
        self.cpu_seconds = 0.0  # of the kernel, for everything: what a busy machine cannot stretch

    def cells(self) -> Iterator[Any]:
        """Run the cells from the first to the last; each is given when it has run. CellExecutionError: a cell raised."""
        inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(OFFLINE), str(ROOT), *inherited]), "HF_HUB_OFFLINE": "1"}
        with self.client.setup_kernel(env=env):
            for index, cell in enumerate(self.book.cells):
                start = time.monotonic()
                self.client.execute_cell(cell, index)
                self.seconds += time.monotonic() - start
                self.cpu_seconds = sum(psutil.Process(self.client.km.provisioner.pid).cpu_times()[:2])
                yield cell

    def again(self, cell: Any, source: str | None = None) -> str:
        """Run a cell another time, perhaps with other text in it; what it said."""
        other = copy.deepcopy(cell)
        other.source = cell.source if source is None else source
        index = next(i for i, each in enumerate(self.book.cells) if each.id == cell.id)
        text = said(self.client.execute_cell(other, index))
        self.book.cells[index] = cell  # the client has put the other one in its place
        return text


if __name__ == "__main__":
    for path in paths():
        text = written(tidy(read(path)))
        if text != path.read_text(encoding="utf-8"):
            path.write_text(text, encoding="utf-8")
            print(f"tidied {path.relative_to(ROOT)}")
