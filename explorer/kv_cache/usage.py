"""What the pool held, step by step, and what came of each prefix look-up: events to rows, pure.

Paged: a request holds whole blocks, so only its last block has empty slots. Contiguous: an engine without pages sets
``max_model_len`` slots aside for each running request at once, since it cannot know how long the text gets.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.events.state import State
from engine.events.types import (
    BlockCopied,
    EngineStarted,
    Event,
    KnobChanged,
    PoolResized,
    PrefixLookup,
    RequestFinished,
    RequestForked,
    RequestPreempted,
    Snapshot,
    StepDone,
)
from engine.hardware.memory import blocks_for, contiguous_slots, utilisation
from explorer.i18n import _, ngettext

COLUMNS = ("step", "requests", "tokens", "stored", "slots", "blocks", "reserved", "pool", "paged_use", "contiguous_use")


class UsageRows:
    """Feed it events in order; each ``StepDone`` gives one row.

    Columns: ``tokens`` that requests have in the cache (shared ones counted for each), ``stored`` of them (shared ones once),
    ``blocks`` and ``slots`` held, ``reserved`` slots under contiguous reservation, ``pool`` slots there are, and the two
    utilisations in per cent (NaN where nothing is held).
    """

    def __init__(self) -> None:
        self.max_model_len = 0
        self.block_size = 0
        self.num_blocks = 0
        self._computed: dict[str, int] = {}  # requests that hold blocks -> tokens in the cache
        self._one_tail: list[set[str]] = []  # siblings (n > 1) whose last block is still the same physical one
        self._after = -1  # events up to this step are in already
        self.emptied = False  # whether the prefix cache was emptied since the engine started
        self._gone: set[str] = set()  # ran in the step under way, but hold nothing at its end

    def rows(self, events: Iterable[Event]) -> dict[str, list[float]]:
        """The rows of these events, by column (all columns, perhaps empty)."""
        out: dict[str, list[float]] = {name: [] for name in COLUMNS}
        for event in events:
            row = self._take(event)
            if row is not None:
                for name, value in zip(COLUMNS, row, strict=True):
                    out[name].append(value)
        return out

    def resume(self, started: EngineStarted, state: State) -> None:
        """Begin in the middle of a run, at ``state``: rows of its step and of earlier ones are not given."""
        self._start(started)
        self.block_size, self.num_blocks = state.block_size, state.num_blocks
        self._computed = {view.request_id: view.num_computed_tokens for view in state.requests.values() if view.block_ids}
        self._after = state.step

    def _start(self, started: EngineStarted) -> None:
        self.__init__()  # type: ignore[misc]
        self.max_model_len = int(started.config.get("max_model_len") or 0)
        self.block_size = int(started.config.get("block_size") or 0)
        self.num_blocks = int(started.config.get("num_kv_blocks") or 0)

    def _take(self, event: Event) -> tuple[float, ...] | None:
        self.emptied = self.emptied or empties(event)
        if event.step <= self._after and not isinstance(event, EngineStarted):
            return None
        if isinstance(event, StepDone):
            for run in event.runs:
                if run.is_padding:
                    continue
                self._part(run.request_id)
                if run.request_id not in self._gone:
                    self._computed[run.request_id] = run.end
            self._gone.clear()
            return self._row(event)
        if isinstance(event, RequestForked):
            self._computed[event.request_id] = event.num_computed_tokens
            self._join(event.parent_id, event.request_id)
        elif isinstance(event, BlockCopied):
            self._part(event.request_id)
        elif isinstance(event, RequestFinished | RequestPreempted):
            self._computed.pop(event.request_id, None)
            self._part(event.request_id)
            self._gone.add(event.request_id)
        elif isinstance(event, EngineStarted):
            self._start(event)
        elif isinstance(event, PoolResized):
            self.block_size, self.num_blocks = event.block_size, event.num_blocks
            self._computed.clear()
            self._one_tail.clear()
        elif isinstance(event, Snapshot):
            self.block_size, self.num_blocks = event.block_size, event.num_blocks
            self._computed = {r.request_id: r.num_computed_tokens for r in event.requests if r.block_ids}
            self._one_tail.clear()
        return None

    def _join(self, parent: str, child: str) -> None:
        for group in self._one_tail:
            if parent in group:
                group.add(child)
                return
        self._one_tail.append({parent, child})

    def _part(self, request_id: str) -> None:
        """It wrote into a block of its own, or left: the others go on sharing while there are at least two."""
        for group in self._one_tail:
            group.discard(request_id)
        self._one_tail = [group for group in self._one_tail if len(group) > 1]

    def _row(self, done: StepDone) -> tuple[float, ...]:
        size = max(1, self.block_size)
        computed = self._computed
        slots = done.used_blocks * size
        again = {rid for group in self._one_tail for rid in sorted(group)[1:]}  # their last block has been counted
        empty = sum(blocks_for(n, size) * size - n for rid, n in computed.items() if rid not in again)
        stored = max(0, slots - empty)
        tokens = sum(computed.values())
        reserved = contiguous_slots(len(computed), self.max_model_len) if self.max_model_len else 0
        return (
            done.step, len(computed), tokens, stored, slots, done.used_blocks, reserved, self.num_blocks * size,
            percent(utilisation(stored, slots)), percent(utilisation(tokens, reserved)),
        )  # fmt: skip


def percent(share: float | None) -> float:
    return float("nan") if share is None else 100 * share


def summary(row: dict[str, float], max_model_len: int, block_size: int) -> str:
    """One row in words: what is held, what pages waste, what contiguous reservation would have wasted."""
    requests, slots = int(row["requests"]), int(row["slots"])
    if not requests:
        return _("No request holds a block at this step.")
    paged = _("{stored:,} tokens in {blocks:,} blocks of {size} ({slots:,} slots, {use:.0f} % in use)").format(
        stored=int(row["stored"]), blocks=int(row["blocks"]), size=block_size, slots=slots, use=row["paged_use"]
    )
    shared = int(row["tokens"] - row["stored"])
    if shared > 0:
        paged += _("; sharing spares another {n:,} tokens' worth").format(n=shared)
    reserved = int(row["reserved"])
    fit = int(row["pool"]) // max_model_len if max_model_len else 0
    more = _("more than this pool has") if reserved > row["pool"] else _("the pool would fit {n} such requests").format(n=fit)
    return _(
        "{paged}. Contiguous reservation would set aside {n} × {length:,} = {reserved:,} slots ({use:.1f} % in use), {more}."
    ).format(paged=paged, n=requests, length=max_model_len, reserved=reserved, use=row["contiguous_use"], more=more)


# -------------------------------------------------------------------------------------------------------- prefix look-ups


@dataclass(frozen=True)
class Lookup:
    """One question to the prefix cache, with its answer in words."""

    step: int
    request_id: str
    asked: int  # tokens
    hit: int  # tokens
    blocks: tuple[int, ...]
    words: str
    recompute: bool


def lookups(events: Iterable[Event], block_size: int, emptied: bool = False) -> list[Lookup]:
    """``emptied``: whether the prefix cache was emptied before these events."""
    found = []
    for e in events:
        emptied = not isinstance(e, EngineStarted) and (emptied or empties(e))
        if isinstance(e, PrefixLookup):
            words = in_words(e, block_size, emptied)
            found.append(Lookup(e.step, e.request_id, e.num_tokens, e.num_hit_tokens, tuple(e.block_ids), words, e.recompute))
    return found


def empties(event: Event) -> bool:
    """Whether the prefix cache forgets everything here: the pool is built anew, or prefix caching is switched off."""
    off = isinstance(event, KnobChanged) and event.name == "enable_prefix_caching" and not event.new
    return off or isinstance(event, PoolResized)


def in_words(lookup: PrefixLookup, block_size: int, emptied: bool = False) -> str:
    """Why the hit was no longer than it was, for a reader who has never seen a prefix cache. ``emptied``: whether the cache was
    emptied before, so that nobody can tell what was sent."""
    asked, hit = lookup.num_tokens, lookup.num_hit_tokens
    again = _("After a preemption: ") if lookup.recompute else ""
    if lookup.num_swapped_tokens:
        there = _("the KV of its {n} tokens comes back from host memory; blocks that the pool still had, and are shared: {m}.")
        return _sentence(again + there.format(n=lookup.num_swapped_tokens, m=len(lookup.block_ids)))
    if not lookup.miss_reason:
        left = asked - hit
        there = ngettext(
            "everything that can be cached was there; the last token is computed.",
            "everything that can be cached was there; the last {n} tokens, less than a block or wanted for their logits, are computed.",
            left,
        )
        return _sentence(again + there.format(n=left) + _part_in_words(lookup))
    start = again + _("the first {n} tokens were there; then ").format(n=hit) if hit else again
    if emptied:
        new = _("new text, or cached before the pool was built anew or prefix caching was off")
    elif lookup.recompute:
        new = (
            _("what it had computed itself is not in the cache any more")
            if not hit
            else _("the rest is not in the cache any more")
        )
    else:
        new = _("the rest is new text") if hit else _("nobody sent this beginning before")
    short = _("too short: only full blocks of {size} tokens are cached, and one token is always computed.")
    reason = {
        "disabled": _("prefix caching is switched off, so nothing was looked up."),
        "no such prefix": _("no block is known that goes on with these tokens ({new}).").format(new=new),
        "shorter than a block": short.format(size=block_size),
        "evicted": _("the next block was cached once, but had been evicted to make room."),
        "different salt": _("the same tokens are cached under another salt, and salts do not share."),
        "not in the drafter's cache": _(
            "the next block is cached, but the drafter has not seen it: both need their own KV of it."
        ),
        "hash collision": _("a block with the same hash holds other tokens; they were compared, so it is a miss."),
    }.get(lookup.miss_reason, lookup.miss_reason)
    return _sentence(start + reason + _part_in_words(lookup))


def _part_in_words(lookup: PrefixLookup) -> str:
    if not lookup.num_partial_tokens:
        return ""
    return " " + ngettext(
        "Of the last block {n} token was its own: that block was copied.",
        "Of the last block {n} tokens were its own: that block was copied.",
        lookup.num_partial_tokens,
    ).format(n=lookup.num_partial_tokens)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def hit_share(rows: Iterable[Lookup]) -> float | None:
    """Tokens hit over tokens asked, of all look-ups; None without any."""
    pairs: list[Any] = [(row.hit, row.asked) for row in rows]
    return utilisation(sum(hit for hit, _ in pairs), sum(asked for _, asked in pairs))
