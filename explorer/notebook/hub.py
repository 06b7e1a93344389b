"""The one thread that keeps all widgets of a kernel up to date, also while a cell runs."""

import threading
import time
import weakref
from typing import Any

from IPython import get_ipython

TICK_S = 0.1  # ten times a second,
SHARE = 0.02  # or less often, so that views take no more than this share of what an engine in the same kernel gets,
SLOWEST_S = 1.0  # but never less often than this

# Callbacks come from three sides: the thread below, the kernel's thread that runs cells, and the one that handles what a page
# sends (with JupyterLab 4.4 and later that is a thread of its own). Views and mirrors are for one at a time.
LOCK = threading.RLock()


class Hub:
    """Calls ``tick`` of what was added, up to ten times a second, while somebody looks at it (``looked_at``)."""

    def __init__(self) -> None:
        self._desks: weakref.WeakSet[Any] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._start = threading.Lock()
        self._busy = False
        self._free_since = 0.0
        self._others = 0.0  # of a core that the rest of this process used lately

    def add(self, desk: Any) -> None:
        with self._start:
            self._desks.add(desk)
            if self._thread is None or not self._thread.is_alive():
                self._follow_cells()
                self._thread = threading.Thread(target=self._run, name="explorer-widgets", daemon=True)
                self._thread.start()

    def remove(self, desk: Any) -> None:
        with self._start:
            self._desks.discard(desk)

    def _follow_cells(self) -> None:
        """A kernel that runs a cell may hear nothing of a page: what a page leaves unsaid counts only in between."""
        shell = get_ipython()
        if shell is not None:
            shell.events.register("pre_run_cell", lambda *_info: setattr(self, "_busy", True))
            shell.events.register("post_run_cell", lambda *_result: self._now_free())

    def _now_free(self) -> None:
        self._busy, self._free_since = False, time.monotonic()

    def _run(self) -> None:
        while True:
            wall, all_of_us, ours = time.monotonic(), time.process_time(), time.thread_time()
            self._round()
            cost = time.thread_time() - ours
            time.sleep(self._pace(cost))
            elapsed = time.monotonic() - wall
            self._others = max(0.0, time.process_time() - all_of_us - cost) / elapsed

    def _pace(self, cost: float) -> float:
        """Seconds until the next round, after one that took ``cost`` seconds of CPU."""
        if self._others < 0.1:  # nothing else runs in this kernel: nobody is held up
            return TICK_S
        return min(max(TICK_S, cost / (SHARE * min(self._others, 1.0))), SLOWEST_S)

    def _round(self) -> None:
        with self._start:
            desks = list(self._desks)
        for desk in desks:
            if not self._busy:
                desk.forget_the_gone(self._free_since)
            if desk.looked_at:
                desk.tick()
            else:
                desk.rest()


HUB = Hub()
