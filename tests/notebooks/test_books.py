"""Each notebook runs from top to bottom without a network; its exercise is open, can be solved, and answers mistakes with a hint."""

import copy
import re
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.conftest import CI
from tests.notebooks import books
from tests.notebooks.wrong import WRONG

BOOKS = {path.stem: books.read(path) for path in books.paths()}
WORKSHOP = books.ROOT / "docs" / "workshop.md"
REQUIRED = ("question", "prediction", "view", "taught", "exercise", "check", "solution", "answer")


# --------------------------------------------------------------------------------------------------------- really run


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", BOOKS)
def test_it_runs_offline_and_its_exercise_can_be_solved_and_missed(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], record_property: Any
) -> None:
    """One run of the notebook as it is committed. At the check cell the exercise is also answered rightly; where there is time (each answer
    runs the engine again), wrongly before that, and left open again."""
    (source,) = (books.solution(cell) for cell in books.tagged(BOOKS[name], "solution"))
    (exercise,) = books.tagged(BOOKS[name], "exercise")
    running = books.Running(BOOKS[name], tmp_path)
    verdicts, tried = [], [] if CI else WRONG[name]
    for cell in running.cells():
        if cell.id == exercise.id:
            open_exercise = cell
        if "check" in cell.metadata.get("tags", []):
            verdicts.append(books.said(cell))
            assert "Not yet: fill in the exercise" in verdicts[0], "the exercise as it is committed must be open"
            for wrong in tried:
                running.again(open_exercise, wrong.source)
                answer = running.again(cell)
                assert "Not yet: got" in answer and wrong.hint in answer, (wrong.source, answer)
            running.again(open_exercise, source)
            answer = running.again(cell)
            assert "✓ Right." in answer, answer
            if not CI:
                running.again(open_exercise)
                assert running.again(cell) == verdicts[0]
    assert len(verdicts) == 1
    for figure in ("seconds", "cpu_seconds"):
        record_property(figure, round(getattr(running, figure), 1))
    with capsys.disabled():
        print(f"\n{name}: {running.seconds:.0f} s from top to bottom (budget: 60 s on two quiet cores)", end="")
        print(
            f", {running.cpu_seconds:.0f} s of one core with the kernel's start and the exercise tried {len(tried) + (1 if CI else 2)} more times"
        )


@pytest.mark.slow
def test_the_network_is_out_of_reach(tmp_path: Path) -> None:
    """The guard that the runs above rely on, also in a process that a cell starts."""
    connect = "import socket; socket.create_connection(('203.0.113.1', 80), timeout=3)"
    code = (
        f"import subprocess, sys\ntry:\n    {connect}\nexcept OSError as error:\n    print('here:', error)\n"
        f"done = subprocess.run([sys.executable, '-c', {connect!r}], capture_output=True, text=True)\nprint('child:', done.stderr.splitlines()[-1])"
    )
    book = books.nbformat.v4.new_notebook(cells=[books.nbformat.v4.new_code_cell(code)])
    (cell,) = books.Running(book, tmp_path).cells()
    said = books.said(cell)
    assert re.search(r"here: .*must run offline", said) and re.search(r"child: OSError: .*must run offline", said), said


# ----------------------------------------------------------------------------------------------------------- as committed


def test_there_are_notebooks() -> None:
    assert list(BOOKS)[:3] == ["00_quickstart", "01_kv_cache", "02_reading_a_run"]


@pytest.mark.parametrize("name", BOOKS)
def test_nothing_of_a_run_is_committed(name: str) -> None:
    """No outputs, no counts, no machine: exactly what ``python -m tests.notebooks.books`` leaves."""
    text = (books.FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert text == books.written(books.tidy(BOOKS[name])), "run: python -m tests.notebooks.books"


def test_tidying_takes_away_what_a_run_leaves() -> None:
    book = copy.deepcopy(BOOKS["00_quickstart"])
    cell = next(cell for cell in book.cells if cell.cell_type == "code")
    cell.outputs = [books.nbformat.v4.new_output("stream", text="/a/path")]
    cell.execution_count = 7
    cell.metadata["execution"] = {"iopub.execute_input": "2026-01-01"}
    book.metadata["kernelspec"]["name"] = "my-env"
    book.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {}}
    assert books.written(books.tidy(book)) == books.written(BOOKS["00_quickstart"])


@pytest.mark.parametrize("name", BOOKS)
def test_it_has_what_a_lesson_has(name: str) -> None:
    book = BOOKS[name]
    order = [tag for cell in book.cells for tag in cell.metadata.get("tags", [])]
    assert set(order) == set(REQUIRED)
    assert order.count("question") == order.count("exercise") == order.count("check") == order.count("solution") == 1
    assert order.index("question") < order.index("prediction") < order.index("answer")
    assert order.index("exercise") + 1 == order.index("check") and order.index("check") + 1 == order.index("solution")
    for cell in books.tagged(book, "prediction"):
        assert re.fullmatch(r"\w+ = None +# your number.*", cell.source), cell.source
        variable = cell.source.split()[0]
        assert any(f"compare({variable}, " in c.source for c in books.tagged(book, "answer")), f"{variable} is never compared"
    ids = [cell.id for cell in book.cells]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[a-z0-9-]+", i) for i in ids)
    assert re.search(r"\*\*Sources\.\*\*", book.cells[-1].source)
    assert any(re.search(r"kinds=.*\"measured\"", cell.source) for cell in book.cells)


@pytest.mark.parametrize("name", BOOKS)
def test_the_exercise_is_open_and_the_solution_is_hidden(name: str) -> None:
    (exercise,) = books.tagged(BOOKS[name], "exercise")
    (solution,) = books.tagged(BOOKS[name], "solution")
    assert "None" in exercise.source
    assert solution.source.startswith("<details><summary>") and solution.source.endswith("</details>")
    assert set(re.findall(r"^(?:def )?(\w+)", exercise.source, re.M)) <= set(
        re.findall(r"\b(\w+)\b", books.solution(solution))
    ), "the solution answers something else"


def test_every_notebook_has_its_mistakes() -> None:
    assert set(WRONG) == set(BOOKS)


# ------------------------------------------------------------------------------------------------------------ links, guide


def documents() -> dict[str, str]:
    """Everything a reader can click in: the notebooks' texts and the guide."""
    texts = {f"notebooks/{n}.ipynb": "\n".join(c.source for c in b.cells if c.cell_type == "markdown") for n, b in BOOKS.items()}
    return {**texts, "docs/workshop.md": WORKSHOP.read_text(encoding="utf-8")}


@pytest.mark.parametrize("name", documents())
def test_links_resolve(name: str) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", documents()[name])
    assert links
    for link in links:
        if link.startswith("http"):
            assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}|http://127\.0\.0\.1:\d+/\S*", link), f"{name}: {link}"
        else:
            assert (books.ROOT / Path(name).parent / link.split("#")[0]).exists(), f"{name}: {link}"


def test_the_guide_names_every_notebook_in_teaching_order() -> None:
    named = re.findall(r"\]\(\.\./notebooks/(\w+)\.ipynb\)", WORKSHOP.read_text(encoding="utf-8"))
    assert list(dict.fromkeys(named)) == list(BOOKS)


def test_each_notebook_points_to_the_next() -> None:
    names = list(BOOKS)
    for this, following in pairwise(names):
        assert f"]({following}.ipynb)" in BOOKS[this].cells[-1].source


# --------------------------------------------------------------------------------------------------- what single cells say


def cell_of(name: str, cell_id: str) -> str:
    (source,) = (cell.source for cell in BOOKS[name].cells if cell.id == cell_id)
    return str(source)


def test_the_overview_of_a_run_shows_a_usual_step_and_counts_steps() -> None:
    """On four events: three steps until the first token, then pauses of 5, 90 and 7 ms, of which 7 is the usual one."""
    said: dict[str, Any] = {}
    there: dict[str, Any] = {"table": lambda columns, rows, **more: said.update(columns=columns, rows=rows), "median": median}
    there |= {"RequestAdded": Came, "TokenSampled": Wrote, "log": [Came(2), Wrote(5, 0, 400.0)]}
    there["log"] += [Wrote(6, 1, 5.0), Wrote(9, 2, 90.0), Wrote(10, 3, 7.0)]
    exec(cell_of("02_reading_a_run", "overview"), there)
    (row,) = (dict(zip(said["columns"], row, strict=True)) for row in said["rows"])
    assert row["usual pause, ms"] == 7.0 and row["longest pause, ms"] == 90.0 and row["arrived after step"] == 2
    assert there["seen"]["r"]["ttft_steps"] == 3 and there["seen"]["r"]["pause_steps"] == 3


class Came:
    def __init__(self, step: int) -> None:
        self.request_id, self.step, self.prompt_token_ids = "r", step, [1, 2, 3]


class Wrote:
    def __init__(self, step: int, index: int, step_ms: float) -> None:
        self.request_id, self.step, self.index, self.step_ms = "r", step, index, step_ms


def test_a_claim_about_the_first_word_rests_on_what_cannot_be_noisy() -> None:
    budgets, claim = cell_of("02_reading_a_run", "chunk-budgets"), cell_of("02_reading_a_run", "stall-answer")
    assert "steps to summary's first token" in budgets and "ms (noisy)" in budgets
    assert "fewer steps" in claim and "noisy" in claim and "first word" not in claim


def test_steps_of_the_warm_up_are_explained() -> None:
    """What the cell that stages the run sends after 0, 4 and 6 steps stands in the log two steps later."""
    assert "max_tokens=2" in cell_of("02_reading_a_run", "stage")
    assert "after steps 2, 6 and 8" in cell_of("02_reading_a_run", "overview-text")


def test_the_half_day_teaches_every_notebook_and_its_page() -> None:
    guide = WORKSHOP.read_text(encoding="utf-8")
    short, rest = guide.split("## 90 minutes")[1].split("## Half a day")
    half, wrong = rest.split("## What people get wrong")
    plan = re.findall(r"^\| (\d+)–(\d+) \|(.*)$", half, re.M)
    assert all(one[1] == following[0] for one, following in pairwise(plan)), "a gap in the plan"
    assert f"Half a day: {plan[-1][1]} minutes" in guide
    where = " ".join(what for _begin, _end, what in plan)
    for name in BOOKS:
        assert f"notebook {name[:2]}" in where
    assert "| Sampling |" in where and "| Sampling |" in short
    for said in ("Top-p 0.9", "A negative logit is multiplied", "More beams"):
        assert said in wrong


def test_the_guide_says_one_thing_of_the_running_time() -> None:
    guide = WORKSHOP.read_text(encoding="utf-8")
    assert guide.count("less than a minute") == 1 and "less than two minutes" not in guide
