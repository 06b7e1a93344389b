"""Drawing a draft, in the way that ``engine.speculation.verify`` weighs it. Every drafter that has a distribution draws here.

A token is found as the target's is: u is laid along the probabilities in descending order, ties by token id. Several children of
one node are drawn without replacement: each from what its elder siblings have left, renormalised. All that were drawn must be
proposed, in their order: how many may depend on anything but what came out.

For "rejection" u comes from the drafter's own stream, one number for each sibling. For "coupled" it is the number with which the
target will draw the token of that position, so that both fall on the same token as often as their distributions let them.

Shapes: S rows, V vocabulary, Vd the drafter's own (reduced) vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from engine.request import SamplingParams
from engine.sampling import selection
from engine.sampling.rng import STREAM_DRAFT, STREAM_TOKEN, uniform
from engine.sampling.sampled import SampleRow
from engine.sampling.sampler import Sampler

_HEAD = 64  # tokens that are sorted before a row is sorted whole; it changes no result


@dataclass
class Drawn:
    """The children of one node, in the order in which they were drawn (at temperature 0: of the drafter's probability).

    ``probs``: the drafter's probability of each, after the request's processors; at temperature 0, where all mass would be
    on one token, what it is at temperature 1. ``tops``: the likeliest of them all, as ``Draft.tops``.
    ``q`` float64 [V]: what they were drawn from; None: at temperature 0, and in coupled drafts (see ``Draft.q``).
    ``error``: nothing can be drawn (NaN in the logits); there are no tokens then.
    """

    token_ids: list[int] = field(default_factory=list)
    probs: list[float] = field(default_factory=list)
    tops: list[tuple[int, float]] = field(default_factory=list)
    q: Tensor | None = None
    error: str | None = None


class DraftSampler:
    """Draws for one drafter. ``vocab`` int64 [Vd], ascending: the token ids that its logits are of; None: all of them.

    Not for several threads at once.
    """

    def __init__(self, vocab_size: int, vocab: Tensor | None = None) -> None:
        self.vocab_size = vocab_size
        self.vocab = vocab
        self._ids = None if vocab is None else vocab.tolist()
        self._whole = Sampler(vocab_size)
        self._own = self._whole if vocab is None else Sampler(len(vocab))

    @torch.inference_mode()
    def draw(
        self, logits: Tensor, rows: Sequence[SampleRow], count: int = 1, acceptance: str = "rejection", num_top: int = 0
    ) -> list[Drawn]:
        """Up to ``count`` children for each row of ``logits`` [S, Vd]; fewer where fewer have any probability.

        ``rows``: what the token of that place would be sampled with (``SampleRow.after`` gives those further on).
        ``num_top``: how many of the likeliest tokens to tell.
        """
        out = [Drawn() for _ in rows]
        for greedy in (True, False):
            at = [i for i, row in enumerate(rows) if (row.params.temperature == 0) == greedy]
            if at:
                part = logits if len(at) == len(rows) else logits[torch.tensor(at, device=logits.device)]
                if greedy:
                    self._greedy(part, [rows[i] for i in at], count, num_top, [out[i] for i in at])
                else:
                    self._sampled(part, [rows[i] for i in at], count, acceptance, num_top, [out[i] for i in at])
        return out

    def _greedy(self, logits: Tensor, rows: list[SampleRow], count: int, num_top: int, out: list[Drawn]) -> None:
        p, errors = self._processed(logits, [replace(row, params=_at_one(row.params)) for row in rows])
        self._tell(p, max(count, num_top), num_top, errors, out)
        for one in out:
            one.token_ids = [token for token, _ in one.tops[:count]]
            one.probs = [prob for _, prob in one.tops[:count]]
            one.tops = one.tops[:num_top]

    def _sampled(
        self, logits: Tensor, rows: list[SampleRow], count: int, acceptance: str, num_top: int, out: list[Drawn]
    ) -> None:
        q, errors = self._processed(logits, rows)
        self._tell(q, num_top, num_top, errors, out)
        coupled = acceptance == "coupled"
        good = [i for i, error in enumerate(errors) if error is None]
        if not good:
            return
        left = q[good]
        for sibling in range(count):
            us = [draft_u(rows[i], sibling, coupled) for i in good]
            tokens = walk(left, us)
            for j, (i, token) in enumerate(zip(good, tokens, strict=True)):
                if token >= 0:
                    out[i].token_ids.append(self._token(token))
                    out[i].probs.append(float(q[i, token]))
                    left[j, token] = 0.0
        if not coupled:
            whole = self._over_all(q)
            for i in good:
                out[i].q = whole[i]

    def _processed(self, logits: Tensor, rows: list[SampleRow]) -> tuple[Tensor, list[str | None]]:
        """Distributions [S, Vd] over the drafter's own vocabulary, and why there is none."""
        if self.vocab is None or not any(row.params.penalised for row in rows):
            found = self._own.distributions(logits, rows)
            return found.p, found.errors
        spread = torch.full((len(rows), self.vocab_size), -torch.inf, device=logits.device)
        spread[:, self.vocab] = logits.float()
        found = self._whole.distributions(spread, rows)
        return found.p[:, self.vocab], found.errors

    def _over_all(self, q: Tensor) -> Tensor:
        if self.vocab is None:
            return q
        return torch.zeros(len(q), self.vocab_size, dtype=q.dtype, device=q.device).index_copy_(1, self.vocab, q)

    def _tell(self, p: Tensor, k: int, num_top: int, errors: list[str | None], out: list[Drawn]) -> None:
        if k:
            h = selection.head(p, min(p.shape[-1], k + _HEAD))
            values, ids = h.values_SK[:, :k].tolist(), h.ids_SK[:, :k].tolist()
        for i, one in enumerate(out):
            one.error = errors[i]
            if k and errors[i] is None:
                one.tops = [(self._token(token), value) for token, value in zip(ids[i], values[i], strict=True) if value > 0]

    def _token(self, index: int) -> int:
        return index if self._ids is None else int(self._ids[index])


@lru_cache(maxsize=64)
def _at_one(params: SamplingParams) -> SamplingParams:
    """The penalties of a greedy request alone, at temperature 1."""
    return params.changed(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def draft_u(row: SampleRow, sibling: int = 0, coupled: bool = False) -> float:
    """What a drafter draws the token of ``row.position`` with."""
    if coupled:
        return uniform(row.seed, row.sample_index, row.position, STREAM_TOKEN)
    return uniform(row.seed, row.sample_index, row.position, STREAM_DRAFT, sibling)


def walk(p: Tensor, us: Sequence[float]) -> list[int]:
    """The token that u falls on when it is laid along a row of masses in descending order, ties by token id.

    ``p`` float64 [S, V], at least 0, of any sum (u is measured in it); ``us``: [0, 1) each. -1 for a row with no mass.
    """
    h = selection.head(p, min(_HEAD, p.shape[-1]))
    total = p.sum(-1)
    target = torch.tensor(list(us), dtype=torch.float64, device=p.device) * total
    summed = h.values_SK.cumsum(-1)
    passed = (summed <= target.unsqueeze(-1)).sum(-1)
    last = (h.values_SK > 0).sum(-1) - 1
    size = h.size_S if bool((h.floor_S1 > 0).any()) else torch.full_like(last, p.shape[-1] + 1)
    chosen = h.ids_SK.gather(-1, torch.minimum(passed, last).clamp_(min=0).unsqueeze(-1)).squeeze(-1)
    out: list[int] = torch.where(last < 0, -1, chosen).tolist()
    for i in torch.nonzero(passed >= size).squeeze(-1).tolist():
        out[i] = _walk_whole(p[i], float(target[i]))
    return out


def _walk_whole(p: Tensor, target: float) -> int:
    masses = p.cpu().numpy()
    ids = np.flatnonzero(masses > 0)
    kept = masses[ids]
    ordered = np.sort(kept)[::-1]
    index = min(int(np.count_nonzero(np.cumsum(ordered) <= target)), len(ids) - 1)
    value = ordered[index]
    return int(ids[kept == value][index - np.count_nonzero(kept > value)])
