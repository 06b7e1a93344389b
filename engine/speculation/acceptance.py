"""The arithmetic of acceptance: pure functions of p and q, so that tests can integrate them exactly. ``verify`` applies them.

p is what the target would have drawn from, q what the drafter drew from: both after all processors, float64 [V].

Sources: the accept test and the residual are Leviathan et al., arXiv 2211.17192, section 2.3 and appendix A.1, and Chen et al.,
arXiv 2302.01318, theorem 1. Several children of one node, drawn without replacement: recursive rejection sampling, Miao et al.
(SpecInfer, arXiv 2305.09781, algorithm 2, "multi-step speculative sampling"), with q renormalised over what the elder siblings left.
Typical acceptance: Cai et al. (Medusa, arXiv 2401.10774), section 3.3.1.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

TYPICAL_EPSILON = 0.09
TYPICAL_DELTA = 0.3


def accept_probability(p: float, q: float) -> float:
    """min(1, p / q) for a token that was drawn with probability q > 0: 0 where p is 0."""
    return min(1.0, p / q)


def residual(p: Tensor, q: Tensor) -> tuple[Tensor, float]:
    """The law of the next try after a rejection: the positive part of p - q, normalised; and its mass before.

    The mass is the probability of a rejection. Where it is 0, p and q are equal but for rounding, and p itself is the law.
    """
    positive = (p - q).clamp_(min=0.0)
    mass = float(positive.sum())
    return (positive.div_(mass), mass) if mass > 0 else (p, 0.0)


def left_over(q: Tensor, taken: Sequence[int]) -> Tensor | None:
    """q without the tokens that elder siblings took, renormalised. None: nothing is left, or it is no distribution (NaN)."""
    if taken:
        q = q.clone()
        q[list(taken)] = 0.0
    total = float(q.sum())
    if not 0 < total < math.inf or float(q.amin()) < 0:
        return None
    return q / total


def typical_threshold(p: Tensor) -> float:
    """Typical acceptance takes a token whose p exceeds min(epsilon, delta * exp(-entropy of p))."""
    entropy = float(torch.special.entr(p).sum())
    return min(TYPICAL_EPSILON, TYPICAL_DELTA * math.exp(-entropy))


class Place:
    """One place of the text that a draft wants to fill: its candidates are weighed one after the other, until one is accepted.

    ``p`` is the law that the token must follow given that those before were rejected; after the last of them it is drawn from.
    """

    def __init__(self, p: Tensor) -> None:
        self.p = p
        self.mass = 1.0  # of the last residual before normalising
        self._taken: list[int] = []
        self._q: Tensor | None = None

    def weigh(self, token: int, q: Tensor) -> tuple[float, float, float]:
        """p and q of the next candidate as they are compared, and the probability with which it is to be accepted.

        ``q``: the row that it was drawn from, before elder siblings took theirs. A token that cannot have been drawn from it
        (its q is 0, or the row is no distribution) is passed over, whatever its p: (p, NaN, 0), and ``reject`` leaves p as it is.
        """
        self._q = left_over(q, self._taken)
        self._taken.append(token)
        p_x = float(self.p[token])
        q_x = 0.0 if self._q is None else float(self._q[token])
        if q_x == 0:
            self._q = None
            return p_x, math.nan, 0.0
        return p_x, q_x, accept_probability(p_x, q_x)

    def reject(self) -> None:
        """The candidate that was weighed last is not accepted."""
        if self._q is not None:
            self.p, self.mass = residual(self.p, self._q)
