"""Split-K: the curve has its lowest point where the launch chooses, and merged parts are the whole."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.paged_decode.splits import choose_splits
from explorer.attention.decode import chip_html, parts_html
from explorer.attention.decode_rows import merge, plan

lengths = st.lists(st.integers(1, 40_000), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 16), st.sampled_from([16, 64, 128]), st.integers(1, 160), st.integers(1, 4))
def test_the_lowest_point_is_the_launchs_choice(found: list[int], kv_heads: int, block_n: int, sms: int, per: int) -> None:
    made = plan(found, kv_heads, block_n, sms, per)
    curve = made.curve()
    assert made.splits == min(curve, key=lambda row: (row[1], row[0]))[0]
    assert made.splits == choose_splits(len(found), kv_heads, max(found), sms, block_n, per)
    assert all(0 < busy <= 1 and waves >= 1 for _s, _t, waves, busy in curve)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 40))
def test_parts_cover_the_context_once_and_merge_to_the_whole(length: int, splits: int) -> None:
    made = plan([length], 1, 64, 132, 2, splits)
    ranges = made.ranges(0)
    assert ranges[0][0] == 0 and ranges[-1][1] == length and all(a[1] == b[0] for a, b in pairwise(ranges))
    whole = merge(ranges)
    assert whole.difference < 1e-5 and float(whole.weights.sum()) == pytest.approx(1, abs=1e-5)
    assert (whole.weights[[end == start for start, end in ranges]] == 0).all()


def test_a_batch_that_fills_the_chip_is_not_split() -> None:
    assert plan([4096] * 64, 8, 64, 132, 2).splits == 1
    assert plan([32768], 8, 64, 132, 2).splits > 8
    with pytest.raises(ValueError, match="at least one request"):
        plan([], 8, 64, 132, 2)


def test_as_many_places_are_drawn_full_as_there_are_programs_in_the_last_wave() -> None:
    made = plan([1000], 3, 64, 10, 2, 4)
    assert chip_html(made).count("height:50%") == 8 and chip_html(made).count("height:100%") == 2  # 12 programs on 10
    assert "12 of 20 places" in chip_html(made)
    assert "28 more requests" in parts_html(plan([100] * 40, 1, 64, 10, 2))
    assert np.isfinite(merge([(0, 64), (64, 64)]).whole)
