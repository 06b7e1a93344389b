"""The engine's own process: commands in, events and text out.

Three threads: the main one owns the engine and steps it; one reads commands; one sends what has gathered, a frame every
``SEND_INTERVAL`` seconds at most. The engine never waits for a slow reader: events beyond a bound are dropped, and the next
ones begin with a Snapshot, so that whoever reads can go on from there. When the connection closes, the process ends.
"""

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Client, Connection
from typing import Any

from engine import messages as m
from engine.config import WEIGHT_KNOBS, EngineConfig
from engine.events.keyframe import weight
from engine.events.types import Event
from engine.hardware.heap import settle
from engine.request import SamplingParams

ENGINE = "engine.engine:Engine"
SEND_INTERVAL = 0.05  # as often as a screen looks
MAX_PENDING_BYTES = 64 << 20  # of events that wait to be sent, as objects, roughly
LOOK_INTERVAL = 0.1  # seconds between two looks at what is made beside the steps
EXIT_AFTER = 3.0  # seconds that a step under way is given when the parent has gone


class Mailbox:
    """What waits to be read. Events are bounded; text is merged per sequence, so the outputs themselves bound it."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._events: list[Event] = []
        self._event_bytes = 0
        self._dropped = 0
        self._texts: dict[tuple[str, int], list[Any]] = {}  # (request, index) -> [pieces, number of tokens]
        self._others: list[Any] = []
        self.overflowed = False  # set: no event is taken until resume()

    def event(self, event: Event) -> None:
        """A recorder's sink."""
        with self._ready:
            if self.overflowed:
                self._dropped += 1
                return
            self._events.append(event)
            self._event_bytes += weight(event)
            if self._event_bytes > MAX_PENDING_BYTES:
                self._dropped += len(self._events)
                self._events, self._event_bytes = [], 0
                self.overflowed = True
            self._ready.notify()

    def resume(self, snapshot: Event) -> None:
        """Take events again, from this Snapshot on."""
        self.overflowed = False
        self.event(snapshot)

    def text(self, request_id: str, index: int, text: str, num_tokens: int) -> None:
        with self._ready:
            entry = self._texts.setdefault((request_id, index), [[], 0])
            entry[0].append(text)
            entry[1] += num_tokens
            self._ready.notify()

    def message(self, message: Any) -> None:
        with self._ready:
            self._others.append(message)
            self._ready.notify()

    def take(self, timeout: float) -> list[Any]:
        """All messages, in order; waits up to ``timeout`` seconds for the first."""
        with self._ready:
            self._ready.wait_for(self._holds, timeout)
            return self._take()

    def _holds(self) -> bool:
        return bool(self._events or self._texts or self._others)

    def _take(self) -> list[Any]:
        first = [x for x in self._others if isinstance(x, m.Loading | m.Ready)]
        batch: list[Any] = list(first)
        if self._events:
            batch.append(m.Events(self._events, self._dropped))  # type: ignore[arg-type]
            self._events, self._event_bytes, self._dropped = [], 0, 0
        batch += [m.TextPiece(rid, index, "".join(pieces), count) for (rid, index), (pieces, count) in self._texts.items()]
        batch += self._others[len(first) :]  # a Finished comes after its last text
        self._texts, self._others = {}, []
        return batch


class Outbox(Mailbox):
    """A mailbox that a thread empties into a connection."""

    def __init__(self, connection: Connection) -> None:
        super().__init__()
        self._connection = connection
        self._closed = False
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sender", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is left and stop."""
        with self._ready:
            self._closed = True
            self._ready.notify()
        self._hurry.set()
        self._thread.join(5)

    def _run(self) -> None:
        last = 0.0
        while True:
            with self._ready:
                while not (self._holds() or self._closed):
                    self._ready.wait()
            # Not on the condition: what comes in meanwhile would wake this thread, event by event, and hold up the engine's.
            self._hurry.wait(max(0.0, last + SEND_INTERVAL - time.monotonic()))
            with self._ready:
                batch, closed = self._take(), self._closed
            last = time.monotonic()
            try:
                if batch:
                    self._connection.send_bytes(m.encode(m.Batch(batch)))
            except OSError:
                return  # the other end has gone; the thread that reads commands sees it too
            except Exception:  # something was recorded that cannot be sent: better a crash that is seen than silence
                traceback.print_exc()
                os._exit(4)
            if closed:
                return


class Worker:
    """Drives one engine from commands."""

    def __init__(self, engine: Any, outbox: Mailbox, commands: "queue.SimpleQueue[m.Command | None]") -> None:
        self.engine = engine
        self.outbox = outbox
        self.commands = commands  # None: the parent has gone
        self.paused = False
        self.steps_left: int | None = None  # None: run freely
        self.observed = False
        self.stopping = False
        self._handlers: dict[type, Callable[[Any], Any]] = {
            m.AddRequest: self._add_request,
            m.Branch: self._branch,
            m.Abort: lambda c: engine.abort(c.request_id),
            m.AbortOwner: lambda c: engine.abort_owner(c.owner),
            m.Reconfigure: self._reconfigure,
            m.UpdateSampling: lambda c: engine.update_sampling(c.request_id, by=c.by, **c.changes),
            m.Watch: self._watch,
            m.MeasureCache: lambda c: engine.measure_cache(c.lengths),
            m.Study: self._study,
            m.Observe: lambda c: self.observe(c.on),
            m.Pause: lambda c: self._set_pause(True),
            m.Resume: lambda c: self._set_pause(False),
            m.Step: self._allow_steps,
            m.Stop: lambda c: setattr(self, "stopping", True),
        }

    def run(self) -> None:
        """Until Stop, or until the parent has gone."""
        while not self.stopping:
            self._take_commands()
            if self._may_step():
                self._step()

    def observe(self, on: bool) -> None:
        """Events are sent from now on (EngineStarted and a Snapshot first), or no longer."""
        if on and not self.observed:
            self.outbox.event(self.engine.started_event())
            self.outbox.event(self.engine.snapshot())
            self.engine.recorder.attach(self.outbox.event)
        elif self.observed and not on:
            self.engine.recorder.detach(self.outbox.event)
        self.observed = on

    def _may_step(self) -> bool:
        return not self.stopping and not self.paused and self.engine.has_unfinished()

    def _take_commands(self) -> None:
        """All that wait; when there is nothing to step, wait for one."""
        while not self.stopping:
            busy = self.engine.busy_beside_steps
            try:
                command = self.commands.get(block=not self._may_step(), timeout=LOOK_INTERVAL if busy else None)
            except queue.Empty:
                if self._may_step():
                    return
                self._poll()
                continue
            if command is None:
                self.stopping = True
            else:
                self._obey(command)

    def _poll(self) -> None:
        """Take what was made beside the steps, while there are none."""
        self.engine.poll()
        self._deliver(self.engine.take_outputs())

    def _obey(self, command: m.Command) -> None:
        try:
            self._handlers[type(command)](command)
        except (ValueError, TypeError) as error:  # the caller's mistake; anything else is ours, and ends the process
            request_id = getattr(command, "request_id", None) or ""
            self.outbox.message(m.Rejected(type(command).__name__, request_id, str(error)))
        self._deliver(self.engine.take_outputs())

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            outputs = self.engine.take_outputs()
            if not any(output.finished for output in outputs):
                raise  # nobody was told: the engine itself is broken
            traceback.print_exc()  # the requests of this step ended with the error, the others go on
            self.outbox.message(m.Rejected("Step", "", f"a step failed: {type(error).__name__}: {error}"))
        self._deliver(outputs)
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left <= 0 or not self.engine.has_unfinished():
                self._set_pause(True)

    def _deliver(self, outputs: list[Any]) -> None:
        for output in outputs:
            if output.new_text or output.new_token_ids:
                self.outbox.text(output.request_id, output.index, output.new_text, len(output.new_token_ids))
            if output.finished is not None:
                self.outbox.message(_finished(output))
        if self.outbox.overflowed and self.observed:
            self.outbox.resume(self.engine.snapshot())

    # -- commands ---------------------------------------------------------------------------------------------------------

    def _add_request(self, c: m.AddRequest) -> None:
        options: dict[str, Any] = {"cache_salt": c.cache_salt} if c.cache_salt is not None else {}
        if c.priority:
            options["priority"] = c.priority
        prompt = self.engine.tokenizer.apply_chat_template(c.messages) if c.messages else c.prompt
        self.engine.add_request(prompt, SamplingParams(**c.sampling), owner=c.owner, request_id=c.request_id, **options)

    def _branch(self, c: m.Branch) -> None:
        params = None if c.sampling is None else SamplingParams(**c.sampling)
        self.engine.branch(c.source_id, c.position, c.token_id, params, owner=c.owner, branch_id=c.request_id)

    def _reconfigure(self, c: m.Reconfigure) -> None:
        waiting = {"wait": False} if any(name in c.knobs for name in WEIGHT_KNOBS) else {}
        self.engine.reconfigure(by=c.by, **waiting, **c.knobs)

    def _study(self, c: m.Study) -> None:
        if c.what not in m.STUDIES:
            raise ValueError(f"what is measured is one of {', '.join(m.STUDIES)}, got {c.what!r}")
        waiting = {} if c.what == "cancel_quantization" else {"wait": False}
        getattr(self.engine, c.what)(**c.options, **waiting)

    def _watch(self, c: m.Watch) -> None:
        if c.on:
            self.engine.watch(c.kind, c.request_id, **c.options)
        else:
            self.engine.unwatch(c.kind, c.request_id)

    def _set_pause(self, paused: bool) -> None:
        self.paused, self.steps_left = paused, None
        self.outbox.message(m.LoopState(paused, self.engine.recorder.step))

    def _allow_steps(self, c: m.Step) -> None:
        """Run that many steps and pause; with nothing to run, pause at once."""
        if c.count < 1:
            raise ValueError(f"count must be at least 1, got {c.count}")
        self._set_pause(not self.engine.has_unfinished())
        self.steps_left = None if self.paused else c.count


def _finished(output: Any) -> m.Finished:
    done, request = output.finished, output.request
    return m.Finished(
        request_id=output.request_id,
        index=output.index,
        reason=done.finish_reason,
        detail=done.message,
        token_ids=list(done.token_ids),
        text=done.text,
        num_cached_tokens=request.num_cached_tokens if request is not None else 0,
        last=request is not None,
    )


def read_commands(connection: Connection, commands: "queue.SimpleQueue[m.Command | None]") -> None:
    """The command thread: ends the process when the parent has gone, even from the middle of an endless step."""
    try:
        while True:
            commands.put(m.decode_command(connection.recv_bytes(m.MAX_FRAME)))
    except (EOFError, OSError):
        pass
    except ValueError:  # no command: nothing that follows can be trusted, and an engine that no longer listens must not live on
        traceback.print_exc()
    commands.put(None)
    time.sleep(EXIT_AFTER)
    os._exit(3)


def build(factory: str, config: EngineConfig, outbox: Outbox) -> Any:
    """The engine, with its start told step by step. ``factory``: "module:attribute", called with the config."""
    module, _, attribute = factory.partition(":")
    outbox.message(m.Loading("starting the engine"))
    if factory == ENGINE:
        from engine.model.store import resolve_model

        def progress(done: int, total: int) -> None:
            outbox.message(m.Loading(f"fetching {config.model}", done / total if total else None))

        resolve_model(config.model, progress)
    make = getattr(import_module(module), attribute)
    outbox.message(m.Loading(f"loading {config.model}"))
    return make(config)


def main() -> int:
    """The process: what to run comes as one JSON line on standard input, so that no key shows in a list of processes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; this process ends when the parent does
    order = json.loads(sys.stdin.readline())
    connection = Client(_address(order["address"]), authkey=bytes.fromhex(order["authkey"]))
    commands: queue.SimpleQueue[m.Command | None] = queue.SimpleQueue()
    threading.Thread(target=read_commands, args=(connection, commands), name="commands", daemon=True).start()
    outbox = Outbox(connection)
    try:
        engine = build(order["factory"], EngineConfig(**order["config"]), outbox)
    except (ValueError, OSError) as error:  # a model that is not there, a setting that does not fit: said, not traced
        outbox.message(m.Rejected("Start", "", str(error)))
        outbox.close()
        print(error, file=sys.stderr)
        return 2
    worker = Worker(engine, outbox, commands)
    settle()
    outbox.message(m.Ready(engine.started_event()))  # nothing but Loading came before it
    worker.observe(order["observe"])
    try:
        worker.run()
    finally:
        outbox.close()  # also when it broke: what led to it is worth seeing
    engine.close()
    return 0


def _address(address: str | list[Any]) -> Any:
    return address if isinstance(address, str) else tuple(address)
