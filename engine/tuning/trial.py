"""One trial: an engine with one configuration, driven by the load from its first request to its last, and measured."""

import contextlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.load.arrivals import Burst
from engine.load.generate import Load, conversations
from engine.load.lengths import Equal
from engine.measures import COMPLETED, QUEUE_FULL, Limits, Measures

COMPILER_S = 120.0  # how long a trial waits for compiled functions, which later runs find in the cache
_WARM_UP_SEED = 7_919  # of tokens that the load's own seed does not give: nothing of the load is cached before it begins


class TrialFailed(Exception):
    """A trial that gave no measures, and why."""


@dataclass(frozen=True)
class Task:
    """What one trial measures. ``run``: the function that does it (of a module, so that another process finds it)."""

    config: EngineConfig
    load: Load
    limits: Limits
    run: "Callable[[Task], Report]"
    threads: int | None = None  # that torch may compute with; None: all


@dataclass(frozen=True)
class Report:
    """``load_s``: making the engine and warming it up; ``measured_s``: the load. ``pool_tokens``: tokens that its KV pool holds."""

    measures: Measures
    pool_tokens: int
    load_s: float
    measured_s: float


def run_trial(task: Task) -> Report:
    """Measure a configuration in this process. TrialFailed where not every request was completed (or refused for a full queue):
    latencies of those that got through would tell the others' away. ValueError or RuntimeError for an engine that cannot be made."""
    import torch

    from engine import Engine
    from engine.load.drive import drive

    if task.threads is not None:
        torch.set_num_threads(task.threads)
    began = time.perf_counter()
    engine = Engine(task.config)
    try:
        load = for_model(task.load, engine)
        _warm_up(engine, load)
        ready = time.perf_counter()
        results = drive(engine, conversations(load))
        measures = results.measures(task.limits)
        check(measures, results.first_error)
        pool_tokens = engine.pool.num_blocks * engine.pool.block_size
        return Report(measures, pool_tokens, ready - began, time.perf_counter() - ready)
    finally:
        engine.close()


def check(measures: Measures, first_error: str = "") -> None:
    """TrialFailed unless every request was completed or refused for a full queue, and one at least completed."""
    lost = {name: n for name, n in measures.outcomes.items() if n and name not in (*COMPLETED, QUEUE_FULL)}
    if lost or not measures.num_completed:
        counts = ", ".join(f"{n} {name}" for name, n in lost.items()) or "none was completed"
        raise TrialFailed(
            f"of {measures.num_requests} requests: {counts}" + (f"; the first error: {first_error}" if first_error else "")
        )


def for_model(load: Load, engine: Any) -> Load:
    """The load with token ids and lengths that the engine's model has. Not with those of its pool: every trial gets the same load."""
    vocab_size, length = engine.model_config.vocab_size, engine.config.max_model_len
    longest = length if load.max_model_len is None else min(length, load.max_model_len)
    return load.changed(vocab_size=vocab_size, first_token=min(load.first_token, vocab_size - 1), max_model_len=longest)


def _warm_up(engine: Any, load: Load) -> None:
    """The first steps are slower than all others (memory is touched, functions are compiled), and would be one configuration's tail."""
    from engine.load.drive import drive

    compiled = engine.parts.model.compiled
    if compiled is not None and compiled.state == "compiling":
        with contextlib.suppress(subprocess.TimeoutExpired):  # then plain functions are measured
            compiled.wait(COMPILER_S)
    length = max(1, min(32, engine.max_tokens_of_a_request // 2))
    count = min(2, engine.config.max_num_seqs)
    few = Load(
        arrivals=Burst(), num_requests=count, prompt=Equal(length), output=Equal(min(4, length)), seed=_WARM_UP_SEED + load.seed,
        vocab_size=load.vocab_size, first_token=load.first_token,
    )  # fmt: skip
    results = drive(engine, conversations(few), observe=False)
    if results.first_error:
        raise TrialFailed(f"the warm-up: {results.first_error}")
