"""Who waits to be admitted, in the order in which they are asked.

"fcfs": in order of arrival. "priority": by priority (vLLM's: a smaller number is more urgent), and a step of waiting counts for
something: ``PRIORITY_STEPS`` steps make up for one level. So a request is overtaken only by what arrives within that many steps
a level after it, and nobody waits for ever, whatever arrives. Everybody ages alike, so the order of two requests never
changes, and the queue is kept sorted. Aging against starvation: Silberschatz et al., Operating System Concepts, "CPU scheduling".
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from engine.request import Request

PRIORITY_STEPS = 256  # steps of waiting that weigh as much as one level of priority

_Key = tuple[int, int, int]  # in front or not, rank, order of arrival


class Waiting:
    """The queue. Those that were preempted come back to its front: at once under "fcfs", before their equals under "priority"."""

    def __init__(self, policy: str = "fcfs") -> None:
        self.step = 0  # of the scheduler: what "now" is to who arrives
        self._policy = policy
        self._queue: list[tuple[_Key, Request]] = []
        self._keys: dict[str, _Key] = {}
        self._count = 0

    @property
    def policy(self) -> str:
        return self._policy

    @policy.setter
    def policy(self, policy: str) -> None:
        """Those that wait are put in the new order."""
        self._policy = policy
        requests = [request for _, request in self._queue]
        self._queue = []
        for request in requests:
            front, _, order = self._keys[request.request_id]
            self._insert(request, (front, self._rank(request) if not front else 0, order))

    def append(self, request: Request) -> None:
        """It arrives."""
        self._count += 1
        request.arrived_step = self.step
        request.arrival_order = self._count
        self._insert(request, (0, self._rank(request), self._count))

    def appendleft(self, request: Request, front: bool = False) -> None:
        """It comes back. ``front``: before everybody, under "priority" too."""
        self._count += 1
        if front or self._policy == "fcfs":
            self._insert(request, (-1, 0, -self._count))
        else:
            self._insert(request, (0, self._rank(request), request.arrival_order))

    def popleft(self) -> Request:
        """RuntimeError when nobody waits."""
        if not self._queue:
            raise RuntimeError("nobody waits")
        _, request = self._queue.pop(0)
        del self._keys[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """RuntimeError when it does not wait."""
        key = self._keys.pop(request.request_id, None)
        if key is None:
            raise RuntimeError(f"{request!r} does not wait")
        del self._queue[bisect_left(self._queue, key, key=_key)]

    def _insert(self, request: Request, key: _Key) -> None:
        if request.request_id in self._keys and any(r is request for _, r in self._queue):
            raise RuntimeError(f"{request!r} waits already")
        self._keys[request.request_id] = key
        insort(self._queue, (key, request), key=_key)

    def _rank(self, request: Request) -> int:
        return 0 if self._policy == "fcfs" else rank(request)[0]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter([request for _, request in self._queue])

    def __getitem__(self, index: int) -> Request:
        return self._queue[index][1]


def rank(request: Request) -> tuple[int, int]:
    """Where it stands under "priority": smaller is earlier. The same for the siblings and beams of a request."""
    return request.priority * PRIORITY_STEPS + request.arrived_step, request.arrival_order


def _key(entry: tuple[_Key, Request]) -> _Key:
    return entry[0]
