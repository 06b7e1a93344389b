"""Driving an engine in a process of its own (``engine.process``), from a loop of one's own or from somebody else's."""

import math
import time
from collections.abc import Iterable
from typing import Any

from engine import messages as m
from engine.events.types import StepDone
from engine.load.agenda import Agenda, Results
from engine.load.drive import OWNER, Watch
from engine.load.generate import Conversation
from engine.measures import COMPLETED, QUEUE_FULL
from engine.process import EngineProcess


class ProcessLoad:
    """Sends a load to an EngineProcess while others use it too. Whoever polls the process calls ``pump`` now and then, and gives
    every message to ``take``.

    Token times are those of the engine's steps where its events come, else those at which their text came (which is sent in batches).
    """

    def __init__(
        self, process: EngineProcess, load: Iterable[Conversation], *, max_waiting: int | None = None, owner: str = OWNER,
        name: str | None = None, cache_salt: str | None = None,
    ) -> None:  # fmt: skip
        """``name``: begins the ids of its requests (None: the owner). ``cache_salt``: they share prefixes with those of the same salt only."""
        self.process = process
        self.owner = owner
        self.name = name if name is not None else owner
        self.cache_salt = cache_salt
        self.agenda = Agenda(load)
        self.results = Results(max_waiting)
        self._watch = Watch(self.results)
        if process.started is not None:
            self._watch.num_blocks = process.started.config["num_kv_blocks"] or 0
        self._origin = time.monotonic()
        self._told = False  # whether steps are told, so that text need not be timed

    def now(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._origin

    @property
    def done(self) -> bool:
        return not self.results.live and self.agenda.next_time() == math.inf

    def pump(self) -> float:
        """Send what is due; the seconds until something is due next (infinity: nothing is known of)."""
        for due in self.agenda.due(self.now()):
            if not self.results.has_room():
                continue
            request_id = f"{self.name}-{due.arrival.index}"
            more: dict[str, Any] = {"priority": due.arrival.priority} if due.arrival.priority else {}
            if self.cache_salt is not None:
                more["cache_salt"] = self.cache_salt
            try:
                self.process.add_request(due.prompt, due.arrival.params, owner=self.owner, request_id=request_id, **more)
            except ValueError as error:
                self.results.failed(request_id, due, self.now(), str(error))
            else:
                self.results.sent(request_id, due, self.now())
        return max(0.0, self.agenda.next_time() - self.now())

    def stop(self) -> None:
        """Send nothing more and abort what runs; it has ended when ``done``."""
        self.agenda.stop()
        for request_id in self.results.live:
            self.process.abort(request_id)

    def take(self, message: Any) -> None:
        """Any message of the process; those that are not about this load change nothing."""
        if isinstance(message, m.Events):
            for event in message.events:
                self._event(event)
        elif isinstance(message, m.TextPiece) and not self._told and message.index == 0:
            self.results.tokens(message.request_id, message.num_tokens, self.now())
        elif isinstance(message, m.Finished) and message.last and message.request_id in self.results.live:
            self._finished(message)
        elif isinstance(message, m.Rejected) and message.request_id in self.results.live and message.command == "AddRequest":
            outcome = QUEUE_FULL if message.error.startswith(QUEUE_FULL) else "error"
            self.results.ended(message.request_id, outcome, self.now(), message.error)
        elif isinstance(message, m.Died):
            self.agenda.stop()
            for request_id in list(self.results.live):
                self.results.ended(request_id, "error", self.now(), message.error)

    def _event(self, event: Any) -> None:
        end = event.time_ns / 1e9 - self._origin
        if isinstance(event, StepDone) and end < 0:
            return  # of before the load
        self._watch.take(event, end - (event.step_ms / 1e3 if isinstance(event, StepDone) else 0.0), end)
        if isinstance(event, StepDone):
            self._told = True
            for run in event.runs:
                if run.sampled:
                    self.results.tokens(run.request_id, 1 + run.num_accepted, end)

    def _finished(self, message: m.Finished) -> None:
        record = self.results.live[message.request_id][1]
        missing = len(message.token_ids) - record.num_output_tokens
        if missing > 0:
            last = record.token_times_s[-1] if record.token_times_s else self.now()
            self.results.tokens(message.request_id, missing, last)
        elif missing < 0:  # a draft that was accepted beyond the end
            del record.token_times_s[missing:]
        record.num_cached_tokens = message.num_cached_tokens
        end = record.token_times_s[-1] if self._told and record.token_times_s and message.reason in COMPLETED else self.now()
        due = self.results.ended(message.request_id, message.reason, end, message.detail)
        if message.reason in COMPLETED:
            self.agenda.ended(due, message.token_ids, self.now())


def drive_process(
    process: EngineProcess, load: Iterable[Conversation], *, max_waiting: int | None = None, stop_s: float | None = None,
) -> Results:  # fmt: skip
    """Run a load on an engine's process, which is up, to its end. RuntimeError when the process dies."""
    driver = ProcessLoad(process, load, max_waiting=max_waiting)
    stopped = False
    while not driver.done:
        if stop_s is not None and driver.now() >= stop_s and not stopped:
            stopped = True
            driver.stop()
        for message in process.poll(min(0.05, driver.pump())):
            driver.take(message)
            if isinstance(message, m.Died):
                raise RuntimeError(f"{message.error}: {message.stderr}" if message.stderr else message.error)
    return driver.results
