"""The pool at one step, as arrays and rows: the map of physical blocks, the block tables, what a block holds.

All of it is pure: a ``State`` (see ``engine.events.state``) goes in, plain values come out.
"""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.events.state import ReqView, State
from engine.events.types import Event, TokenSampled
from explorer.canvas.blockmap import CACHED, FREE, HELD, SHARED, pack_codes
from explorer.i18n import _, ngettext

CHIPS = 48  # blocks of a table that are shown, unless its request is selected
CHIPS_SELECTED = 400
TEXTS_KEPT = 65536  # token texts remembered


@dataclass(frozen=True)
class PoolMap:
    """Every physical block: what it is, who holds it, how full it is."""

    kind: np.ndarray  # uint8 [num_blocks]: FREE, CACHED, HELD, SHARED
    holder: np.ndarray  # int32 [num_blocks]: index into ``requests`` of the first holder; -1 where nobody holds it
    level: np.ndarray  # uint8 [num_blocks]: 255 x the share of its slots that hold a token; 255 only when it is full
    ref_counts: np.ndarray  # int32 [num_blocks]
    requests: list[ReqView] = field(default_factory=list)

    @property
    def num_held(self) -> int:
        return int(np.count_nonzero(self.ref_counts))


class PoolMapper:
    """Reads the pool out of a state. Keeps each table as an array, since most of a table is the same a moment later."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[list[int], np.ndarray]] = {}

    def map(self, state: State) -> PoolMap:
        """A block that a request holds but has not written yet has level 0."""
        n, size = state.num_blocks, max(1, state.block_size)
        refs = state.ref_counts
        kind = np.minimum(refs, 2).astype(np.uint8)
        kind[kind > 0] += HELD - 1  # one reference: HELD, more: SHARED
        level = np.zeros(n, np.uint8)
        if state.lru:
            free = np.fromiter(state.lru, np.int64, len(state.lru))
            kind[free], level[free] = CACHED, 255  # only full blocks are cached
        holder = np.full(n, -1, np.int32)
        requests = [view for view in state.requests.values() if view.block_ids]
        for index in range(len(requests) - 1, -1, -1):  # backwards: the first holder has the last word
            view = requests[index]
            blocks = self._array(view)
            holder[blocks] = index
            full, rest = divmod(view.num_computed_tokens, size)
            level[blocks[:full]] = 255
            if rest and full < len(blocks):
                level[blocks[full]] = max(int(level[blocks[full]]), rest * 255 // size)
        if len(self._tables) > 2 * len(requests) + 16:
            self._tables = {view.request_id: self._tables[view.request_id] for view in requests}
        return PoolMap(kind, holder, level, refs, requests)

    def _array(self, view: ReqView) -> np.ndarray:
        known, array = self._tables.get(view.request_id, ([], np.zeros(0, np.int64)))
        table = view.block_ids
        if len(known) != len(table) or known != table:
            grown = len(known) < len(table) and table[: len(known)] == known
            array = np.concatenate([array, np.array(table[len(known) :])]) if grown else np.array(table, np.int64)
            self._tables[view.request_id] = (table.copy(), array)
        return array


def pool_map(state: State) -> PoolMap:
    return PoolMapper().map(state)


def block_codes(pool: PoolMap, colour_index: Callable[[ReqView], int]) -> np.ndarray:
    """The codes that ``BlockMap.draw`` takes, uint32 [num_blocks]."""
    colours = np.array([colour_index(view) for view in pool.requests] + [0], np.uint8)  # the last: nobody's
    return pack_codes(pool.kind, colours[pool.holder], pool.ref_counts, pool.level)


@dataclass(frozen=True)
class Counts:
    """The numbers over the map."""

    free: int
    cached: int
    held: int  # by exactly one request
    shared: int
    references: int  # what tables name, shared blocks counted for each

    @property
    def saved(self) -> int:
        """Blocks that sharing saves now."""
        return self.references - self.held - self.shared


def counts(pool: PoolMap) -> Counts:
    by_kind = np.bincount(pool.kind, minlength=4)
    return Counts(int(by_kind[FREE]), int(by_kind[CACHED]), int(by_kind[HELD]), int(by_kind[SHARED]), int(pool.ref_counts.sum()))


def number_of(view: ReqView) -> int:
    """A number that tells an owner's requests apart and never changes: that in its id ("req-12" is 12), siblings counted on."""
    digits = re.findall(r"\d+", view.request_id.split("#", 1)[0])
    base = int(digits[-1][-9:]) if digits else zlib.crc32(view.request_id.encode())
    return base + view.sample_index


# -------------------------------------------------------------------------------------------------------- a single block


def holders(state: State, block_id: int) -> list[tuple[ReqView, int]]:
    """(request, logical index) of every table that names the block."""
    return [(view, view.block_ids.index(block_id)) for view in state.requests.values() if block_id in view.block_ids]


class TokenTexts:
    """Texts of token ids, learnt from the tokens that were watched. ``more`` (a tokenizer's look-up) knows the others."""

    def __init__(self, more: Callable[[int], str] | None = None) -> None:
        self._texts: dict[int, str] = {}
        self._more = more

    def learn(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, TokenSampled) and len(self._texts) < TEXTS_KEPT:
                self._texts[event.token_id] = event.text
                for candidate in event.top:
                    self._texts[candidate.token_id] = candidate.text

    def __call__(self, token_id: int) -> str | None:
        if token_id not in self._texts and self._more is not None and token_id >= 0:
            self._texts[token_id] = self._more(token_id)
        return self._texts.get(token_id)


def block_tokens(view: ReqView, index: int, block_size: int) -> list[int]:
    """Token ids whose KV the logical block holds; -1 where the id was not watched."""
    end = min((index + 1) * block_size, view.num_computed_tokens)
    return view.token_ids[index * block_size : end]


def describe_block(state: State, block_id: int, text_of: Callable[[int], str | None] = lambda _id: None) -> list[str]:
    """The lines that a hover over a block shows. ValueError for a block outside the pool."""
    if not 0 <= block_id < state.num_blocks:
        raise ValueError(f"block_id must lie in [0, {state.num_blocks}), got {block_id}")
    refs = int(state.ref_counts[block_id])
    lines = [f"ref_count {refs}"]
    if refs == 0:
        if block_id in state.cached:
            place = list(state.lru).index(block_id) + 1 if block_id in state.lru else 1
            lines[0] = _("ref_count 0 · cached: a prompt with this prefix would hit it")
            if state.knobs.get("prefix_index") == "radix":
                lines.append(_("one of {n} that may be evicted: ends of prefixes first").format(n=len(state.lru)))
            else:
                lines.append(_("{place} of {n} to be evicted").format(place=ordinal(place), n=len(state.lru)))
        else:
            lines[0] = _("ref_count 0 · free, nothing to find in it")
    who = holders(state, block_id)
    for view, index in who[:6]:
        first = index * state.block_size
        held = max(0, min(state.block_size, view.num_computed_tokens - first))
        where = _("positions {first}–{last}").format(first=first, last=first + held - 1) if held else _("nothing written yet")
        line = _("{request} ({status}): logical block {index}, {where} · {held} of {size} tokens")
        lines.append(
            line.format(request=view.request_id, status=view.status, index=index, where=where, held=held, size=state.block_size)
        )
    if len(who) > 6:
        lines.append(ngettext("and {n} more request", "and {n} more requests", len(who) - 6).format(n=len(who) - 6))
    if block_id in state.cached:
        lines.append(f"hash {state.cached[block_id] & (2**64 - 1):016x}")
    if who:
        lines.append(_tokens_line(block_tokens(*who[0], state.block_size), text_of))
    return [line for line in lines if line]


def _tokens_line(token_ids: list[int], text_of: Callable[[int], str | None]) -> str:
    """The text where every token's is known, the ids otherwise."""
    if not token_ids:
        return ""
    texts = [text_of(token) for token in token_ids]
    if all(text is not None for text in texts):
        return _("tokens: ") + "|".join(str(text).replace("\n", "⏎") for text in texts)
    parts = [str(token) if token >= 0 else "?" for token in token_ids]
    more = _(" … {n} more").format(n=len(parts) - 24) if len(parts) > 24 else ""
    return _("token ids: ") + " ".join(parts[:24]) + more


def ordinal(n: int) -> str:
    """1 -> "1st". English only: a catalogue that has no such form leaves {place} out of its sentence."""
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"


# ---------------------------------------------------------------------------------------------------------- block tables


def table_rows(
    state: State, colour: Callable[[ReqView], list[str]], *, selected: str | None = None, limit: int = 64
) -> tuple[list[dict[str, Any]], int]:
    """One row for each request that is not finished, in order of arrival, and how many were left out beyond ``limit``.

    ``chips``: [logical index, physical block, ref_count] of the first and last blocks; ``skipped`` blocks lie between them at
    position ``cut``. ``fill`` tokens are in the last block. ``colour`` is [light, dark].
    """
    live = state.live
    rows = []
    for view in live[:limit]:
        table = view.block_ids
        shown = CHIPS_SELECTED if view.request_id == selected else CHIPS
        head = list(range(len(table))) if len(table) <= shown else list(range(shown - 12))
        tail = [] if len(table) <= shown else list(range(len(table) - 12, len(table)))
        last = view.num_computed_tokens - (len(table) - 1) * state.block_size if table else 0
        rows.append(
            {
                "id": view.request_id,
                "owner": view.owner,
                "colour": colour(view),
                "status": status(view),
                "tokens": view.num_computed_tokens,
                "blocks": len(table),
                "cached": view.num_cached_tokens,
                "fill": max(0, min(state.block_size, last)),
                "size": state.block_size,
                "chips": [[i, table[i], int(state.ref_counts[table[i]])] for i in head + tail],
                "cut": len(head),
                "skipped": len(table) - len(head) - len(tail),
            }
        )
    return rows, max(0, len(live) - limit)


def status(view: ReqView) -> str:
    """A request's state in a word or a few."""
    if view.status == "preempted" and view.num_swapped_tokens:
        return ngettext(
            "preempted, {n} token in host memory", "preempted, {n} tokens in host memory", view.num_swapped_tokens
        ).format(n=view.num_swapped_tokens)
    return view.status


def blocks_of(state: State, request_id: str | None) -> list[int]:
    """The physical blocks of a request; [] when there is no such request or it holds none."""
    requests: Mapping[str, ReqView] = state.requests
    return list(requests[request_id].block_ids) if request_id is not None and request_id in requests else []
