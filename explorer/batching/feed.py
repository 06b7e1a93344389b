"""Brings a schedule's canvas the steps that it needs: all of a stretch, then, while the run is followed, those that are new."""

from collections.abc import Sequence
from typing import Any

from explorer.batching.figure import names_in, pack
from explorer.batching.rows import BatchRows, StepRow
from explorer.canvas.schedule import Schedule

FOLLOWED = 1500  # steps that a canvas is given when it begins to follow
BLOCK = 500  # of a run that stands still: steps in a third of what it is given


class Feed:
    """``rows``: the schedule that the canvas shows."""

    def __init__(self, canvas: Schedule, rows: BatchRows) -> None:
        self.canvas, self.rows = canvas, rows
        self._seq = 1  # counts on, except where nothing is ever added
        self._replayed = False
        self._sent: tuple[int, int] | None = None  # first and last step that the canvas has
        self._block: int | None = None  # of a run that stands still
        self._marks: list[tuple[int, str]] = []  # that came and were not sent yet
        self._again = False
        canvas.param.watch(lambda _event: setattr(self, "_again", True), "resync")

    def update(self, shown: int, live: bool, replayed: bool) -> None:
        """``shown``: the step on the screen; ``live``: it is the newest and more come. ``replayed``: of a saved run."""
        self._marks += self.rows.new_marks
        self._replayed = replayed
        again = self._again or self.rows.restarted or self._sent is None
        if live and not replayed:
            self._follow(again)
        elif replayed:
            self._stand(shown, again)
        elif again or self._sent is None or not self._sent[0] <= shown <= self._sent[1]:
            self._stand(shown, True)
        for name, value in (("at", shown), ("live", live and not replayed)):
            if getattr(self.canvas, name) != value:
                setattr(self.canvas, name, value)

    def _follow(self, again: bool) -> None:
        new, sent = self.rows.new_steps, self._sent
        newest = self.rows.steps[-1].step if self.rows.steps else -1
        if sent is not None and not again and self._block is None:
            if newest <= sent[1]:
                return
            if new and new[0].step == sent[1] + 1:
                self._send(new, False)
                return
        self._block = None
        self._send(self.rows.between(newest - FOLLOWED + 1, newest), True)

    def _stand(self, shown: int, again: bool) -> None:
        """What is sent depends on the step alone, not on the way there."""
        block = max(0, shown) // BLOCK
        if block != self._block or again or self.rows.new_steps:
            self._block = block
            self._send(self.rows.between((block - 1) * BLOCK, (block + 2) * BLOCK - 1), True)

    def _send(self, steps: Sequence[StepRow], whole: bool) -> None:
        if not steps:
            self._sent, self._again = None, False
            if self.canvas.steps:
                self.canvas.steps = b""
            return
        first, last = steps[0].step, steps[-1].step
        marks = [m for m in self.rows.marks if first - 1 <= m[0] <= last] if whole else self._marks
        self._marks = []
        before, self._seq = self._seq, self._seq + (not self._replayed)
        data = pack(steps, names_in(steps, self.rows.names), marks, before if not whole else 0, self._seq)
        if whole:
            self._again = False
            self._sent = first, last
            if self.canvas.steps != data:
                self.canvas.steps = data
        else:
            self._sent = (self._sent[0] if self._sent else first), last
            self.canvas.more = data


def show_whole(canvas: Schedule, rows: BatchRows, steps: Sequence[StepRow]) -> None:
    """A stretch that does not grow."""
    marks = [m for m in rows.marks if steps and steps[0].step <= m[0] < steps[-1].step]
    data: Any = pack(steps, names_in(steps, rows.names), marks, 0, 1) if steps else b""
    if canvas.steps != data:
        canvas.steps = data
