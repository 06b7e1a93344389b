"""Random distributions on a small vocabulary, and the exact law of the text that a draft and its verification give."""

import itertools
from collections.abc import Callable, Sequence

import torch

from engine.request import SamplingParams
from engine.sampling.processors import probabilities, process
from engine.speculation.acceptance import Place

VOCAB = 6
SHARP = SamplingParams(temperature=0.7, top_p=0.85)  # takes tokens away, so p and q have zeros in different places

Law = torch.Tensor  # float64 [V, V, ..., V]: probability of each text of so many tokens
Prefix = tuple[int, ...]


def processed(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """float64 [V]."""
    *_, (_, final) = process(logits[None], params)
    return probabilities(final)[0]


class Models:
    """A target and a drafter with random logits after every prefix: ``p(prefix)``, ``q(prefix)`` float64 [V]."""

    def __init__(self, seed: int, params: SamplingParams = SHARP, holes: float = 0.2, likeness: float = 0.6) -> None:
        self.params, self.seed, self.holes, self.likeness = params, seed, holes, likeness
        self._rows: dict[tuple[str, Prefix], torch.Tensor] = {}
        self._laws: dict[tuple[str, Prefix], torch.Tensor] = {}

    def logits(self, who: str, prefix: Prefix) -> torch.Tensor:
        """float32 [V]; a share ``holes`` of -inf, and the drafter's near the target's by ``likeness``."""
        if (who, prefix) not in self._rows:
            number = sum((token + 1) * (VOCAB + 1) ** i for i, token in enumerate(prefix)) * 2 + (who == "q")
            g = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            x = 1.5 * torch.randn(VOCAB, generator=g)
            gone = torch.rand(VOCAB, generator=g) < self.holes
            gone[int(torch.randint(VOCAB, (1,), generator=g))] = False
            if who == "q":
                like = self.logits("p", prefix).clamp(min=-3)
                x = self.likeness * like + (1 - self.likeness) * x
            self._rows[who, prefix] = x.masked_fill(gone, -torch.inf)
        return self._rows[who, prefix]

    def p(self, prefix: Prefix) -> torch.Tensor:
        return self._law("p", prefix)

    def q(self, prefix: Prefix) -> torch.Tensor:
        return self._law("q", prefix)

    def _law(self, who: str, prefix: Prefix) -> torch.Tensor:
        if (who, prefix) not in self._laws:
            self._laws[who, prefix] = processed(self.logits(who, prefix), self.params)
        return self._laws[who, prefix]


def target_law(models: Models, depth: int, prefix: Prefix = ()) -> Law:
    """The law of ``depth`` tokens (at least 1) of plain decoding."""
    if depth == 1:
        return models.p(prefix)
    later = torch.stack([target_law(models, depth - 1, (*prefix, token)) for token in range(VOCAB)])
    return models.p(prefix).reshape(-1, *[1] * (depth - 1)) * later


def speculated_law(
    models: Models, shape: Sequence[int], drawn_from: Callable[[Prefix], torch.Tensor] | None = None, prefix: Prefix = ()
) -> Law:
    """The law of ``len(shape) + 1`` tokens when every node at depth d has ``shape[d]`` children, drawn without replacement from
    ``drawn_from(prefix)`` (``models.q``), and verified against ``models.q``: all ways of drawing and of testing, weighted exactly.

    What the step itself does not decide any more is the target's, as in the steps after it.
    """
    draw = models.q if drawn_from is None else drawn_from
    if not shape:
        return models.p(prefix)
    q = draw(prefix)
    law = torch.zeros([VOCAB] * (len(shape) + 1), dtype=torch.float64)
    plain = torch.stack([target_law(models, len(shape), (*prefix, token)) for token in range(VOCAB)])
    followed = {}
    for siblings in itertools.permutations(range(VOCAB), min(shape[0], int((q > 0).sum()))):
        weight, rest = 1.0, 1.0
        for token in siblings:  # without replacement: each from what its elders left
            weight *= float(q[token]) / rest if rest > 0 else 0.0
            rest -= float(q[token])
        if weight <= 0:
            continue
        place = Place(models.p(prefix))
        for token in siblings:
            accept = place.weigh(token, models.q(prefix))[2]
            if token not in followed:
                followed[token] = speculated_law(models, shape[1:], drawn_from, (*prefix, token))
            law[token] += weight * accept * followed[token]
            weight *= 1 - accept
            place.reject()
        law += weight * place.p.reshape(-1, *[1] * len(shape)) * plain
    return law


def total_variation(a: Law, b: Law) -> float:
    return float((a - b).abs().sum()) / 2
