"""What a run was worth, in the measures of the field: derived here, from the records of its requests and of its steps, and nowhere else.

For a request that arrives at time a and gets its tokens at t_1, ..., t_n (all in seconds, n the output's length):

    TTFT  time to first token      t_1 - a                     with the wait in the queue and the prefill
    ITL   inter-token latency      t_i - t_(i-1), i = 2 .. n   each one counts: a stall shows in the high percentiles
    TPOT  time per output token    (t_n - t_1) / (n - 1)       one a request; none where n = 1
    E2E   end-to-end latency       f - a                       f: the moment the request ended

Goodput: completed requests a second whose TTFT and TPOT both keep a limit (DistServe, arXiv 2401.09670, section 2). The definitions
and names are those of vLLM's metrics and of its serving benchmark; ``NAMES`` gives vLLM's name for each that has one.
"""

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

COMPLETED = ("stop", "length")
QUEUE_FULL = "queue full"
OUTCOMES = (*COMPLETED, "abort", "error", QUEUE_FULL, "unfinished")

NAMES = {
    "ttft_s": "vllm:time_to_first_token_seconds",
    "itl_s": "vllm:inter_token_latency_seconds",
    "tpot_s": "vllm:request_time_per_output_token_seconds",
    "e2e_s": "vllm:e2e_request_latency_seconds",
    "queue_s": "vllm:request_queue_time_seconds",
    "num_completed": "vllm:request_success_total",
    "num_prompt_tokens": "vllm:prompt_tokens_total",
    "num_output_tokens": "vllm:generation_tokens_total",
    "num_preemptions": "vllm:num_preemptions_total",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "waiting": "vllm:num_requests_waiting",
    "running": "vllm:num_requests_running",
    "step_tokens": "vllm:iteration_tokens_total",
}


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request's life; seconds on whatever clock the run had. Refused ones have no tokens and end when they arrive."""

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    token_times_s: "array[float]" = field(default_factory=lambda: array("d"))  # when each output token came
    finish_s: float = math.nan
    outcome: str = "unfinished"  # one of OUTCOMES
    message: str = ""
    scheduled_s: float = math.nan  # the beginning of the first step that ran it; NaN where that is not known
    num_cached_tokens: int = 0  # of the prompt
    num_preemptions: int = 0
    priority: int = 0
    conversation: int = -1
    turn: int = 0

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_times_s)

    @property
    def completed(self) -> bool:
        return self.outcome in COMPLETED

    @property
    def ttft_s(self) -> float:
        """NaN before the first token."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else math.nan

    @property
    def tpot_s(self) -> float:
        """NaN with fewer than two tokens."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else math.nan

    @property
    def e2e_s(self) -> float:
        return self.finish_s - self.arrival_s

    @property
    def queue_s(self) -> float:
        return self.scheduled_s - self.arrival_s


class Steps:
    """Columns of what each step was; the oldest half goes when ``capacity`` steps are there, and ``num_dropped`` says so."""

    COLUMNS = (
        "end_s",
        "step_s",
        "waiting",
        "running",
        "kv_usage",
        "prefill_tokens",
        "decode_tokens",
        "padding_tokens",
        "token_budget",
    )

    def __init__(self, capacity: int = 1_000_000) -> None:
        if capacity < 2:
            raise ValueError(f"capacity must be at least 2, got {capacity}")
        self.capacity = capacity
        self.num_dropped = 0
        self._columns = {name: array("d") for name in self.COLUMNS}

    def __len__(self) -> int:
        return len(self._columns["end_s"])

    def append(self, **values: float) -> None:
        """One step; every column has a value. ``kv_usage`` is NaN where the pool's size is not known."""
        for name in self.COLUMNS:
            self._columns[name].append(values[name])
        if len(self) > self.capacity:
            dropped = self.capacity // 2
            self.num_dropped += dropped
            for column in self._columns.values():
                del column[:dropped]

    def column(self, name: str) -> np.ndarray:
        """float64 [steps], a copy."""
        return np.array(self._columns[name])


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as good; None: no such limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise ValueError(f"{name} must be None or a number of seconds > 0, got {value!r}")

    def kept(self, record: RequestRecord) -> bool:
        """A request of one token has no TPOT, and keeps any limit on it."""
        late = self.ttft_s is not None and not record.ttft_s <= self.ttft_s
        slow = self.tpot_s is not None and record.tpot_s > self.tpot_s
        return record.completed and not late and not slow


@dataclass(frozen=True)
class Distribution:
    """Of ``count`` values; all NaN where there are none. Percentiles interpolate linearly between the two values next to them."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution":
        """NaN among the values are those that there is nothing to say of."""
        x = np.fromiter(values, np.float64)
        x = x[~np.isnan(x)]
        if not x.size:
            return cls(0, *[math.nan] * 5)
        p50, p90, p99 = np.percentile(x, (50, 90, 99)).tolist()
        return cls(x.size, float(x.mean()), p50, p90, p99, float(x.max()))


@dataclass(frozen=True)
class StepMeasures:
    """Means over the time that the steps took (a long step counts for more), and the highest values; idle time does not count."""

    num_steps: int
    step_s: float  # sum
    kv_usage: float  # share of the pool's blocks that requests hold; NaN where the pool's size is not known
    kv_usage_max: float
    waiting: float  # requests, at the ends of steps
    waiting_max: int
    running: float
    running_max: int
    step_tokens: float  # tokens that a step computed (mean over steps), padding included
    budget_share: float  # of the token budget (mean over steps)
    padding_share: float  # of all computed tokens


@dataclass(frozen=True)
class Measures:
    """``measure`` explains. Rates are per second of ``duration_s``; NaN where nothing has lasted."""

    duration_s: float
    outcomes: dict[str, int]
    num_prompt_tokens: int  # of requests that got a token: the others' prompts may not have been computed
    num_cached_tokens: int  # of these, found in the prefix cache
    num_output_tokens: int
    request_throughput: float
    input_throughput: float
    output_throughput: float
    goodput: float  # requests a second; without limits as request_throughput
    good_share: float  # of all requests that were sent, refused ones too
    ttft_s: Distribution
    itl_s: Distribution
    tpot_s: Distribution
    e2e_s: Distribution
    queue_s: Distribution
    num_preemptions: int
    limits: Limits
    steps: StepMeasures | None  # None where no step was seen

    @property
    def num_requests(self) -> int:
        return sum(self.outcomes.values())

    @property
    def num_completed(self) -> int:
        return sum(self.outcomes[name] for name in COMPLETED)

    def table(self) -> str:
        """For a terminal."""
        return "\n".join(_table(self))

    def as_metrics(self) -> dict[str, Any]:
        """Those that vLLM has a name for, under it: a number, or a Distribution (seconds)."""
        found = {name: getattr(self, ours) for ours, name in NAMES.items() if hasattr(self, ours)}
        if self.steps is not None:
            found |= {name: getattr(self.steps, ours) for ours, name in NAMES.items() if hasattr(self.steps, ours)}
        return found


def measure(
    records: Iterable[RequestRecord], steps: Steps | None = None, limits: Limits | None = None, *,
    duration_s: float | None = None, refused: int = 0, unfinished: bool = False,
) -> Measures:  # fmt: skip
    """The measures of a run.

    ``duration_s``: None is from the first arrival to the last thing that happened to a request. Latencies are those of completed
    requests; with ``unfinished`` TTFT, ITL and queue time also of those that have not ended (yet), which a live screen wants. Tokens and their
    throughput count whatever became of the request. ``refused``: requests that found the queue full and have no record.
    """
    records, limits = list(records), limits if limits is not None else Limits()
    if duration_s is None:
        duration_s = _span(records)
    outcomes = dict.fromkeys(OUTCOMES, 0)
    for record in records:
        outcomes[record.outcome] += 1
    outcomes[QUEUE_FULL] += refused
    ended = [r for r in records if r.completed]
    shown = [r for r in records if r.completed or (unfinished and r.outcome == "unfinished")]
    begun = [r for r in records if r.token_times_s]
    num_prompt, num_output = sum(r.num_prompt_tokens for r in begun), sum(r.num_output_tokens for r in begun)
    good, sent = sum(limits.kept(r) for r in ended), sum(outcomes.values())
    return Measures(
        duration_s=duration_s, outcomes=outcomes, num_prompt_tokens=num_prompt, num_output_tokens=num_output,
        num_cached_tokens=sum(r.num_cached_tokens for r in begun), request_throughput=_rate(len(ended), duration_s),
        input_throughput=_rate(num_prompt, duration_s), output_throughput=_rate(num_output, duration_s),
        goodput=_rate(good, duration_s), good_share=_rate(good, sent), ttft_s=Distribution.of(r.ttft_s for r in shown),
        itl_s=Distribution.of(_gaps(shown)), tpot_s=Distribution.of(r.tpot_s for r in ended),
        e2e_s=Distribution.of(r.e2e_s for r in ended), queue_s=Distribution.of(r.queue_s for r in shown),
        num_preemptions=sum(r.num_preemptions for r in records), limits=limits, steps=measure_steps(steps),
    )  # fmt: skip


def measure_steps(steps: Steps | None) -> StepMeasures | None:
    if steps is None or not len(steps):
        return None
    c = {name: steps.column(name) for name in Steps.COLUMNS}
    weights = c["step_s"] if c["step_s"].sum() > 0 else np.ones(len(steps))
    tokens = c["prefill_tokens"] + c["decode_tokens"] + c["padding_tokens"]
    return StepMeasures(
        num_steps=len(steps) + steps.num_dropped, step_s=float(c["step_s"].sum()),
        kv_usage=float(np.average(c["kv_usage"], weights=weights)), kv_usage_max=float(c["kv_usage"].max()),
        waiting=float(np.average(c["waiting"], weights=weights)), waiting_max=int(c["waiting"].max()),
        running=float(np.average(c["running"], weights=weights)), running_max=int(c["running"].max()),
        step_tokens=float(tokens.mean()), budget_share=float((tokens / c["token_budget"]).mean()),
        padding_share=_rate(float(c["padding_tokens"].sum()), float(tokens.sum())),
    )  # fmt: skip


def _gaps(records: Sequence[RequestRecord]) -> np.ndarray:
    gaps = [np.diff(np.array(r.token_times_s)) for r in records if r.num_output_tokens > 1]
    return np.concatenate(gaps) if gaps else np.empty(0)


def _span(records: Sequence[RequestRecord]) -> float:
    if not records:
        return 0.0
    ends = [r.token_times_s[-1] for r in records if r.token_times_s]
    ends += [r.finish_s for r in records if not math.isnan(r.finish_s)]
    first = min(r.arrival_s for r in records)
    return max([first, *ends]) - first


def _rate(count: float, over: float) -> float:
    return count / over if over > 0 else math.nan


def _table(m: Measures) -> list[str]:
    counts = ", ".join(f"{n:,} {name}" for name, n in m.outcomes.items() if n) or "none"
    lines = [
        f"requests              {m.num_requests:,} in {m.duration_s:.2f} s: {counts}",
        f"tokens                {m.num_prompt_tokens:,} in ({m.num_cached_tokens:,} cached), {m.num_output_tokens:,} out",
        f"throughput            {m.request_throughput:.2f} requests/s, {m.input_throughput:.1f} tokens/s in, {m.output_throughput:.1f} out",
    ]
    bounds = [
        f"{n.upper()} <= {1e3 * v:g} ms" for n, v in (("ttft", m.limits.ttft_s), ("tpot", m.limits.tpot_s)) if v is not None
    ]
    if bounds:
        lines.append(
            f"goodput               {m.goodput:.2f} requests/s ({m.good_share:.1%} of those sent) with {' and '.join(bounds)}"
        )
    lines.append(f"{'ms':21s}{'mean':>10s}{'p50':>10s}{'p90':>10s}{'p99':>10s}{'max':>10s}{'count':>10s}")
    for name, d in (
        ("queue time", m.queue_s),
        ("TTFT", m.ttft_s),
        ("ITL", m.itl_s),
        ("TPOT", m.tpot_s),
        ("E2E latency", m.e2e_s),
    ):
        if d.count:
            lines.append(
                f"{name:21s}" + "".join(f"{1e3 * v:10.2f}" for v in (d.mean, d.p50, d.p90, d.p99, d.max)) + f"{d.count:10,}"
            )
    if m.steps is not None:
        s = m.steps
        lines += [
            f"steps                 {s.num_steps:,}; {s.step_tokens:.1f} tokens each, {s.budget_share:.1%} of the budget; padding {s.padding_share:.1%}",
            f"KV use                {_share_of_pool(s)}; preemptions {m.num_preemptions}",
            f"running, waiting      mean {s.running:.1f}, {s.waiting:.1f}; max {s.running_max}, {s.waiting_max}",
        ]
    return lines


def _share_of_pool(s: StepMeasures) -> str:
    return "not known" if math.isnan(s.kv_usage) else f"mean {s.kv_usage:.1%}, max {s.kv_usage_max:.1%}"
