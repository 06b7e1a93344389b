"""Static against continuous batching, in theory: closed forms, brute force, and the two meeting."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.load.ideal import (
    continuous_steps,
    dynamic_starts,
    harmonic,
    ideal_ratio,
    measured_ratio,
    static_padding_share,
    static_steps,
)

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=20)


def slot_by_slot(lengths: list[int], batch: int) -> tuple[int, int, int]:
    """(static steps, padding tokens of them, continuous steps), one step at a time."""
    static = padding = 0
    for i in range(0, len(lengths), batch):
        left = lengths[i : i + batch]
        while any(n > 0 for n in left):
            static += 1
            padding += sum(n <= 0 for n in left)
            left = [n - 1 for n in left]
    waiting, slots, continuous = list(lengths), [0] * batch, 0
    while waiting or any(slots):
        slots = [n if n else (waiting.pop(0) if waiting else 0) for n in slots]
        slots = [max(0, n - 1) for n in slots]
        continuous += 1
    return static, padding, continuous


@given(LENGTHS, st.integers(1, 5))
def test_against_one_step_at_a_time(lengths: list[int], batch: int) -> None:
    static, padding, continuous = slot_by_slot(lengths, batch)
    assert static_steps(lengths, batch) == static and continuous_steps(lengths, batch) == continuous
    assert static_padding_share(lengths, batch) == pytest.approx(padding / (padding + sum(lengths)))
    assert measured_ratio(lengths, batch) == static / continuous


@pytest.mark.parametrize("batch", [1, 2, 8, 32])
def test_the_ratios_reach_their_limits(batch: int) -> None:
    rng = np.random.default_rng(1)
    n = 40_000 - 40_000 % batch
    assert measured_ratio(np.full(n, 17), batch) == ideal_ratio("equal", batch) == 1
    uniform = measured_ratio(rng.uniform(0, 100, n), batch)
    assert uniform == pytest.approx(ideal_ratio("uniform", batch), rel=0.02) and uniform < 2
    exponential = measured_ratio(rng.exponential(100, n), batch)
    assert exponential == pytest.approx(ideal_ratio("exponential", batch), rel=0.03)
    whole = measured_ratio(rng.geometric(1 / 100, n), batch)  # as Exponential draws them
    assert whole == pytest.approx(harmonic(batch), rel=0.03)


def test_the_harmonic_number() -> None:
    assert harmonic(1) == 1 and harmonic(4) == pytest.approx(25 / 12) and harmonic(32) == pytest.approx(4.0585, abs=1e-4)


def test_dynamic_batches_start_full_or_late() -> None:
    assert dynamic_starts([0, 0.1, 0.2, 5.0], 3, 1.0, 0.5) == [(0.2, 3), (6.0, 1)]
    assert dynamic_starts([0, 0.1, 2.0], 3, 1.0, 0.5) == [(1.0, 2), (3.0, 1)]
    assert dynamic_starts([0, 0.1, 0.2, 0.3], 2, 1.0, 5.0) == [(0.1, 2), (5.1, 2)]  # the one before has to end


@given(st.lists(st.floats(0, 20), max_size=15), st.integers(1, 4), st.floats(0, 3), st.floats(0, 2))
def test_dynamic_batches_by_a_clock(arrivals: list[float], batch: int, wait: float, takes: float) -> None:
    batches = dynamic_starts(arrivals, batch, wait, takes)
    times, free = sorted(arrivals), -np.inf
    assert sum(size for _, size in batches) == len(times)
    for start, size in batches:
        group, times = times[:size], times[size:]
        assert 1 <= size <= batch and start >= max(free, group[-1])
        assert start in (free, group[0] + wait) or (size == batch and start == group[-1])
        assert size == batch or not times or times[0] > start
        free = start + takes


@pytest.mark.parametrize(
    "call",
    [
        lambda: static_steps([], 2),
        lambda: continuous_steps([1, 0], 2),
        lambda: static_steps([1], 0),
        lambda: ideal_ratio("normal", 2),
    ],
)
def test_nonsense_is_refused(call) -> None:
    with pytest.raises(ValueError, match="must be"):
        call()
