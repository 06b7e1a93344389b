"""A run of the tests that has told its result must also end: what holds it up is shown, and the run ends as the tests went.

After the summary the interpreter still joins threads, calls what was registered with ``atexit``, and takes objects apart. If that
takes longer than PATIENCE_S, all threads' stacks are printed and the process ends with the exit status that the tests earned. What
comes last, taking the interpreter itself apart with torch and all its threads in it, is left to the system: the process just ends.
"""

import atexit
import faulthandler
import os
import sys
import threading
import time

import pytest

PATIENCE_S = float(os.environ.get("TEST_PATIENCE_S", "60"))
WORKERS_PATIENCE_S = 5.0  # of one of several processes (pytest-xdist), which is killed 10 s after it was asked to end

_earned: dict[str, int] = {}


def _end() -> None:
    """After all other handlers, since it was registered before them: nothing of Python's is left to do."""
    if "status" in _earned and not _earned.get("worker"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_earned["status"])


atexit.register(_end)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
    _earned["status"] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if "status" not in _earned:
        return  # no test was meant to run: --version, --help
    stderr = os.dup(2)  # the real one: pytest has put it back by now, and at the end Python's objects for it are gone
    _earned["worker"] = hasattr(config, "workerinput")
    if _earned["worker"]:  # it is not at its end yet: it waits for the others
        watch, patience = _watch_a_worker, min(PATIENCE_S, WORKERS_PATIENCE_S)
    else:
        watch, patience = _watch, PATIENCE_S
    threading.Thread(target=watch, args=(stderr, patience, _earned["status"]), name="end of the tests", daemon=True).start()


def _watch_a_worker(stderr: int, patience: float, earned: int) -> None:
    while threading.main_thread().is_alive():
        time.sleep(0.2)
    _watch(stderr, patience, earned)


def _watch(stderr: int, patience: float, earned: int) -> None:
    time.sleep(patience)
    said = f"\nThe tests are over (exit status {earned}), but the process did not end within {patience:.0f} s. Its threads:\n"
    os.write(stderr, said.encode())
    faulthandler.dump_traceback(file=stderr, all_threads=True)
    os._exit(earned)
