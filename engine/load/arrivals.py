"""When requests arrive: endless, non-decreasing times in seconds from 0."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


def _rate(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"rate must be a number of requests a second > 0, got {value!r}")


@dataclass(frozen=True)
class Poisson:
    """Independent arrivals, ``rate`` a second on average: exponential gaps, the first one before the first request."""

    rate: float

    def __post_init__(self) -> None:
        _rate(self.rate)

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        now = 0.0
        while True:
            now += float(rng.standard_exponential()) / self.rate
            yield now


@dataclass(frozen=True)
class Constant:
    """One every 1 / rate seconds, the first at 0."""

    rate: float

    def __post_init__(self) -> None:
        _rate(self.rate)

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        i = 0
        while True:
            yield i / self.rate
            i += 1


@dataclass(frozen=True)
class Burst:
    """``size`` at once, then nothing until the next burst: ``rate`` a second in all. ``size=None``: everything at 0."""

    rate: float = 1.0
    size: int | None = None

    def __post_init__(self) -> None:
        _rate(self.rate)
        if self.size is not None and (not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1):
            raise ValueError(f"size must be None or an integer >= 1, got {self.size!r}")

    def times(self, rng: np.random.Generator) -> Iterator[float]:
        i = 0
        while True:
            yield 0.0 if self.size is None else (i // self.size) * self.size / self.rate
            i += 1


Arrivals = Poisson | Constant | Burst
