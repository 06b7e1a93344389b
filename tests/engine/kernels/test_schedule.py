"""The pure functions beside the kernels, against brute force; and the naive functions against torch's own attention."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.flash_attention import FlashConfig, default_config, naive_flash_attention, tile_schedule
from engine.kernels.flash_attention.naive import visible
from engine.kernels.paged_decode import choose_splits, naive_merge, split_ranges, tree_bits
from engine.kernels.tracing import FIELDS, TraceBuffer

CONFIG = FlashConfig(16, 16)


@given(
    st.integers(0, 70), st.integers(0, 70), st.sampled_from([(16, 16), (32, 16), (16, 64)]), st.booleans(),
    st.none() | st.integers(1, 80),
)  # fmt: skip
def test_tiles_are_those_that_are_seen(q_len, kv_len, tile, causal, window):
    seen = visible(q_len, kv_len, causal, window)
    config = FlashConfig(*tile)
    ranges = tile_schedule(q_len, kv_len, config, causal, window)
    assert [(r.q_start, r.q_rows) for r in ranges] == [(i, min(tile[0], q_len - i)) for i in range(0, q_len, tile[0])]
    for r in ranges:
        part = seen[r.q_start : r.q_start + r.q_rows]
        for n in range(0, kv_len, tile[1]):
            block = part[:, n : n + tile[1]]
            done = n in r.tiles(tile[1])
            assert done or not block.any()  # what is skipped is seen by nobody
            if r.full_start <= n < r.full_stop:
                assert done and bool(block.all()) and block.shape[1] == tile[1]  # what is not masked is seen by all, and whole
        # Nothing is done in vain: both the first and the last tile have something to see.
        if r.tiles(tile[1]):
            first, last = r.tiles(tile[1])[0], r.tiles(tile[1])[-1]
            assert part[:, first : first + tile[1]].any() and part[:, last : r.stop].any()
        assert r.skipped_window + len(r.tiles(tile[1])) + r.skipped_causal == -(-kv_len // tile[1]) or not r.tiles(tile[1])


@given(st.integers(0, 200), st.integers(1, 5), st.integers(1, 12), st.none() | st.integers(1, 99))
def test_splits_cover_the_context_once(seq_len, tokens, splits, window):
    ranges = split_ranges(seq_len, tokens, splits, 16, window)
    keys = [n for start, stop in ranges for n in range(start, stop)]
    assert len(ranges) == splits and len(keys) == len(set(keys))
    first = 0 if window is None else max(seq_len - tokens - window + 1, 0)
    assert set(range(first, seq_len)) <= set(keys)  # all that the first new token sees
    assert all(start % 16 == 0 or start == seq_len for start, _ in ranges)


def test_splits_fill_the_chip_where_it_is_idle():
    assert choose_splits(1, 1, 16, 132) == 1  # one tile
    assert choose_splits(64, 8, 8192, 132) == 1  # full already
    few = choose_splits(1, 8, 8192, 132)
    assert 16 <= few <= 128
    assert choose_splits(1, 8, 8192, 132) >= choose_splits(8, 8, 8192, 132) >= choose_splits(64, 8, 8192, 132)
    assert choose_splits(1, 8, 8192, 20) < few  # a smaller chip
    with pytest.raises(ValueError, match="num_sms must be an integer >= 1, got 0"):
        choose_splits(1, 8, 8192, 0)


@given(st.integers(1, 64), st.integers(1, 16), st.integers(0, 1 << 17), st.sampled_from([20, 108, 132, 148]))
def test_a_split_is_never_empty_of_tiles(requests, kv_heads, context, num_sms):
    splits = choose_splits(requests, kv_heads, context, num_sms)
    assert 1 <= splits <= max(1, min(-(-context // 64), 128))


def test_tree_words():
    ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    assert tree_bits(ancestors).tolist() == [1, 3, 5]
    assert tree_bits(torch.ones(64, 64, dtype=torch.bool).tril())[63] == -1
    with pytest.raises(ValueError, match="n <= 64"):
        tree_bits(torch.eye(65, dtype=torch.bool))


@pytest.mark.parametrize("causal", [True, False])
def test_naive_attention_is_torchs(causal):
    torch.manual_seed(0)
    q, k, v = torch.randn(7, 4, 64), torch.randn(7, 2, 64), torch.randn(7, 2, 64)
    cu = torch.tensor([0, 7])
    out, lse = naive_flash_attention(q, k, v, cu, cu, causal=causal)
    q_, k_, v_ = (t.double().transpose(0, 1) for t in (q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)))
    want = F.scaled_dot_product_attention(q_, k_, v_, is_causal=causal)
    torch.testing.assert_close(out.transpose(0, 1), want, atol=1e-12, rtol=0)
    logits = (q_ @ k_.transpose(1, 2) / 8).masked_fill(~visible(7, 7, causal, None), -torch.inf)
    torch.testing.assert_close(lse, logits.exp().sum(-1).log(), atol=1e-12, rtol=0)


def test_naive_merge_is_attention_over_all():
    torch.manual_seed(0)
    logits, values = torch.randn(3, 4, 10).double(), torch.randn(3, 10, 5).double()
    parts = [(logits[..., a:b], values[:, a:b]) for a, b in ((0, 4), (4, 4), (4, 10))]
    outs = torch.stack([torch.softmax(x, -1) @ v if x.shape[-1] else torch.zeros(3, 4, 5).double() for x, v in parts])
    lses = torch.stack([torch.logsumexp(x, -1) if x.shape[-1] else torch.full((3, 4), -torch.inf).double() for x, _ in parts])
    out, lse = naive_merge(outs, lses)
    torch.testing.assert_close(out, torch.softmax(logits, -1) @ values)
    torch.testing.assert_close(lse, torch.logsumexp(logits, -1))
    out, lse = naive_merge(torch.zeros(2, 1, 3), torch.full((2, 1), -torch.inf))
    assert out.tolist() == [[0, 0, 0]] and lse.tolist() == [-torch.inf]


def test_configs():
    assert default_config(64, torch.bfloat16, 1).block_m == 16
    with pytest.raises(ValueError, match="the head size must be one of"):
        default_config(63, torch.bfloat16)
    with pytest.raises(ValueError, match="block_m must be a power of two"):
        FlashConfig(48).check()


def test_trace_buffers():
    assert len(FIELDS) == 18  # the kernels' row width
    assert len(TraceBuffer("cpu", 3).read()) == 0
    with pytest.raises(ValueError, match="the capacity of a trace must be an integer >= 1, got 0"):
        TraceBuffer("cpu", 0)
    with pytest.raises(ValueError, match="the traced row must be an integer >= 0, got -1"):
        TraceBuffer("cpu", 5, -1)
