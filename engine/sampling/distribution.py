"""The whole distribution that a token is drawn from, where one token of it is not enough: a draft is weighed against it.

What is kept of a row is what ``engine.sampling.selection`` finds for the sampler, without sorting the vocabulary: the last
token that min_p, top_k and top_p leave says it all, since what they keep is a prefix of the order.

Shapes: S rows, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling import selection
from engine.sampling.sampled import failed
from engine.sampling.selection import Draws


@dataclass(frozen=True)
class Distributions:
    """``p`` float64 [S, V]: each row sums to 1, or is all 0 where ``errors`` says why nothing can be drawn from it.

    ``sizes``: tokens that min_p, top_k and top_p left, as ``Sampled.nucleus_size`` (V where nothing filters).
    """

    p: Tensor
    sizes: list[int]
    errors: list[str | None]


def weigh(logits: Tensor, table: np.ndarray, head: int) -> Distributions:
    """Of float32 rows [S, V] after the penalties (with no +inf); ``table`` float64 [5, S], see ``Draws``, with u = 0.

    ``head``: tokens that are sorted before a row is sorted whole; it changes no result.
    """
    h = selection.head(logits, head)
    tops = h.values_SK[:, 0].tolist()
    errors = [one.error if (one := failed(top)) is not None else None for top in tops]
    ends = _last_kept(logits, table, h, tops)
    p = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    for i, (x, end) in enumerate(zip(logits, ends, strict=True)):  # row by row: each stays in a core's cache
        if errors[i] is not None:
            continue
        if end is None:
            p[i].copy_(x).sub_(tops[i]).div_(table[0, i]).exp_()
            p[i].div_(p[i].sum())
        else:
            ids = _at_least(x, end.value, end.token_id)
            weights = x[ids].double().sub_(tops[i]).div_(table[0, i]).exp_()
            p[i][ids] = weights.div_(weights.sum())
    return Distributions(p, [logits.shape[-1] if end is None else end.size for end in ends], errors)


@dataclass(frozen=True)
class _End:
    """The last token that a row keeps, and how many it keeps."""

    value: float
    token_id: int
    size: int


def _last_kept(logits: Tensor, table: np.ndarray, h: selection.Head, tops: list[float]) -> list[_End | None]:
    """Where each row ends; None where nothing filters it (or nothing can be drawn from it)."""
    vocab = logits.shape[-1]
    cut = (table[1] < vocab) | (table[2] < 1) | (table[3] > 0)
    if not cut.any():
        return [None] * len(tops)
    total = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    draws = Draws.of(table, logits.device)
    if (cut & (table[1] >= vocab) & (table[3] == 0)).any():  # top_p of the whole row
        total = selection.mass(logits, h.values_SK[:, :1], draws.temperature if (table[0] != 1).any() else None)
    pick = selection.walk_head(h, draws, total.unsqueeze(-1), vocab)
    columns = (pick.resolved, pick.last_value, pick.last_id, pick.size, total)
    host = torch.stack([torch.as_tensor(column).double() for column in columns]).cpu().numpy()
    ends: list[_End | None] = [None] * len(tops)
    for i in np.flatnonzero(cut):
        resolved, value, token_id, size, mass = host[:, i]
        if not np.isfinite(tops[i]):
            continue
        if not resolved:
            whole = selection.walk_row(logits[i].cpu().numpy(), table[:, i], float(mass))
            value, token_id, size = whole.last_value, whole.last_id, whole.size
        ends[i] = _End(float(value), int(token_id), int(size))
    return ends


def _at_least(x: Tensor, value: float, token_id: int) -> Tensor:
    """Ids [N], ascending, of the tokens of float32 [V] that come no later in the order than this one."""
    if x.device.type == "cpu":  # several times faster than torch's
        ids = torch.from_numpy(np.flatnonzero(x.numpy() >= np.float32(value)))
    else:
        ids = torch.nonzero(x >= value).squeeze(-1)
    return ids[(x[ids] > value) | (ids <= token_id)]
