"""What a sampled row is told as: the token, and on request how it stood among the others before and after each processor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from engine.request import SamplingParams
from engine.sampling.processors import NEG_INF, TokenCounts

# Token id, raw log-probability, probability after all processors, log-probability after the penalties, probability after
# penalties and temperature, and the processor that removed it ("": none did).
Listed: TypeAlias = tuple[int, float, float, float, float, str]
_REMOVED_BY = np.array(["", "temperature", "min_p", "top_k", "top_p"], dtype=object)


@dataclass(slots=True)
class SampleRow:
    """What one row of logits is sampled with. ``position``: that of the token to be sampled, in its sequence.

    ``counts``: what penalties look at; a request that is sampled again and again keeps one (``TokenCounts``), None
    counts the two lists anew each time. The lists are read only where there is a penalty.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    position: int
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    counts: TokenCounts | None = None

    @classmethod
    def next_of(cls, request: Any) -> "SampleRow":
        """What the next token of a request (``engine.request.Request``) is sampled with."""
        row = cls(request.params, request.seed, request.draw_index, request.num_tokens)
        if request.params.penalised:
            row.prompt_token_ids, row.output_token_ids = request.prompt_token_ids, request.output_token_ids
            if request.token_counts is None:
                request.token_counts = TokenCounts(row.prompt_token_ids)
            row.counts = request.token_counts
        return row

    def after(self, tokens: Sequence[int]) -> "SampleRow":
        """The row that follows when these tokens come first; this one stays as it is."""
        row = SampleRow(self.params, self.seed, self.sample_index, self.position + len(tokens))
        if self.params.penalised:
            row.prompt_token_ids, row.output_token_ids = self.prompt_token_ids, [*self.output_token_ids, *tokens]
            if self.counts is not None:
                self.counts.update(self.output_token_ids)
                row.counts = self.counts.copy()
                row.counts.update(row.output_token_ids)
        return row


@dataclass(slots=True)
class Sampled:
    """The token of one row, and what was asked to be told about it.

    What follows ``nucleus_size`` is filled for rows that are observed (``params.logprobs`` or ``observe_top`` is not None).
    ``logprob``, ``rank`` and ``entropy`` are of the raw distribution: before any processor, at temperature 1.
    """

    token_id: int  # -1 when there is an error
    logprob: float = math.nan  # natural log
    rank: int = 0  # 1: the likeliest token; ties by token id; 0: not looked for
    u: float | None = None  # None: greedy
    prob: float = 1.0  # of the token after the processors, renormalised
    nucleus_size: int = 0  # tokens that min_p, top_k and top_p left; 0: greedy
    nucleus_mass: float = math.nan  # their mass at the request's temperature, before renormalising; 0 when greedy
    entropy: float = math.nan  # nats
    top: list[tuple[int, float]] = field(default_factory=list)  # params.logprobs likeliest (id, log-probability)
    candidates: list[Listed] = field(default_factory=list)  # the observe_top likeliest of the raw distribution
    kept_sizes: list[int] = field(default_factory=list)  # tokens left by min_p, top_k and top_p (1, 1, 1: greedy)
    kept_masses: list[float] = field(default_factory=list)  # and their mass at the request's temperature
    error: str | None = None


def failed(top: float) -> Sampled | None:
    """The answer for a row whose largest logit leaves nothing to choose from; None when there is something."""
    if math.isnan(top):
        return Sampled(-1, prob=0.0, error="the logits contain NaN")
    if top == NEG_INF:
        return Sampled(-1, prob=0.0, error="every logit is -inf: no token can be chosen")
    return None


def told(host: dict[str, np.ndarray], rows: list[SampleRow], table: np.ndarray, observe_top: int | None) -> list[Sampled]:
    """What the sampler found of S rows (``host``: its arrays [S] or [S, n]), row by row. ``table``: [5, S], see ``Draws``."""
    greedy = np.array([row.params.temperature == 0 for row in rows])
    us = [None if g else u for g, u in zip(greedy, table[4].tolist(), strict=True)]
    tops, ids, probs = host["top"].tolist(), host["token_id"].astype(np.int64).tolist(), host["prob"].tolist()
    sizes = np.where(greedy, 0, host["size"]).astype(np.int64).tolist()
    with np.errstate(invalid="ignore", divide="ignore"):  # rows of NaN and of -inf, which are answered by ``failed``
        seen = _Seen(host, table, greedy) if "raw_total" in host else None
    out = []
    for i, row in enumerate(rows):
        one = failed(tops[i])
        if one is not None:
            one.u = us[i]
        else:
            one = Sampled(ids[i], u=us[i], prob=probs[i], nucleus_size=sizes[i])
            if seen is not None and (observe_top is not None or row.params.logprobs is not None):
                seen.fill(one, i, row.params.logprobs or 0, observe_top or 0)
        out.append(one)
    return out


class _Seen:
    """The observations of S rows, computed for all of them at once."""

    def __init__(self, host: dict[str, np.ndarray], table: np.ndarray, greedy: np.ndarray) -> None:
        total = host["total"]
        log_total = host["raw_top"] + np.log(host["raw_total"])
        self.logprobs = (host["raw_logit"] - log_total).tolist()
        self.ranks = host["rank"].astype(np.int64).tolist()
        self.entropies = np.maximum(0.0, host["entropy"]).tolist()
        mass = np.array([host["min_p_mass"], host["top_k_mass"], host["weight"]]).T / total[:, None]
        mass[greedy] = 1.0
        size = np.array([host["min_p_size"], host["top_k_size"], host["size"]]).T
        size[greedy] = 1
        self.masses = np.minimum(1.0, mass).tolist()
        self.sizes = np.nan_to_num(size).astype(np.int64).tolist()
        self.greedy = greedy.tolist()
        if host["list_ids"].shape[1]:
            self._list(host, table, greedy[:, None], log_total)

    def _list(self, host: dict[str, np.ndarray], table: np.ndarray, greedy: np.ndarray, log_total: np.ndarray) -> None:
        def column(name: str) -> np.ndarray:
            return host[name][:, None]

        ids, values = host["list_ids"], host["list_values"]
        chosen = ids == column("token_id")
        x = torch.from_numpy((values - column("top")) / table[0][:, None])
        w = x.exp_().numpy()  # torch's exp, as where min_p was decided
        kept = _within(values, ids, column("last_value"), column("last_id"))
        within_k = _within(values, ids, column("top_k_value"), column("top_k_id"))
        code = np.where(w < table[3][:, None], 2, np.where(~within_k, 3, np.where(~kept, 4, 0)))
        self.columns = [
            ids.astype(np.int64).tolist(),
            (host["list_raw"] - log_total[:, None]).tolist(),
            np.where(kept, w / column("weight"), 0.0).tolist(),
            (values - (host["top"] + np.log(host["plain_total"]))[:, None]).tolist(),
            np.where(greedy, chosen, w / column("total")).tolist(),
            _REMOVED_BY[np.where(greedy, ~chosen, code)].tolist(),
        ]

    def fill(self, one: Sampled, i: int, logprobs: int, observe_top: int) -> None:
        one.logprob, one.rank, one.entropy = self.logprobs[i], self.ranks[i], self.entropies[i]
        one.nucleus_mass = 0.0 if self.greedy[i] else self.masses[i][2]
        one.kept_sizes, one.kept_masses = self.sizes[i], self.masses[i]
        if logprobs:
            one.top = list(zip(self.columns[0][i][:logprobs], self.columns[1][i], strict=False))
        if observe_top:
            part: list[Any] = [column[i][:observe_top] for column in self.columns]
            one.candidates = list(zip(*part, strict=True))


def _within(values: np.ndarray, ids: np.ndarray, last_value: np.ndarray, last_id: np.ndarray) -> np.ndarray:
    """Whether tokens come no later in the order than a given last one."""
    return (values > last_value) | ((values == last_value) & (ids <= last_id))
