"""How many tokens prompts and outputs have: distributions to draw from, and their short form for a command line."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


def _whole(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}")


@dataclass(frozen=True)
class Equal:
    """Every length is ``value``."""

    value: int

    def __post_init__(self) -> None:
        _whole("value", self.value, 1)

    def draw(self, rng: np.random.Generator) -> int:
        return self.value

    @property
    def mean(self) -> float:
        return float(self.value)


@dataclass(frozen=True)
class Uniform:
    """Every length from ``low`` to ``high``, both included, equally often."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _whole("low", self.low, 1)
        _whole("high", self.high, self.low)

    def draw(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high + 1))

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Exponential:
    """Memoryless lengths: each further token is as likely as the one before, ``mean_length`` tokens on average (the geometric
    distribution, which is what the exponential one is in whole tokens). Lengths beyond ``most`` become ``most``; None: there is no bound."""

    mean_length: float
    most: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mean_length, (int, float)) or not 1 <= self.mean_length < 1 << 30:
            raise ValueError(f"mean_length must be a number >= 1, got {self.mean_length!r}")
        if self.most is not None:
            _whole("most", self.most, 1)

    def draw(self, rng: np.random.Generator) -> int:
        length = int(rng.geometric(1 / self.mean_length))
        return length if self.most is None else min(length, self.most)

    @property
    def mean(self) -> float:
        """Of what is drawn: sum over k of P(length > k)."""
        stay = 1 - 1 / self.mean_length
        return self.mean_length if self.most is None else self.mean_length * (1 - stay**self.most)


@dataclass(frozen=True)
class Recorded:
    """Lengths of a real load, in their order and then from the beginning again; ``shuffle``: drawn from them at random."""

    values: tuple[int, ...]
    shuffle: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))
        if not self.values:
            raise ValueError("recorded lengths: at least one is needed")
        for value in self.values:
            _whole("a recorded length", value, 1)

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


Lengths = Equal | Uniform | Exponential | Recorded


class Drawer:
    """Lengths one after the other, from one distribution and one generator."""

    def __init__(self, lengths: Lengths, rng: np.random.Generator) -> None:
        self.lengths = lengths
        self.rng = rng
        self._taken = 0

    def __call__(self) -> int:
        if not isinstance(self.lengths, Recorded):
            return self.lengths.draw(self.rng)
        values = self.lengths.values
        i = int(self.rng.integers(len(values))) if self.lengths.shuffle else self._taken % len(values)
        self._taken += 1
        return values[i]


FORMS = '"16" or "equal:16", "uniform:4:28", "exponential:16" (or with a bound, "exponential:16:64"), "recorded:3,5,8" or "recorded:@file"'


def parse_lengths(text: str) -> Lengths:
    """A distribution from its short form (``FORMS``); a file has whole numbers between white space or commas. ValueError for anything else."""
    kind, _, rest = text.partition(":") if ":" in text else ("equal", ":", text)
    try:
        if kind == "recorded":
            return Recorded(tuple(int(part) for part in _listed(rest)))
        numbers: Sequence[str] = rest.split(":")
        if kind == "equal":
            (value,) = numbers
            return Equal(int(value))
        if kind == "uniform":
            low, high = numbers
            return Uniform(int(low), int(high))
        if kind == "exponential":
            mean, *most = numbers
            return Exponential(float(mean), *(int(m) for m in most))
    except (ValueError, TypeError) as error:
        raise ValueError(f"a distribution of lengths is {FORMS}; got {text!r}: {error}") from None
    raise ValueError(f"a distribution of lengths is {FORMS}; got {text!r}")


def _listed(text: str) -> list[str]:
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"cannot read {text[1:]!r}: {error.strerror}") from None
    return text.replace(",", " ").split()
