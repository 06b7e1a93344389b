"""An Engine of this very process, stepped by a thread: a notebook's cell that starts a run returns, and views follow.

Whoever made the engine goes on using it. ``EngineThread`` makes its methods take turns with the thread:

- A call waits for the step under way, at most, and goes before the next one. ``generate()`` and ``chat()`` keep the turn to
  their end; they step whatever is queued, so nothing that was sent from a view is held up.
- ``add_request()`` is enough for a request to run: the thread steps it. ``step()`` and ``stream()`` work as ever and give what
  the thread's steps brought for the caller's own requests; of those sent from views they give nothing.
- ``close()`` ends the thread first; views say that the engine was closed and keep what was recorded.
- To step by hand, pause the engine (``Session.pause``): then only the caller's own ``step()`` and ``generate()`` move it.
"""

import functools
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine import messages as m
from engine.engine import Engine
from engine.process import EngineProcess
from engine.worker import Mailbox, Worker

POLL_INTERVAL = 0.05  # seconds between two looks at the mailbox: whoever reads it must not wake up for every event
CLOSED = "the engine was closed"


class Turn:
    """A lock that two sides share: the thread lets everybody else go first, or it would take the turn again at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._count = threading.Lock()
        self._waiting = 0
        self._depth = 0  # how often the thread has taken it: inside of its own turn it gives way to nobody
        self.thread: threading.Thread | None = None

    @contextmanager
    def taken(self) -> Iterator[None]:
        here = threading.current_thread() is self.thread
        if here:
            while self._waiting and not self._depth:
                time.sleep(0.0005)
            self._lock.acquire()
        else:
            self._change(1)
            try:
                self._lock.acquire()
            finally:
                self._change(-1)
        self._depth += here
        try:
            yield
        finally:
            self._depth -= here
            self._lock.release()

    def _change(self, by: int) -> None:
        with self._count:
            self._waiting += by


class _Nudge(m.Message, frozen=True):
    """The engine was used by somebody else: look whether there is something to step or to deliver."""


class _Worker(Worker):
    """The engine process's loop, for an engine that others use as well."""

    def __init__(self, engine: Any, mailbox: Mailbox, commands: Any, turn: Turn) -> None:
        super().__init__(engine, mailbox, commands)
        self.turn = turn
        self.mine: set[str] = set()  # requests that came as commands, unfinished
        self.nudged = False  # one that waits is enough
        self._handlers[_Nudge] = lambda _command: setattr(self, "nudged", False)

    def _may_step(self) -> bool:
        scheduler = self.engine.scheduler  # not has_unfinished(): outputs may wait for somebody else
        return not self.stopping and not self.paused and bool(scheduler.running or scheduler.waiting)

    def _obey(self, command: Any) -> None:
        with self.turn.taken():
            if not self.stopping:
                super()._obey(command)

    def _poll(self) -> None:
        with self.turn.taken():
            if not self.stopping:
                super()._poll()

    def _step(self) -> None:
        with self.turn.taken():
            if self._may_step():  # it may have been closed or emptied while this thread waited
                super()._step()

    def _add_request(self, c: m.AddRequest) -> None:
        super()._add_request(c)
        self.mine.add(c.request_id)

    def _branch(self, c: m.Branch) -> None:
        super()._branch(c)
        self.mine.add(c.request_id)

    def _deliver(self, outputs: list[Any]) -> None:
        self.engine._undelivered += [output for output in outputs if output.request_id not in self.mine]
        self.deliver_mine(outputs)

    def deliver_mine(self, outputs: list[Any]) -> list[Any]:
        """Send what belongs to the views' requests; returns the rest."""
        mine = [output for output in outputs if output.request_id in self.mine]
        super()._deliver(mine)
        self.mine.difference_update(output.request_id for output in mine if output.request is not None)
        return [output for output in outputs if output not in mine]


def _in_turn(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def taking_the_turn(self: "SharedEngine", *args: Any, **options: Any) -> Any:
        with self._keeper.turn.taken():
            result = method(self, *args, **options)
        self._keeper.nudge()
        return result

    return taking_the_turn


class SharedEngine(Engine):
    """What an Engine becomes while an EngineThread steps it: the same object, whose methods take turns.

    (They name Engine, not ``super()``: the object may be an Engine again when a call that waited for its turn goes on.)
    """

    _keeper: "EngineThread"

    def step(self) -> list[Any]:
        with self._keeper.turn.taken():
            outputs = Engine.step(self)
            if self._keeper.steps_here:
                return outputs
            return self._keeper.worker.deliver_mine(outputs)

    def take_outputs(self) -> list[Any]:
        with self._keeper.turn.taken():
            outputs = Engine.take_outputs(self)
            if self._keeper.steps_here:
                return outputs
            return self._keeper.worker.deliver_mine(outputs)

    @contextmanager
    def record(self, capacity: int = 1_000_000) -> Iterator[Any]:
        recording = Engine.record(self, capacity)
        with self._keeper.turn.taken():
            log = recording.__enter__()
        try:
            yield log
        finally:
            with self._keeper.turn.taken():
                recording.__exit__(None, None, None)

    def close(self) -> None:
        keeper = self._keeper
        keeper.leave()
        Engine.close(self)  # still watched: views see how the requests end
        keeper.closed()


def _share_the_rest() -> None:
    """Every other method that is public, and the two that a generator from ``stream()`` goes on calling."""
    parts = [kind for kind in Engine.__mro__ if kind is not object]
    names = {name for kind in parts for name, value in vars(kind).items() if callable(value) and name[0] != "_"}
    for name in (names | {"_outputs_of", "_discard"}) - set(vars(SharedEngine)):
        setattr(SharedEngine, name, _in_turn(getattr(Engine, name)))


_share_the_rest()


class EngineThread(EngineProcess):
    """The handle of ``engine.process`` for an engine of this process. ValueError for one that is closed or has a thread already."""

    def __init__(self, engine: Engine) -> None:
        if type(engine) is not Engine:
            raise ValueError(f"engine must be an Engine that no thread steps yet, got {type(engine).__name__}")
        if engine.runner is None:
            raise ValueError(f"{CLOSED}: make a new one")
        super().__init__(engine.config)
        self.engine = engine
        self.turn = Turn()
        self.mailbox = Mailbox()
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.worker = _Worker(engine, self.mailbox, self.commands, self.turn)
        self._last_poll = 0.0
        self._running = False

    # -- life -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Take the engine over and return. RuntimeError if it runs, or was stopped: a thread has one life."""
        if self.turn.thread is not None:
            raise RuntimeError("this engine's thread was started before: make a new engine and a new view")
        self.turn.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.engine.__class__ = SharedEngine
        self.engine._keeper = self  # type: ignore[attr-defined]
        self._running = True
        self.mailbox.message(m.Ready(self.engine.started_event()))
        self.worker.observe(True)
        self.turn.thread.start()

    @property
    def alive(self) -> bool:
        return self._running

    @property
    def steps_here(self) -> bool:
        """Whether the caller is the engine's own thread."""
        return threading.current_thread() is self.turn.thread

    def _run(self) -> None:
        try:
            self.worker.run()
        except Exception as error:  # the engine itself is broken
            traceback.print_exc()
            self._end(f"the engine broke: {type(error).__name__}: {error}")

    def _end(self, why: str) -> None:
        with self._lock:
            was, self._running = self._running, False
            lost, self._unfinished = list(self._unfinished), {}
        if was:
            self.mailbox.message(m.Died(why, None, "", lost))

    def leave(self) -> None:
        """End the thread after the step under way; the engine is its maker's alone again, still watched."""
        self.worker.stopping = True
        self.commands.put(None)
        thread = self.turn.thread
        if thread is not None and not self.steps_here:
            thread.join()
        self.engine.__class__ = Engine

    def closed(self) -> None:
        """The engine was closed by its maker."""
        self.worker.observe(False)
        self._end(CLOSED)

    def stop(self, patience: float = 5.0) -> None:
        """Give the engine back: what was sent from views is aborted, it is not closed."""
        if not self._running:
            return
        with self._lock:
            self._running = False
            self._unfinished.clear()
        self.leave()
        for request_id in list(self.worker.mine):
            self.engine.abort(request_id, "the views have left")
        self.worker.observe(False)

    def restart(self, config: Any = None) -> None:
        raise RuntimeError(f"{CLOSED}: make a new one and a view of it")

    # -- commands and what comes back -------------------------------------------------------------------------------------

    def _enter(self, request_id: str | None, command: Any) -> str:
        with self._lock:
            if request_id is None:  # the engine gives its own names to its maker's requests
                request_id, self._next_id = f"ask-{self._next_id}", self._next_id + 1
            return super()._enter(request_id, command)

    def _send(self, command: Any) -> None:
        m.encode_command(command)  # what another process could not read is refused here too
        if not self._running:
            raise RuntimeError(f"{CLOSED}: make a new one and a view of it")
        self.commands.put(command)

    def nudge(self) -> None:
        if self._running and not self.steps_here and not self.worker.nudged:
            self.worker.nudged = True
            self.commands.put(_Nudge())

    def poll(self, timeout: float = 0.0) -> list[Any]:
        with self._poll_lock:
            time.sleep(max(0.0, self._last_poll + POLL_INTERVAL - time.monotonic()))
            messages = self.mailbox.take(timeout)
            self._last_poll = time.monotonic()
            for message in messages:
                self._note(None, message)  # type: ignore[arg-type]
            return messages
