"""From logits to tokens, for a whole batch at once, on whatever device the logits are.

A row is greedy (temperature 0: the largest logit after penalties) or drawn: a number u in [0, 1) that depends only on
the request's seed, its sample index and the position is laid along the kept probabilities in descending order (ties by
token id), and the token it falls on is taken; the last kept token if rounding leaves their sum short of it. The chain of
processors, its order and its edge rules are those of ``engine.sampling.processors``; ``engine.sampling.selection`` finds
the token without sorting the vocabulary. What else is in the batch changes nothing.

Results come to the host in one copy. Rows that the short head of the order does not settle (a draw far down the tail, a
nucleus of hundreds of tokens) are copied and walked whole on the host: a few rows in a step at temperature 1.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.sampling import look, selection
from engine.sampling.distribution import Distributions, weigh
from engine.sampling.processors import NEG_INF, Penalised, TokenCounts, penalise
from engine.sampling.rng import uniform, uniforms
from engine.sampling.sampled import Sampled, SampleRow, failed, told
from engine.sampling.selection import Draws

__all__ = ["SampleRow", "Sampled", "Sampler"]

_COLDEST, _HOTTEST = 1e-30, 1e30  # beyond, float32 logits give the same; within, 1 / temperature is a float32 number
_SPARE = 12  # tokens of a head beyond those that are listed: a tie with its last ones would need the whole row
_RAW_HEAD = 32  # enough of the raw order to place nearly every token that is chosen
_SCALAR_DRAWS = 16  # up to this many rows the scalar generator is faster than the vectorised one


class Sampler:
    """``sample`` turns the logits of a step into tokens. Nothing but memory to work in is kept between calls.

    ``head``: how many of the likeliest tokens are sorted before a row is walked whole; it changes no result.
    Not for several threads at once.
    """

    def __init__(self, vocab_size: int, head: int = 64) -> None:
        if vocab_size < 1 or head < 1:
            raise ValueError(f"vocab_size and head must be at least 1, got {vocab_size!r} and {head!r}")
        self.vocab_size = vocab_size
        self._head = head
        self._buffers: dict[str, Tensor] = {}

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow], observe_top: int | None = None) -> list[Sampled]:
        """One token a row of ``logits`` [S, V] (any float dtype; left as it is).

        ``observe_top``: None observes only rows whose params ask for log-probabilities; k observes every row and lists
        its k likeliest tokens (0: none). A row with NaN, or with nothing above -inf, gets ``error`` and no token; the
        others are not affected. ValueError when the shapes do not fit.
        """
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(f"logits must be [{len(rows)}, {self.vocab_size}] (rows, vocabulary), got {list(logits.shape)}")
        if observe_top is not None and observe_top < 0:
            raise ValueError(f"observe_top must be None or at least 0, got {observe_top!r}")
        out: dict[int, Sampled] = {}
        quick: list[int] = []
        full: list[int] = []
        for i, row in enumerate(rows):
            plain = row.params.temperature == 0 and row.params.logprobs is None and observe_top is None
            (quick if plain else full).append(i)
        for chosen, run in ((quick, self._greedy), (full, self._draw)):
            if chosen:
                part = logits if len(chosen) == len(rows) else logits[torch.tensor(chosen, device=logits.device)]
                out.update(zip(chosen, run(part, [rows[i] for i in chosen], observe_top), strict=True))
        return [out[i] for i in range(len(rows))]

    @torch.inference_mode()
    def describe(
        self, logprobs: Tensor, rows: Sequence[SampleRow], chosen: Sequence[tuple[int, float]], observe_top: int | None
    ) -> list[Sampled]:
        """What ``sample`` tells of tokens that were chosen otherwise (by a beam search), with nothing drawn and nothing filtered.

        ``logprobs``: float32 [S, V], finite somewhere in each row; ``chosen``: token and its processed log-probability, a row.
        """
        raw, table = logprobs, np.tile(np.array([[1.0], [self.vocab_size], [1.0], [0.0], [0.0]]), len(rows))
        listed = min(max(rows[0].params.logprobs or 0, observe_top or 0), self.vocab_size)
        tokens = torch.tensor([token for token, _ in chosen], device=raw.device)
        penalised, changed = self._penalised(raw, list(rows))
        host = self._measure(raw, penalised, table, listed, changed, tokens)
        out = told(host, list(rows), table, observe_top if observe_top is not None else 0)
        for one, (_, logprob) in zip(out, chosen, strict=True):
            one.u, one.prob, one.nucleus_size, one.nucleus_mass = None, math.exp(logprob), 0, 0.0
        return out

    @torch.inference_mode()
    def tell(
        self, logits: Tensor, rows: Sequence[SampleRow], chosen: Sequence[tuple[int, float, float | None]],
        observe_top: int | None = None,
    ) -> list[Sampled]:  # fmt: skip
        """What ``sample`` tells, of tokens that were chosen otherwise (by an accept test): token, probability and u, a row.

        Everything else is measured as where the sampler draws itself: filters, masses, candidates.
        """
        if logits.shape != (len(rows), self.vocab_size) or len(chosen) != len(rows):
            raise ValueError(
                f"logits must be [{len(rows)}, {self.vocab_size}], with a token each, got {list(logits.shape)} and {len(chosen)}"
            )
        tokens = torch.tensor([token for token, _, _ in chosen], device=logits.device)
        out = self._draw(logits, list(rows), observe_top, tokens)
        for one, (_, prob, u) in zip(out, chosen, strict=True):
            one.prob, one.u = prob, u
        return out

    @torch.inference_mode()
    def distributions(self, logits: Tensor, rows: Sequence[SampleRow]) -> Distributions:
        """What ``sample`` draws from: all processors applied to rows [S, V], float64; at temperature 0 all mass is on one token.

        A row with NaN, or with nothing above -inf, is reported, and the others are not affected. ValueError for a shape that
        does not fit.
        """
        if logits.shape != (len(rows), self.vocab_size):
            raise ValueError(f"logits must be [{len(rows)}, {self.vocab_size}] (rows, vocabulary), got {list(logits.shape)}")
        x = self._penalised(logits.float(), list(rows))[0]
        if bool((x.amax(-1) == math.inf).any()):
            x = _limit(x)
        return weigh(x, _table(list(rows), self.vocab_size, draw=False), self._head)

    def _greedy(self, logits: Tensor, rows: list[SampleRow], _: int | None) -> list[Sampled]:
        """Rows of temperature 0 that nobody observes: the first of the largest logits, and no exponentials."""
        values, ids = _argmax(self._penalised(logits, rows)[0])
        host = torch.stack([values.double(), ids.double()]).cpu()
        return [failed(v) or Sampled(int(i), nucleus_mass=0.0) for v, i in zip(*host.tolist(), strict=True)]

    def _draw(
        self, logits: Tensor, rows: list[SampleRow], observe_top: int | None, chosen: Tensor | None = None
    ) -> list[Sampled]:
        """Rows that are drawn, or observed. ``chosen`` [S]: the tokens, where they are not to be drawn here."""
        raw = logits if logits.dtype == torch.float32 else self._buffer("raw", logits).copy_(logits)
        penalised, changed = self._penalised(raw, rows)
        wanted = [-1 if r.params.logprobs is None else r.params.logprobs for r in rows]
        listed = min(max(*wanted, -1 if observe_top is None else observe_top), self.vocab_size)  # -1: nobody observes
        table = _table(rows, self.vocab_size, draw=chosen is None)
        host = self._measure(raw, penalised, table, listed, changed, chosen)
        infinite = np.flatnonzero(host["top"] == math.inf)
        if infinite.size:  # take the limit (all mass on the tokens at +inf), and look again at these rows
            at = torch.from_numpy(infinite).to(raw.device)
            limit = _limit(raw[at])
            penalised_limit = limit if penalised is raw else _limit(penalised[at])
            again = self._measure(
                limit, penalised_limit, table[:, infinite], listed, tokens=None if chosen is None else chosen[at]
            )
            for name, values in again.items():
                host[name][infinite] = values
        return told(host, rows, table, observe_top)

    def _measure(
        self, raw: Tensor, logits: Tensor, table: np.ndarray, listed: int, changed: Penalised | None = None,
        tokens: Tensor | None = None,
    ) -> dict[str, np.ndarray]:  # fmt: skip
        """Everything ``told`` needs of float32 rows, on the host; ``logits``: ``raw`` after the penalties,
        which ``changed`` these (None: not known).

        ``listed``: how many of the likeliest tokens to list; -1: do not observe at all. ``tokens`` [S]: chosen already.
        """
        h = selection.head(logits, max(self._head, listed + _SPARE))
        draws = Draws.of(table, logits.device)
        top = h.values_SK[:, :1]
        temperature = draws.temperature if (table[0] != 1).any() else None
        total = torch.zeros(len(raw), dtype=torch.float64, device=raw.device)
        seen: dict[str, Tensor] = {}
        if listed >= 0:
            raw_head = h if raw is logits else _raw_head(h, raw, changed, max(_RAW_HEAD, listed + _SPARE))
            at_one = None if temperature is None else (table[0] == 1).tolist()
            total, seen = _totals(raw, logits, raw_head.values_SK[:, :1], top, temperature, at_one, changed)
        elif ((table[1] >= self.vocab_size) & (table[3] == 0)).any():  # rows that neither top_k nor min_p cuts
            total = selection.mass(logits, top, temperature)
        greedy = bool((table[1] == 1).all())  # that is all there is to a greedy row: it keeps its first token
        pick = selection.first_of(h) if greedy else selection.walk_head(h, draws, total.unsqueeze(-1), self.vocab_size)
        if tokens is not None:
            pick = replace(pick, token_id=tokens)
        if listed >= 0:
            seen |= look.stages(h, draws, total.unsqueeze(-1), self.vocab_size)
            seen |= look.look(raw, logits, raw_head, torch.as_tensor(pick.token_id), listed)
        host = _to_host({"top": top, "total": total, **vars(pick), **seen})
        self._walk_whole(raw, logits, table, listed, host, tokens is not None)
        return host

    def _walk_whole(
        self, raw: Tensor, logits: Tensor, table: np.ndarray, listed: int, host: dict[str, np.ndarray], chosen: bool
    ) -> None:
        """Mend in ``host`` the rows that their heads did not settle. ``chosen``: the tokens stay as they are."""
        unsettled = host["resolved"] == 0
        if listed >= 0:
            unsettled |= (host["looked"] == 0) | (host["staged"] == 0)
        at = np.flatnonzero(unsettled & np.isfinite(host["top"]))
        if not at.size:
            return
        index = torch.from_numpy(at).to(raw.device)
        rows = logits[index].cpu().numpy()
        raw_rows = rows if raw is logits else raw[index].cpu().numpy()
        for i, row, raw_row in zip(at, rows, raw_rows, strict=True):
            found: dict[str, Any] = {}
            draw, total = table[:, i], float(host["total"][i])
            if not host["resolved"][i]:
                found = dict(vars(selection.walk_row(row, draw, total)))
                if chosen:
                    del found["token_id"]
            if listed >= 0 and not host["staged"][i]:
                found |= look.stages_row(row, draw, total)
            if listed >= 0 and (found or not host["looked"][i]):
                found |= look.look_row(raw_row, row, int(found.get("token_id", host["token_id"][i])), listed)
            for name, value in found.items():
                host[name][i] = value

    def _penalised(self, logits: Tensor, rows: list[SampleRow]) -> tuple[Tensor, Penalised | None]:
        """Float32 logits after the penalties, and what those changed; the same tensor and None when no row has one."""
        counts = [_counts(row) for row in rows]
        if all(c is _NOTHING for c in counts):
            return logits, None
        changed = penalise(
            logits,
            counts,
            repetition_penalty=[row.params.repetition_penalty for row in rows],
            presence_penalty=[row.params.presence_penalty for row in rows],
            frequency_penalty=[row.params.frequency_penalty for row in rows],
        )
        out = self._buffer("penalised", logits).copy_(logits)
        return out.index_put_((changed.rows, changed.ids), changed.after), changed

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        """Float32 memory of the shape of ``like``; asking the system for it at every step would cost more than filling it."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < len(like) or buffer.device != like.device:
            buffer = self._buffers[name] = torch.empty(like.shape, dtype=torch.float32, device=like.device)
        return buffer[: len(like)]


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest logit of each row and its id, the lowest of equals; NaN where a row has one. [S], [S].

    By chunks of ids, since the maximum of a chunk takes vector instructions and ``argmax`` over a long row does not.
    """
    vocab = logits.shape[-1]
    chunk = max(1, math.isqrt(vocab))
    chunks = vocab // chunk
    best = logits[:, : chunks * chunk].unflatten(-1, (chunks, chunk)).amax(-1)
    if chunks * chunk < vocab:
        best = torch.cat([best, logits[:, chunks * chunk :].amax(-1, keepdim=True)], dim=-1)
    first = best.argmax(-1, keepdim=True)  # the lowest of equal chunks
    ids = first * chunk + torch.arange(chunk, device=logits.device)
    inside = ids.clamp(max=vocab - 1)  # the last chunk may be short: its last id again, which argmax does not prefer
    values = logits.gather(-1, inside)
    at = values.argmax(-1, keepdim=True)
    return values.gather(-1, at).squeeze(-1), inside.gather(-1, at).squeeze(-1)


def _raw_head(h: selection.Head, raw: Tensor, changed: Penalised | None, k: int) -> selection.Head:
    """The head of rows whose head after the penalties is ``h``."""
    if raw.device.type != "cpu" or raw.shape[-1] <= selection.SMALL or changed is None or changed.raised:
        return selection.head(raw, k)
    return selection.head_before(h, raw, changed, k)


def _totals(
    raw: Tensor, logits: Tensor, raw_top: Tensor, top: Tensor, temperature: Tensor | None, at_one: list[bool] | None,
    changed: Penalised | None,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """Masses of rows that are observed: after the penalties at the temperature; then the raw row's and its entropy, and the row's
    after the penalties at 1. In units of the likeliest token's. The tops: largest of each row [S, 1].

    The raw row's masses are those of the other tokens and of the few that were ``changed``, without another pass over the
    vocabulary, but where logits were raised: there the difference could be all rounding.
    """
    total, plain, entropy = selection.masses(logits, top, temperature, at_one)
    if raw is logits:
        return total, {"raw_total": plain, "entropy": entropy, "plain_total": plain}
    if changed is None:
        _, raw_total, nats = selection.masses(raw, raw_top)
    else:
        raw_total, nats = _before_penalties(changed, raw_top, top, plain, entropy)
        if changed.raised:
            whole = torch.tensor(changed.raised, device=raw.device)
            _, masses, entropies = selection.masses(raw[whole], raw_top[whole])
            raw_total, nats = raw_total.index_copy(0, whole, masses), nats.index_copy(0, whole, entropies)
    return total, {"raw_total": raw_total, "entropy": nats, "plain_total": plain}


def _before_penalties(changed: Penalised, raw_top: Tensor, top: Tensor, plain: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """Mass and entropy [S] of raw rows, given those after the penalties, by what the changed tokens had more before."""
    rows, origin = changed.rows, raw_top.double().squeeze(-1)  # nothing is larger, so no exponential overflows
    shift = top.double().squeeze(-1) - origin
    base = plain * shift.exp()
    weighted = base * (plain.log() - entropy + shift)  # the sum of weight * logit behind that entropy
    before, after = (x.double() - origin[rows] for x in (changed.before, changed.after))
    w_before, w_after = before.exp(), after.exp()
    mass = base.index_add(0, rows, w_before - w_after)
    more = torch.where(w_before > 0, w_before * before, 0.0) - torch.where(w_after > 0, w_after * after, 0.0)
    nats = mass.log() - weighted.index_add(0, rows, more) / mass
    unchanged = torch.ones_like(mass, dtype=torch.bool).index_fill(0, rows, False)
    return mass, torch.where(unchanged, entropy, nats)


def _limit(logits: Tensor) -> Tensor:
    """Rows that hold +inf as the distribution they tend to: 0 where they are +inf, -inf elsewhere; other rows as they are."""
    infinite = logits == math.inf
    return torch.where(infinite.any(-1, keepdim=True), torch.where(infinite, 0.0, NEG_INF), logits)


_NOTHING = TokenCounts(())


def _counts(row: SampleRow) -> TokenCounts:
    """What the penalties of this row look at, up to date; ``_NOTHING`` where it has none."""
    if not row.params.penalised:
        return _NOTHING
    if row.counts is None:
        return TokenCounts(row.prompt_token_ids, row.output_token_ids)
    row.counts.update(row.output_token_ids)
    return row.counts


def _table(rows: list[SampleRow], vocab: int, draw: bool = True) -> np.ndarray:
    """The columns of ``Draws`` for these rows: float64 [5, S]. A greedy row is one that keeps its first token.

    Without ``draw`` every u is 0.
    """
    table = np.empty((5, len(rows)))
    for i, row in enumerate(rows):
        p = row.params
        if p.temperature == 0:
            table[:, i] = 1, 1, 1, 0, 0
        else:
            temperature = min(max(p.temperature, _COLDEST), _HOTTEST)
            table[:, i] = temperature, min(p.top_k, vocab) if p.top_k > 0 else vocab, p.top_p, p.min_p, 0
    drawn = [i for i, row in enumerate(rows) if draw and row.params.temperature != 0]
    if len(drawn) <= _SCALAR_DRAWS:
        for i in drawn:
            table[4, i] = uniform(rows[i].seed, rows[i].sample_index, rows[i].position)
    else:
        of = [rows[i] for i in drawn]
        table[4, drawn] = uniforms([r.seed for r in of], [r.sample_index for r in of], [r.position for r in of])
    return table


def _to_host(tensors: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Tensors [S] or [S, n] as float64 arrays (ids and counts are exact below 2**53), in one copy."""
    if all(t.device.type == "cpu" for t in tensors.values()):
        copies = {name: t.numpy().astype(np.float64) for name, t in tensors.items()}
        return {name: a if name.startswith("list_") else a.reshape(-1) for name, a in copies.items()}
    parts = [t.double() if t.ndim == 2 else t.double().unsqueeze(-1) for t in tensors.values()]
    packed = torch.cat(parts, dim=-1).cpu().numpy()
    ends = np.cumsum([p.shape[-1] for p in parts])[:-1]
    arrays = np.split(packed, ends, axis=1)
    return {name: a if name.startswith("list_") else a[:, 0] for name, a in zip(tensors, arrays, strict=True)}
