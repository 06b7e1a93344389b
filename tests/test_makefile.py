"""The Makefile's promises, with a stand-in for Python: what it says when something is missing, and that a failure is no stamp."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="no make")

# A Python that answers the Makefile's questions: it notes its calls, "makes" environments by copying itself into them,
# lacks what the file `lacks` names, and fails to install while the file `broken` is there.
PYTHON = """#!/bin/sh
here={here}
echo "$@" >> "$here/calls"
lacks=$(cat "$here/lacks" 2>/dev/null)
case "$*" in
    *version_info*) [ "$lacks" != version ] ;;
    *"import ensurepip, venv"*) [ "$lacks" != venv ] ;;
    *"import torch, triton"*) [ "$lacks" != torch ] ;;
    "-m venv --clear "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
    "-m pip install "*) [ ! -e "$here/broken" ] ;;
    *works*) echo works ;;
    --version) echo Python 3.11.0 ;;
esac
"""


class Machine:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "python"
        self.python.write_text(PYTHON.format(here=folder))
        self.python.chmod(0o755)
        self.venv = folder / "venv"

    def make(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        command = ["make", "--no-print-directory", f"VENV={self.venv}", f"PYTHON=no-such-python {self.python}", *arguments]
        return subprocess.run(command, cwd=ROOT, env={**clean, **env}, capture_output=True, text=True, timeout=60)

    def installs(self) -> int:
        calls = self.folder / "calls"
        return calls.read_text().count("-m pip install") if calls.exists() else 0


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_no_python_that_fits(machine: Machine) -> None:
    (machine.folder / "lacks").write_text("version")
    done = machine.make("model")
    assert done.returncode != 0 and "No Python 3.11, 3.12 or 3.13 among: no-such-python" in done.stderr
    assert machine.installs() == 0


def test_python_without_venv(machine: Machine) -> None:
    (machine.folder / "lacks").write_text("venv")
    done = machine.make("model")
    assert done.returncode != 0 and "no venv or no ensurepip" in done.stderr and "python3-venv" in done.stderr
    assert machine.installs() == 0


def test_a_failed_install_is_tried_again_and_a_good_one_is_not(machine: Machine) -> None:
    (machine.folder / "broken").touch()
    assert machine.make("model").returncode != 0 and machine.installs() == 1
    (machine.folder / "broken").unlink()
    assert machine.make("model").returncode == 0 and machine.installs() == 2
    assert machine.make("model").returncode == 0 and machine.installs() == 2
    calls = (machine.folder / "calls").read_text()
    assert calls.count("-m venv") == 1 and calls.count("-m engine.model.store") == 2


def test_an_environment_whose_python_is_gone_is_made_anew(machine: Machine) -> None:
    assert machine.make("model").returncode == 0
    (machine.venv / "bin" / "python").unlink()
    assert machine.make("model").returncode == 0 and machine.installs() == 2


def test_the_tests_tools_include_the_app(machine: Machine) -> None:
    assert machine.make(str(machine.venv / ".installed-test")).returncode == 0
    assert ".[test]" in (machine.folder / "calls").read_text()
    assert machine.make("model").returncode == 0 and machine.installs() == 1


def test_the_app_listens_here_only_and_opens_a_browser_only_where_there_is_a_screen(machine: Machine) -> None:
    for display in ("", ":0"):
        (machine.folder / "calls").write_text("")
        assert machine.make("app", "PORT=5123", DISPLAY=display, WAYLAND_DISPLAY="").returncode == 0
        serve = next(line for line in (machine.folder / "calls").read_text().splitlines() if "panel serve" in line)
        assert "--address 127.0.0.1 --port 5123" in serve
        if os.uname().sysname != "Darwin":
            assert ("--show" in serve) is bool(display)


def test_gpu_takes_the_first_python_that_has_torch_as_it_is(machine: Machine) -> None:
    done = machine.make("gpu", "GPU=--seconds 99")
    assert done.returncode == 0
    calls = (machine.folder / "calls").read_text().splitlines()
    assert calls[-1] == "-m tests.gpu --seconds 99" and machine.installs() == 0


def test_gpu_without_torch(machine: Machine) -> None:
    (machine.folder / "lacks").write_text("torch")
    done = machine.make("gpu")
    assert done.returncode != 0 and "No Python with torch, triton and pytest among: no-such-python" in done.stderr
