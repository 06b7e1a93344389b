"""What the tuner's tab reads of a search: points of its scatter, rows of its table, the loads one may choose. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from engine.config import DRAINING_KNOBS, LIVE_KNOBS, EngineConfig
from engine.load.arrivals import Burst, Poisson
from engine.load.generate import Load
from engine.load.lengths import Exponential, Lengths, Recorded, Uniform
from engine.measures import Limits, RequestRecord
from engine.tuning.front import AXES
from engine.tuning.result import Trial, Tuning
from engine.tuning.search import Budget
from engine.tuning.space import POOL_SHARE, Knobs
from explorer.i18n import _
from explorer.theme import number

RECORDED, ALL_AT_ONCE = "recorded", "burst"
_CHAT: tuple[Lengths, Lengths] = (Uniform(16, 96), Uniform(8, 40))
LENGTHS: dict[str, tuple[Lengths, Lengths]] = {  # of prompts and of answers
    "chat": _CHAT,
    "documents": (Recorded((24, 24, 24, 320)), Uniform(8, 24)),
    "writing": (Uniform(8, 24), Exponential(40, 128)),
    ALL_AT_ONCE: _CHAT,
}
LOADS = {
    "chat": _("Chat: 16 to 96 tokens in, 8 to 40 out"),
    "documents": _("Short prompts, each fourth one 320 tokens long"),
    "writing": _("Long answers of very different lengths"),
    ALL_AT_ONCE: _("Chat, all requests at once"),
    RECORDED: _("The lengths of the newest load that ran here"),
}
LATENCIES = {"ttft_p99": _("p99 TTFT"), "itl_p99": _("p99 ITL"), "tpot_p99": _("p99 TPOT"), "e2e_p99": _("p99 end to end")}
THROUGHPUTS = {"output_throughput": _("output tokens/s"), "goodput": _("goodput, requests/s")}
NAMES = {
    "max_num_seqs": _("batch size"), "max_num_batched_tokens": _("token budget"), "block_size": _("block size"),
    POOL_SHARE: _("share of the pool"), "enable_chunked_prefill": _("chunked prefill"), "batching": _("policy"),
    "batching_timeout_ms": _("waits for a batch"),
}  # fmt: skip


def load_of(kind: str, rate: float, requests: int, seed: int, records: Sequence[RequestRecord] = ()) -> Load:
    """A load of ``LOADS``. ValueError for "recorded" where no request has ended here."""
    arrivals = Burst() if kind == ALL_AT_ONCE else Poisson(rate)
    if kind == RECORDED:
        if not records:
            raise ValueError(_("No request has ended here yet: send some first, or choose another load."))
        prompt: Lengths = Recorded(tuple(r.num_prompt_tokens for r in records))
        output: Lengths = Recorded(tuple(r.num_output_tokens for r in records))
    else:
        prompt, output = LENGTHS[kind]
    return Load(arrivals=arrivals, num_requests=requests, prompt=prompt, output=output, seed=seed)


def config_of(knobs: dict[str, Any]) -> EngineConfig:
    """The running engine's configuration, from what its events told. ValueError where that cannot be one."""
    known = {f.name for f in fields(EngineConfig)}
    return EngineConfig(**{name: value for name, value in knobs.items() if name in known})


@dataclass(frozen=True)
class Point:
    """A trial in the scatter. ``kind``: "chosen", "default", "front" or "dominated"; of several that hold, the first."""

    number: int
    x: float
    y: float
    kind: str
    on_front: bool
    label: str


def points_of(found: Tuning, latency: str, throughput: str) -> list[Point]:
    """First measurements that have both values; the front is that of these two alone. Latency in ms."""
    front = {t.number for t in found.front((throughput, latency))}
    chosen, points = found.chosen, []
    for t in found.measured:
        assert t.measures is not None
        x, y = 1e3 * AXES[latency].of(t.measures), AXES[throughput].of(t.measures)
        if math.isnan(x) or math.isnan(y):
            continue
        named = (
            (chosen is not None and t.number == chosen.number, "chosen"),
            (t.number == 0, "default"),
            (t.number in front, "front"),
        )
        kind = next((name for holds, name in named if holds), "dominated")
        points.append(Point(t.number, x, y, kind, t.number in front, knobs_label(t.knobs)))
    return points


def staircase(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    """The front's line: for each latency the most throughput at that latency or less."""
    steps = sorted((p.x, p.y) for p in points if p.on_front)
    xs: list[float] = []
    ys: list[float] = []
    for x, y in steps:
        if ys:
            xs.append(x)
            ys.append(ys[-1])
        xs.append(x)
        ys.append(y)
    return xs, ys


def limit_ms(limits: Limits, latency: str) -> float | None:
    """Where the limit on the drawn latency stands; ITL has the one of TPOT, which is its mean."""
    seconds = {"ttft_p99": limits.ttft_s, "itl_p99": limits.tpot_s, "tpot_p99": limits.tpot_s}.get(latency)
    return None if seconds is None else 1e3 * seconds


def knobs_label(knobs: Knobs) -> str:
    """ "batch size 8, token budget 512, ..."."""
    return ", ".join(f"{NAMES.get(name, name)} {value_label(name, value)}" for name, value in knobs.items())


def value_label(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return _("on") if value else _("off")
    if name == POOL_SHARE:
        return f"{100 * value:.0f} %"
    return number(value, "ms") if name == "batching_timeout_ms" else str(value)


def changed(trial: Trial, default: Trial) -> Knobs:
    """The knobs in which a trial differs from the default."""
    return {name: value for name, value in trial.knobs.items() if default.knobs.get(name) != value}


def live_knobs(trial: Trial, now: dict[str, Any]) -> dict[str, Any]:
    """What a running engine has to be told to come to a trial's configuration; ``now``: how it is configured."""
    wanted = {name: getattr(trial.config, name) for name in (*trial.knobs, "num_kv_blocks") if name != POOL_SHARE}
    can = (*LIVE_KNOBS, *DRAINING_KNOBS)
    return {name: value for name, value in wanted.items() if name in can and value is not None and now.get(name) != value}


def progress(found: Tuning, budget: Budget) -> float:
    """Share of the budget that is spent: of its trials or of its seconds, whichever is more."""
    ended = sum(t.state != "running" for t in found.trials)
    shares = [ended / budget.trials] + ([found.seconds / budget.seconds] if budget.seconds else [])
    return 1.0 if found.stopped else min(1.0, max(shares))
