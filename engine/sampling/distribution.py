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
    top = h.values_SK[:, :1]
    draws = Draws.of(table, logits.device)
    cut = (table[1] < logits.shape[-1]) | (table[2] < 1) | (table[3] > 0)
    pick = None
    if cut.any():
        pick = _last_kept(logits, table, h, draws)
    x = logits.double().sub_(top).div_(draws.temperature).exp_()
    if pick is not None:
        last_value, last_id, sizes = pick
        ids = torch.arange(logits.shape[-1], device=logits.device)
        x.masked_fill_((logits < last_value) | ((logits == last_value) & (ids > last_id)), 0.0)
    else:
        sizes = [logits.shape[-1]] * len(logits)
    tops = top.squeeze(-1).tolist()
    errors = [one.error if (one := failed(value)) is not None else None for value in tops]
    for i, error in enumerate(errors):
        if error is not None:
            x[i] = 0.0
    x /= x.sum(-1, keepdim=True).clamp_(min=1e-300)
    return Distributions(x, sizes, errors)


def _last_kept(logits: Tensor, table: np.ndarray, h: selection.Head, draws: Draws) -> tuple[Tensor, Tensor, list[int]]:
    """Logit and id of the last token that each row keeps, [S, 1] each, and how many it keeps."""
    vocab, top = logits.shape[-1], h.values_SK[:, :1]
    total = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    if ((table[1] >= vocab) & (table[3] == 0) & (table[2] < 1)).any():
        total = selection.mass(logits, top, draws.temperature if (table[0] != 1).any() else None)
    pick = selection.walk_head(h, draws, total.unsqueeze(-1), vocab)
    columns = [top.squeeze(-1), pick.resolved, pick.last_value, pick.last_id, pick.size, total]
    host = torch.stack([torch.as_tensor(c).double() for c in columns]).cpu().numpy()
    open_ = (table[1] >= vocab) & (table[2] >= 1) & (table[3] == 0)
    for i in np.flatnonzero((host[1] == 0) & np.isfinite(host[0]) & ~open_):
        found = selection.walk_row(logits[i].cpu().numpy(), table[:, i], float(host[5, i]))
        host[2:5, i] = found.last_value, found.last_id, found.size
    host[2, open_], host[3, open_], host[4, open_] = -np.inf, vocab, vocab
    value, last_id = torch.from_numpy(host[2:4]).to(logits.device).unsqueeze(-1)
    return value, last_id, host[4].astype(np.int64).tolist()
