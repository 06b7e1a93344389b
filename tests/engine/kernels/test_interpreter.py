"""The tests in ``running`` under Triton's interpreter, each file in a process of its own: what a process decorates is either all
interpreted or all compiled."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.interpreter import environment

ROOT = Path(__file__).parents[3]
LONG = ("test_flash_backward", "test_sample")  # of kernels that the engine does not run
FILES = sorted((Path(__file__).parent / "running").glob("test_*.py"))


def test_there_are_files() -> None:
    assert len(FILES) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=[pytest.mark.long] if p.stem in LONG else []) for p in FILES], ids=lambda path: path.stem
)
def test_under_the_interpreter(path: Path) -> None:
    env = {k: v for k, v in environment().items() if not k.startswith("PYTEST_")}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--durations=5", str(path)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600, check=False)
    report = done.stdout + done.stderr
    assert done.returncode == 0, report
    assert " passed" in report and "skipped" not in report, report
