"""The search: trial 0 is the configuration as it is, then the optimiser proposes, then the best one and trial 0 are measured again."""

import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from engine.config import EngineConfig
from engine.load.generate import Load
from engine.measures import Limits
from engine.tuning.apart import ProcessTrials, Trials
from engine.tuning.front import OBJECTIVES, axes_of, values_of
from engine.tuning.optimizer import Optimizer
from engine.tuning.result import GOOD_SHARE, Trial, Tuning
from engine.tuning.space import POOL_SHARE, Knobs, Space, configured, default_knobs, default_space, effective, longest_request
from engine.tuning.trial import Report, Task, TrialFailed, run_trial

EXECUTORS = ("process", "ray")
_TICK_S = 0.1  # how long one wait lasts, so that a cancellation is soon seen
_SLACK = 2.5  # a trial may take so many times what trial 0 took,
_SLACK_S = 15.0  # and this long more, where no limit is given;
_LONGEST_S = 600.0  # or this long, where that one was not measured


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a search may cost. ``trials``: measurements in all, the default's and the repeats among them.

    ``seconds``: none is started that would not end by then, as far as those before tell, and what still runs then is ended. ``trial_seconds``:
    of one trial, the engine's start included (None: a few times what the default took). ``repeats``: pairs of default and best that are
    measured again in the end; they are left out where the budget has no room.
    """

    trials: int = 24
    seconds: float | None = None
    trial_seconds: float | None = None
    repeats: int = 1

    def __post_init__(self) -> None:
        for name, low in (("trials", 1), ("repeats", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")
        for name in ("seconds", "trial_seconds"):
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
            ):
                raise ValueError(f"{name} must be None or seconds > 0, got {value!r}")

    @property
    def to_search(self) -> int:
        """Trials before the repeats. With fewer than four in all nothing is repeated."""
        return self.trials - 2 * self.repeats if self.trials >= 2 * self.repeats + 2 else self.trials


class Search:
    """``run`` does it, in any thread; the others may call ``cancel`` and read ``found`` meanwhile.

    ``executor``: "process" (fresh processes of this machine), "ray" (over a Ray cluster), or a ``Trials``. ``workers``: trials at once.
    ``options``: of RayTrials. ``progress``: called in ``run``'s thread with ``found`` whenever a trial begins or ends.
    ``measure`` replaces ``run_trial`` in tests. ValueError for what cannot be searched.
    """

    def __init__(
        self, load: Load, limits: Limits | None = None, config: EngineConfig | None = None, *, space: Space | None = None,
        budget: Budget | None = None, objectives: tuple[str, ...] = OBJECTIVES, executor: str | Trials = "process", workers: int = 1,
        seed: int = 0, progress: Callable[[Tuning], None] | None = None, options: dict[str, Any] | None = None,
        measure: Callable[[Task], Report] = run_trial,
    ) -> None:  # fmt: skip
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 1:
            raise ValueError(f"workers must be an integer >= 1, got {workers!r}")
        if isinstance(executor, str) and executor not in EXECUTORS:
            raise ValueError(f"executor must be one of {EXECUTORS}, got {executor!r}")
        self.load, self.limits = load, limits if limits is not None else Limits()
        self.config = config if config is not None else EngineConfig()
        self.space = space if space is not None else default_space(self.config, load)
        self.space.check(self.config)
        self.budget = budget if budget is not None else Budget()
        self.axes = axes_of(objectives)
        self.workers, self.seed, self.executor, self.options = workers, seed, executor, options or {}
        self._progress, self._measure = progress, measure
        self._cancelled = threading.Event()
        self._began = time.monotonic()
        self._trials: list[Trial] = []
        self._stopped = ""
        self._ended: float | None = None
        self._pool_tokens: int | None = None
        self._running: dict[Future[Report], tuple[Trial, Any, float]] = {}  # future -> (trial, the optimiser's, when it began)
        self._longest = longest_request(load)
        self._found = Tuning((), self.limits, tuple(objectives))

    # -- from outside --------------------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """End it: the trial that runs is stopped, and ``run`` returns what was found."""
        self._cancelled.set()

    @property
    def found(self) -> Tuning:
        """So far."""
        return replace(self._found, seconds=self._elapsed())

    def run(self) -> Tuning:
        """Search until the budget is spent, everything was tried or it is cancelled."""
        self._began = time.monotonic()
        trials = self._make_executor()
        try:
            self._search(trials)
        finally:
            trials.close()
            self._stop_running()
            self._ended = time.monotonic()
            self._tell()
        return self.found

    def _make_executor(self) -> Trials:
        if self.executor == "ray":
            from engine.tuning.cluster import RayTrials

            return RayTrials(**self.options)
        return ProcessTrials() if isinstance(self.executor, str) else self.executor

    # -- the three parts -----------------------------------------------------------------------------------------------------

    def _search(self, trials: Trials) -> None:
        first = effective(default_knobs(self.config, self.space.choices))
        self._start(trials, first, self.config, None)
        self._drain()
        if self._over():
            return
        optimizer = self._make_optimizer(first)
        while not self._over():
            while len(self._running) < self.workers and self._may_start(self._to_search):
                asked = optimizer.ask()
                if asked is None:
                    self._stopped = "exhausted"
                    break
                if not self._propose(trials, *asked):
                    optimizer.tell(asked[0], None)
            if not self._running:
                break
            self._collect(optimizer)
        enough = len(self._trials) >= self._to_search
        if not self._over():
            self._repeat(trials)
        self._stopped = self._stopped or ("trials" if enough else "seconds")

    def _make_optimizer(self, first: Knobs) -> Optimizer:
        """It knows how the default did."""
        space = self.space
        if self._pool_tokens is None and POOL_SHARE in space.choices:  # the default failed: a share of its pool is not known
            space = space.without(POOL_SHARE)
            first = {name: value for name, value in first.items() if name != POOL_SHARE}
        startup = max(2, min(10, self.budget.to_search // 3))
        optimizer = Optimizer(space, self.axes, first, seed=self.seed, startup=startup)
        asked = optimizer.ask()
        assert asked is not None
        self._tell_optimizer(optimizer, asked[0], self._trials[0])
        return optimizer

    def _repeat(self, trials: Trials) -> None:
        """The best and the default again, in turns, so that a machine that changes treats both alike."""
        best = self._found.chosen
        if best is None or best.number == 0 or self._trials[0].measures is None:
            return
        for _ in range(self.budget.repeats if self.budget.to_search < self.budget.trials else 0):
            if not self._has_time(2):
                return
            for trial in (self._trials[0], best):
                self._start(trials, trial.knobs, trial.config, None, again=trial.number)
                self._drain()
                if self._over():
                    return

    # -- one trial -----------------------------------------------------------------------------------------------------------

    def _propose(self, trials: Trials, asked: Any, knobs: Knobs) -> bool:
        """Whether it runs."""
        try:
            config = configured(self.config, knobs, self._pool_tokens, self._longest)
        except ValueError as error:  # values that do not go together: nothing to run
            self._trials.append(Trial(len(self._trials), knobs, self.config, "failed", reason=str(error)))
            self._tell()
            return False
        self._start(trials, knobs, config, asked)
        return True

    def _start(self, trials: Trials, knobs: Knobs, config: EngineConfig, asked: Any, again: int | None = None) -> None:
        trial = Trial(len(self._trials), knobs, config, again=again)
        self._trials.append(trial)
        threads = max(1, (os.cpu_count() or 1) // self.workers) if self.executor == "process" and self.workers > 1 else None
        task = Task(config, self.load, self.limits, self._measure, threads)
        self._running[trials.submit(task, self._limit_s())] = trial, asked, time.monotonic()
        self._tell()

    def _limit_s(self) -> float:
        limit = self.budget.trial_seconds
        if limit is None:
            limit = _SLACK * self._trials[0].seconds + _SLACK_S if self._trials[0].state == "done" else _LONGEST_S
        return min(limit, max(0.01, self._left()))

    def _drain(self) -> None:
        while self._running and not self._over():
            self._collect(None)

    def _collect(self, optimizer: Optimizer | None) -> None:
        for future in wait(self._running, timeout=min(_TICK_S, max(0.0, self._left())), return_when=FIRST_COMPLETED).done:
            trial, asked, began = self._running.pop(future)
            seconds = time.monotonic() - began
            try:
                report = future.result()
            except TrialFailed as error:
                over = self._left() <= 0
                trial = replace(trial, state="stopped" if over else "failed", reason="" if over else str(error), seconds=seconds)
            else:
                trial = replace(trial, state="done", measures=report.measures, seconds=seconds)
                if trial.number == 0:
                    self._pool_tokens = report.pool_tokens
            self._trials[trial.number] = trial
            if optimizer is not None:
                self._tell_optimizer(optimizer, asked, trial)
            self._tell()

    def _tell_optimizer(self, optimizer: Optimizer, asked: Any, trial: Trial) -> None:
        if trial.measures is None:
            optimizer.tell(asked, None)
            return
        values = [0.0 if math.isnan(value) else value for value in values_of(trial.measures, self.axes)]  # no gaps: none is long
        optimizer.tell(asked, values, GOOD_SHARE - trial.good_share)

    def _stop_running(self) -> None:
        for trial, _asked, began in self._running.values():
            self._trials[trial.number] = replace(trial, state="stopped", seconds=time.monotonic() - began)
        self._running.clear()

    # -- the budget ------------------------------------------------------------------------------------------------------------

    def _elapsed(self) -> float:
        return (time.monotonic() if self._ended is None else self._ended) - self._began

    def _left(self) -> float:
        return math.inf if self.budget.seconds is None else self.budget.seconds - self._elapsed()

    def _over(self) -> bool:
        """Whether it ends now, whatever runs."""
        if self._cancelled.is_set():
            self._stopped = "cancelled"
        elif self._left() <= 0:
            self._stopped = "seconds"
        else:
            return False
        return True

    @property
    def _to_search(self) -> int:
        """Trials before the repeats, of which there are none against a default that failed."""
        return self.budget.trials if self._trials[0].state == "failed" else self.budget.to_search

    def _may_start(self, trials: int) -> bool:
        if len(self._trials) >= trials or self._stopped:
            return False
        return self._has_time(1 + (2 * self.budget.repeats if trials < self.budget.trials else 0))

    def _has_time(self, trials: int = 1) -> bool:
        """Whether so many more, one after the other, would end in time, if they take as long as those before did."""
        took = [t.seconds for t in self._trials if t.state == "done"]
        return self._left() > trials * (statistics.median(took) if took else 0.0)

    def _tell(self) -> None:
        self._found = replace(self._found, trials=tuple(self._trials), stopped=self._stopped, seconds=self._elapsed())
        if self._progress is not None:
            self._progress(self._found)


def tune(load: Load, limits: Limits | None = None, config: EngineConfig | None = None, **how: Any) -> Tuning:
    """Search the best configuration for a load. Arguments are those of ``Search``.

    >>> found = tune(Load(arrivals=Poisson(4), num_requests=32), Limits(ttft_s=1.0, tpot_s=0.1), budget=Budget(trials=16, seconds=300))
    >>> print(found.text)
    """
    return Search(load, limits, config, **how).run()
