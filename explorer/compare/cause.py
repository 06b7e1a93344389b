"""Why a token differs from the one in another run: another draw, a distribution that moved, or only numerics.

Pure functions on what was recorded of the token in both runs. The prefix is the same in both (it is the first difference), so
the model was asked the same question; what can differ is how the answer was computed, what was done with it, and the dart.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from engine.events.types import TokenSampled
from explorer.i18n import _
from explorer.theme import number

# Parameters that shape the distribution. Others (max_tokens, stop) only decide when it ends.
SHAPING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
TIE = 0.02  # logits: in float32 another order of summation may turn a choice this close
EDGE = 1e-4  # of probability: a draw this near to an edge of its token's share may fall on the neighbour


@dataclass(frozen=True)
class Changed:
    """Something that is not the same in two runs."""

    name: str
    a: Any
    b: Any

    def __str__(self) -> str:
        return f"{self.name}: {_short(self.a)} → {_short(self.b)}"


@dataclass(frozen=True)
class Cause:
    """``kind``: "draw" (another u), "distribution" (a setting or other weights moved it, or made a draw of a greedy choice),
    "numerics" (the same computation, rounded otherwise), "end" (one of the two ended), "unseen" (a log does not hold the token).

    ``margin``: how close the choice was in the first run, in logits when greedy, else the distance of u to the nearest edge
    of the token's share; None where the recorded candidates do not say. ``shift``: by how much the recorded raw
    log-probabilities of the same tokens differ at most. ``fault``: in float32 the margin is larger than rounding explains.
    """

    kind: str
    words: str
    changed: tuple[Changed, ...] = ()
    margin: float | None = None
    shift: float | None = None
    fault: bool = False
    facts: list[str] = field(default_factory=list)


def differences(a: dict[str, Any], b: dict[str, Any], names: Any = None) -> tuple[Changed, ...]:
    """What two dicts say differently, of ``names`` or of all that either has."""
    names = dict.fromkeys([*a, *b]) if names is None else names
    return tuple(Changed(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name))


def token_cause(
    a: TokenSampled, b: TokenSampled, sampling: tuple[dict[str, Any], dict[str, Any]], weights: tuple[Changed, ...],
    numerics: tuple[Changed, ...], dtype: str,
) -> Cause:  # fmt: skip
    """Why ``b`` is another token than ``a``.

    ``sampling``: the parameters in force in either run. ``weights``: differences of the model itself; ``numerics``: of how it is
    computed (number format, device, backend, batch shape). ``dtype``: of the first run.
    """
    margin, shift = choice_margin(a, sampling[0]), logprob_shift(a, b)
    facts = [_chosen(_("first run"), a), _chosen(_("second run"), b)]
    shaping = differences(*sampling, SHAPING)
    if a.u != b.u and a.u is not None and b.u is not None:
        changed = differences(*sampling, ("seed",)) + shaping + weights
        words = _("another draw: u was {a:.6f} and is {b:.6f}").format(a=a.u, b=b.u)
        return Cause("draw", words, changed, margin, shift, facts=facts)
    if shaping or weights:
        words = _moved_words(a, b, ", ".join(map(str, shaping + weights)))
        return Cause("distribution", words, shaping + weights, margin, shift, facts=facts)
    return _numerics(a, margin, shift, numerics, dtype, facts)


def _moved_words(a: TokenSampled, b: TokenSampled, what: str) -> str:
    """What a setting or other weights did to the choice."""
    if a.u is None and b.u is not None:
        said = _(
            "a greedy choice became a draw ({what}): the first run took the best token, in the second u = {u:.6f} drew rank {rank}"
        )
        return said.format(what=what, u=b.u, rank=b.rank)
    if a.u is not None and b.u is None:
        said = _(
            "a draw became a greedy choice ({what}): in the first run u = {u:.6f} drew rank {rank}, the second took the best token"
        )
        return said.format(what=what, u=a.u, rank=a.rank)
    how = _("the best token") if a.u is None else _("the token on which the same u = {u:.6f} falls").format(u=a.u)
    return _("the distribution moved ({what}), and with it {how}").format(what=what, how=how)


def _numerics(
    a: TokenSampled, margin: float | None, shift: float | None, changed: tuple[Changed, ...], dtype: str, facts: list[str]
) -> Cause:
    greedy = a.u is None
    parts = [_("only numerics: same settings and same draw") if not greedy else _("only numerics: same settings")]
    if changed:
        parts.append(_("computed otherwise ({what})").format(what=", ".join(map(str, changed))))
    if margin is None:
        parts.append(_("the margin is not among the recorded candidates"))
    elif greedy:
        parts.append(_("the two best tokens were {m} apart in logits").format(m=number(margin)))
    else:
        parts.append(_("u lay {m} from the edge of the token's share").format(m=number(margin)))
    if shift is not None:
        parts.append(_("log-probabilities differ by up to {s}").format(s=number(shift)))
    fault = dtype == "float32" and margin is not None and margin > (TIE if greedy else EDGE)
    if fault:
        parts.append(_("more than rounding in float32 explains"))
    return Cause("numerics", "; ".join(parts), changed, margin, shift, fault, facts)


def choice_margin(e: TokenSampled, sampling: dict[str, Any]) -> float | None:
    """How close the choice of ``e`` was: logits between the best two when greedy, else probability from u to the nearest
    edge of the chosen token's share. None where the recorded candidates do not tell."""
    penalties = any(sampling.get(name, off) != off for name, off in _PENALTIES_OFF)
    if e.u is None:
        scores = [_greedy_score(c, penalties) for c in e.top]
        if len(scores) < 2 or any(s is None or math.isnan(s) for s in scores):
            return None
        best = sorted((s for s in scores if s is not None), reverse=True)
        return best[0] - best[1]
    kept = sorted((c for c in e.top if c.prob > 0), key=lambda c: (-c.prob, c.token_id))
    before = 0.0
    for c in kept:
        if c.token_id == e.token_id:
            # With penalties a token outside of the raw top may come before this one, unless all that were kept are known.
            if penalties and len(kept) < e.nucleus_size:
                return None
            return max(0.0, min(e.u - before, before + c.prob - e.u))
        before += c.prob
    return None


_PENALTIES_OFF = (("repetition_penalty", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0))


def _greedy_score(candidate: Any, penalties: bool) -> float | None:
    if not penalties:
        return candidate.logprob
    return getattr(candidate, "penalised", None)  # recorded since candidates carry every stage


def logprob_shift(a: TokenSampled, b: TokenSampled) -> float | None:
    """The largest difference of the raw log-probabilities that both runs recorded; None without a token in common."""
    first = {c.token_id: c.logprob for c in a.top} | {a.token_id: a.logprob}
    second = {c.token_id: c.logprob for c in b.top} | {b.token_id: b.logprob}
    pairs = [abs(first[i] - second[i]) for i in first.keys() & second.keys()]
    return max((p for p in pairs if math.isfinite(p)), default=None)


def _chosen(who: str, e: TokenSampled) -> str:
    how = _("greedy") if e.u is None else f"u = {e.u:.6f}"
    raw = math.exp(e.logprob) if e.logprob > -700 else 0.0
    return _("{who}: {text} (id {id}), p = {p} of the raw distribution, rank {rank}, {how}").format(
        who=who, text=repr(e.text), id=e.token_id, p=number(raw), rank=e.rank, how=how
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}…"
