"""What another setting would have done to the same token: what the engine's processors do, on recorded logits. Pure, no engine.

A ``Basis`` is what is known of one token's distribution: all logits (``watch("logits", request_id)``), or the recorded candidates.
On all logits the result is the engine's, up to their 16 bits. On candidates it is a computation among these alone: what lies outside is
left out of every sum, so ``Outcome.exact`` says when that makes no difference.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.events.types import LogitsRecorded, TokenSampled
from engine.request import SamplingParams
from engine.sampling.processors import ORDER, TRANSFORMERS_ORDER, TokenCounts, apply_penalties
from explorer.sampling.rows import logits_of

KNOBS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
PENALTIES = KNOBS[4:]
FILTERS = ("min_p", "top_k", "top_p")


class Basis:
    """Logits by ascending token id: ``token_ids`` int64 [N], ``logits`` float32 [1, N] (of candidates: raw log-probabilities).

    ``full``: all of the vocabulary, in order. ``history``: (prompt, output) ids that the penalties look at.
    """

    def __init__(self, token_ids: np.ndarray, logits: np.ndarray, full: bool, history: tuple[list[int], list[int]]) -> None:
        if not full:
            order = np.argsort(token_ids, kind="stable")
            token_ids, logits = token_ids[order], logits[order]
        self.token_ids = np.asarray(token_ids, dtype=np.int64)
        self.logits = torch.from_numpy(np.asarray(logits, dtype=np.float32)).unsqueeze(0)
        self.full = full
        self.counts = self._counts(*history)
        self._walk: tuple[tuple[float, ...], Any] | None = None
        self.penalised = np.zeros(0)  # probabilities in the order of the last walk

    @classmethod
    def of_logits(cls, e: LogitsRecorded, history: tuple[list[int], list[int]]) -> "Basis":
        logits = logits_of(e)
        return cls(np.arange(len(logits)), logits, True, history)

    @classmethod
    def of_candidates(cls, e: TokenSampled, history: tuple[list[int], list[int]]) -> "Basis":
        """ValueError for a token without recorded candidates."""
        if not e.top:
            raise ValueError(f"no candidates were recorded with the token at position {e.position}")
        return cls(np.array([c.token_id for c in e.top]), np.array([c.logprob for c in e.top]), False, history)

    def _counts(self, prompt: list[int], output: list[int]) -> TokenCounts:
        if self.full:
            inside = len(self.token_ids)
            return TokenCounts([t for t in prompt if 0 <= t < inside], [t for t in output if 0 <= t < inside])
        place = {int(token): i for i, token in enumerate(self.token_ids)}
        return TokenCounts([place[t] for t in prompt if t in place], [place[t] for t in output if t in place])

    def walk(self, params: SamplingParams) -> tuple[np.ndarray, np.ndarray, torch.Tensor]:
        """After the penalties, in the order of the walk (descending, ties by token id): places [N] in ``token_ids``, raw
        probabilities [N], logits [1, N]. The last one is kept: most sliders leave the penalties alone."""
        key = tuple(float(getattr(params, name)) for name in PENALTIES)
        if self._walk is None or self._walk[0] != key:
            x = apply_penalties(self.logits, [self.counts], [key[0]], [key[1]], [key[2]])
            ordered, place = torch.sort(x, dim=-1, descending=True, stable=True)
            at = place[0].numpy()
            raw = self.logits[0].double().numpy()
            raw = np.exp(raw - raw.max()) / np.exp(raw - raw.max()).sum() if self.full else np.exp(raw)
            self._walk = key, (at, raw[at], ordered)
            self.penalised = _softmax(ordered[0].double().numpy())
        found: tuple[np.ndarray, np.ndarray, torch.Tensor] = self._walk[1]
        return found


@dataclass(frozen=True)
class Outcome:
    """One token's choice, recomputed. Arrays over N tokens in the order of the walk."""

    token_ids: np.ndarray
    raw: np.ndarray  # probabilities before any processor
    stages: dict[str, np.ndarray]  # after each processor of ``order``; 0 from the one on that removed the token
    left: dict[str, int]  # tokens that each left
    removed_by: np.ndarray  # int8: place in ``order``; -1: kept
    order: tuple[str, ...]
    landing: int  # the place on which u falls (the likeliest when there is no draw)
    exact: bool
    full: bool

    @property
    def final(self) -> np.ndarray:
        return self.stages[self.order[-1]]

    @property
    def kept(self) -> set[int]:
        return {int(t) for t in self.token_ids[self.removed_by < 0]}

    @property
    def token_id(self) -> int:
        return int(self.token_ids[self.landing])

    def margin(self, u: float) -> float:
        """How far ``u`` lies from the nearer edge of the piece on which it falls, in probability."""
        before = float(self.final[: self.landing].sum())
        return max(0.0, min(u - before, before + float(self.final[self.landing]) - u))


def recompute(basis: Basis, params: SamplingParams, u: float | None, order: tuple[str, ...] = ORDER) -> Outcome:
    """Apply ``params`` to the recorded logits and let the same ``u`` fall. ``order`` begins with the penalties.

    ValueError for a repetition penalty on candidates: it asks for the sign of logits, which log-probabilities do not tell.
    """
    if not basis.full and params.repetition_penalty != 1:
        raise ValueError("a repetition penalty needs the full logits (watch('logits', request_id)), got candidates only")
    if order[0] != "penalties":
        raise ValueError(f"order must begin with the penalties, got {order!r}")
    at, raw, x = basis.walk(params)
    stages = {"penalties": basis.penalised}
    left = {"penalties": len(at)}
    removed = np.full(len(at), -1, np.int8)
    weights = _weights(x, params.temperature)
    alive = 1 if params.temperature == 0 else int((x > -torch.inf).sum())  # where a weight is too small for a float, too
    kept, before = len(at), "penalties"
    for i, name in enumerate(order[1:], start=1):
        now = min(kept, alive if name == "temperature" else _first(name, weights[:kept], params))
        if now == kept and name != "temperature":
            stages[name] = stages[before]
        else:
            removed[now:kept] = i
            stages[name] = np.zeros(len(at))
            np.divide(weights[:now], weights[:now].sum(), out=stages[name][:now])
        left[name] = kept = now
        before = name
    weights[kept:] = 0.0
    return Outcome(
        basis.token_ids[at], raw, stages, left, removed, tuple(order), landing(weights, u), _exact(basis, params, left, len(at)),
        basis.full,
    )  # fmt: skip


def _weights(x: torch.Tensor, temperature: float) -> np.ndarray:
    """exp of the logits [1, N] at a temperature, the likeliest 1; float64 [N]. 0: the first alone."""
    if temperature == 0:
        return np.eye(1, x.shape[1])[0]
    values = x[0].double().numpy()
    with np.errstate(invalid="ignore"):  # of equal infinities
        return np.where(values == values[0], 1.0, np.exp((values - values[0]) / temperature))


def _first(name: str, weights: np.ndarray, params: SamplingParams) -> int:
    """How many a processor leaves of tokens in the order of the walk: each of them takes away from the end.

    The definitions are those of ``engine.sampling.processors``, to which tests hold this; there each works on its own, in any
    order of tokens, and sorts. A slider wants its answer sooner.
    """
    if params.temperature == 0:
        return len(weights)
    if name == "min_p" and params.min_p > 0:
        return int(np.count_nonzero(weights >= params.min_p * weights[0]))
    if name == "top_k" and params.top_k > 0:
        return params.top_k
    if name == "top_p" and params.top_p < 1:
        mass = np.cumsum(weights / weights.sum())
        return 1 + int(np.count_nonzero(mass[:-1] < params.top_p))
    return len(weights)


def landing(weights: np.ndarray, u: float | None) -> int:
    """The place on which ``u`` falls along ``weights`` (in any unit): where their sum passes it, at latest the last one above 0."""
    if u is None:
        return 0
    summed = np.cumsum(weights)
    last = max(0, int(np.count_nonzero(weights)) - 1)
    return min(int(np.count_nonzero(summed[weights > 0] <= u * summed[-1])), last)


def _exact(basis: Basis, params: SamplingParams, left: dict[str, int], known: int) -> bool:
    """Whether tokens outside of the basis could change anything."""
    if basis.full or (params.temperature == 0 and not params.penalised):
        return True
    if params.penalised:  # one from outside may overtake those that are pushed down
        return False
    # The order ends inside: at top_k (top_p sees only what top_k left), or where min_p stops.
    return (0 < params.top_k <= known and params.min_p == 0) or (params.min_p > 0 and left["min_p"] < known)


def _softmax(x: np.ndarray) -> np.ndarray:
    w = np.exp(x - x.max())
    return w / w.sum()


@dataclass(frozen=True)
class Orders:
    """What vLLM's order keeps and transformers' does not, and the other way round."""

    ours: int  # tokens kept in vLLM's order
    theirs: int
    only_ours: list[int]  # token ids, likeliest first
    only_theirs: list[int]


def orders_differ(basis: Basis, params: SamplingParams, ours: Outcome) -> Orders | None:
    """Where the two orders keep different sets; None where they keep the same. ``ours``: the outcome in vLLM's order.

    They can only differ when min_p filters together with top_k or top_p: transformers puts min_p last.
    """
    if params.temperature == 0 or params.min_p == 0 or (params.top_k <= 0 and params.top_p >= 1):
        return None
    theirs = recompute(basis, params, None, TRANSFORMERS_ORDER)
    a, b = ours.removed_by < 0, theirs.removed_by < 0  # the walk is the same
    if (a == b).all():
        return None
    return Orders(int(a.sum()), int(b.sum()), ours.token_ids[a & ~b].tolist(), ours.token_ids[b & ~a].tolist())


def active(params: SamplingParams, order: tuple[str, ...] = ORDER) -> list[str]:
    """The processors that are on, in order."""
    filters = params.temperature != 0
    on = {
        "penalties": params.penalised, "temperature": params.temperature != 1, "min_p": filters and params.min_p > 0,
        "top_k": filters and params.top_k > 0, "top_p": filters and params.top_p < 1,
    }  # fmt: skip
    return [name for name in order if on[name]]


def params_of(facts: dict[str, Any], **changes: Any) -> SamplingParams:
    """The recorded parameters with some of the knobs changed. ValueError for a value that is out of range."""
    known = {name: facts[name] for name in KNOBS if facts.get(name) is not None}
    return SamplingParams(**{**known, **changes})
