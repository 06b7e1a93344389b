"""Re-run and verify, in a process of its own: the app stays quick, and a crash there is a line of text here."""

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from engine.events.log import EventLog
from explorer.i18n import _

MAX_LINES = 400


class Verifier:
    """Starts at once. ``said()`` gives what there is to read so far, and whether it is over."""

    def __init__(self, log: EventLog) -> None:
        self._lines = [_("Saving what is to be repeated …")]
        self._done = False
        self._process: subprocess.Popen[str] | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(log,), name="verify a run", daemon=True)
        self._thread.start()

    def said(self) -> tuple[str, bool]:
        return "\n".join(self._lines), self._done

    def _run(self, log: EventLog) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="cutaway-verify-") as folder:
                path = Path(folder) / "run.cutaway"
                log.save(path)
                self._lines = [_("Loading the model …")]
                self._follow(path)
        except (OSError, ValueError) as error:
            self._lines = [_("It could not be repeated: {error}").format(error=error)]
        self._done = True

    def _follow(self, path: Path) -> None:
        command = [sys.executable, "-m", "explorer.sources.rerun", str(path), "--progress"]
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        if self._stopped.is_set():
            process.kill()
        assert process.stdout is not None
        report: list[str] = []
        for line in process.stdout:
            if line.startswith("step "):
                self._lines = [_("Repeating: {line}").format(line=line.strip())]
            elif len(report) < MAX_LINES:
                report.append(line.rstrip())
        process.wait()
        self._lines = report or [
            _("The process that repeated the run has ended without a word (exit {code}).").format(code=process.returncode)
        ]

    def stop(self) -> None:
        """End it now; nothing is said any more."""
        self._stopped.set()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
