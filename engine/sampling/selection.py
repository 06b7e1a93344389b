"""Finding the token that a draw falls on without sorting the vocabulary.

All filters keep a prefix of the order (descending logit, ties by ascending id), so a token can be found by walking a
short sorted head of the row. ``head`` cuts it out, ``walk_head`` walks the heads of a whole batch on the device and
says for which rows the head was long enough, ``walk_row`` is the same walk over one whole row on the host, for the few
rows that need more. Both add the same float64 numbers in the same order, so on a CPU they agree to the last bit.

Shapes: S rows, V vocabulary, K tokens of the head.
"""

import functools
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.sampling.processors import Penalised

_GROUP = 8  # numbers a group, see _largest
SMALL = 1024  # up to this many numbers a plain sort or topk is cheaper than groups
_PARTS = 64  # pieces of a row: each is added in float32, the sum of the pieces in float64
_LOWEST = torch.finfo(torch.float32).min
_AT_ONCE = 100_000  # numbers a thread whose exponentials are summed at once: float32 work that stays in its core's L2 cache
_CHUNK = 2048  # tokens that walk_row weighs at a time


@dataclass(frozen=True)
class Head:
    """The likeliest tokens of each row, in order. Every token above ``floor`` is among them; at or below it some may not be."""

    values_SK: Tensor  # float32
    ids_SK: Tensor  # int64
    floor_S1: Tensor  # float32; -inf: the whole row's mass is in the head

    @functools.cached_property
    def size_S(self) -> Tensor:
        """How many tokens of the head can be trusted."""
        return (self.values_SK > self.floor_S1).sum(-1)

    @functools.cached_property
    def exact_SK(self) -> Tensor:
        """The values in float64."""
        return self.values_SK.double()


def head(logits: Tensor, k: int) -> Head:
    """The head of ``k`` tokens (fewer when the vocabulary is smaller) of float32 rows [S, V]."""
    if logits.shape[-1] <= max(SMALL, k):
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return Head(values, ids, torch.full_like(values[:, :1], -math.inf))
    ids = _largest(logits, k).sort(dim=-1).values  # ascending, so that the stable sort leaves ties in order
    values, order = torch.sort(logits.gather(-1, ids), dim=-1, descending=True, stable=True)
    return Head(values, ids.gather(-1, order), values[:, -1:])


def head_before(h: Head, raw: Tensor, changed: Penalised, k: int) -> Head:
    """The head of ``k`` tokens of rows ``raw``, given the head ``h`` of these rows after penalties, none of which raised a logit.

    Where nothing was changed the order is the same, so only the changed tokens join; no other token of the row is read. Floors
    may be higher than those of ``head``.
    """
    same = raw.gather(-1, h.ids_SK) == h.values_SK
    counts = torch.bincount(changed.rows, minlength=len(raw))
    place = torch.arange(len(changed.rows), device=raw.device) - (counts.cumsum(0) - counts)[changed.rows]
    shape = len(raw), max(k, int(counts.max()))  # at least k, for topk
    values, ids = raw.new_full(shape, -math.inf), torch.zeros(shape, dtype=torch.int64, device=raw.device)
    values[changed.rows, place] = torch.where(changed.before == changed.after, -math.inf, changed.before)
    ids[changed.rows, place] = changed.ids
    values = torch.cat([torch.where(same, h.values_SK, -math.inf), values], dim=-1)
    chosen = values.topk(k, dim=-1, sorted=False).indices
    ids, by_id = torch.cat([h.ids_SK, ids], dim=-1).gather(-1, chosen).sort(dim=-1)
    values, order = torch.sort(values.gather(-1, chosen).gather(-1, by_id), dim=-1, descending=True, stable=True)
    return Head(values, ids.gather(-1, order), torch.maximum(values[:, -1:], h.floor_S1))


def _largest(x: Tensor, k: int) -> Tensor:
    """Indices [S, k] of the k largest of each row of [S, N], in any order and with any choice among equals.

    Only the k groups with the largest maxima need be searched: those maxima are k numbers that nothing elsewhere
    exceeds. Finding these groups is the same task on an eighth of the numbers, so a row is read once, by a maximum that
    runs at the speed of memory. Group g is g, g + G, g + 2 G, ...; the few numbers left over at the end join as they are.
    """
    n = x.shape[-1]
    if n <= max(SMALL, _GROUP * k):
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
    float32, a ``_PARTS``-th of a row is added before the sum goes on in float64, in an order that does not depend on S.
    """
    inverse = top_S1 if temperature_S1 is None else (1 / temperature_S1).float()
    sums = _Sums(logits)
    for (x_in, top, factor, parts), x, _ in _blocks(logits, top_S1, inverse, sums.parts):
        torch.sub(x_in, top, out=x)
        if temperature_S1 is not None:
            x.mul_(factor)
        sums.add(x.exp_(), parts)
    return sums.total()


def masses(
    logits: Tensor, top_S1: Tensor, temperature_S1: Tensor | None = None, at_one: list[bool] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row [S], float64: ``mass`` at the temperature, at 1, and the entropy at 1 in nats. Reads the row once.

    ``at_one``: rows whose temperature is known to be 1 on the host. The masses are those of ``mass`` to the last bit; the
    entropy is out by less than 1e-5: its terms are rounded to float32, and no mean of logits is far from the largest.
    """
    inverse = top_S1 if temperature_S1 is None else (1 / temperature_S1).float()
    on_cpu, row = logits.device.type == "cpu", 0
    tempered, plain, weighted = _Sums(logits), _Sums(logits), _Sums(logits)
    for block, x, w in _blocks(logits, top_S1, inverse, tempered.parts, plain.parts, weighted.parts):
        torch.sub(block[0], block[1], out=x)
        if not on_cpu:  # here nobody can look without waiting whether it is needed
            x.clamp_(min=_LOWEST)
        torch.exp(x, out=w)
        plain.add(w, block[4])
        weighted.add(w.mul_(x), block[5])
        if temperature_S1 is None or (at_one is not None and all(at_one[row : row + len(x)])):
            block[3].copy_(block[4])
        else:
            tempered.add(x.mul_(block[2]).exp_(), block[3])
        row += len(x)
    total, nats = plain.total(), weighted.total()
    if on_cpu and (undefined := nats.isnan()).any():  # 0 * -inf: tokens that cannot come, which add nothing
        nats[undefined] = _weighted(logits[undefined], top_S1[undefined])
    return tempered.total(), total, total.log() - nats / total


def _weighted(logits: Tensor, top_S1: Tensor) -> Tensor:
    """Sum of (logit - top) * exp(logit - top) over each row, float64 [S], where some are -inf; NaN where some are NaN."""
    sums = _Sums(logits)
    for (x_in, top, parts), x, w in _blocks(logits, top_S1, sums.parts):
        torch.sub(x_in, top, out=x)
        x.clamp_(min=_LOWEST)
        sums.add(torch.exp(x, out=w).mul_(x), parts)
    return sums.total()


_scratch = threading.local()


def _blocks(logits: Tensor, *others: Tensor) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
    """A few rows of all tensors [S, n] at a time, with twice the memory of the rows of ``logits`` (the same each time)."""
    step = max(1, len(logits))
    if logits.device.type == "cpu":
        step = min(step, max(1, _AT_ONCE // logits.shape[-1]) * torch.get_num_threads())
    scratch = getattr(_scratch, "tensor", None)  # kept: the first touch of fresh memory costs as much as the arithmetic
    if scratch is None or scratch.device != logits.device or scratch.shape[2] != logits.shape[-1] or scratch.shape[1] < step:
        with torch.inference_mode(False):  # so that it can be written to in either mode
            scratch = _scratch.tensor = torch.empty(2, step, logits.shape[-1], device=logits.device)
    x, w = scratch[:, :step]
    for block in zip(*(t.split(step) for t in (logits, *others)), strict=True):
        n = len(block[0])
        yield block, x[:n], w[:n]


class _Sums:
    """Row sums of [S, V]: float32 over each of ``_PARTS`` pieces of a row, float64 over what they give (``parts``)."""

    def __init__(self, like: Tensor) -> None:
        self._size = max(1, like.shape[-1] // _PARTS)
        self._pieces, left = divmod(like.shape[-1], self._size)
        self.parts = torch.empty(len(like), self._pieces + left, device=like.device)

    def add(self, x: Tensor, parts: Tensor) -> None:
        """``parts``: the rows of ``self.parts`` that ``x`` has."""
        n, vocab = x.shape
        if vocab == self._pieces * self._size:
            torch.sum(x.view(n, self._pieces, self._size), -1, out=parts)
        else:
            used = self._pieces * self._size
            torch.sum(x[:, :used].unflatten(-1, (self._pieces, self._size)), -1, out=parts[:, : self._pieces])
            parts[:, self._pieces :] = x[:, used:]

    def total(self) -> Tensor:
        return self.parts.double().sum(-1)


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
    values = h.exact_SK
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


def first_of(h: Head) -> Pick:
    """``walk_head`` for rows that are all greedy."""
    one, values, ids = torch.ones_like(h.ids_SK[:, 0]), h.exact_SK[:, 0], h.ids_SK[:, 0]
    return Pick(h.size_S > 0, one - 1, ids, one, one, one, values, ids)


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
        token_id=id_at(logits_V, ascending, index),
        prob=float(w[index]) / mass2,
        weight=mass2,
        size=vocab if all_kept else n2,
        last_value=-math.inf if all_kept else float(ordered[n2 - 1]),
        last_id=vocab if all_kept else id_at(logits_V, ascending, n2 - 1),
    )


def id_at(logits_V: np.ndarray, ascending: np.ndarray, index: int) -> int:
    """The id of the token at a place in the (descending) order: of tokens with that value, ids ascend."""
    value = ascending[len(ascending) - 1 - index]
    first = len(ascending) - int(np.searchsorted(ascending, value, side="right"))
    return int(np.flatnonzero(logits_V == value)[index - first])
