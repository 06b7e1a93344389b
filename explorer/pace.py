"""How often a figure is drawn while it follows a running engine.

A Bokeh figure is drawn whole for every change, which costs a browser without a GPU more than everything else on its page; a few
times a second is as live as a person sees.
"""

import time


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
