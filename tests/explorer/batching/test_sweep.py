"""Batch size: what a log's steps say, the KV limit, the knee where the roofs meet, the padding of static batches, and what is sent."""

import json
import math

import numpy as np
import pytest

from engine.events.hardware import RoofsMeasured
from engine.events.types import KnobChanged
from engine.load.ideal import harmonic
from engine.load.replay import Replayed
from explorer.batching.sweep import SweepPanel, words
from explorer.batching.sweep_rows import Bounds, Roof, SweepRows, best_batch, bounds_of, ideal_padding, kv_limit, padded
from explorer.batching.whatif_rows import History, Setting
from explorer.mirror import Mirror
from tests.explorer.batching.whatif_made import BLOCKS, COST, Made, View

ROOFS = RoofsMeasured(step=999, time_ns=1, name="a processor", device="cpu", threads=2, copy_bandwidth=1e10, read_bandwidth=2e10,
                      peak={"float32": 1e12, "bfloat16": 4e12}, kept=False, fingerprint="x")  # fmt: skip


def bursts(*sizes: int) -> Made:
    made = Made(Setting(max_num_seqs=32))
    for size in sizes:
        made.load([Replayed(0.0, 16, 10)] * size)
    return made


def test_the_points_are_the_costs_of_the_steps() -> None:
    rows = SweepRows()
    rows.feed(bursts(1, 2, 8).events)
    points = {p.batch: p for p in rows.points}
    assert set(points) == {1, 2, 8}
    for batch, point in points.items():
        assert point.itl_ms == pytest.approx(1e3 * COST(batch, batch * 21), rel=1e-3)  # the median step has 21 tokens of context
        assert point.tokens_per_s == pytest.approx(1e3 * batch / point.itl_ms)
        assert point.num_steps == 9


def test_steps_with_a_prompt_or_padding_do_not_count() -> None:
    rows = SweepRows()
    rows.feed(Made(Setting(batching="static", max_num_seqs=2)).load([Replayed(0, 8, 30), Replayed(0, 8, 5)]).events)
    assert [p.batch for p in rows.points] == [2]
    assert rows.points[0].num_steps == 4


def test_other_weights_begin_anew() -> None:
    rows = SweepRows()
    made = bursts(4)
    rows.feed(made.events)
    rows.feed([KnobChanged(step=made.step, time_ns=made.now_ns, name="quantization", old=None, new="int4", by="ann")])
    assert rows.points == []


@pytest.mark.parametrize(("blocks", "size", "tokens"), [(31, 16, 40), (100, 16, 16), (100, 16, 17), (0, 16, 5), (5, 4, 99)])
def test_the_kv_limit_is_the_most_that_fit(blocks: int, size: int, tokens: int) -> None:
    n = kv_limit(blocks, size, tokens)
    need = sum(1 for _ in range(0, tokens, size))
    assert n * need <= blocks < (n + 1) * need


def test_the_knee_is_where_both_roofs_take_as_long() -> None:
    bounds = Bounds(1e8, 2.7e8, 1e6, Roof("x", 2e10, 1e11, "float32"))
    knee = bounds.knee
    memory, compute = (1e8 + knee * 1e6) / 2e10, knee * 2.7e8 / 1e11
    assert memory == pytest.approx(compute)
    assert bounds.seconds(knee / 2) == pytest.approx((1e8 + knee / 2 * 1e6) / 2e10)
    assert bounds.seconds(2 * knee) == pytest.approx(2 * compute)
    assert bounds.tokens_per_s(4 * knee) == pytest.approx(bounds.tokens_per_s(2 * knee))  # flat beyond it
    assert math.isinf(Bounds(1e8, 1e6, 1e9, bounds.roof).knee)  # where each request's KV costs more than its arithmetic


def test_the_bounds_take_the_engine_s_dtype_and_the_faster_way_to_memory() -> None:
    rows = SweepRows()
    rows.feed([*bursts(1, 4).events, ROOFS])
    assert rows.roof == Roof("a processor", 2e10, 1e12, "float32")
    bounds = bounds_of(rows.points, rows.roof)
    assert bounds is not None and (bounds.weight_bytes, bounds.flops) == (1e8, 2e8)
    assert bounds_of([], rows.roof) is None and bounds_of(rows.points, None) is None


def test_the_best_batch_is_the_smallest_that_is_nearly_as_good() -> None:
    rows = SweepRows()
    rows.feed(bursts(1, 2, 4, 8, 16).events)
    best = best_batch(rows.points)
    assert best is not None and best.batch == 16  # the base cost dominates here: no batch is large enough
    assert best_batch(rows.points, 0.1).batch == 2  # type: ignore[union-attr]


def test_ideal_padding_by_the_spread_of_lengths() -> None:
    assert ideal_padding("equal", 16) == 0
    assert ideal_padding("uniform", 16) == pytest.approx(1 - 17 / 32)
    assert ideal_padding("exponential", 16) == pytest.approx(1 - 1 / harmonic(16))
    rng = np.random.default_rng(0)
    longest = rng.exponential(1.0, (4000, 16)).max(axis=1).mean()  # by drawing
    assert ideal_padding("exponential", 16) == pytest.approx(1 - 1 / longest, abs=0.01)


def test_measured_padding_is_what_the_lengths_say() -> None:
    history = History()
    lengths = [3, 9, 30, 4, 12, 12, 5, 40, 8, 8, 8, 8]
    history.feed(Made(Setting(batching="static", max_num_seqs=4)).load([Replayed(0.0, 16, n) for n in lengths]).events)
    found = padded(history, history.loads[0])
    assert found is not None and found.num_requests == 12
    assert found.measured == pytest.approx(found.derived)
    by_hand = [n - 1 for n in lengths]
    slots = 4 * (max(by_hand[:4]) + max(by_hand[4:8]) + max(by_hand[8:]))
    assert found.measured == pytest.approx(1 - sum(by_hand) / slots)
    history = History()
    history.feed(bursts(4).events)
    assert padded(history, history.loads[0]) is None


def test_the_tab_draws_what_was_measured_and_marks_what_bounds_it() -> None:
    view = View()
    tab = SweepPanel(view)
    tab.update()
    assert tab.nothing.visible and tab.roofs.visible
    view.give(tab, *bursts(1, 2, 4, 8).events)
    assert tab.drawn.visible and tab.figures.points[0].data["batch"] == [1, 2, 4, 8]
    assert tab.figures.roofs[0].data["x"] == [] and not tab.figures.knees[0].visible
    tab.roofs.clicks += 1
    assert view.session.of("measure_roofs") == [(("ann",), {})]
    view.give(tab, ROOFS)
    assert tab.figures.roofs[0].data["x"] and not tab.roofs.visible and "arithmetic takes over" in tab.told.object
    allowed = dict(zip(tab.figures.roofs[0].data["x"], tab.figures.roofs[0].data["y"]))
    assert all(
        allowed[min(allowed, key=lambda a: abs(a - x))] >= y
        for x, y in zip(tab.figures.points[0].data["x"], tab.figures.points[0].data["tokens"])
    )
    tab.tokens.value = 4096
    tab.update()
    assert f"<b>{BLOCKS // 256}</b> requests of 4,096 tokens" in tab.told.object and tab.figures.limits[0].location == 4
    text = json.dumps(Mirror(tab).spec())
    assert "NaN" not in text and "Infinity" not in text


def test_what_it_sends() -> None:
    view = View()
    tab = SweepPanel(view)
    view.give(tab, *Made(Setting(max_num_seqs=8)).events)
    (stage,) = tab.bursts()
    assert stage.knobs == {"max_num_seqs": 32, "batching": "continuous"} and len(stage.asks) == 63
    assert [i for i, ask in enumerate(stage.asks) if ask.after] == [0, 1, 3, 7, 15, 31]
    stages = tab.padding_stages()
    assert [stage.knobs.get("batching") for stage in stages] == ["dynamic", None, None]
    drawn = [[ask.params.max_tokens for ask in stage.asks] for stage in stages]
    assert len(set(drawn[0])) == 1 and len(set(drawn[2])) > 5 and all(n >= 2 for n in drawn[2])


def test_the_words_compare_only_what_was_measured() -> None:
    rows = SweepRows()
    rows.feed(bursts(8).events)
    alone = words(rows.points, None, 100, 25)
    assert "8 decoded at once" in alone and "From" not in alone and "more" not in alone
    rows.feed(bursts(1, 16).events)
    assert "From 1 to 16 requests" in words(rows.points, None, 100, 25)
