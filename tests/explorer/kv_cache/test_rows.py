"""The pool as arrays and rows, from events that a real pool recorded."""

import numpy as np
import pytest

from engine.events.batching import BlockSwapped
from engine.events.state import State
from engine.events.types import Candidate, KnobChanged, TokenSampled
from explorer.canvas.blockmap import CACHED, FREE, HELD, SHARED
from explorer.kv_cache import rows
from tests.explorer.kv_cache.pool_events import PoolSim


def replay(sim: PoolSim) -> State:
    return State().apply_all(sim.events)


@pytest.fixture
def two_sharing() -> PoolSim:
    """Blocks of 4. "a-1" holds 10 tokens in blocks 0, 1, 2; "a-2" shares 0 and 1 and has 3 (2 tokens)."""
    sim = PoolSim(num_blocks=8)
    sim.add("a-1", list(range(10)))
    sim.prefill("a-1")
    sim.step()
    sim.add("a-2", [*range(8), 50, 51], owner="bob")
    sim.prefill("a-2")
    sim.step()
    return sim


def test_map_of_two_that_share(two_sharing):
    pool = rows.pool_map(replay(two_sharing))
    assert pool.kind.tolist() == [SHARED, SHARED, HELD, HELD, FREE, FREE, FREE, FREE]
    assert [v.request_id for v in pool.requests] == ["a-1", "a-2"]
    assert pool.holder.tolist() == [0, 0, 0, 1, -1, -1, -1, -1]
    assert pool.level.tolist() == [255, 255, 127, 127, 0, 0, 0, 0]
    assert pool.ref_counts.tolist() == [2, 2, 1, 1, 0, 0, 0, 0]
    n = rows.counts(pool)
    assert (n.free, n.cached, n.held, n.shared, n.references, n.saved) == (4, 0, 2, 2, 6, 2)


def test_finished_requests_leave_cached_blocks(two_sharing):
    two_sharing.finish("a-1")
    two_sharing.finish("a-2")
    two_sharing.step()
    pool = rows.pool_map(replay(two_sharing))
    assert pool.kind.tolist() == [CACHED, CACHED, FREE, FREE, FREE, FREE, FREE, FREE]
    assert pool.level.tolist()[:3] == [255, 255, 0]
    assert pool.requests == []


def test_codes_carry_kind_colour_count_and_fill(two_sharing):
    pool = rows.pool_map(replay(two_sharing))
    codes = rows.block_codes(pool, lambda view: {"ann": 3, "bob": 5}[view.owner])
    assert codes.dtype == np.uint32
    assert (codes & 255).tolist() == pool.kind.tolist()
    assert (codes >> 8 & 255).tolist() == [3, 3, 3, 5, 0, 0, 0, 0]
    assert (codes >> 16 & 255).tolist() == [2, 2, 1, 1, 0, 0, 0, 0]
    assert (codes >> 24).tolist() == [255, 255, 127, 127, 0, 0, 0, 0]


def test_an_almost_full_block_is_not_full_and_300_references_do_not_wrap():
    sim = PoolSim(num_blocks=2, block_size=1000, max_model_len=2000)
    sim.add("a-1", list(range(999)))
    sim.prefill("a-1")
    sim.step()
    state = replay(sim)
    state.ref_counts = np.array([300, 0], np.int32)
    code = int(rows.block_codes(rows.pool_map(state), lambda _: 0)[0])
    assert (code >> 24, code >> 16 & 255, code & 255) == (254, 255, SHARED)


def test_a_mapper_that_remembers_sees_what_a_fresh_one_sees():
    """Through growth, copy-on-write (a table changed in its middle), preemption and a name used again."""
    sim, mapper = PoolSim(num_blocks=64), rows.PoolMapper()

    def check() -> None:
        sim.step()
        state = replay(sim)
        old, new = mapper.map(state), rows.pool_map(state)
        for name in ("kind", "holder", "level", "ref_counts"):
            assert getattr(old, name).tolist() == getattr(new, name).tolist(), name

    sim.add("a-1", list(range(10)))
    sim.prefill("a-1")
    check()
    sim.fork("a-1", "a-1#1")
    check()
    for _ in range(4):
        sim.decode("a-1")
        sim.decode("a-1#1")
        check()
    sim.preempt("a-1", "a-1#1")
    check()
    sim.prefill("a-1")
    check()
    for name in ("a-1", "a-1#1"):
        sim.finish(name)
    for i in range(40):
        sim.add(f"b-{i}", [i] * 6)
        sim.prefill(f"b-{i}")
        check()
        sim.finish(f"b-{i}")
    assert len(mapper._tables) < 20


def test_hover_tells_who_where_and_what(two_sharing):
    state = replay(two_sharing)
    lines = rows.describe_block(state, 1)
    assert lines[0] == "ref_count 2"
    assert lines[1] == "a-1 (running): logical block 1, positions 4–7 · 4 of 4 tokens"
    assert lines[2] == "a-2 (running): logical block 1, positions 4–7 · 4 of 4 tokens"
    assert lines[3] == f"hash {state.cached[1]:016x}"
    assert lines[4] == "token ids: 4 5 6 7"
    assert rows.describe_block(state, 3)[1:] == [
        "a-2 (running): logical block 2, positions 8–9 · 2 of 4 tokens",
        "token ids: 50 51",
    ]
    assert rows.describe_block(state, 3, lambda t: f"<{t}>\n")[-1] == "tokens: <50>⏎|<51>⏎"
    assert rows.describe_block(state, 7) == ["ref_count 0 · free, nothing to find in it"]
    for outside in (-1, 8):
        with pytest.raises(ValueError, match=r"block_id must lie in \[0, 8\)"):
            rows.describe_block(state, outside)


def test_hover_over_a_cached_block_tells_when_it_will_be_evicted(two_sharing):
    two_sharing.finish("a-1")
    two_sharing.finish("a-2")
    state = replay(two_sharing)
    # The end of a sequence goes before its beginning.
    assert rows.describe_block(state, 1)[1] == "1st of 2 to be evicted"
    assert rows.describe_block(state, 0)[1] == "2nd of 2 to be evicted"


def test_under_the_radix_index_no_place_in_a_row_is_told(two_sharing):
    two_sharing.finish("a-1")
    two_sharing.finish("a-2")
    state = replay(two_sharing)
    state.apply(KnobChanged(step=3, time_ns=9, name="prefix_index", old="hash", new="radix"))
    assert rows.describe_block(state, 1)[1] == "one of 2 that may be evicted: ends of prefixes first"


def test_a_swapped_request_says_where_its_kv_is(two_sharing):
    two_sharing.preempt("a-2", "a-1")
    out = {"num_tokens": 10, "num_bytes": 640, "used_bytes": 640, "budget_bytes": 1000, "copy_ms": 0.1}
    state = replay(two_sharing)
    for direction, said in (("out", "preempted, 10 tokens in host memory"), ("in", "preempted")):
        state.apply(BlockSwapped(step=3, time_ns=9, request_id="a-2", direction=direction, block_ids=[0, 1, 3], **out))
        table, _ = rows.table_rows(state, lambda _: ["", ""])
        assert [r["status"] for r in table] == ["running", said]


def test_table_rows(two_sharing):
    table, omitted = rows.table_rows(replay(two_sharing), lambda view: [view.owner, "dark"])
    assert omitted == 0
    assert [(r["id"], r["tokens"], r["blocks"], r["cached"], r["fill"]) for r in table] == [
        ("a-1", 10, 3, 0, 2),
        ("a-2", 10, 3, 8, 2),
    ]
    assert table[1]["chips"] == [[0, 0, 2], [1, 1, 2], [2, 3, 1]]
    assert table[0]["colour"] == ["ann", "dark"]


def test_long_tables_are_cut_and_say_so_and_finished_requests_are_not_listed():
    sim = PoolSim(num_blocks=200, max_model_len=1000)
    sim.add("long-1", list(range(400)))
    sim.prefill("long-1")
    sim.add("gone-2", [1, 2, 3])
    sim.prefill("gone-2")
    sim.finish("gone-2")
    state = replay(sim)
    (row,), _ = rows.table_rows(state, lambda _: ["", ""])
    assert row["skipped"] == 100 - rows.CHIPS and len(row["chips"]) == rows.CHIPS
    assert [chip[0] for chip in row["chips"]][row["cut"] - 1 : row["cut"] + 1] == [row["cut"] - 1, 88]
    (row,), _ = rows.table_rows(state, lambda _: ["", ""], selected="long-1")
    assert row["skipped"] == 0 and len(row["chips"]) == 100
    assert rows.table_rows(state, lambda _: ["", ""], limit=0) == ([], 1)


def test_a_block_after_preemption_belongs_to_nobody(two_sharing):
    two_sharing.preempt("a-2", "a-1")
    two_sharing.step()
    state = replay(two_sharing)
    assert rows.blocks_of(state, "a-2") == []
    assert rows.holders(state, 0)[0][0].request_id == "a-1"
    assert len(rows.holders(state, 0)) == 1
    assert rows.blocks_of(state, None) == rows.blocks_of(state, "nobody") == []


def test_numbers_of_requests_are_stable():
    sim = PoolSim()
    for name in ("req-12", "x", "x2"):
        sim.add(name, [1, 2, 3])
    sim.prefill("req-12")
    sim.fork("req-12", "req-12#1")
    views = replay(sim).requests
    assert [rows.number_of(views[i]) for i in ("req-12", "req-12#1", "x2")] == [12, 13, 2]
    views["x2"].request_id = "7" * 5000
    assert rows.number_of(views["x2"]) == 777_777_777
    assert rows.number_of(views["x"]) == rows.number_of(replay(sim).requests["x"])


def test_token_texts_are_learnt_from_what_was_watched():
    texts = rows.TokenTexts()
    assert texts(5) is None
    texts.learn(
        [
            TokenSampled(
                step=1, time_ns=0, request_id="a", position=3, index=0, token_id=5, text=" cat", logprob=-1, rank=1, u=None, prob=1,
                nucleus_size=0, nucleus_mass=1, entropy=0, top=[Candidate(6, " dog", -2, 0.1)],
            )
        ]
    )  # fmt: skip
    assert (texts(5), texts(6), texts(7)) == (" cat", " dog", None)
    assert rows.TokenTexts(lambda token: f"#{token}")(9) == "#9"


@pytest.mark.parametrize(
    ("n", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (21, "21st"), (112, "112th")]
)
def test_ordinal(n, text):
    assert rows.ordinal(n) == text
