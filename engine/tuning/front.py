"""Which of the measured points nothing beats: the Pareto front. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.measures import Measures


@dataclass(frozen=True)
class Axis:
    """One measure to compare by. ``of`` gives it in ``unit``, NaN where there is nothing to say."""

    name: str
    unit: str
    higher_is_better: bool
    of: Callable[[Measures], float]


AXES = {
    axis.name: axis
    for axis in (
        Axis("output_throughput", "tokens/s", True, lambda m: m.output_throughput),
        Axis("goodput", "requests/s", True, lambda m: m.goodput),
        Axis("request_throughput", "requests/s", True, lambda m: m.request_throughput),
        Axis("ttft_p99", "s", False, lambda m: m.ttft_s.p99),
        Axis("itl_p99", "s", False, lambda m: m.itl_s.p99),
        Axis("tpot_p99", "s", False, lambda m: m.tpot_s.p99),
        Axis("e2e_p99", "s", False, lambda m: m.e2e_s.p99),
    )
}
OBJECTIVES = ("output_throughput", "ttft_p99", "itl_p99")  # of the search


def axes_of(names: Sequence[str]) -> list[Axis]:
    """ValueError for a name that is not in ``AXES``, or that comes twice."""
    unknown = [name for name in names if name not in AXES]
    if unknown or not names or len(set(names)) < len(names):
        raise ValueError(f"objectives must be different ones of {', '.join(AXES)}; got {', '.join(map(str, names)) or 'none'}")
    return [AXES[name] for name in names]


def values_of(measures: Measures, axes: Sequence[Axis]) -> list[float]:
    return [axis.of(measures) for axis in axes]


def front(points: Sequence[Sequence[float]], axes: Sequence[Axis]) -> list[int]:
    """The indices, ascending, of the points [N, len(axes)] that no other one dominates.

    A point dominates another when it is at least as good on every axis and better on one (Pareto). Equal points are all in;
    one with a NaN is never in and dominates nothing.
    """
    if not points:
        return []
    costs = np.asarray(points, np.float64).reshape(len(points), len(axes))
    costs = costs * np.where([axis.higher_is_better for axis in axes], -1.0, 1.0)
    known = ~np.isnan(costs).any(axis=1)
    found = []
    for i in np.flatnonzero(known):
        no_worse = (costs[known] <= costs[i]).all(axis=1)
        better = (costs[known] < costs[i]).any(axis=1)
        if not (no_worse & better).any():
            found.append(int(i))
    return found
