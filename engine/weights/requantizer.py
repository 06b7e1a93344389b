"""Changes the weights of one engine: makes the new ones in a thread beside the running engine, and puts them in between two steps.

Methods that only round are waited for (a second or two). Those that calibrate take minutes, and whoever asks may let them go on in
the background: the engine runs with the old weights until the new ones are there. At the change all running requests give up
their KV and are computed again: what the old weights stored is not what the new ones would have. Of several plans the last one counts.
"""

import threading
import time
import traceback
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from engine.events.quantization import QuantizationProgress, WeightsChanged
from engine.weights import threads
from engine.weights.build import Built, Cancelled
from engine.weights.make import make_weights
from engine.weights.plan import WeightPlan

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.loading import Parts


class Job:
    """One plan on its way. ``by``: who asked."""

    def __init__(self, parts: "Parts", plan: WeightPlan, by: str) -> None:
        self.plan, self.by = plan, by
        self.started = time.perf_counter()
        self.progress: tuple[int, int, str] | None = None  # the latest, to be told
        self.cancel = threading.Event()
        self.result: Future[Built] = Future()
        self._parts = parts

    def start(self) -> None:
        self.thread = threads.start("quantization", self._run, self.cancel)

    def _run(self) -> None:
        try:
            self.result.set_result(make_weights(self._parts, self.plan, self._tell, self.cancel.is_set))
        except BaseException as error:
            self.result.set_exception(error)

    def _tell(self, done: int, total: int, doing: str) -> None:
        self.progress = (done, total, doing)


class Requantizer:
    """See the module. All methods are for the engine's own thread."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self.job: Job | None = None
        self.last: WeightsChanged | None = None  # what this engine was told of the weights that run

    @property
    def busy(self) -> bool:
        """Whether ``poll`` is to be called soon even when there is nothing to step."""
        return self.job is not None

    @property
    def plan(self) -> WeightPlan:
        """What runs, or will when the job is done."""
        return self.job.plan if self.job is not None else self.engine.parts.weights.plan

    def start(self, plan: WeightPlan, by: str, wait: bool) -> None:
        """Change to a plan. ``wait``: until it is done (ValueError where it cannot be); else it may go on in the background."""
        if plan == self.plan:
            return
        self.cancel("")
        if plan == self.engine.parts.weights.plan:  # back to what runs, before anything else came of it
            self.engine.knobs.weights_stay(by)
            return
        job = self.job = Job(self.engine.parts, plan, by)
        job.start()
        if wait:
            try:
                while not job.result.done():
                    job.thread.join(0.2)
                    self._report(job)
                self._finish(job, swallow=False)
            except BaseException:  # Ctrl-C: nothing comes of it
                self.cancel("cancelled")
                raise

    def poll(self) -> None:
        """Between two steps: tell how far it is, and change the weights once the new ones are there."""
        if self.job is None:
            return
        self._report(self.job)
        if self.job.result.done():
            self._finish(self.job, swallow=True)

    def cancel(self, why: str = "cancelled") -> None:
        """Give up what is under way, if anything is: the weights that run stay."""
        job, self.job = self.job, None
        if job is not None:
            job.cancel.set()
            if why:
                self._emit_progress(job, why)
                self.engine.knobs.weights_stay(job.by)

    def close(self) -> None:
        self.cancel("")

    def _report(self, job: Job) -> None:
        if job.progress is not None:
            self._emit_progress(job, "")

    def _emit_progress(self, job: Job, doing: str) -> None:
        done, total, does = job.progress or (0, len(self.engine.parts.model.layers), "")
        job.progress = None
        if self.engine.recorder.on:
            self.engine.recorder.emit(
                QuantizationProgress, method=job.plan.method or "", done=done, total=total, doing=doing or does
            )

    def _finish(self, job: Job, swallow: bool) -> None:
        """Take what the thread made. ``swallow``: nobody waits for an error; those who watch are told."""
        self.job = None
        try:
            built = job.result.result()
        except Cancelled:
            return
        except Exception as error:
            if not isinstance(error, ValueError):
                traceback.print_exception(error)
            self._emit_progress(job, f"failed: {error}")
            if not swallow:
                raise
            self.engine.knobs.weights_stay(job.by)
            return
        self._install(built, job)

    def _install(self, built: Built, job: Job) -> None:
        engine = self.engine
        recomputed = engine.scheduler.preempt_all()
        engine.pool.forget_all()
        engine.parts.install(built)
        engine.knobs.weights_changed(built.plan, job.by)
        self.announce(time.perf_counter() - job.started, recomputed)
        engine.studies.weights_changed()

    def announce(self, seconds: float = 0.0, recomputed: list[str] | None = None) -> None:
        """Tell what runs."""
        weights = self.engine.parts.weights
        self.last = WeightsChanged(
            step=self.engine.recorder.step, time_ns=time.monotonic_ns(), seconds=seconds, recomputed=recomputed or [],
            **weights.facts(),
        )  # fmt: skip
        self.announce_again()

    def announce_again(self) -> None:
        """For those who begin to watch."""
        if self.last is None:
            self.announce()
        elif self.engine.recorder.on:
            fields: dict[str, Any] = {name: getattr(self.last, name) for name in self.last.__struct_fields__}
            del fields["step"], fields["time_ns"]
            self.engine.recorder.emit(WeightsChanged, **fields)
