"""One token's choice as a picture: its candidates through every processor, the bar that u falls on, the curve that top-p cuts. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.events.types import TokenSampled
from engine.request import SamplingParams
from engine.sampling.candidates import left, shares
from engine.sampling.processors import ORDER
from explorer.sampling.whatif import Outcome, active

LISTED = 16  # candidates shown, the likeliest of the raw distribution
LISTED_AFTER = 6  # and the likeliest after the processors, where they are others
SEGMENTS = 40  # of the bar
MIN_SEGMENT = 0.002  # smaller ones are drawn together
CURVE = 1000  # ranks of the curve
CURVE_POINTS = 90


@dataclass(frozen=True)
class Row:
    token_id: int
    shares: list[float]  # one a column; NaN: not known
    removed_by: str  # "" : kept
    chosen: bool  # the token that the engine took
    lands: bool  # the token that u falls on here


@dataclass(frozen=True)
class Curve:
    """The mass of the r likeliest tokens, over r, as top_p looks at it."""

    ranks: list[int]
    sums: list[float]
    p: float | None  # where it is cut; None: not at all
    size: int | None  # tokens in front of the cut, that one included; None: beyond what is known


@dataclass(frozen=True)
class Choice:
    columns: list[str]  # "raw" and the processors that are on, in order
    rows: list[Row]
    others: list[float]  # mass of all tokens that are not listed, one a column; NaN: not known
    num_others: int
    segments: list[tuple[int, float]]  # (token id, probability) along the bar, the first ones
    rest: float  # the probability behind them
    num_rest: int
    u: float | None
    landing: int | None  # token id; None: somewhere in the rest, where nothing says which
    left: dict[str, int]
    curve: Curve
    order: tuple[str, ...] = ORDER
    exact: bool = True
    derived: bool = False
    full: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


def recorded_choice(e: TokenSampled, params: SamplingParams, vocab_size: int, history: Iterable[int] = ()) -> Choice:
    """As the engine recorded it: every number measured, or a quotient of two that were. ``history``: tokens that penalties saw."""
    found, columns = shares(e), ["raw", *active(params)]
    by_raw = sorted(range(len(e.top)), key=lambda i: -e.top[i].logprob)
    walk = sorted(range(len(e.top)), key=lambda i: (-_after(e, i), e.top[i].token_id))
    final = [c.prob for c in e.top]
    rows = [
        Row(
            c.token_id, [found[name][i] for name in columns], c.removed_by, c.token_id == e.token_id, c.token_id == e.token_id
        )
        for i, c in ((i, e.top[i]) for i in by_raw[:LISTED])
    ]  # fmt: skip
    if all(row.token_id != e.token_id for row in rows):  # far down: of it only the beginning and the end were recorded
        rows.append(
            Row(e.token_id, [math.exp(e.logprob), *[math.nan] * (len(columns) - 2), e.prob][: len(columns)], "", True, True)
        )
    size = e.nucleus_size or 1
    places = [i for i in walk if final[i] > 0]
    if params.penalised and len(places) < size:
        least = _where_others_begin(e, params, set(history))
        places = [i for i in places if _after(e, i) > least]
    kept = [(e.top[i].token_id, final[i]) for i in places]
    sizes = left(e, vocab_size)
    return Choice(
        columns, rows, _others(rows, len(columns)), vocab_size - len(rows),
        *_segments(kept, max(0.0, 1.0 - sum(p for _t, p in kept)), max(0, size - len(kept))),
        e.u, e.token_id, sizes, _recorded_curve(e, params, found, walk),
    )  # fmt: skip


def _after(e: TokenSampled, i: int) -> float:
    value = e.top[i].penalised
    return e.top[i].logprob if math.isnan(value) else value


def _where_others_begin(e: TokenSampled, params: SamplingParams, history: set[int]) -> float:
    """The log-probability after the penalties that no unlisted token exceeds; inf where there is no telling.

    What is not listed was no likelier than the last candidate, and penalties that discourage move it no further up than a
    token that they leave alone.
    """
    encouraging = params.repetition_penalty < 1 or params.presence_penalty < 0 or params.frequency_penalty < 0
    shifts = [c.penalised - c.logprob for c in e.top if c.token_id not in history and not math.isnan(c.penalised)]
    if encouraging or not shifts:
        return math.inf
    return min(c.logprob for c in e.top) + max(shifts)


def _others(rows: list[Row], columns: int) -> list[float]:
    sums = [math.fsum(row.shares[i] for row in rows) for i in range(columns)]
    return [max(0.0, 1.0 - x) if not math.isnan(x) else math.nan for x in sums]


def _segments(kept: list[tuple[int, float]], rest: float, num_rest: int) -> tuple[list[tuple[int, float]], float, int]:
    """The bar's first pieces, and what is drawn as one behind them."""
    n = 0
    while n < min(len(kept), SEGMENTS) and (kept[n][1] >= MIN_SEGMENT or n == 0):
        n += 1
    return kept[:n], rest + math.fsum(p for _t, p in kept[n:]), num_rest + len(kept) - n


def _recorded_curve(e: TokenSampled, params: SamplingParams, found: dict[str, list[float]], walk: list[int]) -> Curve:
    seen = [found["top_k"][i] for i in walk if found["top_k"][i] > 0]
    if e.u is None or not seen or math.isnan(seen[0]):
        seen = sorted((math.exp(c.logprob) for c in e.top), reverse=True)
        return Curve(list(range(1, len(seen) + 1)), np.cumsum(seen).tolist(), None, None)
    p = params.top_p if params.top_p < 1 else None
    size = e.kept_sizes[2] if p is not None and e.kept_sizes else None
    return Curve(list(range(1, len(seen) + 1)), np.cumsum(seen).tolist(), p, size)


def outcome_choice(out: Outcome, params: SamplingParams, chosen_id: int, u: float | None, vocab_size: int) -> Choice:
    """As it is recomputed with other settings. Mass outside of the basis is not known, and is not shown as if it were."""
    columns = ["raw", *active(params, out.order)]
    count = min(LISTED, len(out.raw))
    near = np.flatnonzero(out.raw >= np.partition(out.raw, len(out.raw) - count)[len(out.raw) - count])
    by_raw = near[np.lexsort((out.token_ids[near], -out.raw[near]))][:count]
    wanted = dict.fromkeys([*by_raw.tolist(), *range(min(LISTED_AFTER, len(out.token_ids))), out.landing])
    wanted |= dict.fromkeys(np.flatnonzero(out.token_ids == chosen_id).tolist())
    listed = sorted((i for i in wanted), key=lambda i: (-out.raw[i], out.token_ids[i]))
    arrays = [out.raw, *(out.stages[name] for name in columns[1:])]
    rows = [
        Row(
            int(out.token_ids[i]), [float(a[i]) for a in arrays], out.order[out.removed_by[i]] if out.removed_by[i] >= 0 else "",
            int(out.token_ids[i]) == chosen_id, i == out.landing,
        )
        for i in listed
    ]  # fmt: skip
    others = _others(rows, len(columns)) if out.full else [_others(rows, 1)[0], *[math.nan] * (len(columns) - 1)]
    if out.exact:
        others = [x if name == "raw" or not math.isnan(x) else 0.0 for name, x in zip(columns, others, strict=True)]
    final = out.final
    alive = int(np.count_nonzero(final > 0))
    kept = [(int(out.token_ids[i]), float(final[i])) for i in range(min(alive, SEGMENTS))]
    return Choice(
        columns, rows, others, vocab_size - len(rows),
        *_segments(kept, float(final[len(kept) : alive].sum()), alive - len(kept)),
        u if params.temperature != 0 else None, out.token_id, out.left, _curve(out, params), out.order, out.exact, True, out.full,
    )  # fmt: skip


def _curve(out: Outcome, params: SamplingParams) -> Curve:
    before = out.order[out.order.index("top_p") - 1]
    given = out.stages[before if params.temperature != 0 else "penalties"]
    given = given[given > 0][:CURVE]
    sums = np.cumsum(given)
    at = np.unique(np.geomspace(1, len(given), CURVE_POINTS).round().astype(int))
    on = params.top_p < 1 and params.temperature != 0
    return Curve(at.tolist(), sums[at - 1].tolist(), params.top_p if on else None, out.left["top_p"] if on else None)
