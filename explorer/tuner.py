"""The server's one search for a better configuration: a thread that starts trials, and what they have found so far.

Trials are processes of their own (``engine.tuning``); the running engine is not touched, but shares the machine with them. One search
at a time, since two would measure each other. Whoever started it may cancel it, and it ends when they leave.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from engine.config import EngineConfig
from engine.load.generate import Load
from engine.measures import Limits
from engine.tuning.result import Tuning
from engine.tuning.search import Budget, Search
from explorer.i18n import _

_log = logging.getLogger(__name__)


class Tuner:
    """Read ``busy``, ``found`` and ``error`` at any time, from any thread. ``make``: of the search; replaced in tests."""

    def __init__(self, make: Callable[..., Search] = Search) -> None:
        self.make = make
        self.owner = ""  # who started the search that runs or ran last
        self.budget = Budget()
        self.error = ""  # why it ended otherwise than by its budget
        self._lock = threading.Lock()
        self._search: Search | None = None
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    @property
    def found(self) -> Tuning | None:
        """What the newest search has found so far; None before the first."""
        return None if self._search is None else self._search.found

    def start(self, owner: str, load: Load, limits: Limits, config: EngineConfig, budget: Budget, **how: Any) -> str:
        """Begin a search. "", or why there is none."""
        with self._lock:
            if self.busy:
                return _("A search is running already. One at a time: two would measure each other.")
            try:
                search = self.make(load, limits, config, budget=budget, **how)
            except ValueError as error:
                return str(error)
            self.owner, self.budget, self.error, self._search = owner, budget, "", search
            self._thread = threading.Thread(target=self._run, args=(search,), name="tuner", daemon=True)
            self._thread.start()
        return ""

    def _run(self, search: Search) -> None:
        try:
            search.run()
        except Exception as error:  # told on the page: nobody else would hear of it
            _log.exception("the search ended")
            self.error = f"{type(error).__name__}: {error}"

    def cancel(self, owner: str) -> None:
        """End the search that this viewer started; those of others are left alone."""
        with self._lock:
            if self._search is not None and owner == self.owner:
                self._search.cancel()

    def stop(self) -> None:
        """End what runs, and wait for it."""
        with self._lock:
            search, thread = self._search, self._thread
        if search is not None and thread is not None:
            search.cancel()
            thread.join(timeout=5)
