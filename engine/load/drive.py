"""Driving an engine in this process, by its steps, on a real clock or a simulated one."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from engine.events.types import Event, PoolResized, PrefixLookup, RequestPreempted, Snapshot, StepDone
from engine.load.agenda import Agenda, Due, Results
from engine.load.collector import add_step
from engine.load.generate import Conversation
from engine.measures import Steps
from engine.request import QueueFull

OWNER = "load"


class Clock(Protocol):
    """Seconds since the run began."""

    def now(self) -> float: ...

    def wait_until(self, time_s: float) -> None: ...

    def stepped(self, step: StepDone | None) -> None:
        """The engine made a step; what it recorded of it, where it is watched."""


class RealClock:
    def __init__(self) -> None:
        self._origin = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self._origin

    def wait_until(self, time_s: float) -> None:
        time.sleep(max(0.0, time_s - self.now()))

    def stepped(self, step: StepDone | None) -> None:
        pass


class SimulatedClock:
    """Time passes by steps alone, and nobody waits: minutes of load take as long as the engine's steps really do.

    ``step_s``: seconds a step takes, or a function of what was recorded of it.
    """

    def __init__(self, step_s: float | Callable[[StepDone], float]) -> None:
        if not callable(step_s) and not step_s > 0:
            raise ValueError(f"step_s must be seconds > 0, got {step_s!r}")
        self.step_s = step_s
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, time_s: float) -> None:
        self._now = max(self._now, time_s)

    def stepped(self, step: StepDone | None) -> None:
        if not callable(self.step_s):
            self._now += self.step_s
        elif step is not None:
            self._now += self.step_s(step)
        else:
            raise ValueError("step_s is a function of the step: the engine must be watched (observe=True)")


class Watch:
    """Puts what an engine records into results: steps, preemptions, cached tokens, the wait in the queue."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.num_blocks = 0
        results.steps = Steps()

    def take(self, event: Event, began_s: float, end_s: float) -> None:
        live = self.results.live
        if isinstance(event, StepDone):
            assert self.results.steps is not None
            add_step(self.results.steps, event, self.num_blocks, end_s, end_s - began_s)
            for run in event.runs:
                if run.request_id in live and not run.is_padding:
                    record = live[run.request_id][1]
                    record.scheduled_s = began_s if record.scheduled_s != record.scheduled_s else record.scheduled_s
        elif isinstance(event, RequestPreempted) and event.request_id in live:
            live[event.request_id][1].num_preemptions += 1
        elif isinstance(event, PrefixLookup) and event.request_id in live and not event.recompute:
            live[event.request_id][1].num_cached_tokens = event.num_hit_tokens
        elif isinstance(event, Snapshot | PoolResized):
            self.num_blocks = event.num_blocks


def drive(
    engine: Any, load: Iterable[Conversation], *, clock: Clock | None = None, max_waiting: int | None = None,
    stop_s: float | None = None, observe: bool = True,
) -> Results:  # fmt: skip
    """Run a load (``engine.load.generate.conversations``) on an engine to its end.

    ``engine``: an Engine, or anything with its add_request, step, has_unfinished, abort, recorder and snapshot. ``stop_s``: when to
    abort what is left. ``observe``: have the engine record, for the measures of its steps. ValueError when the engine is at work for others,
    or gathers dynamic batches, which it does by the real clock, while ``clock`` is a simulated one.
    """
    if engine.has_unfinished():
        raise ValueError("the engine has other requests: a load is driven on one that is idle")
    if isinstance(clock, SimulatedClock) and getattr(getattr(engine, "config", None), "batching", "") == "dynamic":
        raise ValueError(
            "a dynamic batch is gathered by the real clock, not by a simulated one: use another batching or a RealClock"
        )
    driver = _Driver(engine, load, clock or RealClock(), max_waiting)
    if not observe:
        driver.run(stop_s)
        return driver.results
    driver.watch = Watch(driver.results)
    driver.watch.take(engine.snapshot(), 0.0, 0.0)
    engine.recorder.attach(driver.events.append)
    try:
        driver.run(stop_s)
    finally:
        engine.recorder.detach(driver.events.append)
    return driver.results


class _Driver:
    def __init__(self, engine: Any, load: Iterable[Conversation], clock: Clock, max_waiting: int | None) -> None:
        self.engine = engine
        self.clock = clock
        self.agenda = Agenda(load)
        self.results = Results(max_waiting)
        self.watch: Watch | None = None
        self.events: list[Event] = []

    def run(self, stop_s: float | None) -> None:
        stop = float("inf") if stop_s is None else stop_s
        while True:
            now = self.clock.now()
            if now >= stop:
                self._stop()
            for due in self.agenda.due(now):
                if self.results.has_room():
                    self._send(due)
            if self.engine.has_unfinished():
                self._step()
            elif self.agenda.next_time() < float("inf"):
                self.clock.wait_until(min(self.agenda.next_time(), stop))
            else:
                return

    def _send(self, due: Due) -> None:
        request_id = f"load-{due.arrival.index}"
        more = {"priority": due.arrival.priority} if due.arrival.priority else {}
        try:
            self.engine.add_request(due.prompt, due.arrival.params, owner=OWNER, request_id=request_id, **more)
        except QueueFull:
            self.results.num_refused += 1
            return
        except ValueError as error:
            self.results.failed(request_id, due, self.clock.now(), str(error))
            return
        self.results.sent(request_id, due, self.clock.now())

    def _step(self) -> None:
        self.events.clear()
        began = self.clock.now()
        outputs = self.engine.step()
        self.clock.stepped(next((e for e in self.events if isinstance(e, StepDone)), None))
        self._note(outputs, began)

    def _stop(self) -> None:
        self.agenda.stop()
        for request_id in list(self.results.live):
            self.engine.abort(request_id)

    def _note(self, outputs: Iterable[Any], began: float) -> None:
        now = self.clock.now()
        if self.watch is not None:
            for event in self.events:
                self.watch.take(event, began, now)
        for output in outputs:
            if output.index == 0:
                self.results.tokens(output.request_id, len(output.new_token_ids), now)
            if output.request is not None and output.request_id in self.results.live:
                first = output.request.outputs[0]
                due = self.results.ended(output.request_id, first.finish_reason, now, first.message)
                if first.finish_reason in ("stop", "length"):
                    self.agenda.ended(due, first.token_ids, now)
