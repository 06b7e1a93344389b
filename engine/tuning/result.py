"""What a search has found: its trials, the front, the chosen configuration and what it gains over the default."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.measures import Limits, Measures
from engine.tuning.front import OBJECTIVES, axes_of, front, values_of
from engine.tuning.space import Knobs, as_text

GOOD_SHARE = 0.99  # of the requests that must keep the limits for a configuration to keep them: its p99 does
STOPPED = {
    "trials": "all trials were run",
    "seconds": "the time was over",
    "cancelled": "it was cancelled",
    "exhausted": "everything there was to choose from was tried",
}


@dataclass(frozen=True)
class Trial:
    """One configuration and what became of it.

    ``state``: "running", "done", "failed" (``reason`` says why) or "stopped" (the search ended before it). ``again``: the trial that
    this one repeats, None for a first measurement.
    """

    number: int
    knobs: Knobs
    config: EngineConfig
    state: str = "running"
    measures: Measures | None = None
    reason: str = ""
    seconds: float = 0.0  # from its start to its end, the engine's start included
    again: int | None = None

    @property
    def good_share(self) -> float:
        """Of its requests, those that kept the limits."""
        return self.measures.good_share if self.measures is not None else math.nan


@dataclass(frozen=True)
class Gain:
    """The chosen configuration against the default; each value is the mean of the ``pairs`` repeated pairs, or (pairs = 0) from the search's own trials.

    The best of many noisy measurements is too good on average, so only repeats tell a gain fairly."""

    axis: str
    default: float
    chosen: float
    pairs: int

    @property
    def ratio(self) -> float:
        return self.chosen / self.default if self.default > 0 else math.nan


@dataclass(frozen=True)
class Tuning:
    """Trial 0 is the default. ``stopped``: one of STOPPED; "" while it runs."""

    trials: tuple[Trial, ...]
    limits: Limits
    objectives: tuple[str, ...] = OBJECTIVES
    stopped: str = ""
    seconds: float = 0.0

    @property
    def measured(self) -> list[Trial]:
        """First measurements, in their order."""
        return [t for t in self.trials if t.measures is not None and t.again is None]

    @property
    def default(self) -> Trial | None:
        return self.trials[0] if self.trials else None

    def front(self, objectives: Sequence[str] | None = None) -> list[Trial]:
        """The trials that no other one dominates, by ``objectives`` (names of ``front.AXES``; None: those of the search)."""
        axes = axes_of(self.objectives if objectives is None else objectives)
        measured = self.measured
        return [measured[i] for i in front([values_of(t.measures, axes) for t in measured if t.measures], axes)]

    @property
    def chosen(self) -> Trial | None:
        """The most goodput; of equals the most output tokens a second, then the lowest p99 TTFT, then the first. None: nothing was measured.

        Without limits every completed request is a good one."""
        return max(self.measured, key=_worth, default=None)

    @property
    def keeps_limits(self) -> bool:
        """Whether the chosen one keeps the limits for GOOD_SHARE of the requests."""
        return self.chosen is not None and self.chosen.good_share >= GOOD_SHARE

    def gain(self, axis: str = "goodput") -> Gain | None:
        """None where the default or the chosen one was not measured."""
        chosen, of = self.chosen, axes_of([axis])[0].of
        if chosen is None or not self.trials or self.trials[0].measures is None or chosen.measures is None:
            return None
        repeats: dict[int, list[float]] = {
            number: [of(t.measures) for t in self.trials if t.again == number and t.measures is not None]
            for number in {0, chosen.number}
        }
        pairs = min(len(values) for values in repeats.values())
        if not pairs:
            return Gain(axis, of(self.trials[0].measures), of(chosen.measures), 0)
        default, best = (math.fsum(repeats[number][:pairs]) / pairs for number in (0, chosen.number))
        return Gain(axis, default, best, pairs)

    @property
    def text(self) -> str:
        """The chosen configuration as Python; "" where there is none."""
        return as_text(self.chosen.config) if self.chosen is not None else ""

    def table(self) -> str:
        """For a terminal."""
        return "\n".join(_table(self))


def _worth(trial: Trial) -> tuple[float, float, float, int]:
    m = trial.measures
    assert m is not None
    return _or(m.goodput, 0.0), _or(m.output_throughput, 0.0), -_or(m.ttft_s.p99, math.inf), -trial.number


def _or(value: float, otherwise: float) -> float:
    return otherwise if math.isnan(value) else value


def knobs_text(knobs: Knobs) -> str:
    return ", ".join(f"{name}={value}" for name, value in knobs.items())


def _table(found: Tuning) -> list[str]:
    on_front, chosen = {t.number for t in found.front()}, found.chosen
    lines = [f"{'trial':>7s}{'tokens/s':>10s}{'goodput':>9s}{'good':>6s}{'TTFT p99':>10s}{'ITL p99':>9s}  knobs"]
    for t in found.trials:
        mark = "*" if chosen is not None and t.number == chosen.number else "+" if t.number in on_front else " "
        head = f"{mark}{t.number:6d}"
        if t.measures is not None:
            m = t.measures
            head += f"{m.output_throughput:10.1f}{m.goodput:9.2f}{m.good_share:6.0%}{1e3 * m.ttft_s.p99:10.0f}{1e3 * m.itl_s.p99:9.1f}"
        else:
            head += f"  {t.state}" + (f": {t.reason}" if t.reason else "")
        lines.append(f"{head}  {knobs_text(t.knobs) if t.again is None else f'trial {t.again} again'}")
    lines.append("+ on the front, * chosen; goodput in requests/s, good: share of requests within the limits, times in ms")
    return lines + _verdict(found)


def _verdict(found: Tuning) -> list[str]:
    lines = [f"{len(found.trials)} trials in {found.seconds:.0f} s: {STOPPED.get(found.stopped, 'it runs')}."]
    if found.chosen is None:
        return [*lines, "Nothing could be measured."]
    if not found.keeps_limits:
        lines.append(
            f"No configuration kept the limits for {GOOD_SHARE:.0%} of its requests; this one did for {found.chosen.good_share:.0%}."
        )
    gain = found.gain()
    if found.chosen.number == 0:
        lines.append("Nothing was better than the default.")
    elif gain is None:
        lines.append(f"The default failed: {found.trials[0].reason}")
    else:
        how = (
            f"mean of {gain.pairs} repeated pairs" if gain.pairs else "measured once, not repeated: the best of many is flattered"
        )
        times = "" if math.isnan(gain.ratio) else f", × {gain.ratio:.2f}"
        lines.append(f"Goodput {gain.default:.2f} by default, {gain.chosen:.2f} requests/s now{times} ({how}).")
    return [*lines, "", found.text]
