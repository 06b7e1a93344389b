"""How much continuous batching can gain over static batching, from the lengths alone: every step takes the same time, prompts cost nothing,
and requests always wait.

A static batch of B runs until its longest is done, so it takes B slots for E[max of B] steps where the work is B E[length]; a
continuous one refills a slot as soon as it is free. The ratio of their throughputs is E[max of B] / E[length].
"""

import heapq
from collections.abc import Sequence

import numpy as np


def _lengths(lengths: Sequence[int] | np.ndarray, batch_size: int) -> np.ndarray:
    x = np.asarray(lengths, np.float64)
    if x.ndim != 1 or not x.size or not (x > 0).all():
        raise ValueError(f"lengths must be a list of numbers > 0, got {lengths!r}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")
    return x


def static_steps(lengths: Sequence[int] | np.ndarray, batch_size: int) -> float:
    """Steps to run requests of these lengths in their order, ``batch_size`` at a time, each batch until its longest is done."""
    x = _lengths(lengths, batch_size)
    starts = np.arange(0, x.size, batch_size)
    return float(np.maximum.reduceat(x, starts).sum())


def continuous_steps(lengths: Sequence[int] | np.ndarray, batch_size: int) -> float:
    """Steps to run them in their order on ``batch_size`` slots, the next one as soon as a slot is free."""
    x = _lengths(lengths, batch_size)
    ends = x[:batch_size].tolist()
    heapq.heapify(ends)
    for length in x[batch_size:].tolist():
        heapq.heapreplace(ends, ends[0] + length)
    return float(max(ends))


def static_padding_share(lengths: Sequence[int] | np.ndarray, batch_size: int) -> float:
    """Of what a static batch computes, the share that is for requests that are done."""
    x = _lengths(lengths, batch_size)
    starts = np.arange(0, x.size, batch_size)
    sizes = np.diff(np.append(starts, x.size))
    return 1 - float(x.sum()) / float((np.maximum.reduceat(x, starts) * sizes).sum())


def dynamic_starts(arrivals_s: Sequence[float], batch_size: int, max_wait_s: float, batch_s: float) -> list[tuple[float, int]]:
    """(start, size) of each batch of dynamic batching: it starts when ``batch_size`` wait or its first has waited ``max_wait_s``, and the
    one before it, which takes ``batch_s`` seconds, is done."""
    times = sorted(arrivals_s)
    batches, i, free = [], 0, -np.inf
    while i < len(times):
        full = times[i + batch_size - 1] if i + batch_size <= len(times) else np.inf
        start = max(free, min(full, times[i] + max_wait_s))
        size = min(batch_size, int(np.searchsorted(times, start, "right")) - i)
        batches.append((float(start), size))
        i, free = i + size, start + batch_s
    return batches


def harmonic(n: int) -> float:
    """1 + 1/2 + ... + 1/n."""
    return float((1 / np.arange(1, n + 1)).sum())


def ideal_ratio(kind: str, batch_size: int) -> float:
    """Throughput of continuous over static batching as the number of requests grows: the mean of the largest of B lengths over
    the mean length. "equal": 1. "uniform" (on 0 to L): 2 B / (B + 1). "exponential": the harmonic number H_B."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be an integer >= 1, got {batch_size!r}")
    ratios = {"equal": 1.0, "uniform": 2 * batch_size / (batch_size + 1), "exponential": harmonic(batch_size)}
    if kind not in ratios:
        raise ValueError(f"kind must be one of {tuple(ratios)}, got {kind!r}")
    return ratios[kind]


def measured_ratio(lengths: Sequence[int] | np.ndarray, batch_size: int) -> float:
    """The same of these lengths: steps of static over steps of continuous batching."""
    return static_steps(lengths, batch_size) / continuous_steps(lengths, batch_size)
