"""Kernels beside the app: answers are kept, what nobody asks for any more is given up; and what the real ones say."""

import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.kernels.lazy import triton_version
from explorer.attention import lab
from explorer.attention.lab import Lab
from explorer.attention.rows import Schedule, dealt, derived, recorded
from explorer.attention.shape import Shape, row_scores
from explorer.attention.worker import decoded

ECHO = """
import json, sys, time
for line in sys.stdin:
    shape = json.loads(line)
    if shape["seq_len"] == 4096:
        time.sleep(60)
    if shape["seq_len"] == 2048:
        sys.exit(3)
    print(json.dumps({"tokens": shape["seq_len"]}), flush=True)
"""


class Echo(Lab):
    """Answers at once with the number of tokens; sleeps on 4096, ends on 2048."""

    begun = 0

    def _started(self) -> Any:
        if self._process is None or self._process.poll() is not None:
            self.begun += 1
            self._process = subprocess.Popen(
                [sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        return self._process


def told(made: Schedule) -> list[tuple[int, ...]]:
    """Tiles with their programs, rows and bytes, whatever the order: the interpreter takes the heads of a query tile first, a GPU
    its query tiles."""
    program = made.tiles["program"]
    row = made.programs["row"][program]
    columns = [made.programs["x"][program], made.programs["y"][program]]
    columns += [made.rows[name][row] for name in made.rows]
    columns += [made.tiles[name] for name in ("k", "kv_start", "kv_rows", "bytes", "masked")]
    return sorted(zip(*(column.tolist() for column in columns), strict=True))


def wait(found: Lab, who: str, shape: Shape, seconds: float = 60.0) -> dict[str, Any]:
    until = time.monotonic() + seconds
    while (answer := found.ask(who, shape)) is None:
        assert time.monotonic() < until, "no answer"
        time.sleep(0.02)
    return answer


@pytest.fixture
def echo() -> Any:
    made = Echo("interpret")
    yield made
    made.stop()
    assert made._process is None or made._process.poll() is not None


def test_an_answer_is_kept_and_one_process_gives_many(echo: Echo) -> None:
    assert wait(echo, "ann", Shape(seq_len=128)) == {"tokens": 128}
    assert wait(echo, "bob", Shape(seq_len=256)) == {"tokens": 256}
    assert echo.ask("cyd", Shape(seq_len=128)) == {"tokens": 128} and echo.begun == 1
    assert [shape.seq_len for shape, _answer in echo.known()] == [256, 128]


def test_a_job_is_given_up_when_its_knob_moves_again(echo: Echo) -> None:
    long = Shape(seq_len=4096)
    assert echo.ask("ann", long) is None
    while echo.seconds(long) is None:
        time.sleep(0.02)
    assert wait(echo, "ann", Shape(seq_len=64)) == {"tokens": 64}  # sooner than the minute that the other takes
    assert echo.begun == 2 and long not in dict(echo.known())


def test_a_job_goes_on_while_another_viewer_wants_it(echo: Echo) -> None:
    long = Shape(seq_len=4096)
    echo.ask("ann", long)
    echo.ask("bob", long)
    while echo.seconds(long) is None:
        time.sleep(0.02)
    echo.forget("ann")
    assert echo.seconds(long) is not None
    echo.forget("bob")
    until = time.monotonic() + 30
    while echo.seconds(long) is not None:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_process_that_ends_is_an_error_and_the_next_job_gets_another(echo: Echo) -> None:
    assert "ended (3)" in wait(echo, "ann", Shape(seq_len=2048))["error"]
    assert wait(echo, "ann", Shape(seq_len=64)) == {"tokens": 64} and echo.begun == 2


def test_a_process_that_ended_before_it_could_be_told_is_an_error_like_any_other(
    echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as m:
        gone = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        gone.wait()
        echo._process = gone
        m.setattr(gone, "poll", lambda: None)  # it ends between the look and the telling
        assert "ended (0)" in wait(echo, "ann", Shape(seq_len=128))["error"]
    assert wait(echo, "ann", Shape(seq_len=64)) == {"tokens": 64} and echo.begun == 1


def test_without_triton_the_answer_says_so(monkeypatch: pytest.MonkeyPatch, echo: Echo) -> None:
    monkeypatch.setattr(lab, "triton_version", lambda: None)
    answer = echo.ask("ann", Shape())
    assert answer is not None and "Triton is not installed" in answer["error"] and echo.begun == 0


@pytest.mark.slow
@pytest.mark.skipif(triton_version() is None, reason="needs Triton")
def test_what_the_kernel_records_is_what_its_arithmetic_says_and_ends_at_the_full_softmax() -> None:
    found = Lab("interpret")
    try:
        shape = Shape(seq_len=256, window=128, group=2)
        answer = wait(found, "ann", shape.run, 120)
        made = recorded({name: decoded(c) for name, c in answer["columns"].items()}, shape, answer["dropped"])
        expected = derived(shape)
        assert told(made) == told(expected)
        assert told(dealt(made, 8)) == told(expected)
        assert made.bytes_loaded == expected.bytes_loaded and made.bytes_stored == expected.bytes_stored
        for program in range(len(made.programs["row"])):
            row = int(made.programs["row"][program])
            last = int(made.rows["q_start"][row] + made.rows["q_rows"][row] - 1)
            scores = row_scores(shape, int(made.rows["head"][row]), last)
            tile = np.flatnonzero(made.tiles["program"] == program)[-1]
            assert made.tiles["m"][tile] == pytest.approx(scores.max(), rel=1e-6)
            assert made.tiles["total"][tile] == pytest.approx(np.exp(scores - scores.max()).sum(), rel=2e-6)
        assert answer["error_max"] < 2e-3
    finally:
        found.stop()


@pytest.mark.slow
@pytest.mark.skipif(triton_version() is None, reason="needs Triton")
def test_the_compilers_refusal_and_what_a_bad_shape_gets() -> None:
    found = Lab("compile")
    try:
        large = Shape(block_m=256, block_n=128, num_stages=5, num_warps=8, head_dim=128, gpu="rtx4090")
        answer = wait(found, "ann", large.compiled, 240)
        assert "out of resource: shared memory" in answer["refused"] and answer["shared_bytes"] > 101376
        assert "must be a power of two" in wait(found, "ann", replace(large, block_m=48).compiled, 240)["error"]
    finally:
        found.stop()
