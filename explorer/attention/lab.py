"""Kernels run and compiled beside the app, in a process for each, one job after another.

Who asks gets what is known, and asks again later. What nobody asks for any more is given up: a knob has moved again.
"""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from typing import Any

from engine.kernels.interpreter import environment
from engine.kernels.lazy import triton_version
from explorer.attention.shape import Shape
from explorer.i18n import _

KEPT = 64  # answers
IDLE_S = 60.0  # after which a process that nobody needs ends
PATIENCE_S = 3.0  # a wish that was not renewed for so long is given up
NO_TRITON = _(
    "Triton is not installed here, so the kernel can be neither run nor compiled. What follows from its arithmetic is shown."
)


class Lab:
    """``kind``: "interpret" or "compile", see ``explorer.attention.worker``."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._answers: OrderedDict[Shape, dict[str, Any]] = OrderedDict()
        self._wishes: dict[str, tuple[Shape, float]] = {}  # who asks -> what, and when last
        self._running: tuple[Shape, float] | None = None
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()
        self._ended = False  # by us: what was running is given up
        atexit.register(self.stop)

    def ask(self, who: str, shape: Shape) -> dict[str, Any] | None:
        """The answer; None: not yet. Has to be asked again and again until then, or it is given up."""
        with self._changed:
            if shape in self._answers:
                self._answers.move_to_end(shape)
                self._wishes.pop(who, None)
                return self._answers[shape]
            if triton_version() is None:
                return {"error": NO_TRITON}
            self._wishes[who] = (shape, time.monotonic())
            self._give_up()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"attention-{self.kind}", daemon=True)
                self._thread.start()
            self._changed.notify()
            return None

    def known(self) -> list[tuple[Shape, dict[str, Any]]]:
        """All answers that are kept, oldest first."""
        with self._changed:
            return list(self._answers.items())

    def seconds(self, shape: Shape) -> float | None:
        """How long this job has been running; None: it waits for another one, or is not asked for."""
        running = self._running
        return time.monotonic() - running[1] if running is not None and running[0] == shape else None

    def forget(self, who: str) -> None:
        with self._changed:
            self._wishes.pop(who, None)
            self._give_up()

    def stop(self) -> None:
        """End the process and the thread."""
        with self._changed:
            self._wishes.clear()
            self._end()
            thread = self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(timeout=0.0 if thread is threading.current_thread() else 2.0)

    def _give_up(self) -> None:
        """End a job that nobody wants. Called with the lock held."""
        now = time.monotonic()
        self._wishes = {who: wish for who, wish in self._wishes.items() if now - wish[1] < PATIENCE_S}
        if self._running is not None and self._running[0] not in {shape for shape, _when in self._wishes.values()}:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._ended = True
            self._process.kill()

    def _next(self) -> Shape | None:
        now = time.monotonic()
        wanted = [shape for shape, when in self._wishes.values() if now - when < PATIENCE_S and shape not in self._answers]
        return wanted[0] if wanted else None

    def _work(self) -> None:
        while True:
            with self._changed:
                idle = time.monotonic()
                while (shape := self._next()) is None and not self._ended and time.monotonic() - idle < IDLE_S:
                    self._changed.wait(1.0)
                if shape is None:
                    self._close()
                    self._thread, self._ended = None, False
                    return
                self._running = (shape, time.monotonic())
                try:
                    process = self._started()
                except OSError as error:
                    self._keep(shape, {"error": str(error)})
                    continue
            answer = self._do(process, shape)
            with self._changed:
                ended, self._ended = self._ended, False
                if answer is None:
                    self._close()
                    if ended:
                        self._running = None
                        continue
                    answer = {"error": _("The process that does this has ended ({code}).").format(code=process.returncode)}
                self._keep(shape, answer)
                if ended:
                    self._close()

    def _keep(self, shape: Shape, answer: dict[str, Any]) -> None:
        self._running = None
        self._answers[shape] = answer
        while len(self._answers) > KEPT:
            self._answers.popitem(last=False)

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
            env = environment() if self.kind == "interpret" else {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
            env["OMP_NUM_THREADS"] = "1"  # beside the engine
            command = [sys.executable, "-m", "explorer.attention.worker", self.kind]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env
            )
        return self._process

    @staticmethod
    def _do(process: "subprocess.Popen[str]", shape: Shape) -> dict[str, Any] | None:
        """None: the process has ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(shape.asdict()) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        if not line.endswith("\n"):
            process.wait()
            return None
        found: dict[str, Any] = json.loads(line)
        return found

    def _close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what it was to be told and never read
                        pipe.close()


INTERPRETER, COMPILER = Lab("interpret"), Lab("compile")
