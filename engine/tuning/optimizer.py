"""Which configuration to try next: Optuna's tree-structured Parzen estimator for several objectives, over a ``Space``.

Ozaki et al., "Multiobjective Tree-Structured Parzen Estimator", JAIR 73 (2022). It models the points of the best fronts so far and those
of the others, and proposes where the first are dense and the second are not. For the tens of trials that a person waits for it suits
better than an evolutionary search (NSGA-II), whose first generation would be all of the budget.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from engine.tuning.front import Axis
from engine.tuning.space import Knobs, Space, effective, is_number, key, same

_SAME = 20  # proposals in a row that were tried before, until any untried point is taken
_DRAWS = 200
_FAILED = 2.0  # a share of requests beyond the limits is at most 1


class Optimizer:
    """``first``: the point to begin with. Nothing is proposed twice, since a trial costs seconds.

    ``startup``: how many points are drawn at random before the model decides. The same seed and answers give the same proposals.
    """

    def __init__(self, space: Space, axes: Sequence[Axis], first: Knobs, *, seed: int = 0, startup: int = 8) -> None:
        import optuna  # here, so that whoever only looks at results need not have it

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.space = space.with_values({**default_knobs_of(space), **first})
        self._optuna = optuna
        self._study = optuna.create_study(
            directions=["maximize" if axis.higher_is_better else "minimize" for axis in axes],
            sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=startup, multivariate=True, constant_liar=True),
        )
        self._rng = np.random.default_rng(seed)
        self._tried: set[str] = set()
        self._down = [not axis.higher_is_better for axis in axes]
        self._worst = [0.0] * len(axes)
        self._enqueue({**default_knobs_of(space), **first})

    def ask(self) -> tuple[Any, Knobs] | None:
        """(what ``tell`` is to be given, the knobs to try); None when every point was proposed."""
        for _ in range(_SAME):
            trial, knobs = self._propose()
            if key(knobs) not in self._tried:
                self._tried.add(key(knobs))
                return trial, knobs
            self._forget(trial)
        untried = self._any_untried()
        if untried is None:
            return None
        self._enqueue(untried)
        trial, knobs = self._propose()
        self._tried.add(key(knobs))
        return trial, knobs

    def tell(self, trial: Any, values: Sequence[float] | None, over_limit: float = 0.0) -> None:
        """What came of it: a value for each axis, or None for a trial that failed. ``over_limit`` > 0: by how much a limit was missed.

        A failure counts as the worst that was seen and as farther from the limits than anything measured, so that the model leaves its
        surroundings too; Optuna's own failed state would only be forgotten."""
        if values is None:
            values, over_limit = self._worst, _FAILED
        else:
            values = [float(value) for value in values]
            self._worst = [
                max(pair) if axis_down else min(pair) for axis_down, *pair in zip(self._down, self._worst, values, strict=True)
            ]
        trial.set_constraint("limits", over_limit)
        self._study.tell(trial, values)

    def _forget(self, trial: Any) -> None:
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def _propose(self) -> tuple[Any, Knobs]:
        trial = self._study.ask()
        knobs = {}
        for name, values in self.space.choices.items():
            if _ordered(values):
                knobs[name] = values[trial.suggest_int(name, 0, len(values) - 1)]
            else:
                knobs[name] = values[trial.suggest_categorical(name, list(range(len(values))))]
        return trial, effective(knobs)

    def _enqueue(self, knobs: Knobs) -> None:
        indices = {
            name: next((i for i, value in enumerate(values) if same(value, knobs.get(name))), 0)
            for name, values in self.space.choices.items()
        }
        self._study.enqueue_trial(indices)

    def _any_untried(self) -> Knobs | None:
        for _ in range(_DRAWS):
            knobs = self.space.draw(self._rng)
            if key(knobs) not in self._tried:
                return knobs
        return next((knobs for knobs in self.space.points() if key(knobs) not in self._tried), None)


def default_knobs_of(space: Space) -> Knobs:
    """A value for every knob, so that a point may be given by some of them."""
    return {name: values[0] for name, values in space.choices.items()}


def _ordered(values: Sequence[Any]) -> bool:
    return all(is_number(value) for value in values)
