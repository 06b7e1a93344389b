"""The stall that a long prompt causes to those who are reading already: as measured, and as the scheduler's rules and a step's cost have it. Pure.

While a prompt is computed in one go, nobody else gets a token. Computed in chunks within a token budget, each step takes as long as its
chunk: the stall is bounded, and the prompt's own first token comes later (Agrawal et al., Sarathi-Serve, arXiv 2403.02310, section 4).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from engine.load.cost import StepCost
from engine.load.replay import Replayed, replay
from engine.measures import RequestRecord
from explorer.batching.whatif_rows import History, Load, Setting
from explorer.i18n import _

LONG = 96  # computed tokens from which a prompt is called long
BUDGETS = (16, 32, 64, 128, 256, 512, 1024, 2048)
ALIKE = 0.3  # measured prompts that differ by no more from the modelled one are drawn beside it
BEFORE_S = 0.25  # of the strip, before the prompt comes
_LEAD = 6  # tokens that each reader has when the prompt comes
_AFTER = 6  # and tokens that come after it


@dataclass(frozen=True)
class Stall:
    """A long prompt among readers. ``budget``: None where prompts were not chunked. Seconds; ``itl_*`` are of the readers' tokens that came
    from its admission to its first token, ``usual_s`` is the median of those before."""

    prompt_tokens: int  # computed
    readers: int
    budget: int | None
    ttft_s: float
    itl_p99_s: float
    itl_max_s: float
    usual_s: float
    name: str = ""

    @property
    def label(self) -> str:
        return _("no chunks") if self.budget is None else f"{self.budget:,}"


@dataclass(frozen=True)
class Modelled(Stall):
    """``tokens_s``: when one reader got its tokens, seconds since the prompt came."""

    tokens_s: tuple[float, ...] = ()


def _gaps(reader: RequestRecord, begin: float, end: float) -> tuple[list[float], list[float]]:
    """(gaps that ended before ``begin``, those that ended from it to ``end``)."""
    times = reader.token_times_s
    gaps = [(b, b - a) for a, b in pairwise(times)]
    return [g for at, g in gaps if at <= begin], [g for at, g in gaps if begin < at <= end + 1e-9]


def stall_of(record: RequestRecord, others: Sequence[RequestRecord], setting: Setting) -> Stall | None:
    """What this request's prompt did to those who were reading. None: it was short, nobody was, or it stood in the queue for longer than a
    step takes, so that its time to first token says how full the engine was, and not what its chunks cost."""
    computed = record.num_prompt_tokens - record.num_cached_tokens
    if computed < LONG or record.num_preemptions or not record.token_times_s or math.isnan(record.scheduled_s):
        return None
    begin, end = record.scheduled_s, record.token_times_s[0]
    readers = [
        o
        for o in others
        if o is not record and o.token_times_s and o.token_times_s[0] <= begin and o.token_times_s[-1] >= end - 1e-9
    ]
    before: list[float] = []
    during: list[float] = []
    for reader in readers:
        earlier, meanwhile = _gaps(reader, begin, end)
        before += earlier[-20:]
        during += meanwhile
    if not during or begin - record.arrival_s > max(before + during):
        return None
    usual = float(np.median(before)) if before else math.nan
    budget = setting.max_num_batched_tokens if setting.enable_chunked_prefill else None
    return Stall(
        computed, len(readers), budget, record.ttft_s, float(np.percentile(during, 99)), max(during), usual, record.request_id
    )


def stalls_of(history: History, load: Load) -> list[Stall]:
    """All of a load."""
    if load.mixed or load.setting.batching != "continuous":
        return []
    records = history.records(load)
    found = (stall_of(record, records, load.setting) for record in records)
    return [stall for stall in found if stall is not None]


def modelled(cost: StepCost, prompt: int, readers: int, context: int, budget: int | None) -> Modelled | None:
    """A prompt of ``prompt`` tokens that comes to ``readers`` requests with ``context`` tokens each. ``budget`` None: not chunked.

    None where the readers alone fill the budget: the prompt would wait until they have ended.
    """
    if budget is not None and budget <= readers:
        return None
    whole = prompt + readers
    steps = 1 if budget is None else math.ceil(prompt / (budget - readers))
    reads = Replayed(0.0, context, _LEAD + steps + _AFTER, context - 1)
    lead = (_LEAD - 0.5) * cost(readers, readers * (context + _LEAD))
    requests = [reads] * readers + [Replayed(lead, prompt, 2)]
    made = replay(
        requests,
        cost,
        max_num_seqs=readers + 1,
        max_num_batched_tokens=whole if budget is None else budget,
        chunked=budget is not None,
    )
    *others, long = made.records
    stall = stall_of(long, others, Setting(max_num_batched_tokens=budget or whole, enable_chunked_prefill=budget is not None))
    if stall is None:
        return None
    came = long.arrival_s
    tokens = tuple(t - came for t in others[0].token_times_s if t - came >= -BEFORE_S)
    return Modelled(prompt, readers, budget, stall.ttft_s, stall.itl_p99_s, stall.itl_max_s, stall.usual_s, _("modelled"), tokens)


def curve(cost: StepCost, prompt: int, readers: int, context: int) -> list[Modelled]:
    """Over all budgets that make a difference, from the smallest to none: one that nearly holds prompt and readers is as no chunking."""
    budgets = [b for b in BUDGETS if b <= 0.8 * (prompt + readers)]
    found = (modelled(cost, prompt, readers, context, budget) for budget in (*budgets, None))
    return [point for point in found if point is not None]


def alike(stalls: Sequence[Stall], prompt: int, readers: int) -> list[Stall]:
    """Measured ones that are comparable; of each budget the newest three."""
    near = [
        s
        for s in stalls
        if abs(s.prompt_tokens - prompt) <= ALIKE * prompt and abs(s.readers - readers) <= max(1, ALIKE * readers)
    ]
    return [s for i, s in enumerate(near) if sum(o.budget == s.budget for o in near[i + 1 :]) < 3]
