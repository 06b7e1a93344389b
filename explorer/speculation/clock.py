"""Whether speculation pays: measured times, the speed-up against plain decoding of the same requests, and the modelled curve. Pure.

The model (Leviathan, Kalman and Matias, arXiv 2211.17192, section 3): a pass over K drafted tokens gives E = (1 - a^(K+1)) / (1 - a)
tokens on average when each is accepted with probability a, given that all before it were. Its time, in passes of plain decoding, is
c K + v: a drafter's pass costs c, the target's pass over 1 + K tokens v. A drafter that proposes everything in one go costs c once.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from explorer.i18n import _
from explorer.speculation.rows import AFTER_LOOKUP, Setting, StepRow, Tally, Track
from explorer.speculation.stats import method_name

MAX_K = 8
NEWEST = 400  # steps of the present setting that costs are taken from
FEWEST = 3  # of either kind, before a cost is told
ONE_GO = ("ngram", "lookahead", "rest", "medusa")  # propose all tokens in one go
SAME_BATCH = 0.25  # mean batches that differ by no more are compared


@dataclass(frozen=True)
class Costs:
    """Medians in ms. ``verify_ms[k]``: of a step in which drafts of k tokens were verified; ``plain_ms``: one without drafts.

    ``missing``: why there is no curve yet."""

    method: str
    k: int  # tokens proposed in a row, of late
    batch: int
    temperature: float  # NaN: not one for all
    tree: tuple[int, ...]
    a: float
    hit: float  # share of the requests that asked for a draft and got one
    plain_ms: float
    draft_ms: float
    verify_ms: dict[int, float] = field(default_factory=dict)
    tokens: float = float("nan")  # gained a request and step, measured
    num_steps: int = 0
    num_plain: int = 0
    missing: str = ""

    @property
    def ready(self) -> bool:
        return not self.missing

    @property
    def one_go(self) -> bool:
        return self.method.removesuffix(AFTER_LOOKUP) in ONE_GO

    @property
    def draft(self) -> float:
        """All of drafting at today's K, in plain passes."""
        return self.draft_ms / self.plain_ms

    @property
    def c(self) -> float:
        """One pass of the drafter (or its one go), in plain passes."""
        return self.draft if self.one_go else self.draft / max(1, self.k)

    def v(self, k: int) -> float:
        """The target's pass over 1 + k tokens, in plain passes: as measured; between and beyond, on the line through its neighbours."""
        if k == 0:
            return 1.0
        known = {0: 1.0, **{depth: ms / self.plain_ms for depth, ms in self.verify_ms.items()}}
        x = sorted(known)
        y = [known[each] for each in x]
        if k <= x[-1] or len(x) == 1:
            return float(np.interp(k, x, y))
        slope = max(0.0, (y[-1] - y[0]) / (x[-1] - x[0]))
        return y[-1] + slope * (k - x[-1])

    def expected(self, k: int, a: float | None = None) -> float:
        """Tokens a pass gives, with the passes that had no draft."""
        a = self.a if a is None else a
        if k == 0:
            return 1.0
        with_draft = k + 1.0 if a >= 1 - 1e-12 else (1 - a ** (k + 1)) / (1 - a)
        return self.hit * with_draft + (1 - self.hit)

    def cost(self, k: int) -> float:
        """Time of a pass, in plain passes."""
        if k == 0:
            return 1.0
        drafting = self.c if self.one_go else self.c * k
        return drafting + self.hit * self.v(k) + (1 - self.hit)

    def speedup(self, k: int, a: float | None = None) -> float:
        return self.expected(k, a) / self.cost(k)

    @property
    def today(self) -> float:
        """Speed-up of the steps that were: tokens that came, over what they cost."""
        return self.tokens / self.cost(self.k)

    @property
    def best_k(self) -> int:
        """Of 0 .. MAX_K."""
        return max(range(MAX_K + 1), key=self.speedup)

    @property
    def break_even(self) -> float | None:
        """The acceptance from which on today's K is faster than plain decoding; None: none would be enough."""
        if self.k == 0 or self.speedup(self.k, 1.0) < 1:
            return None
        low, high = 0.0, 1.0
        for _i in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if self.speedup(self.k, middle) >= 1 else (middle, high)
        return high


def costs(steps: Sequence[StepRow], tallies: Iterable[Tally], step: int) -> Costs | None:
    """From the steps up to ``step``; None before anything was drafted.

    Of the newest setting (drafter, K, tree, temperature): the newest ``NEWEST`` steps, at the batch size that most of them had. Plain steps: those of the same batch size without a
    draft, whenever they were.
    """
    seen = [row for row in steps if row.step <= step]
    last = next((row for row in reversed(seen) if row.drafting), None)
    if last is None:
        return None
    kind = _kind(last)
    ours = [row for row in seen if _kind(row) == kind and row.asked][-NEWEST:]
    batch = Counter(row.batch for row in ours if row.drafting).most_common(1)[0][0]  # not the few steps at a batch's end
    same = [row for row in ours if row.batch == batch]
    drafted = [row for row in same if row.drafting]
    plain = [row.verify_ms for row in seen if not row.nodes and row.batch == batch]
    steps_of = {row.step for row in same}
    rounds = [t for t in tallies if t.step in steps_of and t.method == last.method]
    reached = sum(min(t.accepted + 1, t.depth) for t in rounds)
    a = sum(t.accepted for t in rounds) / reached if reached else math.nan
    k = round(median(row.depth for row in drafted))
    by_depth: dict[int, list[float]] = {}
    for row in seen:
        fits = row.method == last.method and row.batch == batch and row.setting.tree == last.setting.tree
        if fits and row.drafting == row.batch and float(row.depth).is_integer():
            by_depth.setdefault(int(row.depth), []).append(row.verify_ms)
    verify = {depth: median(ms[-NEWEST:]) for depth, ms in sorted(by_depth.items()) if len(ms) >= FEWEST}
    if not verify:
        verify = {k: median(row.verify_ms for row in drafted)}
    missing = ""
    if len(plain) < FEWEST:
        missing = _("No plain decode of {n} at a time was measured yet, so there is nothing to compare with.").format(n=batch)
    return Costs(
        last.method, k, batch, last.temperature, last.setting.tree, a, sum(r.drafting for r in same) / max(1, sum(r.asked for r in same)),
        median(plain) if plain else math.nan, median(row.draft_ms for row in same), verify,
        sum(r.kept for r in same) / sum(r.batch for r in same), len(same), len(plain), missing,
    )  # fmt: skip


def _kind(row: StepRow) -> tuple[Setting, str, str]:
    return row.setting, row.method, str(row.temperature)  # as text: NaN is then like NaN


# ------------------------------------------------------------------------------------------------------ the same requests


@dataclass(frozen=True)
class Paired:
    """The same requests with ``setting`` and plainly: milliseconds a token of each."""

    setting: Setting
    temperature: float
    num_requests: int
    batch: float
    ms: float
    plain_ms: float
    tokens: int

    @property
    def speedup(self) -> float:
        return self.plain_ms / self.ms

    @property
    def name(self) -> str:
        how = _("greedy") if self.temperature == 0 else _("temperature {t:g}").format(t=self.temperature)
        return f"{method_name(self.setting.method)}, K = {self.setting.k}, {how}"

    def fits(self, costs: Costs) -> bool:
        """Whether the costs are those of such requests; K may be another."""
        here = (self.setting.method, self.setting.tree, round(self.batch), self.temperature)
        return here == (costs.method, costs.tree, costs.batch, costs.temperature)


def paired(tracks: Iterable[Track], step: int) -> list[Paired]:
    """Requests that ran plainly and with a draft, all else alike (prompt, parameters, seed, about the same batch), both to their end.

    Grouped by setting, batch size and temperature, in the order in which they first ran."""
    plain: dict[str, list[Track]] = {}
    spec: list[Track] = []
    for track in tracks:
        done = track.finished_step is not None and track.finished_step <= step and track.reason in ("length", "stop")
        if not done or track.changed_sampling or len(track.timing.settings) != 1 or not track.timing.tokens:
            continue
        if _setting(track).on:
            spec.append(track)
        else:
            plain.setdefault(_key(track), []).append(track)
    found: dict[tuple[Setting, int, float], list[tuple[Track, Track]]] = {}
    for track in spec:
        near = [p for p in plain.get(_key(track), []) if _alike(p, track)]
        if near:
            found.setdefault((_setting(track), round(track.timing.batch), track.temperature), []).append((track, near[-1]))
    out = []
    for (setting, _batch, temperature), pairs in found.items():
        tokens, ms = sum(t.timing.tokens for t, _p in pairs), sum(t.timing.ms for t, _p in pairs)
        others = {p.request_id: p for _t, p in pairs}.values()
        plain_ms = sum(p.timing.ms for p in others) / sum(p.timing.tokens for p in others)
        batch = sum(t.timing.batch for t, _p in pairs) / len(pairs)
        out.append(Paired(setting, temperature, len(pairs), batch, ms / tokens, plain_ms, tokens))
    return out


def _setting(track: Track) -> Setting:
    return next(iter(track.timing.settings))


def _alike(a: Track, b: Track) -> bool:
    return abs(a.timing.batch - b.timing.batch) <= SAME_BATCH * max(a.timing.batch, b.timing.batch)


def _key(track: Track) -> str:
    greedy = track.temperature == 0  # draws nothing: its seed, which the engine chose, means nothing
    return repr(
        (
            track.prompt_token_ids,
            sorted((name, repr(value)) for name, value in track.sampling.items() if not (greedy and name == "seed")),
        )
    )
