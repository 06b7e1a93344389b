"""The stall: found in a log as it was made, modelled as the rules say, bounded by the budget, and run with knobs that are put back."""

import json
from itertools import pairwise

import pytest

from engine.load.cost import StepCost
from engine.load.replay import Replayed
from explorer.batching.stall import StallPanel
from explorer.batching.stall_rows import alike, curve, modelled, stalls_of
from explorer.batching.whatif_rows import History, Setting
from explorer.batching.whatif_run import BUSY, Ask, Sender, Stage, exactly
from explorer.mirror import Mirror
from tests.explorer.batching.whatif_made import COST, Desk, Made, View

SCENE = [Replayed(0.0, 24, 60)] * 3 + [Replayed(0.1, 300, 4)]


def stalls(setting: Setting) -> list:  # type: ignore[type-arg]
    history = History()
    history.feed(Made(setting).load(SCENE).events)
    return stalls_of(history, history.loads[0])


def test_a_measured_stall_is_as_long_as_the_step_that_caused_it() -> None:
    (whole,) = stalls(Setting(max_num_batched_tokens=1000, enable_chunked_prefill=False))
    assert (whole.prompt_tokens, whole.readers, whole.budget) == (300, 3, None)
    contexts = 300 * 301 / 2 + 3 * 35  # the readers have about 35 tokens then
    assert whole.itl_max_s == pytest.approx(COST(303, contexts), rel=0.01)
    (chunked,) = stalls(Setting(max_num_batched_tokens=64))
    assert chunked.budget == 64 and chunked.readers == 3
    assert chunked.itl_max_s <= COST(64, 61 * 300 + 3 * 60) < whole.itl_max_s
    assert chunked.ttft_s > whole.ttft_s
    assert whole.usual_s == pytest.approx(COST(3, 3 * 30), rel=0.05)


def test_no_stall_where_nobody_reads_or_the_prompt_is_found_or_the_batch_is_static() -> None:
    history = History()
    history.feed(Made().load([Replayed(0.0, 300, 4)]).load([Replayed(0.0, 24, 60), Replayed(0.1, 300, 4, 288)]).events)
    assert stalls_of(history, history.loads[0]) == []
    assert stalls(Setting(batching="static")) == []


def test_a_prompt_that_stood_in_the_queue_is_no_measure_of_what_its_chunks_cost() -> None:
    history = History()
    waits = [*SCENE, Replayed(0.1, 301, 4)]  # for the place of the one before it
    history.feed(Made(Setting(max_num_batched_tokens=64, max_num_seqs=4)).load(waits).events)
    assert [s.prompt_tokens for s in stalls_of(history, history.loads[0])] == [300]


def test_the_model_is_the_measured_scene() -> None:
    (real,) = stalls(Setting(max_num_batched_tokens=64))
    made = modelled(COST, 300, 3, 30, 64)
    assert made is not None
    assert made.itl_max_s == pytest.approx(real.itl_max_s, rel=0.05) and made.ttft_s == pytest.approx(real.ttft_s, rel=0.1)


def test_a_smaller_budget_bounds_the_wait_and_delays_the_first_token() -> None:
    points = curve(COST, 512, 4, 32)
    assert [p.budget for p in points] == [16, 32, 64, 128, 256, None]
    for few, many in pairwise(points):
        assert few.itl_max_s < many.itl_max_s and few.ttft_s > many.ttft_s
    for point in points[:-1]:  # no wait is longer than a full step at the end of the prompt
        assert point.itl_max_s <= COST(point.budget or 0, (point.budget or 0) * 600)
    free = curve(StepCost(0.01), 512, 4, 32)  # where tokens cost nothing nobody stalls, and chunks only cost steps
    assert {round(p.itl_max_s, 6) for p in free} == {0.01} and free[0].ttft_s > free[-1].ttft_s


def test_readers_that_fill_the_budget_leave_nothing_for_a_prompt() -> None:
    assert modelled(COST, 512, 32, 32, 32) is None
    assert next(p.budget for p in curve(COST, 512, 32, 32)) == 64


def test_only_comparable_stalls_are_drawn_beside_the_model() -> None:
    (a,) = stalls(Setting(max_num_batched_tokens=64))
    assert alike([a], 256, 4) == [a] and alike([a], 1024, 4) == [] and alike([a], 256, 16) == []
    assert len(alike([a] * 9, 256, 4)) == 3


def test_the_tab_models_and_runs_four_budgets() -> None:
    view = View()
    tab = StallPanel(view)
    tab.update()
    assert tab.nothing.visible and not tab.drawn.visible
    view.give(tab, *Made(Setting(max_num_batched_tokens=64)).load(SCENE).events)
    assert (tab.prompt.value, tab.readers.value) == (256, 4)
    assert len(tab.trade.points.data["x"]) == 1 and "bounds it" in tab.told.object
    before = list(tab.trade.curve.data["y"])
    tab.prompt.value = 1024
    tab.update()
    assert tab.trade.curve.data["y"] != before and view.session.calls == []
    text = json.dumps(Mirror(tab).spec())
    assert "NaN" not in text and "Infinity" not in text
    stages = tab.stages()
    assert [stage.knobs["max_num_batched_tokens"] for stage in stages] == [1024 + tab.readers.value, 256, 64, 32]
    assert [stage.knobs["enable_chunked_prefill"] for stage in stages] == [False, True, True, True]
    for stage in stages:
        *readers, long = stage.asks
        assert len(long.prompt) == 1024 and len(readers) == tab.readers.value and long.once > 0
        assert all(ask.time_s == 0 and ask.params.max_tokens > 20 for ask in readers)


def test_the_knobs_are_put_back() -> None:
    view = View()
    tab = StallPanel(view)
    view.give(tab, *Made(Setting(max_num_batched_tokens=96, max_num_seqs=3)).load(SCENE).events)
    tab.run.clicks += 1
    assert tab.sender is not None
    tab.sender.stop()
    tab.sender.join(10)
    moved = [named for _args, named in view.session.of("reconfigure")]
    assert moved[-1] == {
        "batching": "continuous",
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": 96,
        "max_num_seqs": 3,
    }
    tab.update()
    assert "Stopped" in tab.state.object and not tab.run.disabled


def test_a_prompt_is_no_longer_than_the_model_takes() -> None:
    view = View()
    tab = StallPanel(view)
    view.give(tab, *Made(Setting(max_num_batched_tokens=64), max_model_len=308).load(SCENE).events)
    tab.prompt.value = 2048
    tab.update()
    assert tab.num_tokens == 300 and set(tab.trade.curve.data["prompt"]) == {300} and len(tab.trade.points.data["x"]) == 1
    assert all(len(stage.asks[-1].prompt) == 300 for stage in tab.stages())


def test_nobody_is_refused_while_it_measures_and_the_limit_comes_back() -> None:
    desk = Desk()
    desk.knobs = {"max_num_waiting": 16}
    sender = Sender(desk, "ann", [Stage("one", {"max_num_seqs": 2}, ())], {"max_num_seqs": 8}).start()
    sender.join(10)
    moved = [named for _args, named in desk.of("reconfigure")]
    assert moved == [{"max_num_waiting": None, "max_num_seqs": 2}, {"max_num_seqs": 8, "max_num_waiting": 16}]


def test_two_measurements_do_not_move_each_others_knobs() -> None:
    desk = Desk()
    first = Sender(desk, "ann", [Stage("one", {"max_num_seqs": 2}, (Ask((1, 2), exactly(3), time_s=60.0),))], {}).start()
    second = Sender(desk, "bob", [Stage("two", {"max_num_seqs": 4}, ())], {}).start()
    assert first.busy and second.failed and not second.busy and second.said == BUSY
    first.stop()
    first.join(10)
    assert {"max_num_seqs": 4} not in [named for _args, named in desk.of("reconfigure")]
    third = Sender(desk, "bob", [Stage("two", {"max_num_seqs": 4}, ())], {}).start()
    third.join(10)
    assert not third.failed
