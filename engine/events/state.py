"""The reducer: from events to the state they describe (pool, block tables, requests, knobs).

``State.apply`` is the only place that knows what an event means for the state; the live views, the keyframes of a log
and the replay of a saved run all go through it. It is strict: an event that cannot follow what came before (an unknown
request, a block outside the pool) is a ValueError, because a log with a hole in it must start again from a Snapshot.

A copy shares what is large with its original until one of the two changes it, so keyframes are cheap.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from engine.events.reducer import HANDLERS, MAX_FINISHED, MAX_FINISHED_TOKENS, MAX_TOKENS
from engine.events.request_view import UNSEEN, ReqView
from engine.events.types import EngineStarted, Event, Snapshot

MAX_BLOCKS = 1 << 24  # what EngineConfig allows; a log that asks for more is refused before anything is allocated

__all__ = ["UNSEEN", "ReqView", "State"]


class State:
    """Pool, tables, requests and knobs after every event up to some point of a log.

    ``step`` is the step of the last event, ``ref_counts`` int32 [num_blocks], ``cached`` maps a block to its prefix hash,
    ``lru`` holds the cached blocks that nobody references, next to be evicted first (a dict used as an ordered set),
    ``requests`` the live requests and the last finished ones in order of arrival. Readers must not change what they are
    given: copies share it.
    """

    __slots__ = (
        "_cow_pool",
        "_finished",
        "_num_tokens",
        "_own",
        "block_size",
        "cached",
        "draining",
        "engine",
        "knobs",
        "lru",
        "num_blocks",
        "ref_counts",
        "requests",
        "step",
        "time_ns",
    )

    def __init__(self) -> None:
        self.step = 0
        self.time_ns = 0
        self.engine: EngineStarted | None = None
        self.num_blocks = 0
        self.block_size = 0
        self.ref_counts: np.ndarray = np.zeros(0, np.int32)
        self.cached: dict[int, int] = {}
        self.lru: dict[int, None] = {}
        self.requests: dict[str, ReqView] = {}
        self.knobs: dict[str, Any] = {}
        self.draining: dict[str, Any] = {}  # knobs that wait until the running requests have finished: name -> new value
        self._finished: dict[str, int] = {}  # finished request -> its token ids, oldest first
        self._num_tokens = 0  # token ids held by all requests
        self._own: set[str] = set()  # requests whose view no other copy shares
        self._cow_pool = False  # whether ref_counts, cached and lru may be shared with a copy

    def copy(self) -> "State":
        """An independent state; costs O(requests) until one of the two changes."""
        other = State.__new__(State)
        for name in ("step", "time_ns", "engine", "num_blocks", "block_size", "ref_counts", "cached", "lru", "_num_tokens"):
            setattr(other, name, getattr(self, name))
        other.requests = self.requests.copy()
        other.knobs = self.knobs.copy()
        other.draining = self.draining.copy()
        other._finished = self._finished.copy()
        other._own = set()
        self._own = set()
        self._cow_pool = other._cow_pool = True
        return other

    def apply(self, event: Event) -> None:
        """Take one event in. ValueError when it cannot follow what came before, or is not an event."""
        handler = HANDLERS.get(type(event))
        if handler is None:
            raise ValueError(f"not an event: {type(event).__name__}; known: {', '.join(k.__name__ for k in HANDLERS)}")
        handler(self, event)
        self.step = event.step
        self.time_ns = event.time_ns

    def apply_all(self, events: Iterable[Event]) -> "State":
        """``apply`` each of them; returns self."""
        handlers = HANDLERS
        event: Event | None = None
        try:
            for event in events:
                handlers[type(event)](self, event)
        except KeyError:
            if type(event) in handlers:
                raise
            raise ValueError(f"not an event: {type(event).__name__}") from None
        if event is not None:
            self.step = event.step
            self.time_ns = event.time_ns
        return self

    def snapshot(self, *, finished: bool = False) -> Snapshot:
        """This state as a Snapshot: of the live requests, as the engine gives it, or with the finished ones that are kept."""
        views = [v for v in self.requests.values() if finished or v.status != "finished"]
        return Snapshot(
            step=self.step,
            time_ns=self.time_ns,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            ref_counts=self.ref_counts.tolist(),
            cached=self.cached.copy(),
            lru=list(self.lru),
            requests=[v.to_state() for v in views],
            knobs=self.knobs.copy(),
        )

    @property
    def live(self) -> list[ReqView]:
        """The requests that have not finished, in order of arrival."""
        return [v for v in self.requests.values() if v.status != "finished"]

    @property
    def num_used_blocks(self) -> int:
        return int(np.count_nonzero(self.ref_counts))

    # What the handlers below share.

    def _view(self, request_id: str) -> ReqView:
        """The request's view, ready to be changed."""
        view = self.requests.get(request_id)
        if view is None:
            raise ValueError(f"event about request {request_id!r}, which is not known at step {self.step}")
        if request_id not in self._own:
            view = self.requests[request_id] = view.own_copy()
            self._own.add(request_id)
        return view

    def _own_pool(self) -> None:
        if self._cow_pool:
            self.ref_counts = self.ref_counts.copy()
            self.cached = self.cached.copy()
            self.lru = self.lru.copy()
            self._cow_pool = False

    def _new_pool(self, num_blocks: int, block_size: int) -> None:
        if not 0 <= num_blocks <= MAX_BLOCKS:
            raise ValueError(f"num_blocks must lie in [0, {MAX_BLOCKS}], got {num_blocks}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self.cached, self.lru = {}, {}
        self._cow_pool = False

    def _count(self, block_id: int, count: int) -> None:
        """``block_id`` now has ``count`` references."""
        if not (0 <= block_id < self.num_blocks and 0 <= count < 1 << 31):
            raise ValueError(f"block {block_id} with {count} references does not fit a pool of {self.num_blocks} blocks")
        self.ref_counts[block_id] = count
        if count:
            self.lru.pop(block_id, None)
        elif block_id in self.cached:
            self.lru.pop(block_id, None)
            self.lru[block_id] = None

    def _hold(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if self._num_tokens > MAX_TOKENS:
            raise ValueError(f"more than {MAX_TOKENS} token ids in live requests")

    def _drop_old(self) -> None:
        """Forget the oldest finished requests beyond what is kept."""
        total = sum(self._finished.values())
        for request_id in list(self._finished):
            if len(self._finished) <= MAX_FINISHED and (total <= MAX_FINISHED_TOKENS or len(self._finished) <= 1):
                break
            if self.requests[request_id].block_ids:
                continue  # a static batch keeps them until it has ended
            size = self._finished.pop(request_id)
            total -= size
            self._num_tokens -= size
            del self.requests[request_id]
            self._own.discard(request_id)
