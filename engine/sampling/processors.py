"""What turns logits into the distribution that a token is drawn from: one pure function a processor.

The order is vLLM's: penalties, temperature, min_p, top_k, top_p (``ORDER``). Every function takes rows of logits
[S, V], leaves them as they are, and returns new ones; a token that a processor removes has -inf afterwards. Parameters
are numbers or tensors of one value a row [S]. Penalties and the comparison of logits work in float32, masses in float64,
whatever the model's dtype.

Edge rules that all share. Tokens are ordered by descending logit and ties by ascending token id. A logit of -inf has no
mass. +inf is read as the limit: tokens at +inf share all the mass equally. A row of NaN stays NaN, a row of -inf stays
-inf: nothing can be drawn from either, and ``engine.sampling.sampler`` reports it.

These are the definitions, written to be read and to be applied to recorded logits. The engine's own path
(``engine.sampling.sampler``) looks at no more tokens than it must, and tests hold it to these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from engine.request import SamplingParams

ORDER = ("penalties", "temperature", "min_p", "top_k", "top_p")
# What transformers 5 does: min_p comes last, so it looks at the largest of the renormalised probabilities (which changes nothing),
# but top_k and top_p count tokens that min_p would have taken away.
TRANSFORMERS_ORDER = ("penalties", "temperature", "top_k", "top_p", "min_p")
NEG_INF = float("-inf")

PerRow: TypeAlias = "float | Tensor"


class TokenCounts:
    """The tokens of one request that penalties look at, kept up to date as its output grows.

    ``ids`` int64 [N]: the distinct tokens of prompt and output; ``counts`` float32 [N]: how often each is in the output
    (0: only in the prompt). ``update`` costs only what is new since the last call.
    """

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int] = ()) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        self._slot = {token: i for i, token in enumerate(distinct)}
        self._ids = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float32)
        self._seen = 0
        self.update(output_token_ids)

    def update(self, output_token_ids: Sequence[int]) -> None:
        """Take in what was appended to the output. RuntimeError when the output has become shorter."""
        if len(output_token_ids) < self._seen:
            raise RuntimeError(f"output went from {self._seen} to {len(output_token_ids)} tokens; counts only grow")
        for token in output_token_ids[self._seen :]:
            slot = self._slot.setdefault(token, len(self._slot))
            if slot == len(self._ids):
                room = max(64, slot)  # double, so that growing stays linear over a long output
                self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.float32)])
            self._ids[slot] = token
            self._counts[slot] += 1
        self._seen = len(output_token_ids)

    def copy(self) -> "TokenCounts":
        """One that grows on its own: a beam splits."""
        other = TokenCounts(())
        other._slot, other._seen = dict(self._slot), self._seen
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._slot)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._slot)]


def probabilities(logits: Tensor) -> Tensor:
    """Softmax in float64 of rows [..., V], with the edge rules above (all -inf: all zero; +inf: shared equally)."""
    x = logits.double()
    top = x.amax(-1, keepdim=True)
    weights = torch.where(x == top, 1.0, torch.exp(x - top))  # equal infinities differ by NaN, not by 0
    weights = torch.where((x == NEG_INF) & (top == NEG_INF), 0.0, weights)
    weights = torch.where(top.isnan(), torch.nan, weights)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)


@dataclass(frozen=True)
class Penalised:
    """What penalties change: the logits of N tokens, ``rows`` and ``ids`` int64 [N], float32 ``before`` and ``after`` [N].

    ``raised``: rows whose penalties may make a token likelier (the host knows that without asking the device).
    """

    rows: Tensor
    ids: Tensor
    before: Tensor
    after: Tensor
    raised: list[int]


def penalise(
    logits: Tensor,
    counts: Sequence[TokenCounts],
    repetition_penalty: Sequence[float],
    presence_penalty: Sequence[float],
    frequency_penalty: Sequence[float],
) -> Penalised:
    """The logits that the penalties change, see ``apply_penalties``."""
    sizes = [len(c.ids) for c in counts]
    ids_N = np.concatenate([c.ids for c in counts])
    if ids_N.size and not 0 <= ids_N.min() <= ids_N.max() < logits.shape[-1]:
        raise ValueError(f"token ids must lie in [0, {logits.shape[-1]}), got {ids_N.min()} to {ids_N.max()}")
    per_token = np.stack(
        [np.concatenate([c.counts for c in counts])]
        + [np.repeat(np.asarray(p, dtype=np.float32), sizes) for p in (repetition_penalty, presence_penalty, frequency_penalty)]
    )
    count_N, repetition_N, presence_N, frequency_N = torch.from_numpy(per_token).to(logits.device)
    rows = torch.from_numpy(np.repeat(np.arange(len(counts)), sizes)).to(logits.device)
    ids = torch.from_numpy(ids_N).to(logits.device)
    before = logits[rows, ids].float()
    x = torch.where(before > 0, before / repetition_N, before * repetition_N)
    penalties = zip(repetition_penalty, presence_penalty, frequency_penalty, strict=True)
    raised = [i for i, (r, p, f) in enumerate(penalties) if r < 1 or p < 0 or f < 0]
    return Penalised(rows, ids, before, x - frequency_N * count_N - presence_N * (count_N > 0), raised)


def apply_penalties(
    logits: Tensor,
    counts: Sequence[TokenCounts],
    repetition_penalty: Sequence[float],
    presence_penalty: Sequence[float],
    frequency_penalty: Sequence[float],
) -> Tensor:
    """Make tokens that were already there less likely; float32 [S, V]. ``counts[i]`` and the penalties belong to row i.

    Repetition (Keskar et al., "CTRL", 2019, with the sign rule of transformers and vLLM): the logit of each token of
    prompt or output is divided by the penalty when positive and multiplied by it otherwise. Then frequency and
    presence (as OpenAI's API defines them, over the output only): logit - frequency * count - presence * (count > 0).
    1, 0 and 0 change nothing. ValueError for a token id outside the vocabulary.
    """
    p = penalise(logits, counts, repetition_penalty, presence_penalty, frequency_penalty)
    return torch.empty_like(logits, dtype=torch.float32).copy_(logits).index_put_((p.rows, p.ids), p.after)


def apply_temperature(logits: Tensor, temperature: PerRow) -> Tensor:
    """Logits / temperature: below 1 sharper, above 1 flatter; float64 [S, V].

    0 is the limit: the likeliest token alone (of equals the one with the lowest id) keeps its logit. Logits are taken
    relative to the largest one (which changes no probability), so no temperature however small overflows.
    """
    t = _column(temperature, logits)
    x = logits.double()
    top = x.amax(-1, keepdim=True)
    scaled = torch.where(x == top, torch.where(x.isinf(), x, 0.0), (x - top) / t)
    first = torch.arange(x.shape[-1], device=x.device) == x.argmax(-1, keepdim=True)
    greedy = torch.where(first | x.isnan(), x, NEG_INF)
    return torch.where(t == 0, greedy, scaled)


def apply_min_p(logits: Tensor, min_p: PerRow) -> Tensor:
    """Keep tokens whose probability is at least ``min_p`` times the largest one; float64 [S, V]. 0: off.

    Nguyen et al., "Turning up the heat: min-p sampling", 2024. The likeliest token (with its equals) always stays.
    """
    p = probabilities(logits)
    return _keep(logits, ~(p < _column(min_p, logits) * p.amax(-1, keepdim=True)))


def apply_top_k(logits: Tensor, top_k: PerRow) -> Tensor:
    """Keep the ``top_k`` likeliest tokens; float64 [S, V]. 0, -1 or more than the vocabulary: all.

    Fan, Lewis and Dauphin, 2018. Exactly k stay: of tokens equal to the k-th the lowest ids (transformers and vLLM
    keep all of those).
    """
    k = _column(top_k, logits)
    return _keep(logits, (_rank(logits) < k) | (k <= 0))


def apply_top_p(logits: Tensor, top_p: PerRow) -> Tensor:
    """Keep the nucleus: tokens in descending order while the mass *before* them is < ``top_p``; float64 [S, V].

    Holtzman et al., "The curious case of neural text degeneration", 2020: the smallest set of likeliest tokens whose
    mass reaches p, so the token that crosses p is in. The likeliest token stays however small p is. 1: off. Mass is
    that of the tokens which the earlier processors left.
    """
    p = _column(top_p, logits)
    rank = _rank(logits)
    sorted_p = torch.zeros_like(rank, dtype=torch.float64).scatter(-1, rank, probabilities(logits))
    before = sorted_p.cumsum(-1).roll(1, -1)
    before[..., 0] = 0.0
    return _keep(logits, (before.gather(-1, rank) < p) | (rank == 0) | (p >= 1) | logits.isnan())


def process(
    logits: Tensor, params: SamplingParams, counts: TokenCounts | None = None, order: Sequence[str] = ORDER
) -> Iterator[tuple[str, Tensor]]:
    """The chain applied to rows [S, V] of one request: (name, logits after it) for each of ``order``.

    ``counts``: what the penalties look at; None: nothing was there before. ``order``: ``ORDER`` is what the engine does,
    ``TRANSFORMERS_ORDER`` gives what transformers would have kept; any other order of these names is taken too, and one
    that leaves some out. ValueError for a name that is no processor.
    """
    known = {"penalties": None, **_FILTERS}
    if unknown := [name for name in order if name not in known]:
        raise ValueError(f"order must consist of {', '.join(ORDER)}, got {unknown[0]!r}")
    n = len(logits)
    x = logits
    for name in order:
        if name == "penalties":
            history = [counts or TokenCounts(())] * n
            x = apply_penalties(
                x, history, [params.repetition_penalty] * n, [params.presence_penalty] * n, [params.frequency_penalty] * n
            )
        else:
            x = _FILTERS[name](x, getattr(params, name))
        yield name, x


def removed_by(logits: Tensor, params: SamplingParams, counts: TokenCounts | None = None, order: Sequence[str] = ORDER) -> Tensor:
    """Which processor of ``order`` took each token away: int8 [S, V], its place in ``order``; -1: none did. As ``process``."""
    gone = torch.full(logits.shape, -1, dtype=torch.int8, device=logits.device)
    for i, (_, x) in enumerate(process(logits, params, counts, order)):
        gone[(x == NEG_INF) & (gone < 0) & (logits > NEG_INF)] = i
    return gone


_FILTERS = {"temperature": apply_temperature, "min_p": apply_min_p, "top_k": apply_top_k, "top_p": apply_top_p}


def _column(value: PerRow, logits: Tensor) -> Tensor:
    """A parameter as float64 [S, 1] (or a scalar) that broadcasts against rows."""
    t = torch.as_tensor(value, dtype=torch.float64, device=logits.device)
    return t.unsqueeze(-1) if t.ndim else t


def _rank(logits: Tensor) -> Tensor:
    """The place of each token in the order (0: likeliest), int64 [S, V]."""
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices
    return order.argsort(-1)


def _keep(logits: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept, logits.double(), NEG_INF)
