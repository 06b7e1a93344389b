"""The engine in a process of its own: neither slows the other, and a crash of one is a message in the other.

``EngineProcess`` is the parent's handle; ``python -m engine.process`` is the child (``engine.worker``). They talk over a local
socket (``engine.messages``) with a key that travels through the child's standard input.
"""

import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from engine import messages as m
from engine.child import WAITING_COMMANDS, Child
from engine.config import EngineConfig
from engine.events.types import EngineStarted
from engine.request import SamplingParams

_ENGINE = "engine.engine:Engine"
_FRAMES_A_POLL = 32


class EngineProcess:
    """Starts, steers and outlives the engine's process. Every method may be called from any thread; none waits for the engine
    except ``poll`` (up to its timeout), ``stop`` and ``restart``.

    Commands are obeyed in order, also those given while it still loads. One that is refused comes back as Rejected.
    ``factory`` ("module:attribute", called with the config) replaces the engine in tests.
    """

    def __init__(self, config: EngineConfig | None = None, *, observe: bool = True, factory: str = _ENGINE) -> None:
        self.config = config if config is not None else EngineConfig()
        self.started: EngineStarted | None = None  # what runs, once it is ready
        self.paused = False
        self._factory = factory
        self._observe = observe
        self._watch_tokens: m.Watch | None = None
        self._child: Child | None = None
        self._lock = threading.RLock()  # the fields
        self._poll_lock = threading.Lock()  # the receiving end of the connection
        self._next_id = 0
        self._unfinished: dict[str, None] = {}

    # -- life -------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process and return at once; ``poll`` tells how far it is (Loading ..., Ready). RuntimeError if it runs."""
        with self._lock:
            if self._child is not None:
                raise RuntimeError("the engine's process runs already")
            self.started, self.paused = None, False
            self._child = Child({"factory": self._factory, "config": self.config.as_dict(), "observe": self._observe})
            if self._watch_tokens is not None:
                self._send(self._watch_tokens)

    @property
    def alive(self) -> bool:
        """Whether the process runs (it may still be loading: see ``started``)."""
        child = self._child
        return child is not None and child.process.poll() is None

    @property
    def pid(self) -> int | None:
        child = self._child
        return None if child is None else child.process.pid

    @property
    def unfinished(self) -> list[str]:
        """Ids of the requests that were sent and have not ended."""
        with self._lock:
            return list(self._unfinished)

    def stop(self, patience: float = 5.0) -> None:
        """End the process, politely at first. Does nothing when there is none."""
        with self._lock:
            child, self._child = self._child, None
            self._unfinished.clear()
            if self.started is None:
                patience = 0.0  # it is loading, and listens to nobody
            self.started = None
        if child is None:
            return
        child.expected_end = True
        try:
            child.commands.put_nowait(m.encode(m.Stop()))
        except queue.Full:
            patience = 0.0
        child.end(patience)
        with self._poll_lock:
            child.release()

    def restart(self, config: EngineConfig | None = None) -> None:
        """A fresh engine, whatever became of the old one; its requests are lost. The watch on tokens is set again."""
        self.stop()
        with self._lock:
            if config is not None:
                self.config = config
            self.start()

    def __enter__(self) -> "EngineProcess":
        if self._child is None:
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- commands ---------------------------------------------------------------------------------------------------------

    def add_request(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, *, owner: str = "local",
        request_id: str | None = None, cache_salt: str | None = None, priority: int = 0,
    ) -> str:  # fmt: skip
        """Queue a request; returns its id at once. RuntimeError when no engine runs, ValueError for what cannot be sent."""
        return self._add(prompt if isinstance(prompt, str) else list(prompt), [], params, owner, request_id, cache_salt, priority)

    def add_chat(
        self, messages: Sequence[dict[str, str]], params: SamplingParams | None = None, *, owner: str = "local",
        request_id: str | None = None, cache_salt: str | None = None,
    ) -> str:  # fmt: skip
        """``add_request`` of a conversation: the checkpoint's chat template makes the prompt."""
        return self._add("", list(messages), params, owner, request_id, cache_salt)

    def _add(
        self, prompt: str | list[int], messages: list[dict[str, str]], params: SamplingParams | None, owner: str,
        request_id: str | None, cache_salt: str | None, priority: int = 0,
    ) -> str:  # fmt: skip
        sampling = asdict(params if params is not None else SamplingParams())
        return self._enter(request_id, lambda rid: m.AddRequest(rid, prompt, sampling, owner, cache_salt, messages, priority))

    def branch(
        self, source_id: str, position: int, token_id: int, params: SamplingParams | None = None, *, owner: str = "local",
        request_id: str | None = None,
    ) -> str:  # fmt: skip
        """Queue a request that goes on from another one's tokens with one of them replaced (see ``Engine.branch``); returns its id."""
        sampling = None if params is None else asdict(params)
        return self._enter(request_id, lambda rid: m.Branch(rid, source_id, position, token_id, sampling, owner))

    def _enter(self, request_id: str | None, command: Callable[[str], m.Command]) -> str:
        """Send a command that makes a request of this id, or of one that is free."""
        with self._lock:
            while request_id is None:
                free, self._next_id = f"req-{self._next_id}", self._next_id + 1
                request_id = None if free in self._unfinished else free
            if request_id in self._unfinished:
                raise ValueError(f"request_id must be unused, got {request_id!r}")
            self._send(command(request_id))
            self._unfinished[request_id] = None
        return request_id

    def abort(self, request_id: str) -> None:
        self._send(m.Abort(request_id))

    def abort_owner(self, owner: str) -> None:
        self._send(m.AbortOwner(owner))

    def reconfigure(self, *, by: str = "", **knobs: Any) -> None:
        self._send(m.Reconfigure(knobs, by))

    def update_sampling(self, request_id: str, *, by: str = "", **changes: Any) -> None:
        self._send(m.UpdateSampling(request_id, changes, by))

    def watch(self, kind: str, request_id: str | None = None, **options: Any) -> None:
        self._set_watch(m.Watch(kind, request_id, options))

    def unwatch(self, kind: str, request_id: str | None = None) -> None:
        self._set_watch(m.Watch(kind, request_id, on=False))

    def _set_watch(self, watch: m.Watch) -> None:
        with self._lock:
            self._send(watch)
            if watch.kind == "tokens":
                self._watch_tokens = watch if watch.on else None

    def measure_cache(self, lengths: Sequence[int]) -> None:
        """Have the engine time steps with and without the KV cache; the answer is a CacheTimed among the events."""
        self._send(m.MeasureCache(list(lengths)))

    def study(self, what: str, **options: Any) -> None:
        """Have the engine measure something of its weights (one of ``engine.messages.STUDIES``); the answer is among the events."""
        self._send(m.Study(what, options))

    def observe(self, on: bool) -> None:
        """Whether events are sent at all; switched on, they start with EngineStarted and a Snapshot."""
        with self._lock:
            self._send(m.Observe(on))
            self._observe = on

    def pause(self) -> None:
        """No further step until ``resume`` or ``step``. LoopState confirms it."""
        self._send(m.Pause())

    def resume(self) -> None:
        self._send(m.Resume())

    def step(self, count: int = 1) -> None:
        """Run ``count`` steps, then pause."""
        self._send(m.Step(count))

    def _send(self, command: m.Command) -> None:
        frame = m.encode_command(command)
        with self._lock:
            if self._child is None:
                raise RuntimeError("no engine is running: start() or restart() it")
            try:
                self._child.commands.put_nowait(frame)
            except queue.Full:
                raise RuntimeError(f"the engine does not take commands: {WAITING_COMMANDS} are waiting") from None

    # -- what comes back --------------------------------------------------------------------------------------------------

    def poll(self, timeout: float = 0.0) -> list[m.FromEngine]:
        """What has come, in order; waits up to ``timeout`` seconds for the first. One thread polls at a time.

        A process that died gives one Died, after everything it still said; then there is nothing until ``restart``.
        """
        with self._poll_lock:
            child = self._child
            if child is None:
                time.sleep(timeout)  # a poller's loop needs its rhythm
                return []
            messages: list[m.FromEngine] = []
            if not child.settled.wait(timeout):
                return messages
            ended = child.connection is None or self._receive(child, timeout, messages)
            for message in messages:
                self._note(child, message)
            if ended and not child.expected_end:
                messages.append(self._bury(child))
            return messages

    def _receive(self, child: Child, timeout: float, messages: list[m.FromEngine]) -> bool:
        """Read what is there, in moderation; True when the connection has ended."""
        assert child.connection is not None
        try:
            for i in range(_FRAMES_A_POLL):
                if not child.connection.poll(0 if i else timeout):
                    return False
                messages.extend(m.decode_batch(child.connection.recv_bytes(m.MAX_FRAME)).messages)
        except (EOFError, OSError):
            return True
        return False

    def _note(self, child: Child, message: m.FromEngine) -> None:
        """Keep the handle's own picture up to date."""
        with self._lock:
            if isinstance(message, m.Ready):
                self.started = message.started
            elif isinstance(message, m.LoopState):
                self.paused = message.paused
            elif (isinstance(message, m.Finished) and message.last) or (
                isinstance(message, m.Rejected) and message.command in ("AddRequest", "Branch")
            ):
                self._unfinished.pop(message.request_id, None)
            elif isinstance(message, m.Rejected) and message.command == "Start":
                child.start_error = message.error

    def _bury(self, child: Child) -> m.Died:
        child.end(2.0)
        code, words = child.process.returncode, child.last_words()
        child.release()
        with self._lock:
            lost, self._unfinished = list(self._unfinished), {}
            if self._child is child:
                self._child = None
            self.started = None
        if child.start_error:
            error = f"the engine could not start: {child.start_error}"
        else:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            error = f"the engine's process {how}"
        return m.Died(error, code, words, lost)


if __name__ == "__main__":
    from engine.worker import main

    sys.exit(main())
