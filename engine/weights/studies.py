"""Measurements of weights, in a thread beside the running engine, one after another. Each ends in an event.

A thread has the model ``apart``: it shares the weights and nothing that a forward pass writes. It never touches the recorder, either:
what it found waits until the engine's own thread comes by (``poll``) and records it.
"""

import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from engine.attention.study import Tracing
from engine.attention.tap import Choice
from engine.events.attention import AttentionTraced
from engine.events.event import Event
from engine.events.quantization import (
    KvObserved,
    LayerQuantized,
    MatrixObserved,
    QualityMeasured,
    QuantizationProbed,
    QuantizationProgress,
)
from engine.weights import threads
from engine.weights.build import Cancelled
from engine.weights.errors import of_layers
from engine.weights.kv_study import observe as observe_kv
from engine.weights.matrix_study import observe as observe_matrix
from engine.weights.plan import MATRICES
from engine.weights.probe import Asked
from engine.weights.quality import Measurement

if TYPE_CHECKING:
    from engine.engine import Engine

Found = tuple[type[Event], dict[str, Any]]


class Study:
    """One measurement. ``work(study)`` runs in the thread; ``finish(fields)`` then in the engine's own (what must be timed there)."""

    def __init__(self, kind: type[Event], work: Callable[["Study"], dict[str, Any] | None], doing: str) -> None:
        self.kind, self.work, self.doing = kind, work, doing
        self.finish: Callable[[dict[str, Any]], None] = lambda fields: None
        self.found: queue.SimpleQueue[Found] = queue.SimpleQueue()
        self.cancelled = threading.Event()
        self.superseded = False  # another study answers the same, later: nobody need be told that this one ended
        self.result: Future[dict[str, Any] | None] = Future()

    def tell(self, kind: type[Event], **fields: Any) -> None:
        """An event on the way. Raises ``Cancelled`` when nobody wants it any more."""
        self.check()
        self.found.put((kind, fields))

    def progress(self, done: int, total: int) -> None:
        self.tell(QuantizationProgress, method="", done=done, total=total, doing=self.doing)

    def check(self) -> None:
        if self.cancelled.is_set():
            raise Cancelled

    def run(self) -> None:
        try:
            self.check()
            self.result.set_result(self.work(self))
        except BaseException as error:
            self.result.set_exception(error)


class Studies:
    """See the module. All methods are for the engine's own thread."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self._under_way: list[Study] = []
        self._thread: threading.Thread | None = None
        self._watched = False
        self._reference: Any = None  # quality of the checkpoint's own weights
        self.tracing = Tracing(engine)

    @property
    def busy(self) -> bool:
        return bool(self._under_way) or self.tracing.ready

    def poll(self) -> None:
        """Record what was found so far."""
        if self.tracing.ready:
            self._under_way.append(Study(AttentionTraced, self.tracing.take(), "tracing attention"))
        while self._under_way:
            study = self._under_way[0]
            ended = study.result.done()  # before the queue is emptied: nothing comes behind it
            while not study.found.empty():
                self._emit(*study.found.get())
            if not ended:
                self._start()
                return
            self._under_way.pop(0)
            self._thread = None
            self._end(study)

    def cancel(self) -> None:
        self.tracing.drop()
        for study in self._under_way:
            study.cancelled.set()

    def _start(self) -> None:
        if self._thread is None:
            study = self._under_way[0]
            self._thread = threads.start("study", study.run, study.cancelled)

    def _end(self, study: Study) -> dict[str, Any] | None:
        try:
            fields = study.result.result()
        except Cancelled:
            if study.superseded:
                return None
            self._emit(QuantizationProgress, {"method": "", "done": 0, "total": 0, "doing": "cancelled"})
            return None
        except Exception as error:
            if not isinstance(error, ValueError):
                traceback.print_exception(error)
            self._emit(QuantizationProgress, {"method": "", "done": 0, "total": 0, "doing": f"failed: {error}"})
            return None
        if fields is not None:
            study.finish(fields)
            self._emit(study.kind, fields)
        return fields

    def _emit(self, kind: type[Event], fields: dict[str, Any]) -> None:
        if self.engine.recorder.on:
            self.engine.recorder.emit(kind, **fields)

    def _do(self, study: Study, wait: bool) -> Any:
        """Start a study (or put it in the queue). ``wait``: for its end, which is returned as an event; its error is raised."""
        self._under_way.append(study)
        self._start()
        if not wait:
            return None
        try:
            while study in self._under_way:
                if self._thread is not None:
                    self._thread.join(0.1)
                self.poll()
        except BaseException:  # Ctrl-C: nobody waits any more
            study.cancelled.set()
            raise
        fields = study.result.result()
        recorder = self.engine.recorder
        return None if fields is None else study.kind(step=recorder.step, time_ns=recorder.now(), **fields)

    # -- what can be asked ------------------------------------------------------------------------------------------------

    def watch_weights(self, on: bool) -> None:
        """Tell what runs and what rounding did to every matrix, now and after every change."""
        self._watched = on
        if on:
            self.engine.requantizer.announce_again()
            self.weights_changed()

    def weights_changed(self) -> None:
        """Other weights run: their errors are told to those who watch."""
        for study in self._under_way:
            if study.kind is LayerQuantized:
                study.superseded = True
                study.cancelled.set()
        if self._watched and self.engine.recorder.on:
            self._do(Study(LayerQuantized, of_layers(self.engine.parts), "comparing weights"), wait=False)

    def observe_matrix(self, layer: int, name: str, wait: bool) -> Any:
        self._check_layer(layer)
        if name not in MATRICES:
            raise ValueError(f"a matrix is one of {', '.join(MATRICES)}, got {name!r}")
        return self._do(Study(MatrixObserved, observe_matrix(self.engine.parts, layer, name), "observing"), wait)

    def observe_kv(self, layer: int, wait: bool) -> Any:
        self._check_layer(layer)
        return self._do(Study(KvObserved, observe_kv(self.engine.parts, self.engine.config, layer), "observing"), wait)

    def probe(
        self, method: str, group_size: int | None, only: list[str] | None, error_between: list[float] | None, text: str,
        top_p: float, probe_id: str, wait: bool,
    ) -> Any:  # fmt: skip
        asked = Asked(self.engine.parts, self.engine.config, method, group_size, only, error_between, text, top_p, probe_id)
        return self._do(Study(QuantizationProbed, asked.run, "probing"), wait)

    def measure_quality(self, wait: bool) -> Any:
        measurement = Measurement(self.engine, self._reference)

        def finish(fields: dict[str, Any]) -> None:
            self._reference = measurement.reference
            measurement.time_decode(fields)

        study = Study(QualityMeasured, measurement.run, "measuring")
        study.finish = finish
        return self._do(study, wait)

    def trace_attention(self, trace_id: str, choice: Choice, wait: bool) -> Any:
        self.tracing.ask(trace_id, choice)
        if not wait:
            return None
        self.tracing.wait()
        return self._do(Study(AttentionTraced, self.tracing.take(), "tracing attention"), wait)

    def _check_layer(self, layer: int) -> None:
        count = len(self.engine.parts.model.layers)
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < count:
            raise ValueError(f"layer must be an integer in [0, {count}), got {layer!r}")
