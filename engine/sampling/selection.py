"""Finding the token that a draw falls on without sorting the vocabulary.

All filters keep a prefix of the order (descending logit, ties by ascending id), so a token can be found by walking a
short sorted head of the row. ``head`` cuts it out, ``walk_head`` walks the heads of a whole batch on the device and
says for which rows the head was long enough, ``walk_row`` is the same walk over one whole row on the host, for the few
rows that need more. Both add the same float64 numbers in the same order, so on a CPU they agree to the last bit.

Shapes: S rows, V vocabulary, K tokens of the head.
"""

import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GROUP = 8  # numbers a group, see _largest
_SMALL = 1024  # up to this many numbers a plain sort or topk is cheaper than groups
_STRIDE = 64  # float32 numbers that are added before the sum goes on in float64
_LOWEST = torch.finfo(torch.float32).min
_ROWS = 4  # rows whose exponentials are summed at once: float32 work that stays in a core's L2 cache
_CHUNK = 2048  # tokens that walk_row weighs at a time


@dataclass(frozen=True)
class Head:
    """The likeliest tokens of each row, in order. Every token above ``floor`` is among them; at or below it some may not be."""

    values_SK: Tensor  # float32
    ids_SK: Tensor  # int64
    floor_S1: Tensor  # float32; -inf: the whole row's mass is in the head

    @property
    def size_S(self) -> Tensor:
        """How many tokens of the head can be trusted."""
        return (self.values_SK > self.floor_S1).sum(-1)


def head(logits: Tensor, k: int) -> Head:
    """The head of ``k`` tokens (fewer when the vocabulary is smaller) of float32 rows [S, V]."""
    if logits.shape[-1] <= max(_SMALL, k):
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return Head(values, ids, torch.full_like(values[:, :1], -math.inf))
    ids = _largest(logits, k).sort(dim=-1).values  # ascending, so that the stable sort leaves ties in order
    values, order = torch.sort(logits.gather(-1, ids), dim=-1, descending=True, stable=True)
    return Head(values, ids.gather(-1, order), values[:, -1:])


def _largest(x: Tensor, k: int) -> Tensor:
    """Indices [S, k] of the k largest of each row of [S, N], in any order and with any choice among equals.

    Only the k groups with the largest maxima need be searched: those maxima are k numbers that nothing elsewhere
    exceeds. Finding these groups is the same task on an eighth of the numbers, so a row is read once, by a maximum that
    runs at the speed of memory. Group g is g, g + G, g + 2 G, ...; the few numbers left over at the end join as they are.
    """
    n = x.shape[-1]
    if n <= max(_SMALL, _GROUP * k):
        return x.topk(k, dim=-1, sorted=False).indices
    groups = n // _GROUP
    used = groups * _GROUP
    chosen = _largest(x[:, :used].unflatten(-1, (_GROUP, groups)).amax(1), k)
    members = (chosen.unsqueeze(1) + torch.arange(0, used, groups, device=x.device).unsqueeze(-1)).flatten(1)
    if used < n:
        members = torch.cat([members, torch.arange(used, n, device=x.device).expand(len(x), -1)], dim=-1)
    return members.gather(-1, x.gather(-1, members).topk(k, dim=-1, sorted=False).indices)


def mass(logits: Tensor, top_S1: Tensor, temperature_S1: Tensor | None = None) -> Tensor:
    """Sum of exp((logit - top) / temperature) over each row of float32 [S, V]; float64 [S].

    ``top_S1`` float32 [S, 1]: the row's largest logit. ``temperature_S1`` float64 [S, 1], None: 1. Exponentials are
    float32, ``_STRIDE`` of them are added before the sum goes on in float64, in an order that does not depend on S.
    """
    inverse = None if temperature_S1 is None else (1 / temperature_S1).float()
    sums = _Sums(logits)
    for rows, x, _ in _blocks(logits):
        torch.sub(logits[rows], top_S1[rows], out=x)
        if inverse is not None:
            x.mul_(inverse[rows])
        sums.add(rows, x.exp_())
    return sums.total()


def masses(logits: Tensor, top_S1: Tensor, temperature_S1: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row [S], float64: ``mass`` at the temperature, at 1, and the entropy at 1 in nats. Reads the row once."""
    inverse = None if temperature_S1 is None else (1 / temperature_S1).float()
    tempered, plain, weighted = _Sums(logits), _Sums(logits), _Sums(logits)
    for rows, x, w in _blocks(logits):
        torch.sub(logits[rows], top_S1[rows], out=x)
        x.clamp_(min=_LOWEST)  # in place of -inf: 0 * -inf would be NaN
        torch.exp(x, out=w)
        plain.add(rows, w)
        weighted.add(rows, w.mul_(x))
        if inverse is not None:
            tempered.add(rows, x.mul_(inverse[rows]).exp_())
    at_one = plain.total()
    return at_one if inverse is None else tempered.total(), at_one, at_one.log() - weighted.total() / at_one


_scratch = threading.local()


def _blocks(logits: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Slices of rows to work on one after the other, each with twice the memory of its rows (the same each time)."""
    step = min(_ROWS, len(logits)) if logits.device.type == "cpu" else len(logits)
    scratch = getattr(_scratch, "tensor", None)  # kept: the first touch of fresh memory costs as much as the arithmetic
    if scratch is None or scratch.device != logits.device or scratch.shape[2] != logits.shape[-1] or scratch.shape[1] < step:
        with torch.inference_mode(False):  # so that it can be written to in either mode
            scratch = _scratch.tensor = torch.empty(2, step, logits.shape[-1], device=logits.device)
    for i in range(0, len(logits), step):
        yield slice(i, i + step), *scratch[:, : min(step, len(logits) - i)]


class _Sums:
    """Row sums of [S, V]: float32 over ``_STRIDE`` values that lie V / ``_STRIDE`` apart, float64 over what they give."""

    def __init__(self, like: Tensor) -> None:
        self._strides = max(1, like.shape[-1] // _STRIDE)
        self._used = like.shape[-1] // self._strides * self._strides
        self._parts = torch.empty(len(like), self._strides + like.shape[-1] - self._used, device=like.device)

    def add(self, rows: slice, x: Tensor) -> None:
        parts = self._parts[rows]
        torch.sum(x[:, : self._used].unflatten(-1, (-1, self._strides)), 1, out=parts[:, : self._strides])
        if self._used < x.shape[-1]:
            parts[:, self._strides :] = x[:, self._used :]

    def total(self) -> Tensor:
        return self._parts.double().sum(-1)


@dataclass(frozen=True)
class Draws:
    """What the rows of a batch are drawn with: float64 [S, 1] each."""

    temperature: Tensor  # > 0
    top_k: Tensor  # 1 .. V (V: off)
    top_p: Tensor
    min_p: Tensor
    u: Tensor

    @classmethod
    def of(cls, table: np.ndarray, device: torch.device) -> "Draws":
        """From a float64 table [5, S] in the order of the fields, in one copy to the device."""
        return cls(*torch.from_numpy(table).to(device).unsqueeze(-1))


@dataclass(frozen=True)
class Pick:
    """Where the draws fell, per row [S] (``walk_head``) or as plain numbers (``walk_row``)."""

    resolved: Tensor | bool  # False: the head was too short, the rest means nothing
    index: Tensor | int  # place of the token in the order (0: likeliest)
    token_id: Tensor | int
    prob: Tensor | float  # of the token, after the processors
    weight: Tensor | float  # mass that was kept, in units of the likeliest token's
    size: Tensor | int  # tokens that were kept
    last_value: Tensor | float  # logit and id of the last token that was kept
    last_id: Tensor | int


def walk_head(h: Head, draws: Draws, total_S1: Tensor, vocab: int) -> Pick:
    """Apply min_p, top_k and top_p to the head of each row and find the token that u falls on.

    ``total_S1`` float64 [S, 1]: ``mass`` of the row at its temperature; read only for rows with neither top_k nor min_p.
    """
    place = torch.arange(h.values_SK.shape[-1], device=h.values_SK.device)
    values = h.values_SK.double()
    w = torch.exp((values - values[:, :1]) / draws.temperature)
    size = h.size_S.unsqueeze(-1)
    whole = h.floor_S1 == -math.inf  # nothing with any mass lies outside the head
    open_ = (draws.top_k >= vocab) & (draws.min_p == 0)
    inside = (place < size) & (place < draws.top_k) & (w >= draws.min_p)
    n1 = inside.sum(-1, keepdim=True)
    ended = whole | (n1 < size) | (draws.top_k <= size)  # min_p and top_k end within the head (or the row does)
    summed = (w * inside).cumsum(-1)
    mass1 = torch.where(open_, total_S1, summed[:, -1:])
    before = torch.cat([torch.zeros_like(mass1), summed[:, :-1]], dim=-1)
    no_p = draws.top_p >= 1
    kept = inside & (no_p | (before < draws.top_p * mass1) | (place == 0))
    n2 = kept.sum(-1, keepdim=True)
    end = (n2 - 1).clamp(min=0)
    ended = ended | ((n2 < n1) & open_)
    all_kept = open_ & no_p
    mass2 = torch.where(all_kept, total_S1, summed.gather(-1, end))
    target = draws.u * mass2
    last = ((kept & (w > 0)).sum(-1, keepdim=True) - 1).clamp(min=0)
    index = torch.minimum((kept & (summed <= target)).sum(-1, keepdim=True), last)
    resolved = (size > 0) & (ended | (all_kept & (summed.gather(-1, end) > target)))
    return Pick(
        resolved=resolved.squeeze(-1),
        index=index.squeeze(-1),
        token_id=h.ids_SK.gather(-1, index).squeeze(-1),
        prob=(w.gather(-1, index) / mass2).squeeze(-1),
        weight=mass2.squeeze(-1),
        size=torch.where(all_kept, vocab, n2).squeeze(-1),
        last_value=torch.where(all_kept, -math.inf, values.gather(-1, end)).squeeze(-1),
        last_id=torch.where(all_kept, vocab, h.ids_SK.gather(-1, end)).squeeze(-1),
    )


def walk_row(logits_V: np.ndarray, draw: np.ndarray, total: float) -> Pick:
    """``walk_head`` for one whole float32 row on the host; ``draw``: the row's column of the table of ``Draws``.

    Only the values are sorted; the id of the token is looked up at the end, among those that have its value.
    """
    temperature, top_k, top_p, min_p, u = (float(x) for x in draw)
    vocab = len(logits_V)
    open_, no_p = top_k >= vocab and min_p == 0, top_p >= 1
    ascending = np.sort(logits_V)
    ordered = ascending[::-1]
    count = min(int(top_k), vocab - int(np.searchsorted(ascending, -np.inf, side="right")))
    summed, w = np.zeros(1), np.zeros(0)  # summed[i]: mass before the i-th token

    def weigh(enough) -> None:
        """Go on along the order until ``enough(summed)`` or min_p or top_k ends it."""
        nonlocal summed, w, count
        while len(w) < count and not enough():
            part = ordered[len(w) : min(len(w) + _CHUNK, count)].astype(np.float64)
            more = torch.from_numpy((part - float(ordered[0])) / temperature).exp_().numpy()  # torch's exp, as in walk_head
            kept = more[more >= min_p]
            w = np.concatenate([w, kept])
            summed = np.concatenate([summed, np.cumsum(np.concatenate([summed[-1:], kept]))[1:]])
            if len(kept) < len(more):
                count = len(w)

    if open_:
        mass1 = total
        goal = u * total if no_p else top_p * total
        weigh(lambda: summed[-1] > goal)
    else:
        weigh(lambda: False)
        mass1 = float(summed[-1])
    n2 = len(w) if no_p else max(1, int(np.count_nonzero(summed[:-1] < top_p * mass1)))
    all_kept = open_ and no_p
    mass2 = total if all_kept else float(summed[n2])
    last = max(0, int(np.count_nonzero(w[:n2])) - 1)
    index = min(int(np.count_nonzero(summed[1 : n2 + 1] <= u * mass2)), last)
    return Pick(
        resolved=True,
        index=index,
        token_id=_id_at(logits_V, ascending, index),
        prob=float(w[index]) / mass2,
        weight=mass2,
        size=vocab if all_kept else n2,
        last_value=-math.inf if all_kept else float(ordered[n2 - 1]),
        last_id=vocab if all_kept else _id_at(logits_V, ascending, n2 - 1),
    )


def stages(h: Head, draws: Draws, total_S1: Tensor, vocab: int) -> dict[str, Tensor]:
    """What min_p, and then top_k, left of each row [S]: ``min_p_size`` and ``min_p_mass`` (in units of the likeliest token's), the
    same for ``top_k``, and the last token that top_k left (``top_k_value``, ``top_k_id``). ``staged`` is False where the
    head was too short to tell. ``total_S1`` as for ``walk_head``, but read for every row.
    """
    place = torch.arange(h.values_SK.shape[-1], device=h.values_SK.device)
    values = h.values_SK.double()
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
    last = _id_at(logits_V, ascending, n2 - 1)
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


def _id_at(logits_V: np.ndarray, ascending: np.ndarray, index: int) -> int:
    """The id of the token at a place in the (descending) order: of tokens with that value, ids ascend."""
    value = ascending[len(ascending) - 1 - index]
    first = len(ascending) - int(np.searchsorted(ascending, value, side="right"))
    return int(np.flatnonzero(logits_V == value)[index - first])
