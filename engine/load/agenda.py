"""What is to be sent next: the first turns at their times, later turns once the turn before has ended. Shared by all drivers."""

import heapq
import itertools
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.load.generate import Arrival, Conversation
from engine.measures import QUEUE_FULL, Limits, Measures, RequestRecord, Steps, measure


@dataclass(slots=True)
class Due:
    """A request whose time has come. ``time_s``: when it was meant to be sent."""

    arrival: Arrival
    prompt: list[Any]  # what the agenda's ``render`` makes of the tokens, with the answers between them
    time_s: float
    rest: tuple[Arrival, ...]  # the turns after it


class Agenda:
    """Conversations in order of time, read as time goes on. ``render``: new tokens as they are sent; by default as they are."""

    def __init__(self, load: Iterable[Conversation], render: Callable[[tuple[int, ...]], list[Any]] = list) -> None:
        self._render = render
        self._load: Iterator[Conversation] = iter(load)
        self._ahead = next(self._load, None)
        self._later: list[tuple[float, int, Due]] = []  # later turns, by time
        self._ids = itertools.count()

    def next_time(self) -> float:
        """When the next request is due; infinity when none is known of (turns may follow those under way)."""
        first = self._ahead.time_s if self._ahead is not None else math.inf
        return min(first, self._later[0][0] if self._later else math.inf)

    def due(self, now_s: float) -> Iterator[Due]:
        """What is due by now, in order of time."""
        while (time_s := self.next_time()) <= now_s and time_s < math.inf:
            if self._later and self._later[0][0] == time_s:
                yield heapq.heappop(self._later)[2]
                continue
            conversation = self._ahead
            assert conversation is not None
            self._ahead = next(self._load, None)
            if self._ahead is not None and self._ahead.time_s < time_s:
                raise ValueError(f"a load must be in order of time: {self._ahead.time_s} s comes after {time_s} s")
            yield Due(conversation.turns[0], self._render(conversation.turns[0].token_ids), time_s, conversation.turns[1:])

    def ended(self, due: Due, output: Sequence[Any], now_s: float) -> None:
        """A turn has been answered: the next one of its conversation goes on from it."""
        if due.rest:
            turn, prompt = due.rest[0], [*due.prompt, *output, *self._render(due.rest[0].token_ids)]
            time_s = now_s + turn.think_s
            heapq.heappush(self._later, (time_s, next(self._ids), Due(turn, prompt, time_s, due.rest[1:])))

    def stop(self) -> None:
        """Nothing more is sent."""
        self._ahead, self._later = None, []


class Results:
    """What became of the requests that a driver sent; the last ``capacity`` finished ones, and how many were refused.

    ``max_waiting``: how many may wait for their first token; one that comes when so many do is refused ("queue full") and, with the
    rest of its conversation, never sent. None: no limit, and an engine that cannot keep up gathers requests without bound.
    """

    def __init__(self, max_waiting: int | None = None, capacity: int = 100_000) -> None:
        if max_waiting is not None and max_waiting < 1:
            raise ValueError(f"max_waiting must be None or an integer >= 1, got {max_waiting!r}")
        self.max_waiting = max_waiting
        self.num_refused = 0
        self.num_waiting = 0  # sent, and without a token
        self.finished: deque[RequestRecord] = deque(maxlen=capacity)
        self.live: dict[str, tuple[Due, RequestRecord]] = {}
        self.steps: Steps | None = None
        self.first_error = ""

    def has_room(self) -> bool:
        """Whether one more may wait; counts a refusal where not."""
        if self.max_waiting is None or self.num_waiting < self.max_waiting:
            return True
        self.num_refused += 1
        return False

    def sent(self, request_id: str, due: Due, now_s: float) -> RequestRecord:
        """It arrives when it was meant to: a driver that comes late makes no latency disappear."""
        a = due.arrival
        record = RequestRecord(
            request_id, min(due.time_s, now_s), len(due.prompt), priority=a.priority, conversation=a.conversation, turn=a.turn
        )
        self.live[request_id] = due, record
        self.num_waiting += 1
        return record

    def tokens(self, request_id: str, count: int, now_s: float) -> None:
        if count > 0 and request_id in self.live:
            times = self.live[request_id][1].token_times_s
            self.num_waiting -= not times
            times.extend(array("d", [now_s]) * count)

    def ended(self, request_id: str, outcome: str, now_s: float, message: str = "") -> Due:
        due, record = self.live.pop(request_id)
        self.num_waiting -= not record.token_times_s
        record.finish_s, record.outcome, record.message = now_s, outcome, message
        if outcome == QUEUE_FULL:  # the server's own limit
            self.num_refused += 1
            return due
        if outcome == "error":
            self.first_error = self.first_error or message
        self.finished.append(record)
        return due

    def failed(self, request_id: str, due: Due, now_s: float, message: str) -> None:
        """It was not even taken."""
        self.sent(request_id, due, now_s)
        self.ended(request_id, "error", now_s, message)

    @property
    def records(self) -> list[RequestRecord]:
        return [*self.finished, *(record for _, record in self.live.values())]

    def measures(self, limits: Limits | None = None) -> Measures:
        return measure(self.records, self.steps, limits, refused=self.num_refused)
