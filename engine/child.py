"""One life of the engine's process, as its parent holds it: the process, the connection to it, and its last words."""

import contextlib
import json
import logging
import os
import queue
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

WAITING_COMMANDS = 10_000
_STDERR_LINES = 40
_log = logging.getLogger(__name__)


class Child:
    """One life of the engine's process: its connection, its last words, and the thread that sends it commands."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.expected_end = False  # set before the process is asked or made to end
        self.connection: Connection | None = None
        self.settled = threading.Event()  # connected, or known never to be
        self.commands: queue.Queue[bytes | None] = queue.Queue(WAITING_COMMANDS)
        self.stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        self.start_error = ""
        self._directory = tempfile.mkdtemp(prefix="cutaway-")
        self._socket, address = _listen(self._directory)
        self._authkey = secrets.token_bytes(32)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "engine.process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_environment(), encoding="utf-8", errors="replace",
        )  # fmt: skip
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({**order, "address": address, "authkey": self._authkey.hex()}) + "\n")
            self.process.stdin.close()
        except OSError:
            pass  # it is dead already: the poll that follows says so
        self._listener = threading.Thread(target=self._keep_stderr, name="engine stderr", daemon=True)
        self._listener.start()
        threading.Thread(target=self._talk, name="engine commands", daemon=True).start()

    def _keep_stderr(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:  # closed here alone: close() waits for a read that is under way
            for line in lines:
                self.stderr.append(line.rstrip()[:2000])
                _log.info("engine: %s", line.rstrip())

    def _talk(self) -> None:
        """Accept the child's connection, then send commands until None comes or the child has gone."""
        try:
            self.connection = self._accept()
        finally:
            self._socket.close()
            shutil.rmtree(self._directory, ignore_errors=True)
            self.settled.set()
        if self.connection is None:
            return
        while (frame := self.commands.get()) is not None:
            try:
                self.connection.send_bytes(frame)
            except OSError:
                return  # whoever polls sees the end of the connection

    def _accept(self) -> Connection | None:
        self._socket.settimeout(0.1)
        while self.process.poll() is None:
            try:
                sock, _ = self._socket.accept()
            except TimeoutError:
                continue
            sock.setblocking(True)
            connection = Connection(sock.detach())
            try:
                deliver_challenge(connection, self._authkey)
                answer_challenge(connection, self._authkey)
                return connection
            except (AuthenticationError, EOFError, OSError) as error:
                _log.warning("a connection was refused: %s", error)
                connection.close()
        return None

    def end(self, patience: float) -> None:
        """Wait for the process to end, or end it."""
        self.expected_end = True
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def last_words(self) -> str:
        self._listener.join(1)
        return "\n".join(self.stderr)

    def release(self) -> None:
        """Free what a dead child leaves. A process that it had started may live on and hold its output open: that is not waited for."""
        with contextlib.suppress(queue.Full):  # then the thread is blocked in a send, which fails when the connection closes
            self.commands.put_nowait(None)
        self.settled.wait(5)
        if self.connection is not None:
            self.connection.close()
        self._listener.join(1)


def _listen(directory: str) -> tuple[socket.socket, str | tuple[str, int]]:
    """A listening socket that only this user can reach (a path in a private directory), or the loopback where there is none."""
    if hasattr(socket, "AF_UNIX"):
        path = os.path.join(directory, "engine")
        unix = socket.socket(socket.AF_UNIX)
        try:
            unix.bind(path)
            unix.listen(1)
            return unix, path
        except OSError:  # a path too long for a socket
            unix.close()
    inet = socket.socket(socket.AF_INET)
    inet.bind(("127.0.0.1", 0))
    inet.listen(1)
    return inet, inet.getsockname()


def _environment() -> dict[str, str]:
    """This environment, with the place that ``engine`` was imported from if the child would not find it by itself."""
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    # libgomp's threads spin about 10 ms for their next work before they sleep. Where the server, a browser or a test wants the
    # same cores, that holds up the thread that all wait for, and steps take ten times as long; this is about 0.1 ms.
    environment.setdefault("GOMP_SPINCOUNT", "10000")
    if not root.name.endswith("-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    return environment
