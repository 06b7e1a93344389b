"""The study that shows one attention call of the running engine as our kernel does it: ``Engine.trace_attention``.

The next step that runs is listened to (``Tap``): a copy of the layer's Q, of the blocks it reads and of what the backend gave. The
kernel then runs on the copy beside the engine, on CUDA in a thread, on a CPU in a process whose kernels are interpreted ones.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.attention.tap import Choice, Taken, Tap
from engine.attention.traced import run_apart, study
from engine.events.attention import AttentionTraced
from engine.kernels.lazy import MISSING, triton_version

if TYPE_CHECKING:
    from engine.engine import Engine
    from engine.weights.studies import Study


class Tracing:
    """Waits for a step that is to be traced. All methods are for the engine's own thread."""

    def __init__(self, engine: "Engine") -> None:
        self.engine = engine
        self._tap: Tap | None = None
        self._trace_id = ""
        self._began = 0.0

    @property
    def ready(self) -> bool:
        """Whether a step was taken, and its study can begin."""
        return self._tap is not None and self._tap.done

    def ask(self, trace_id: str, choice: Choice) -> None:
        """Have the next step taken (in place of one that was asked for and has not come yet). ValueError for what cannot be."""
        if triton_version() is None:
            raise ValueError(f"attention cannot be traced: {MISSING}")
        if self.engine.config.kv_cache_dtype == "int4":
            raise ValueError("attention over a KV cache in int4 cannot be traced: no kernel reads it; choose auto, int8 or fp8")
        choice = choice.check(self.engine.model_config)
        self.drop()
        self._trace_id, self._began = trace_id, time.perf_counter()
        self._listen(choice)

    def _listen(self, choice: Choice) -> None:
        engine, config = self.engine, self.engine.config
        assert config.num_kv_blocks is not None
        self._tap = Tap(engine.runner.attention, choice, config.block_size, config.num_kv_blocks, config.kv_cache_dtype)
        engine.runner.attention = self._tap

    def attach_again(self) -> None:
        """The engine has a new runner: listen there."""
        if self._tap is not None and not self._tap.done:
            self._listen(self._tap.choice)

    def drop(self) -> None:
        """Nobody wants the step any more."""
        if self._tap is not None and self.engine.runner is not None and self.engine.runner.attention is self._tap:
            self.engine.runner.attention = self._tap.inner
        self._tap = None

    def wait(self) -> None:
        """Step the engine until a step was taken; what the steps give is kept for the next to ask. ValueError: nothing runs."""
        engine = self.engine
        while self._tap is not None and not self._tap.done:
            if not engine.scheduler.running and not engine.scheduler.waiting:
                self.drop()
                raise ValueError("nothing runs that could be traced: add a request first")
            engine.step_and_keep()

    def take(self) -> Callable[["Study"], dict[str, Any]]:
        """The study of what was taken. It ends with a ValueError where that cannot be traced."""
        assert self._tap is not None
        taken, error, began = self._tap.taken, self._tap.error, self._began
        shared = {"trace_id": self._trace_id, "device": self.engine.parts.device.name}
        self.drop()

        def work(study: "Study") -> dict[str, Any]:
            if error is not None:
                raise ValueError(f"tracing: {error}")
            assert taken
            for index, launch in enumerate(taken):
                fields = {**shared, **launch.fields, **_run(launch, study), "seconds": time.perf_counter() - began}
                if index < len(taken) - 1:
                    study.tell(AttentionTraced, **fields)
            return fields

        return work


def _run(launch: Taken, beside: "Study") -> dict[str, Any]:
    beside.check()
    if launch.job.q.is_cuda:
        return study(launch.job)
    fields = run_apart(launch.job, beside.cancelled.is_set)
    if fields is None:
        beside.check()  # raises
        raise RuntimeError("a trace ended without a result")
    return fields
