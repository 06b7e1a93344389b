"""How often is drawn what follows a running engine.

A Bokeh figure is drawn whole for every change, which costs a browser without a GPU more than everything else on its page; a few
times a second is as live as a person sees.

And where the engine and whoever looks at it share a machine that has nothing left, everything is drawn less often: looking should
not slow down what is looked at.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import psutil


def quick(widget: Any, ms: int = 2) -> Any:
    """``widget``, which tells at once what a person does, where Panel waits for 50 ms; ``ms`` of waiting where a move costs much.

    Nor does it go into Panel's count of what is busy: nothing here shows that, and to count takes longer than many an answer."""
    widget._debounce = ms
    widget._busy__ignore = ["value", "value_throttled"]
    return widget


class Pace:
    """``due()`` is True at most every ``seconds``; ``late`` after it said False: something waits to be drawn."""

    seconds = 0.25

    def __init__(self) -> None:
        self.late = False
        self._drawn = -1e9

    def due(self) -> bool:
        now = time.monotonic()
        self.late = now - self._drawn < self.seconds
        if not self.late:
            self._drawn = now
        return not self.late


class Crowding:
    """``seconds()`` between two drawings of a page: FASTEST while the machine has something left, up to SLOWEST while it has not."""

    FASTEST, SLOWEST = 0.1, 0.4
    FULL, ROOM = 0.93, 0.80  # shares of all cores that are busy: above the first it gets slower, below the second faster
    _EVERY_S = 1.0

    def __init__(self, busy: Callable[[], float] = lambda: psutil.cpu_percent() / 100) -> None:
        """``busy``: the share of all cores that were busy since it was called last."""
        self._busy, self._lock = busy, threading.Lock()
        self._seconds, self._looked = self.FASTEST, -1e9

    def seconds(self) -> float:
        now = time.monotonic()
        with self._lock:
            if now - self._looked >= self._EVERY_S:
                busy = self._busy()
                if now - self._looked < 10 * self._EVERY_S:  # else it says how things were long ago
                    factor = 1.5 if busy > self.FULL else 0.8 if busy < self.ROOM else 1.0
                    self._seconds = min(max(self._seconds * factor, self.FASTEST), self.SLOWEST)
                self._looked = now
            return self._seconds


CROWDING = Crowding()  # of this machine, for all who look from it
