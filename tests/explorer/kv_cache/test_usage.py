"""Tokens, blocks and reservation over steps, and the look-ups in words."""

import math

import msgspec
import pytest

from engine.events.types import KnobChanged, PoolResized, PrefixLookup
from explorer.kv_cache import usage
from tests.explorer.kv_cache.pool_events import PoolSim


def rows_of(sim: PoolSim) -> list[dict[str, float]]:
    table = usage.UsageRows().rows(sim.events)
    return [dict(zip(table, values, strict=True)) for values in zip(*table.values(), strict=True)]


def test_shared_blocks_count_once_as_stored_and_for_each_as_tokens():
    sim = PoolSim(num_blocks=8, block_size=4, max_model_len=64)
    sim.add("a-1", list(range(10)))
    sim.prefill("a-1")
    sim.step()
    sim.add("a-2", [*range(8), 50, 51])
    sim.prefill("a-2")
    sim.step()
    one, two = rows_of(sim)
    assert (one["requests"], one["tokens"], one["stored"], one["slots"], one["reserved"], one["pool"]) == (1, 10, 10, 12, 64, 32)
    assert (two["requests"], two["tokens"], two["stored"], two["slots"], two["blocks"]) == (2, 20, 12, 16, 4)
    assert two["reserved"] == 128
    assert two["paged_use"] == 75
    assert two["contiguous_use"] == pytest.approx(100 * 20 / 128)
    words = usage.summary(two, 64, 4)
    assert "12 tokens in 4 blocks of 4 (16 slots, 75 % in use)" in words
    assert "spares another 8 tokens" in words
    assert "2 × 64 = 128 slots (15.6 % in use), more than this pool has" in words


def test_stored_tokens_agree_with_the_tables_under_many_moves():
    """Against the tables themselves: distinct (block, offset) pairs that were written."""
    sim = PoolSim(num_blocks=64, block_size=4)
    expected = []

    def close() -> None:
        sim.step()
        written = {
            (block, o) for r, t in sim.tables.items() for i, block in enumerate(t) for o in range(min(4, sim.computed[r] - 4 * i))
        }
        expected.append((len(written), sum(sim.computed.values()), len(sim.tables)))

    for i in range(5):
        sim.add(f"r-{i}", [*range(9), i])
        sim.prefill(f"r-{i}")
        close()
    sim.fork("r-1", "r-1#1")
    sim.fork("r-1", "r-1#2")
    close()
    sim.decode("r-1")  # copies; the two others still write into nothing
    close()
    for _ in range(3):
        for name in list(sim.tables):
            sim.decode(name)
        close()
    sim.preempt("r-4", "r-0")
    close()
    sim.decode("r-3")
    sim.finish("r-3")  # the step that finished it still lists it among its runs
    close()
    sim.finish("r-1")
    close()
    for name in list(sim.tables):
        sim.finish(name)
    close()
    got = [(row["stored"], row["tokens"], row["requests"]) for row in rows_of(sim)]
    assert got == expected
    assert got[-1] == (0, 0, 0)
    assert math.isnan(rows_of(sim)[-1]["paged_use"])
    assert usage.summary(rows_of(sim)[-1], 64, 4) == "No request holds a block at this step."


def test_rows_come_the_same_however_the_events_are_cut():
    sim = PoolSim()
    for i in range(4):
        sim.add(f"r-{i}", list(range(5 + i)))
        sim.prefill(f"r-{i}")
        sim.step()
    whole = usage.UsageRows().rows(sim.events)
    parts = usage.UsageRows()
    pieces = [parts.rows([event]) for event in sim.events]
    assert {name: [v for piece in pieces for v in piece[name]] for name in whole} == whole


def lookup(asked: int, hit: int, reason: str, recompute: bool = False) -> PrefixLookup:
    return PrefixLookup(
        step=3,
        time_ns=0,
        request_id="a",
        num_tokens=asked,
        num_hit_tokens=hit,
        block_ids=[],
        miss_reason=reason,
        recompute=recompute,
    )


@pytest.mark.parametrize(
    ("event", "part"),
    [
        (lookup(33, 32, ""), "the last token is computed"),
        (lookup(40, 32, ""), "the last 8 tokens"),
        (lookup(40, 0, "no such prefix"), "nobody sent this beginning before"),
        (lookup(40, 16, "no such prefix"), "The first 16 tokens were there; then no block is known"),
        (lookup(9, 0, "shorter than a block"), "only full blocks of 16 tokens"),
        (lookup(40, 16, "evicted"), "evicted to make room"),
        (lookup(40, 0, "different salt"), "another salt"),
        (lookup(40, 0, "disabled"), "switched off"),
        (lookup(40, 0, "hash collision"), "other tokens"),
        (lookup(40, 16, "evicted", recompute=True), "After a preemption: the first 16"),
        (lookup(40, 0, "something new"), "Something new"),
    ],
)
def test_every_reason_has_words(event, part):
    words = usage.in_words(event, 16)
    assert part in words and words[0].isupper()


def test_parts_of_blocks_and_host_memory_have_words():
    part = msgspec.structs.replace(lookup(40, 18, "no such prefix"), num_partial_tokens=2, index="radix")
    words = usage.in_words(part, 16)
    assert words.startswith("The first 18 tokens were there; then") and words.endswith(
        "2 tokens were its own: that block was copied."
    )
    whole = msgspec.structs.replace(lookup(40, 39, ""), num_partial_tokens=7, index="radix")
    assert "the last token is computed. Of the last block 7 tokens" in usage.in_words(whole, 16)
    back = msgspec.structs.replace(lookup(40, 39, "evicted", recompute=True), num_swapped_tokens=39, block_ids=[3])
    assert usage.in_words(back, 16).startswith("After a preemption: the KV of its 39 tokens comes back from host memory")


def test_lookups_and_their_share():
    found = usage.lookups([lookup(40, 10, "evicted"), lookup(60, 40, "")], 16)
    assert [(row.asked, row.hit) for row in found] == [(40, 10), (60, 40)]
    assert usage.hit_share(found) == 0.5
    assert usage.hit_share([]) is None


def test_nobody_is_said_to_have_sent_nothing_once_the_cache_was_emptied():
    miss, again = lookup(40, 0, "no such prefix"), lookup(40, 0, "no such prefix", recompute=True)
    (own,) = usage.lookups([again], 16)
    assert "what it had computed itself is not in the cache any more" in own.words
    resized = PoolResized(step=1, time_ns=0, num_blocks=8, block_size=16, kv_bytes_per_block=1, kv_pool_bytes=8)
    off = KnobChanged(step=1, time_ns=0, name="enable_prefix_caching", old=True, new=False)
    for emptying in (resized, off):
        first, *later = usage.lookups([miss, emptying, miss, again], 16)
        assert "nobody sent" in first.words
        assert all("before the pool was built anew" in row.words for row in later)
        rows = usage.UsageRows()
        rows.rows([emptying])
        assert rows.emptied
    (later,) = usage.lookups([miss], 16, emptied=True)
    assert "nobody sent" not in later.words
