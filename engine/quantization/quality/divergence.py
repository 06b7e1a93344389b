"""How far one model's predictions are from another's, at the same positions of the same text.

p is the reference (the 16-bit model), q the other. All logarithms are natural and all masses float64.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.quantization.quality.rows import check_finite
from engine.sampling.processors import apply_top_p, probabilities

TOP_P = 0.9
_ROWS = 16  # at a time in float64: 16 x 49,152 are 6 MB, and five such are alive at once
_HEAD = 1024  # the likeliest tokens among which a nucleus usually ends


def kl_divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) = sum over tokens of p (log p - log q), in nats: float64 [R], from logits [R, vocab_size] each.

    Kullback and Leibler, 1951. A token with no mass in p (logit -inf) adds nothing; one with mass in p alone makes it inf.
    """
    log_p, log_q = torch.log_softmax(p.double(), -1), torch.log_softmax(q.double(), -1)
    terms = log_p.exp() * (log_p - log_q)
    terms[log_p.exp() == 0] = 0.0  # 0 * inf
    return terms.sum(-1).clamp_(min=0.0)  # rounding may leave -1e-17


def total_variation(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Half the sum of |p - q|, in [0, 1]: float64 [R]. At most this share of sampled tokens must differ (maximal coupling)."""
    return 0.5 * (torch.softmax(p.double(), -1) - torch.softmax(q.double(), -1)).abs().sum(-1)


def nucleus(logits: torch.Tensor, top_p: float) -> list[torch.Tensor]:
    """The ids of each row's nucleus, ascending, int64: what ``engine.sampling.processors.apply_top_p`` keeps of [R, vocab_size].

    The same function on the likeliest tokens alone, with the mass of all: sorting whole rows takes ten times as long. Rows whose
    nucleus reaches the edge of those are done whole.
    """
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    vocab = logits.shape[-1]
    if vocab <= _HEAD or top_p == 1:
        return [row.isfinite().nonzero()[:, 0] for row in apply_top_p(logits, top_p)]
    ids = logits.topk(_HEAD, -1).indices.sort(-1).values  # ascending, so that ties fall to the lowest id as in whole rows
    head = logits.gather(-1, ids)
    share = probabilities(logits).gather(-1, ids).sum(-1)  # apply_top_p will take the head's mass for 1
    kept = apply_top_p(head, (top_p / share).clamp(max=1.0)).isfinite()
    edge = head.amin(-1, keepdim=True)
    whole = (kept & (head == edge)).any(-1)
    return [
        apply_top_p(logits[i : i + 1], top_p)[0].isfinite().nonzero()[:, 0] if whole[i] else ids[i][kept[i]]
        for i in range(len(logits))
    ]


@dataclass(frozen=True, slots=True)
class NucleusChange:
    """Which tokens can be sampled with top_p by one model alone. Ids, likeliest first in the model that has them in."""

    top_p: float
    entered: list[int]  # in q's nucleus, not in p's
    left: list[int]  # in p's nucleus, not in q's
    stayed: int
    mass_entered: float  # what q gives to those that entered, of its whole mass
    mass_left: float  # what p gave to those that left


def nucleus_change(p: torch.Tensor, q: torch.Tensor, top_p: float = TOP_P) -> NucleusChange:
    """The tokens that enter and leave the nucleus between two rows of logits [vocab_size]. For a temperature, scale both before."""
    sets = [set(nucleus(row[None], top_p)[0].tolist()) for row in (p, q)]
    masses = [probabilities(row) for row in (p, q)]

    def alone(this: int) -> tuple[list[int], float]:
        ids = sorted(sets[this] - sets[1 - this], key=lambda i: (-float(masses[this][i]), i))
        return ids, sum(float(masses[this][i]) for i in ids)

    (left, mass_left), (entered, mass_entered) = alone(0), alone(1)
    return NucleusChange(top_p, entered, left, len(sets[0] & sets[1]), mass_entered, mass_left)


@dataclass(frozen=True, eq=False, slots=True)
class Divergence:
    """What was found at N positions. ``texts`` and ``positions`` [N] say where: position t is the prediction of token t.

    ``kl`` float64 [N] nats; ``same_top`` bool [N]; ``variation`` float64 [N]; ``entered``, ``left`` and ``stayed`` int64 [N]: how many
    tokens are in q's nucleus alone, in p's alone, and in both.
    """

    texts: list[str]
    positions: list[int]
    top_p: float
    kl: torch.Tensor
    same_top: torch.Tensor
    variation: torch.Tensor
    entered: torch.Tensor
    left: torch.Tensor
    stayed: torch.Tensor
    kept: str = ""  # how the reference's rows were held, where not just computed

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean())

    @property
    def standard_error(self) -> float:
        """Of ``mean_kl``, as if positions were drawn independently. A few positions carry most of it: it is not small."""
        return float(self.kl.std() / len(self) ** 0.5) if len(self) > 1 else float("nan")

    def kl_quantile(self, q: float) -> float:
        """The q-quantile of KL over positions (0.5: the median), interpolated."""
        return float(torch.quantile(self.kl, q))

    @property
    def max_kl(self) -> tuple[float, str, int]:
        """(the largest KL, its text, its position); the first of equals."""
        i = int(self.kl.argmax())
        return float(self.kl[i]), self.texts[i], self.positions[i]

    @property
    def top1_agreement(self) -> float:
        """The share of positions at which both models have the same likeliest token: greedy decoding would not notice."""
        return float(self.same_top.double().mean())

    @property
    def mean_variation(self) -> float:
        return float(self.variation.mean())

    @property
    def nucleus_overlap(self) -> float:
        """Tokens in both nuclei / tokens in either, mean over positions (Jaccard)."""
        return float((self.stayed / (self.stayed + self.entered + self.left)).mean())


class Accumulator:
    """Takes rows of logits of both models a few at a time and keeps some numbers a row, never the rows."""

    def __init__(self, top_p: float = TOP_P, kept: str = "") -> None:
        """``top_p``: of the nuclei that are compared; ``kept``: see ``Divergence``."""
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
        self.top_p = top_p
        self.kept = kept
        self._texts: list[str] = []
        self._positions: list[int] = []
        self._numbers: list[torch.Tensor] = []  # [6, R], float64

    def add(self, p: torch.Tensor, q: torch.Tensor, positions: Sequence[int], text: str = "text") -> None:
        """Compare rows [R, vocab_size] that predict the tokens at ``positions`` [R] of ``text``.

        ValueError where the shapes differ, or for logits of q that are inf or NaN (p may have -inf: a token without mass).
        """
        if p.shape != q.shape or p.dim() != 2 or len(positions) != len(p):
            raise ValueError(
                f"both must be [{len(positions)} positions, vocab_size], got the reference {list(p.shape)} and {list(q.shape)}"
            )
        if bool((p.isnan() | (p == float("inf"))).any()):
            raise ValueError(f"{text}: the reference's logits have NaN or +inf among positions {positions[0]} to {positions[-1]}")
        check_finite(q, positions, text)
        for start in range(0, len(positions), _ROWS):
            self._numbers.append(self._compare(p[start : start + _ROWS].double(), q[start : start + _ROWS].double()).cpu())
        self._positions += positions
        self._texts += [text] * len(positions)

    def _compare(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        counts = []
        for of_p, of_q in zip(nucleus(p, self.top_p), nucleus(q, self.top_p)):
            both = int(torch.isin(of_p, of_q, assume_unique=True).sum())
            counts.append((len(of_q) - both, len(of_p) - both, both))
        sizes = torch.tensor(counts, dtype=torch.float64, device=p.device).T
        same = (p.argmax(-1) == q.argmax(-1)).double()
        return torch.cat((torch.stack((kl_divergence(p, q), same, total_variation(p, q))), sizes))

    def result(self) -> Divergence:
        """What was found so far. ValueError when nothing was added."""
        if not self._positions:
            raise ValueError("nothing was compared: no positions were added")
        kl, same, variation, entered, left, stayed = torch.cat(self._numbers, 1)
        return Divergence(
            list(self._texts), list(self._positions), self.top_p, kl, same.bool(), variation,
            entered.long(), left.long(), stayed.long(), self.kept,
        )  # fmt: skip
