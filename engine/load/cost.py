"""What a step takes, as a function of what it computes: fitted to measured steps, so that others can be modelled."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from engine.events.types import Event, StepDone


def num_contexts(start: int, num_tokens: int) -> float:
    """Pairs of a token and one that it attends to, itself too, for ``num_tokens`` tokens from position ``start`` on."""
    return num_tokens * start + num_tokens * (num_tokens + 1) / 2


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: ``base_s``, and so much for each token and each pair of a token with one that it attends to."""

    base_s: float
    per_token_s: float = 0.0
    per_context_s: float = 0.0
    num_steps: int = 0  # that it was fitted to
    error_share: float = 0.0  # mean absolute error over mean time, on these steps

    def __post_init__(self) -> None:
        costs = (self.base_s, self.per_token_s, self.per_context_s)
        if not all(0 <= c < float("inf") for c in costs) or not any(costs):
            raise ValueError(f"a step's costs must be seconds >= 0, and not all 0, got {costs}")

    def __call__(self, num_tokens: float, contexts: float) -> float:
        return self.base_s + self.per_token_s * num_tokens + self.per_context_s * contexts


def fit_step_cost(events: Iterable[Event]) -> StepCost:
    """The costs, none of them negative, that come nearest to the measured steps (least squares). ValueError where no step computed anything.

    Exact: of all sets of terms, the best fit of one that has no negative cost is the best of all that have none.
    """
    rows, times = [], []
    for event in events:
        if isinstance(event, StepDone) and event.runs:
            contexts = sum(num_contexts(run.start, run.num_tokens) for run in event.runs)
            rows.append((1.0, float(sum(run.num_tokens for run in event.runs)), contexts))
            times.append(event.step_ms / 1e3)
    if not rows:
        raise ValueError("no step that computed anything: its cost cannot be fitted")
    a, t = np.array(rows), np.array(times)
    scale = a.max(axis=0)
    best, error = np.array([t.mean(), 0.0, 0.0]), float(((t - t.mean()) ** 2).sum())
    for size in (1, 2, 3):
        for terms in combinations(range(3), size):
            solved = np.linalg.lstsq(a[:, terms] / scale[list(terms)], t, rcond=None)[0]
            rest = float(((a[:, terms] / scale[list(terms)] @ solved - t) ** 2).sum())
            if (solved >= 0).all() and rest < error * (1 - 1e-9):
                best, error = np.zeros(3), rest
                best[list(terms)] = solved / scale[list(terms)]
    off = float(np.abs(a @ best - t).mean() / t.mean()) if t.mean() > 0 else 0.0
    base, per_token, per_context = best.tolist()
    return StepCost(base, per_token, per_context, len(rows), off)
