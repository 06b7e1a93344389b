"""The arithmetic card and the two curves."""

import numpy as np
import pytest

from engine.events.types import CacheTimed, EngineStarted
from engine.hardware.flops import forward_flops
from explorer.kv_cache import arithmetic
from tests.explorer.kv_cache.pool_events import BYTES_PER_TOKEN, MODEL, PoolSim


@pytest.fixture
def started() -> EngineStarted:
    event = PoolSim(num_blocks=10, block_size=16, max_model_len=2048).events[0]
    assert isinstance(event, EngineStarted)
    return event


def test_card_fills_the_formula_with_the_models_numbers(started):
    measured = arithmetic.Measured.of(started)
    text = arithmetic.card_html(started, measured, 10, 16, ("req-1", 17))
    for piece in ("<b>30</b><i>layers", "<b>3</b><i>KV heads", "<b>64</b><i>head size", "<b>45 KiB</b><i>per token"):
        assert piece in text
    assert f"{160 * BYTES_PER_TOKEN:,} bytes" in text
    assert "17 tokens, in 2 blocks" in text and "32 × 46,080 bytes" in text
    assert "equal to the byte" in text
    assert "135 KiB" in text and "15 KiB" in text  # MHA three times as much, MQA a third


def test_card_says_when_the_tensors_disagree(started):
    text = arithmetic.card_html(started, arithmetic.Measured(10, 16, started.kv_pool_bytes + 64), 10, 16)
    assert "64 bytes more allocated than the formula says" in text and "equal to the byte" not in text


def test_card_says_when_the_log_no_longer_knows(started):
    text = arithmetic.card_html(started, None, 10, 16)
    assert "no longer in the recorded events" in text and "equal to the byte" not in text


def test_names_from_outside_are_escaped(started):
    text = arithmetic.card_html(started, None, 10, 16, ("<script>", 1))
    assert "<script>" not in text and "&lt;script&gt;" in text


def timed(lengths, fixed_with, fixed, rate):
    flops_with = [forward_flops(MODEL, start=t - 1, num_tokens=1).total for t in lengths]
    flops = [forward_flops(MODEL, start=0, num_tokens=t).total for t in lengths]
    return CacheTimed(
        step=0, time_ns=0, lengths=list(lengths), with_ms=[fixed_with + f * 1e-9 for f in flops_with],
        without_ms=[fixed + rate * f for f in flops],
    )  # fmt: skip


def test_curves_find_the_rate_that_made_the_times_in_any_order():
    curves = arithmetic.cache_curves(timed([512, 16, 128, 256], 4.0, 3.0, 2e-9), MODEL)
    assert curves.lengths.tolist() == [16, 128, 256, 512]
    assert curves.gflops == pytest.approx(500, rel=1e-6)
    assert curves.fixed_ms == pytest.approx(3, rel=1e-3)
    np.testing.assert_allclose(np.interp(curves.lengths, curves.grid, curves.model_without), curves.without_ms, rtol=2e-2)
    assert curves.grid[-1] == 512
    assert (curves.attention_only < curves.model_without).all()
    words = arithmetic.in_words(curves, MODEL)
    assert "At 512 tokens" in words and "linear layers" in words


def test_times_that_fall_give_a_flat_curve_and_one_point_a_proportional_one():
    assert arithmetic.fit([1.0, 2.0], np.array([5.0, 3.0])) == (4.0, 0.0)
    assert arithmetic.fit([2.0], np.array([6.0])) == (0.0, 3.0)
    fixed, slope = arithmetic.fit([1.0, 2.0], np.array([1.0, 4.0]))  # the line would start below zero
    assert fixed == 0 and slope == pytest.approx(9 / 5)


def test_attention_takes_over_where_the_operations_are_equal():
    t = arithmetic.crossover(MODEL)
    before, after = forward_flops(MODEL, start=0, num_tokens=t - 1), forward_flops(MODEL, start=0, num_tokens=t)
    assert before.attention < before.linear and after.attention >= after.linear


def test_unequal_columns_are_refused():
    with pytest.raises(ValueError, match="as many times as lengths"):
        arithmetic.cache_curves(CacheTimed(step=0, time_ns=0, lengths=[1, 2], with_ms=[1.0], without_ms=[1.0, 2.0]), MODEL)
    with pytest.raises(ValueError, match="as many times as lengths"):
        arithmetic.cache_curves(CacheTimed(step=0, time_ns=0, lengths=[], with_ms=[], without_ms=[]), MODEL)
