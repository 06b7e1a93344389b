"""The what-if: loads in a log, costs that come back as they were made, replays against the ideal ratios, and what the tab asks for."""

import json
import time
from itertools import pairwise
from statistics import mean

import numpy as np
import pytest

from engine.load.cost import StepCost
from engine.load.ideal import ideal_ratio, measured_ratio
from engine.load.replay import Replayed
from explorer.base import Clock
from explorer.batching.view import BatchingView
from explorer.batching.whatif import WhatIfPanel
from explorer.batching.whatif_rows import (
    History,
    Setting,
    fitted,
    gantt,
    idle_share,
    measured_steps,
    padding_share,
    replayed,
    requests_of,
    slots_of,
)
from explorer.mirror import Mirror
from explorer.store import EventStore
from tests.explorer.batching.whatif_made import COST, Made, View

REQUESTS = [Replayed(0.01 * i, 20 + 7 * (i % 5), 4 + 6 * (i % 4)) for i in range(12)]


def history(made: Made) -> History:
    found = History()
    found.feed(made.events)
    return found


# ------------------------------------------------------------------------------------------------------------- what is known


def test_a_load_ends_with_a_pause_or_another_setting() -> None:
    made = Made().load(REQUESTS[:3]).load(REQUESTS[:2]).pause(10).load(REQUESTS[:4]).knobs(max_num_seqs=2).load(REQUESTS[:5])
    found = history(made)
    assert [(load.num_requests, load.setting.max_num_seqs) for load in found.loads] == [(5, 8), (4, 8), (5, 2)]
    assert not any(load.mixed for load in found.loads) and all(map(found.complete, found.loads))


def test_the_costs_are_those_that_it_was_made_with() -> None:
    found = history(Made().load(REQUESTS))
    cost = fitted(list(found.loads[0].steps)).cost
    for name in ("base_s", "per_token_s", "per_context_s"):
        assert getattr(cost, name) == pytest.approx(getattr(COST, name), rel=1e-3)


def test_a_step_with_another_cause_is_left_out() -> None:
    found = history(Made().load(REQUESTS, slow=5))
    fit = fitted(list(found.loads[0].steps))
    assert fit.left_out == 1 and fit.cost.per_token_s == pytest.approx(COST.per_token_s, rel=1e-2)


def test_the_time_between_steps_counts() -> None:
    found = history(Made().load(REQUESTS))
    from msgspec.structs import replace

    steps = [replace(s, step_ms=s.step_ms - 2) for s in found.loads[0].steps]
    assert fitted(steps).between_s == pytest.approx(0.002, rel=1e-3)
    assert fitted(steps).cost.base_s == pytest.approx(COST.base_s, rel=1e-2)


@pytest.mark.parametrize("batching", ["continuous", "static"])
def test_the_model_gives_back_what_was_measured(batching: str) -> None:
    found = history(Made(Setting(batching=batching, max_num_seqs=3, max_num_batched_tokens=48)).load(REQUESTS))
    load = found.loads[0]
    again = replayed(requests_of(found.records(load), cached=True), load.setting, COST).measures()
    measured = found.measures(load)
    assert again.duration_s == pytest.approx(measured.duration_s, rel=1e-3)
    assert again.itl_s.p99 == pytest.approx(measured.itl_s.p99, rel=1e-3)
    assert again.ttft_s.p99 == pytest.approx(measured.ttft_s.p99, rel=1e-3)


def test_of_a_long_load_the_newest_requests_are_taken_everywhere() -> None:
    """As many as can be replayed while a knob is moved: by number, and by tokens."""
    for requests, kept in (
        ([Replayed(0.01 * i, 8, 2) for i in range(150)], 128),
        ([Replayed(0.01 * i, 8, 600) for i in range(10)], 8),
    ):
        found = history(Made().load(requests))
        load = found.loads[0]
        records = found.records(load)
        assert [r.request_id for r in records] == [f"r{i}" for i in range(len(requests) - kept, len(requests))]
        steps, names = measured_steps(list(load.steps), 0, {r.request_id for r in records})
        assert sorted(names) == sorted(r.request_id for r in records) and all(step.cells for step in steps)


def test_cached_tokens_are_found_again_only_where_there_is_a_cache() -> None:
    found = history(Made().load([Replayed(0, 64, 4, 48), Replayed(0, 64, 4)]))
    records = found.records(found.loads[0])
    assert [r.num_cached_tokens for r in requests_of(records, cached=True)] == [48, 0]
    assert [r.num_cached_tokens for r in requests_of(records, cached=False)] == [0, 0]


# ------------------------------------------------------------------------------------------------------------ ideal ratios


@pytest.mark.parametrize("kind", ["equal", "uniform", "exponential"])
def test_static_against_continuous_comes_to_the_ideal_ratio(kind: str) -> None:
    """The replay alone, with steps of fixed time and prompts of one token, on thousands of requests that all wait."""
    rng, batch, n = np.random.default_rng(7), 8, 1200
    drawn = {"equal": np.full(n, 20), "uniform": rng.integers(1, 41, n), "exponential": rng.geometric(1 / 20, n)}[kind]
    requests = [Replayed(0.0, 1, int(length)) for length in drawn]
    took = {}
    for batching in ("continuous", "static"):
        setting = Setting(batching=batching, max_num_seqs=batch, max_num_batched_tokens=4096)
        took[batching] = replayed(requests, setting, StepCost(0.01)).steps[-1].end_s
    ratio = took["static"] / took["continuous"]
    assert ratio == pytest.approx(measured_ratio(drawn, batch), rel=1e-9)  # exactly what these lengths say
    assert ratio == pytest.approx(ideal_ratio(kind, batch), rel=0.05)  # and near what any number of them would


# --------------------------------------------------------------------------------------------------------------- the Gantt


def test_the_gantt_has_every_token_once_and_no_slot_twice() -> None:
    found = history(Made(Setting(batching="static", max_num_seqs=3)).load(REQUESTS))
    steps, names = measured_steps(list(found.loads[0].steps), 0)
    bars = gantt(steps, names)
    tokens = {
        phase: sum(t for t, p in zip(bars["tokens"], bars["phase"]) if p == phase) for phase in ("prefill", "decode", "padding")
    }
    assert tokens["prefill"] == sum(r.num_prompt_tokens for r in REQUESTS)
    assert tokens["decode"] == sum(r.num_output_tokens - 1 for r in REQUESTS)
    assert tokens["padding"] > 0 and padding_share(steps) == pytest.approx(tokens["padding"] / sum(tokens.values()))
    assert slots_of(bars) == 3 and 0 <= idle_share(steps, 3) < 1
    by_slot: dict[int, list[tuple[float, float]]] = {}
    for left, right, slot in zip(bars["left"], bars["right"], bars["slot"]):
        by_slot.setdefault(slot, []).append((left, right))
    for spans in by_slot.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(spans))


# ----------------------------------------------------------------------------------------------------------------- the tab


def test_it_follows_the_load_and_models_another_batch_size() -> None:
    view = View()
    tab = WhatIfPanel(view)
    view.give(tab, *Made().events)
    assert tab.nothing.visible and not tab.drawn.visible
    view = View()
    tab = WhatIfPanel(view)
    view.give(tab, *Made().load(REQUESTS).events)
    assert tab.drawn.visible and (tab.batch.value, tab.budget.value, tab.policy.value) == (8, 512, "continuous")
    assert "off by <b>±0 %</b>" in tab.words.object and "200 µs for each token + 1.00 µs" in tab.words.object
    bars = dict(tab.after.sources["decode"].data)
    tab.batch.value = 1
    tab.update()
    assert tab.after.sources["decode"].data != bars and set(tab.after.sources["decode"].data["slot"]) == {0}
    tab.policy.value = "static"
    tab.batch.value = 4
    tab.update()
    assert tab.after.sources["padding"].data["left"], "a static batch pads"
    assert view.session.calls == []  # the engine did not notice
    text = json.dumps(Mirror(tab).spec())
    assert "NaN" not in text and "Infinity" not in text


def test_run_it_sends_the_same_requests_and_puts_the_knobs_back() -> None:
    view = View()
    tab = WhatIfPanel(view)
    made = Made().load([Replayed(0.0, 20, 5), Replayed(0.05, 30, 7)])
    view.give(tab, *made.events)
    tab.batch.value = 1
    tab.update()
    tab.run.clicks += 1
    assert tab.sender is not None
    tab.sender.join(10)
    assert not tab.sender.busy and not tab.sender.failed
    knobs = [named for _args, named in view.session.of("reconfigure")]
    assert knobs == [{"max_num_seqs": 1}, {"max_num_seqs": 8}]
    sent = view.session.of("submit")
    assert [len(args[0]) for args, _more in sent] == [20, 30]
    assert [(args[1].max_tokens, args[1].ignore_eos, args[1].temperature) for args, _more in sent] == [
        (5, True, 0.0),
        (7, True, 0.0),
    ]
    assert len({more["cache_salt"] for _args, more in sent}) == 1  # cold, but for each other
    count = len(made.events)
    made.knobs(max_num_seqs=1).load([Replayed(0.0, 20, 5), Replayed(0.05, 30, 7)]).knobs(max_num_seqs=8)
    view.give(tab, *made.events[count:])
    assert "the same requests" in tab.rows.object and "last row" in tab.state.object


def test_another_s_load_is_not_taken_for_the_same_requests() -> None:
    found = history(Made().load(REQUESTS[:4]).knobs(max_num_seqs=2).load(REQUESTS[:4]).knobs(max_num_seqs=4).load(REQUESTS[:3]))
    assert [load.setting.max_num_seqs for load in found.same(found.loads[0])] == [2]


def test_a_recorded_run_can_be_asked_what_if_but_not_run() -> None:
    view = View(live=False)
    tab = WhatIfPanel(view)
    view.give(tab, *Made().load(REQUESTS).events)
    assert tab.drawn.visible and "Run it" not in json.dumps(Mirror(tab).spec())


def test_a_knob_is_answered_within_100_ms() -> None:
    """128 requests, the most that are replayed. Median of the drawings' own time: a busy machine must not fail it."""
    view = View()
    tab = WhatIfPanel(view)
    view.give(tab, *Made().load([Replayed(0.02 * i, 64, 24) for i in range(160)]).events)
    times = []
    for batch in (1, 4, 16, 2, 8, 32, 3, 12):
        tab.batch.value = batch
        begin = time.process_time()
        tab.update()
        times.append(time.process_time() - begin)
    assert mean(times) < 0.2, times


def test_the_address_has_the_knobs_and_they_survive_a_reload() -> None:
    view = BatchingView(EventStore(), None, Clock(), tab="whatif", if_batch=2, if_policy="static")
    view.store.append(Made().load(REQUESTS).events)
    view.update()
    tab = view.panels["whatif"]
    assert (tab.policy.value, tab.batch.value, tab.budget.value) == ("static", 2, 512)
    assert max(tab.after.sources["padding"].data["slot"]) == 1
    tab.batch.value = 8  # as it ran
    tab.budget.value = 64
    view.update()
    assert (view.if_policy, view.if_batch, view.if_budget, view.if_chunked) == ("static", 0, 64, "as it ran")
    view.if_budget = 100  # by a link, or from a notebook
    view.update()
    assert tab.budget.value == 100 and "budget 100" in tab.after_head.object
