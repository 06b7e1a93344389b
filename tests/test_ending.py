"""A run of the tests ends, whatever a test left behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HELD_UP = {
    "a thread that never ends": "threading.Thread(target=time.sleep, args=(600,), name='endless').start()",
    "an atexit handler that waits": "atexit.register(time.sleep, 600)",
}


def run(folder: Path, test: str, patience: float) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(f"import atexit, threading, time\n\ndef test_it():\n{test}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TEST_PATIENCE_S": str(patience)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.ending", "-p", "no:cacheprovider", "test_it.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("earned", [0, 1])
@pytest.mark.parametrize("left_behind", HELD_UP)
def test_what_holds_it_up_is_shown_and_the_tests_own_exit_status_stays(left_behind: str, earned: int, tmp_path: Path) -> None:
    done = run(tmp_path, f"    {HELD_UP[left_behind]}\n    assert {not earned}\n", patience=1)
    assert done.returncode == earned
    assert f"1 {'failed' if earned else 'passed'}" in done.stdout
    assert f"The tests are over (exit status {earned}), but the process did not end within 1 s" in done.stderr
    assert done.stderr.count("most recent call first") >= 2


@pytest.mark.parametrize("earned", [0, 1])
def test_taking_the_interpreter_apart_holds_nothing_up(earned: int, tmp_path: Path) -> None:
    waits = "    class Waits:\n        def __del__(self, sleep=time.sleep): sleep(600)\n    threading.kept = Waits()\n"
    done = run(tmp_path, f"{waits}    assert {not earned}\n", patience=60)
    assert (done.returncode, done.stderr) == (earned, "")
    assert f"1 {'failed' if earned else 'passed'}" in done.stdout


def test_a_run_that_ends_by_itself_says_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, "    threading.Thread(target=time.sleep, args=(0.01,)).start()\n", patience=60)
    assert (done.returncode, done.stderr) == (0, "")
