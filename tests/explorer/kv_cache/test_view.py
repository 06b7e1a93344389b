"""The page without a browser: what it sends when events come, the clock moves, something is selected."""

import numpy as np
import pytest

from engine.events.log import EventLog
from engine.events.types import CacheTimed
from explorer.base import Clock
from explorer.canvas.blockmap import FREE, SHARED
from explorer.kv_cache.view import KVCacheView
from explorer.store import EventStore
from tests.explorer.kv_cache.pool_events import PoolSim


@pytest.fixture
def sim() -> PoolSim:
    """Step 0: nothing. Step 1: a-1 holds 3 of 16 blocks. Step 2: a-2 shares two of them."""
    sim = PoolSim(num_blocks=16, block_size=4)
    sim.step()
    sim.add("a-1", list(range(10)))
    sim.prefill("a-1")
    sim.step()
    sim.add("a-2", [*range(8), 50, 51], owner="<b>bob</b>")
    sim.prefill("a-2")
    sim.step()
    return sim


def kinds(view: KVCacheView) -> list[int]:
    return (
        (np.frombuffer(view.map.full, "<u4")[2:] & 255).tolist() if view.map._codes is None else (view.map._codes & 255).tolist()
    )


def open_view(sim: PoolSim | None, clock: Clock | None = None) -> KVCacheView:
    store = EventStore()
    if sim is not None:
        store.append(sim.events)
    return KVCacheView(store, None, clock or Clock())


def test_empty_store_says_what_to_do():
    view = open_view(None)
    assert not view.map.visible and not view.used_plot.visible and not view.timing_plot.visible
    assert "No engine has started yet" in view.now.object
    assert "Nothing has run yet" in view.used_now.object
    assert "No request has been admitted yet at this step" in view.found.object


def test_events_that_come_later_are_drawn(sim):
    view = open_view(None)
    view.store.append(sim.events)
    view.update()
    assert view.map.visible and kinds(view)[:4] == [SHARED, SHARED, 2, 2]
    assert "<b>4</b> of 16 blocks held (25 %)" in view.now.object and "<b>2</b> shared, which spares 2 blocks" in view.now.object
    assert list(view.used.source.data["step"]) == [0, 1, 2]
    assert list(view.used.source.data["blocks"])[1:] == [3, 4]
    assert [row["id"] for row in view.table.rows] == ["a-1", "a-2"]
    assert "8 of 10 tokens" in view.found.object and "equal to the byte" in view.sums.object


def test_an_update_without_news_sends_nothing(sim):
    view = open_view(sim)
    sent = []
    view.map.param.watch(sent.append, ["full", "delta", "palette", "marked"])
    view.table.param.watch(sent.append, ["rows", "omitted"])
    for pane in (view.now, view.used_now, view.found, view.sums):
        pane.param.watch(sent.append, "object")
    view.update()
    assert sent == []


def test_everything_follows_the_clock_back_and_forth(sim):
    view = open_view(sim)
    view.clock.goto(1, 0, 2)
    view.update()
    assert kinds(view)[:4] == [2, 2, 2, FREE]
    assert [row["id"] for row in view.table.rows] == ["a-1"]
    assert "a-2" not in view.found.object and "Step 1" in view.used_now.object
    assert all(span.visible and span.location == 1 for span in view.used.here)
    view.clock.follow()
    view.update()
    assert kinds(view)[:4] == [SHARED, SHARED, 2, 2] and not view.used.here[0].visible


def test_a_click_on_the_map_lights_up_the_table_and_back(sim):
    view = open_view(sim)
    view.map.selected = 3  # held by a-2 alone
    assert (view.clock.block_id, view.clock.request_id) == (3, "a-2")
    assert (view.table.selected_block, view.table.selected_request) == (3, "a-2")
    assert np.frombuffer(view.map.marked, "<u4").tolist() == [0, 1, 3]
    view.map.selected = 0  # shared: the request that is selected stays
    assert (view.clock.block_id, view.clock.request_id) == (0, "a-2")
    view.table.param.update(selected_block=2, selected_request="a-1")
    assert (view.map.selected, view.clock.request_id) == (2, "a-1")
    view.map.selected = -1
    assert view.clock.block_id is None and view.map.marked == b"" and view.table.selected_request == ""


def test_a_selection_made_elsewhere_shows_when_the_page_opens(sim):
    clock = Clock(request_id="a-2", block_id=3)
    view = open_view(sim, clock)
    assert (view.map.selected, view.table.selected_request) == (3, "a-2")
    assert np.frombuffer(view.map.marked, "<u4").tolist() == [0, 1, 3]
    assert "a-2 now: 10 tokens, in 3 blocks" in view.sums.object


def test_a_block_or_request_that_does_not_exist_is_no_error(sim):
    view = open_view(sim, Clock(request_id="gone", block_id=999))
    view.map.hovered = 999
    assert view.map.detail == {} and view.map.marked == b""


def test_an_answer_that_was_lost_is_given_again(sim):
    view = open_view(sim)
    view.map.hovered = 3
    told = []
    view.map.param.watch(lambda event: told.append(event.new.get("block_id")), "detail")
    view.map.hovered = -1  # the browser asks again
    view.map.hovered = 3
    assert told == [None, 3]


def test_hover_is_answered_and_kept_up_to_date(sim):
    view = open_view(sim)
    view.map.hovered = 3
    assert view.map.detail["block_id"] == 3 and "a-2 (running): logical block 2" in view.map.detail["lines"][1]
    before = len(sim.events)
    sim.decode("a-2", 77)
    sim.step()
    view.store.append(sim.events[before:])
    view.update()
    assert "3 of 4 tokens" in view.map.detail["lines"][1] and view.map.detail["lines"][-1] == "token ids: 50 51 ?"


def test_names_from_outside_are_escaped(sim):
    before = len(sim.events)
    sim.add("<img src=x>", [1, 2, 3])
    sim.prefill("<img src=x>")
    sim.step()
    view = open_view(sim)
    assert before and "<img" not in view.found.object and "&lt;img src=x&gt;" in view.found.object


def test_a_new_engine_wipes_what_the_old_one_left(sim):
    view = open_view(sim)
    view.store.append(PoolSim(num_blocks=8, block_size=2).events)
    view.update()
    assert kinds(view) == [FREE] * 8 and view.table.rows == []
    assert list(view.used.source.data["step"]) == [] and "No request has been admitted yet" in view.found.object


def test_a_view_that_comes_after_the_log_has_dropped_its_beginning_still_counts_right():
    sim = PoolSim(num_blocks=64, block_size=4)
    for i in range(6):
        sim.add(f"r-{i}", list(range(100 * i, 100 * i + 6)))
        sim.prefill(f"r-{i}")
        sim.step()
    for _ in range(400):
        sim.decode("r-0")
        sim.step()
        if len(sim.tables["r-0"]) > 20:
            sim.finish("r-0")
            sim.add("r-0", [1, 2, 3])
            sim.prefill("r-0")
    store = EventStore(log=EventLog(200))
    store.append(sim.events)
    assert store.dropped
    whole, late = open_view(sim), KVCacheView(store, None, Clock())
    assert kinds(whole) == kinds(late)
    assert whole.last_row == late.last_row and late.last_row["requests"] == 6
    assert "equal to the byte" in late.sums.object


def test_measured_times_are_drawn_with_the_curves(sim):
    view = open_view(sim)
    view.store.append(
        [CacheTimed(step=2, time_ns=0, lengths=[16, 64, 128], with_ms=[5.0, 5.1, 5.2], without_ms=[8.0, 16.0, 30.0])]
    )
    view.update()
    assert view.timing_plot.visible and list(view.timing.points.data["t"]) == [16, 64, 128]
    assert len(view.timing.curves.data["t"]) > 50
    assert "At 128 tokens" in view.timing_words.object
