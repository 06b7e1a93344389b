"""The walk as it is defined: sort, cut, add up."""

import math

import torch


def naive_walk(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kept tokens of logits [V] in order (descending logit, ties by ascending id) and the ends of their parts of [0, 1), float64."""
    values, ids = torch.sort(logits.double(), descending=True, stable=True)
    if temperature == 0:
        return ids[:1], torch.ones(1, dtype=torch.float64)
    weights = torch.where(values == values[0], 1.0, torch.exp((values - values[0]) / temperature))
    keep = int(((weights >= min_p) & (weights > 0)).sum())
    keep = min(keep, top_k)
    before = weights[:keep].cumsum(0) - weights[:keep]
    keep = int((before < top_p * weights[:keep].sum()).sum())
    kept = weights[:keep]
    return ids[:keep], kept.cumsum(0) / kept.sum()


def naive_sample(
    logits: torch.Tensor,
    u: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [S]: as ``sample``, a row of logits [S, V] at a time."""
    tokens = []
    for i, row in enumerate(logits):
        if row.isnan().any() or float(row.max()) == -math.inf:
            tokens.append(-1)
            continue
        least = 0.0 if min_p is None else float(min_p[i])
        ids, ends = naive_walk(row, float(temperature[i]), int(top_k[i]), float(top_p[i]), least)
        tokens.append(int(ids[min(int((ends <= float(u[i])).sum()), len(ids) - 1)]))
    return torch.tensor(tokens, dtype=torch.int64)
