"""Trials in fresh processes of this machine, a few at a time. A trial that crashes, hangs or runs out of memory takes nobody with it."""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from engine.tuning.trial import Report, Task, TrialFailed

_LAST_WORDS = 300  # characters of a dead process's output that its reason quotes


class Trials(Protocol):
    """Where trials run. ``submit`` returns at once; its future gives the Report, or raises TrialFailed with the reason."""

    def submit(self, task: Task, seconds: float | None) -> "Future[Report]":
        """``seconds``: how long it may take; None: as long as it does."""

    def close(self) -> None:
        """End what runs; nothing more is started."""


def run_apart(
    task: Task, seconds: float | None = None, started: Callable[["subprocess.Popen[bytes]"], None] | None = None
) -> Report:
    """Run one trial in a new process and wait for it. TrialFailed (with the reason) when it fails, dies or takes more than ``seconds``.

    ``started`` is given the process, which whoever has it may kill.
    """
    with tempfile.TemporaryDirectory(prefix="cutaway-trial-") as folder:
        answer, output = Path(folder, "answer"), Path(folder, "output")
        order = pickle.dumps({"task": pickle.dumps(task), "answer": str(answer), "path": [p or os.getcwd() for p in sys.path]})
        try:
            with output.open("wb") as said:
                process = subprocess.Popen(
                    [sys.executable, "-m", "engine.tuning.worker"], stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT,
                    env=_environment(),
                )  # fmt: skip
        except OSError as error:
            raise TrialFailed(f"no process could be made: {error}") from None
        assert process.stdin is not None
        try:
            if started is not None:
                started(process)
            with contextlib.suppress(OSError):  # it is dead already: what it said will tell
                process.stdin.write(order)
                process.stdin.flush()
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TrialFailed(f"it took more than {seconds:.3g} s") from None
        finally:
            process.kill()
            process.wait()
            with contextlib.suppress(OSError):  # bytes that a dead process did not take
                process.stdin.close()
        return _read(answer, output, process.returncode)


def _read(answer: Path, output: Path, returncode: int) -> Report:
    if not answer.exists():
        words = output.read_text(encoding="utf-8", errors="replace").strip()[-_LAST_WORDS:]
        how = f"signal {-returncode}" if returncode < 0 else f"status {returncode}"
        raise TrialFailed(f"its process ended with {how}" + (f": {words}" if words else ""))
    found = pickle.loads(answer.read_bytes())  # written by our own child, into a folder that only this user can reach
    if isinstance(found, str):
        raise TrialFailed(found)
    return found


def _environment() -> dict[str, str]:
    root = Path(__file__).resolve().parents[2]
    environment = dict(os.environ)
    environment.setdefault("GOMP_SPINCOUNT", "10000")  # as for the engine's own process: see engine.child
    if not root.name.endswith("-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return environment


class ProcessTrials:
    """As many at once as are submitted. With more than one they take the machine from each other, which the measures show."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._threads: set[threading.Thread] = set()

    def submit(self, task: Task, seconds: float | None) -> "Future[Report]":
        done: Future[Report] = Future()
        done.set_running_or_notify_cancel()
        # A daemon: an interpreter that ends waits for no trial (and the trial's process ends with it).
        thread = threading.Thread(target=self._run, args=(task, seconds, done), name="trial", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()
        return done

    def _run(self, task: Task, seconds: float | None, done: "Future[Report]") -> None:
        mine: list[subprocess.Popen[bytes]] = []

        def started(process: "subprocess.Popen[bytes]") -> None:
            mine.append(process)
            with self._lock:
                self._processes.add(process)
                if self._closed:
                    process.kill()

        try:
            report = run_apart(task, seconds, started)
        except Exception as error:  # whatever it is, somebody waits for it
            done.set_exception(error)
        else:
            done.set_result(report)
        finally:
            with self._lock:
                self._processes.difference_update(mine)
                self._threads.discard(threading.current_thread())

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
            threads = list(self._threads)
        for thread in threads:
            thread.join()
