"""Beam search: keep the few best beginnings of a text, go on from all of them, keep the few best again.

The definitions are those of transformers 5 (``GenerationMixin._beam_search`` without sampling):

- The score of a step is the log-probability of the token, after the penalties, which see log-probabilities here (all negative,
  so the repetition penalty always multiplies) and are not renormalised.
- Of all ways to go on, of all beams, the best ``(1 + number of end tokens) * width`` (at least twice the width) are looked at, by
  the sum of their log-probabilities. The best ``width`` that do not end are the next beams. Those that end and are among the
  first ``width`` compete, by ``sum / length ** length_penalty``, for ``width`` places among the complete sequences; the length is
  that of the output, end token included.
- It is over when no beam can improve on the complete ones: with ``early_stopping`` True as soon as there are ``width`` of them;
  False: when the best beam, taken to end here, is no better than the worst of them; "never": when it could not be better at
  its best length (the longest allowed if the length penalty is positive). And when all that is looked at ends.

Differences, all where transformers goes on with sequences that cannot be: a way of probability 0 is never taken, so there are
fewer beams than ``width`` where there are fewer ways (in its first step a vocabulary smaller than the width gives as many beams
as tokens), and equal sums are ordered by beam, then by token id. Sums are float64. Source of the method: Lowerre, "The Harpy
speech recognition system", 1976; of the length penalty: Wu et al., arXiv 1609.08144, section 7.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from engine.sampling import selection
from engine.sampling.processors import NEG_INF

EarlyStopping: TypeAlias = "bool | str"  # True | False | "never"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to go on: ``token_id`` after beam ``source``."""

    source: int
    token_id: int
    logprob: float  # of the token, after the penalties; natural log
    total: float  # with that of the beam


@dataclass(frozen=True, slots=True)
class Complete:
    """A complete sequence: what ``source`` was, and then ``token_id``."""

    token_ids: tuple[int, ...]  # the output, end token included
    total: float
    score: float  # total / length ** length_penalty
    reason: str  # "stop" | "length"


@dataclass(frozen=True, slots=True)
class Step:
    """What one step decided. ``beams`` and ``ended`` hold indices into ``ways``."""

    ways: list[Way]  # looked at, best first
    beams: list[int]  # the next beams, best first
    ended: dict[int, float]  # those that took a place among the complete ones, and their score


class BeamSearch:
    """The beams of one request: sums of log-probabilities, complete sequences, and when it is over. Knows nothing of KV.

    ``num_end_tokens``: tokens that end a sequence (0 when none does). ``max_length``: output tokens at most. ValueError for
    values out of range.
    """

    def __init__(
        self, width: int, length_penalty: float = 1.0, early_stopping: EarlyStopping = False, *, num_end_tokens: int,
        max_length: int,
    ) -> None:  # fmt: skip
        if width < 1 or max_length < 1 or num_end_tokens < 0:
            raise ValueError(
                f"width and max_length must be at least 1 and num_end_tokens at least 0, got {width}, {max_length}, {num_end_tokens}"
            )
        if early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping must be True, False or 'never', got {early_stopping!r}")
        self.width = width
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.max_length = max_length
        self.num_end_tokens = num_end_tokens
        self.length = 0  # output tokens of every beam
        self.totals = [0.0]  # of the live beams
        self.complete: list[Complete] = []  # at most ``width``, best first
        self.done = False

    @property
    def num_ways(self) -> int:
        """How many ways are looked at: enough for ``width`` beams if the best of them all ended."""
        return max(2, 1 + self.num_end_tokens) * self.width

    def ways(self, logprobs_BV: Tensor) -> list[Way]:
        """The best ways to go on, given the processed log-probabilities of the live beams, float32 [B, V]."""
        if logprobs_BV.shape[0] != len(self.totals):
            raise RuntimeError(f"{len(self.totals)} beams, log-probabilities of {logprobs_BV.shape[0]}")
        values, ids = best(logprobs_BV, self.num_ways)
        ways = [
            Way(beam, token, logprob, total + logprob)
            for beam, (total, row, tokens) in enumerate(zip(self.totals, values.tolist(), ids.tolist(), strict=True))
            for logprob, token in zip(row, tokens, strict=True)
            if logprob > NEG_INF
        ]
        return sorted(ways, key=lambda way: -way.total)[: self.num_ways]  # stable: equals stay by beam and token

    def advance(self, ways: Sequence[Way], ends: Sequence[bool], outputs: Sequence[Sequence[int]]) -> Step:
        """Take a step. ``ends[i]``: whether ``ways[i]`` ends its sequence; at ``max_length`` all do. ``outputs``: of the live beams."""
        self.length += 1
        last = self.length >= self.max_length
        ended: dict[int, float] = {}
        for i, way in enumerate(ways[: self.width]):
            if ends[i] or last:
                score = self.score(way.total, self.length)
                reason = "stop" if ends[i] else "length"
                ended[i] = score
                self.complete.append(Complete((*outputs[way.source], way.token_id), way.total, score, reason))
        self.complete = sorted(self.complete, key=lambda c: -c.score)[: self.width]
        least = self.complete[-1].score if self.complete else NEG_INF
        beams = [] if last else [i for i in range(len(ways)) if not ends[i]][: self.width]
        self.totals = [ways[i].total for i in beams]
        full = len(self.complete) == self.width
        self.done = not beams or (full and (self.early_stopping is True or not self.best_possible > least))
        return Step(list(ways), beams, {i: score for i, score in ended.items() if score >= least or not full})

    def score(self, total: float, length: int) -> float:
        return total / length**self.length_penalty

    @property
    def best_possible(self) -> float:
        """What the best live beam is taken to score in the end; NaN when there is no beam."""
        if not self.totals:
            return math.nan
        at_most = self.early_stopping == "never" and self.length_penalty > 0
        return self.score(self.totals[0], self.max_length if at_most else max(1, self.length))


def log_probabilities(logits: Tensor) -> Tensor:
    """Log-softmax in float32 of rows [B, V], of any float dtype.

    +inf is read as the limit, as ``engine.sampling.processors`` does; a row of NaN becomes NaN, a row of -inf stays -inf.
    """
    x = logits.float()
    top = x.amax(-1, keepdim=True)
    if bool(top.isinf().any()):
        x = torch.where(top == math.inf, torch.where(x == math.inf, 0.0, NEG_INF), x)
    return torch.where(top == NEG_INF, NEG_INF, torch.log_softmax(x, dim=-1))


def best(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row of float32 [S, V] and their ids, in order: descending, ties by ascending id. [S, min(k, V)]."""
    k = min(k, x.shape[-1])
    h = selection.head(x, k)
    values, ids = h.values_SK[:, :k], h.ids_SK[:, :k]
    for i in torch.nonzero((h.size_S < k) & (h.floor_S1.squeeze(-1) > NEG_INF)).flatten().tolist():
        sure, floor = (
            int(h.size_S[i]),
            h.floor_S1[i],
        )  # of the tokens equal to the last one the head holds any; wanted are the first
        ids[i, sure:] = torch.nonzero(x[i] == floor).flatten()[: k - sure]
    return values, ids
