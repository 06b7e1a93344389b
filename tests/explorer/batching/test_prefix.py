"""The prefix cache: the tree's layout, what look-ups say, the formula against arithmetic, and the measurement that is sent."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.events.batching import PrefixTree, PrefixTreeNode
from engine.events.types import PrefixLookup
from engine.load.replay import Replayed
from explorer.batching.prefix import SHARES, PrefixPanel
from explorer.batching.prefix_figure import TreeFigure
from explorer.batching.prefix_rows import LookupRows, gain, groups, placed, served_alone, tree_columns
from explorer.batching.whatif_rows import History
from explorer.mirror import Mirror
from tests.explorer.batching.whatif_made import COST, Made, View


def node(node_id: int, parent: int = -1, depth: int = 0, tokens: int = 16, **more: object) -> PrefixTreeNode:
    fields = {
        "token_ids": [1, 2], "text": f"text {node_id} <b>", "block_ids": [node_id], "hits": node_id, "last_used_ns": 1, "num_held": 0, "holders": [],
        "reachable": True, "root_hash": 0,
    } | more  # fmt: skip
    return PrefixTreeNode(node_id, parent, depth, tokens, **fields)  # type: ignore[arg-type]


def tree(*nodes: PrefixTreeNode, index: str = "radix") -> PrefixTree:
    return PrefixTree(step=999, time_ns=1, index=index, enabled=True, block_size=16, num_blocks=64, num_cached_blocks=len(nodes),
                      num_evictable_blocks=1, num_nodes=len(nodes) + 3, nodes=list(nodes), num_lookups=4, num_asked_tokens=100,
                      num_hit_tokens=40)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ the tree


@given(st.lists(st.integers(min_value=-1, max_value=20), min_size=1, max_size=21))
def test_an_icicle_has_a_row_for_each_leaf_and_covers_no_row_twice(parents: list[int]) -> None:
    nodes = [node(i, parent if parent < i else -1) for i, parent in enumerate(parents)]
    places = {p.node.node_id: p for p in placed(nodes)}
    assert len(places) == len(nodes)
    leaves = {n.node_id for n in nodes} - {n.parent_id for n in nodes}
    assert sorted(places[i].top for i in leaves) == list(range(len(leaves)))
    for n in nodes:
        mine = [c for c in nodes if c.parent_id == n.node_id]
        p = places[n.node_id]
        assert p.rows == (sum(places[c.node_id].rows for c in mine) if mine else 1)
        spans = sorted((places[c.node_id].top, places[c.node_id].top + places[c.node_id].rows) for c in mine)
        if spans:  # children fill their parent's rows, in order and without a gap
            assert spans[0][0] == p.top and spans[-1][1] == p.top + p.rows
            assert all(a[1] == b[0] for a, b in zip(spans, spans[1:]))  # noqa: RUF007


def test_a_node_whose_parent_is_not_told_begins_a_tree() -> None:
    places = placed([node(7, parent=99, depth=32), node(8, parent=7, depth=48)])
    assert [(p.node.node_id, p.top, p.rows) for p in places] == [(7, 0, 1), (8, 0, 1)]


def test_the_columns_say_where_a_node_is_and_how_much_it_was_used() -> None:
    columns = tree_columns(
        tree(
            node(1, tokens=20),
            node(2, 1, 20, 12, hits=9, num_held=1, holders=["req-1"]),
            node(3, 1, 20, 5, hits=0, reachable=False),
        )
    )
    assert (columns["left"], columns["right"]) == ([0, 20, 20], [20, 32, 25])
    assert columns["alpha"][1] == pytest.approx(0.9) and columns["alpha"][2] == pytest.approx(0.18)
    assert columns["ink"][1] == "#ffffff" != columns["ink"][2] and columns["node"] == [1, 2, 3]
    assert columns["holders"] == ["–", "req-1", "–"] and "evicted" in columns["state"][2]


def test_texts_that_would_lie_over_each_other_are_left_out() -> None:
    for many, written in ((10, 11), (90, 1)):
        figure = TreeFigure()
        columns = tree_columns(
            tree(node(1000), *(node(n, 1000, 16) for n in range(many)))
        )  # the first is as high as all others together
        figure.show(columns, [True] * (many + 1))
        labels = figure.sources["cached"].data["label"]
        assert sum(map(bool, labels)) == written and labels[0] and all(columns["label"])


# ------------------------------------------------------------------------------------------------------------------ look-ups


def lookup(tokens: int, hit: int, reason: str = "", recompute: bool = False) -> PrefixLookup:
    return PrefixLookup(
        step=1,
        time_ns=1,
        request_id="r",
        num_tokens=tokens,
        num_hit_tokens=hit,
        block_ids=[],
        miss_reason=reason,
        recompute=recompute,
    )


def test_look_ups_are_counted_by_share_and_by_reason() -> None:
    rows = LookupRows()
    rows.feed(
        [lookup(100, 0, "no such prefix"), lookup(50, 5, "evicted"), lookup(20, 16), lookup(10, 10), lookup(9, 9, "", True)]
    )
    seen = rows.seen()
    assert (seen.count, seen.asked, seen.hit) == (4, 180, 31)
    assert seen.shares == (2, 0, 0, 0, 0, 0, 0, 1, 0, 1)  # 0 and exactly a tenth are in the first bin
    assert {r: (n, t) for r, n, t in seen.reasons} == {"": (2, 4), "no such prefix": (1, 100), "evicted": (1, 45)}


# ------------------------------------------------------------------------------------------------------------------ the gain


def test_the_gain_is_the_formula() -> None:
    assert gain(2.0, 1.0, 0.5) == pytest.approx(3 / 2) and gain(2.0, 1.0, 0.0) == 1.0 and gain(2.0, 1.0, 1.0) == 3.0
    assert gain(2.0, 0.0, 0.75) == pytest.approx(4) and math.isinf(gain(2.0, 0.0, 1.0)) and gain(0.0, 1.0, 1.0) == 1.0
    for wrong in ((1, 1, 1.1), (-1, 1, 0.5), (0, 0, 0.5)):
        with pytest.raises(ValueError, match="must lie in"):
            gain(*wrong)


def test_requests_that_ran_alone_keep_the_formula() -> None:
    """Where a prompt's time is proportional to its tokens, measured gains are exactly the formula's."""
    from engine.load.cost import StepCost

    made = Made()
    for cached in (0, 100, 200, 300):
        made.load([Replayed(0.0, 400, 11, cached)], StepCost(0.0, 0.001))
    history = History()
    history.feed(made.events)
    (group,) = groups(served_alone(history))
    assert (len(group.cold), len(group.warm)) == (1, 3)
    assert group.prefill_s == pytest.approx(0.4) and group.decode_s == pytest.approx(0.01)
    for served in group.warm:
        assert group.gained(served) == pytest.approx(gain(0.4, 0.01, served.share), rel=1e-6)


def test_requests_that_shared_a_step_do_not_count() -> None:
    history = History()
    history.feed(Made().load([Replayed(0.0, 64, 8), Replayed(0.01, 64, 8, 48)]).events)
    assert served_alone(history) == []


# ----------------------------------------------------------------------------------------------------------------- the tab


def test_the_tab_asks_for_the_tree_when_the_cache_may_have_changed() -> None:
    view = View()
    tab = PrefixPanel(view)
    tab.update()
    assert view.session.of("observe_prefix") == []  # no engine yet
    made = Made().load([Replayed(0.0, 64, 8)])
    view.give(tab, *made.events)
    assert len(view.session.of("observe_prefix")) == 1 and tab.no_tree.visible
    tab.update()
    assert len(view.session.of("observe_prefix")) == 1
    view.give(tab, tree(node(1, tokens=40), node(2, 1, 40, 8)))
    assert tab.tree_part.visible and "radix tree" in tab.tree_told.object and len(tab.tree.sources["cached"].data["left"]) == 2
    assert "Of 5 nodes, the 2" in tab.tree_told.object and "no such prefix" in tab.lookups.object
    view.give(tab, tree(node(1), index="hash"))
    assert "hash chain" in tab.tree_told.object
    text = json.dumps(Mirror(tab).spec())
    assert "NaN" not in text and "Infinity" not in text


def test_the_gain_is_modelled_first_and_measured_then() -> None:
    view = View()
    tab = PrefixPanel(view)
    made = Made().load([Replayed(0.0, 400, 8)])
    view.give(tab, *made.events)
    assert tab.gained.points.data["share"] == [] and "≈" in tab.gain_told.object
    before = list(tab.gained.curves["formula"].data["gain"])
    tab.output.value = 128
    tab.update()
    assert tab.gained.curves["formula"].data["gain"][-1] < before[-1]
    count = len(made.events)
    made.load([Replayed(0.0, 400, 8, 200)])
    view.give(tab, *made.events[count:])
    assert tab.group.value == "400/8" and tab.gained.points.data["share"] == [0.0, 0.5]
    assert "●" in tab.gain_told.object
    P, D = COST(400, 400 * 401 / 2), sum(COST(1, 401 + i) for i in range(7))
    half = COST(200, 200 * 200 + 200 * 201 / 2) + D
    assert tab.gained.points.data["gain"][1] == pytest.approx((P + D) / half, rel=1e-3)


def test_what_it_sends() -> None:
    view = View()
    tab = PrefixPanel(view)
    view.give(tab, *Made().events)
    tab.prompt.value, tab.output.value = 256, 4
    (stage,) = tab.stages()
    first, *others = stage.asks
    assert stage.cold and stage.knobs == {} and all(ask.after for ask in stage.asks) and first.params.max_tokens == 1
    for ask, h in zip(others, SHARES * 2):
        same = next((i for i, (a, b) in enumerate(zip(ask.prompt, first.prompt)) if a != b), 256)
        assert len(ask.prompt) == 256 and abs(same - 256 * h) <= 2


def test_a_recorded_run_says_why_there_is_no_tree() -> None:
    view = View(live=False)
    tab = PrefixPanel(view)
    view.give(tab, *Made().load([Replayed(0.0, 64, 8)]).events)
    assert "nobody looked" in tab.no_tree.object and "Measure it" not in json.dumps(Mirror(tab).spec())
