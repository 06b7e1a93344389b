"""What is observed of rows beside the token: how many each filter left, its rank, and the likeliest tokens.

As in ``engine.sampling.selection``: heads for a whole batch on the device, and the same of one whole row on the host.
Shapes: S rows, V vocabulary, K tokens of the head.
"""

import math

import numpy as np
import torch
from torch import Tensor

from engine.sampling.selection import Draws, Head, id_at


def stages(h: Head, draws: Draws, total_S1: Tensor, vocab: int) -> dict[str, Tensor]:
    """What min_p, and then top_k, left of each row [S]: ``min_p_size`` and ``min_p_mass`` (in units of the likeliest token's), the
    same for ``top_k``, and the last token that top_k left (``top_k_value``, ``top_k_id``). ``staged`` is False where the
    head was too short to tell. ``total_S1`` as for ``walk_head``, but read for every row.
    """
    place = torch.arange(h.values_SK.shape[-1], device=h.values_SK.device)
    values = h.exact_SK
    w = torch.exp((values - values[:, :1]) / draws.temperature)
    size, whole = h.size_S.unsqueeze(-1), h.floor_S1 == -math.inf
    no_min_p, no_top_k = draws.min_p == 0, draws.top_k >= vocab
    left = (place < size) & (w >= draws.min_p)
    n1 = left.sum(-1, keepdim=True)
    mass1 = torch.where(no_min_p, total_S1, (w * left).sum(-1, keepdim=True))
    both = left & (place < draws.top_k)
    n2 = both.sum(-1, keepdim=True)
    mass2 = torch.where(no_top_k, mass1, (w * both).sum(-1, keepdim=True))
    inside = whole | (n1 < size)
    end = (n2 - 1).clamp(min=0)
    n1 = torch.where(no_min_p, vocab, n1)
    found = {
        "min_p_size": n1,
        "min_p_mass": mass1,
        "top_k_size": torch.where(no_top_k, n1, n2),
        "top_k_mass": mass2,
        "top_k_value": torch.where(no_top_k, -math.inf, values.gather(-1, end)),
        "top_k_id": torch.where(no_top_k, vocab, h.ids_SK.gather(-1, end)),
        "staged": (no_min_p | inside) & (no_top_k | inside | (draws.top_k <= size)),
    }
    return {name: value.squeeze(-1) for name, value in found.items()}


def stages_row(logits_V: np.ndarray, draw: np.ndarray, total: float) -> dict[str, float]:
    """``stages`` of one whole row on the host."""
    temperature, top_k, _, min_p, _ = (float(x) for x in draw)
    vocab = len(logits_V)
    w = torch.from_numpy((logits_V.astype(np.float64) - float(logits_V.max())) / temperature).exp_().numpy()
    left = (w >= min_p) & (logits_V > -np.inf)
    n1, mass1 = (vocab, total) if min_p == 0 else (int(np.count_nonzero(left)), float(w[left].sum()))
    if top_k >= vocab:
        return {
            "min_p_size": n1, "min_p_mass": mass1, "top_k_size": n1, "top_k_mass": mass1,
            "top_k_value": -math.inf, "top_k_id": vocab,
        }  # fmt: skip
    n2 = min(int(top_k), int(np.count_nonzero(left)))
    ascending = np.sort(logits_V)
    last = id_at(logits_V, ascending, n2 - 1)
    kept = (logits_V > logits_V[last]) | ((logits_V == logits_V[last]) & (np.arange(vocab) <= last))
    return {
        "min_p_size": n1, "min_p_mass": mass1, "top_k_size": n2, "top_k_mass": float(w[kept].sum()),
        "top_k_value": float(logits_V[last]), "top_k_id": last,
    }  # fmt: skip


def look(raw: Tensor, logits: Tensor, h: Head, token_S: Tensor, listed: int) -> dict[str, Tensor]:
    """What is observed of each row [S] of the raw distribution; ``h``: head of ``raw``; ``logits``: after penalties.

    ``raw_top``, ``raw_logit`` (largest, and of the token), ``rank`` (from 1), and the ``listed`` likeliest tokens [S, listed]:
    ``list_ids``, ``list_raw``, ``list_values`` (logits before and after penalties). ``looked`` is False where the head
    was too short for the rank or the list.
    """
    token = token_S.unsqueeze(-1)
    raw_logit = raw.gather(-1, token)
    above = (h.values_SK > raw_logit) | ((h.values_SK == raw_logit) & (h.ids_SK < token))
    listable = (h.size_S >= listed) | (h.values_SK.shape[-1] == raw.shape[-1])
    ids = h.ids_SK[:, :listed]
    return {
        "raw_top": h.values_SK[:, 0],
        "raw_logit": raw_logit.squeeze(-1),
        "rank": above.sum(-1) + 1,
        "looked": (raw_logit > h.floor_S1).squeeze(-1) & listable,
        "list_ids": ids,
        "list_raw": h.values_SK[:, :listed],
        "list_values": logits.gather(-1, ids),
    }


def look_row(raw_V: np.ndarray, logits_V: np.ndarray, token: int, listed: int) -> dict[str, np.ndarray | float]:
    """``look`` at one whole row on the host."""
    value = raw_V[token]
    found: dict[str, np.ndarray | float] = {
        "raw_top": float(raw_V.max()),
        "raw_logit": float(value),
        "rank": int(np.count_nonzero(raw_V > value)) + int(np.count_nonzero(raw_V[:token] == value)) + 1,
    }
    least = np.partition(raw_V, -listed)[-listed] if listed else math.inf
    near = np.flatnonzero(raw_V >= least)  # ids ascend, so a stable sort leaves ties in order
    ids = near[np.argsort(-raw_V[near], kind="stable")][:listed]
    return found | {"list_ids": ids, "list_raw": raw_V[ids], "list_values": logits_V[ids]}
