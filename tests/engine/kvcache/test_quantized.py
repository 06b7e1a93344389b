"""Pools in few bits: bytes as allocated, blocks copied, moved, filled; the 4-bit pool's tail."""

import numpy as np
import pytest
import torch

from engine.attention.base import Span
from engine.hardware.memory import KvShape, pool_bytes
from engine.kvcache.create import block_bytes, create_kv_cache
from engine.kvcache.int4 import Int4KVCache
from engine.kvcache.layout import KVCache, block_slots
from tests.engine.kvcache.test_layout import CONFIG
from tests.engine.quantization import naive_kv

DTYPES = ("auto", "int8", "fp8", "int4")
LAYERS, ROW = 3, (4, 8)  # of CONFIG: 2 KV heads of 8


def cache(kv_dtype: str, num_blocks: int = 8, block_size: int = 4, dtype: torch.dtype = torch.float32, tail: int = 2) -> KVCache:
    return create_kv_cache(kv_dtype, CONFIG, num_blocks, block_size, "cpu", dtype, tail)


def write(kv: KVCache, table: list[int], start: int, rows: torch.Tensor, draft: bool = False) -> Span:
    """``rows`` [layers, n, 2 K, D]: positions from ``start`` on of the request with this block table."""
    n = rows.shape[1]
    span = Span(0, start, n, block_slots(table, kv.block_size)[: start + n], draft=draft)
    writes = kv.writes([span])
    for layer, own in zip(kv.layers, rows):
        layer.index_copy_(0, writes, own)
    return span


def read(kv: KVCache, table: list[int], count: int, start: int | None = None) -> torch.Tensor:
    """[layers, count, 2 K, D]: what a token at position ``start`` (None: just behind) reads of those before it."""
    start = count if start is None else start
    slots = kv.pool.slots(Span(0, start, 1, block_slots(table, kv.block_size)[: start + 1]), None)[:-1]
    index = kv.pool.index(slots)
    return torch.stack([layer.index_select(0, index) for layer in kv.layers])


def some(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(LAYERS, n, *ROW, generator=torch.Generator().manual_seed(seed))


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Whole blocks of 4 in 4 bits, float64."""
    out = torch.empty_like(rows, dtype=torch.float64)
    for layer in range(LAYERS):
        for first in range(0, rows.shape[1], 4):
            block = rows[layer, first : first + 4].double().numpy()
            out[layer, first : first + 4, :2] = torch.from_numpy(naive_kv.keys_int4(block[:, :2]))
            out[layer, first : first + 4, 2:] = torch.from_numpy(naive_kv.values_int4(block[:, 2:]))
    return out


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_bytes_are_those_of_the_tensors_and_of_the_formula(kv_dtype, block_size):
    kv = cache(kv_dtype, 7, block_size, torch.bfloat16)
    assert kv.bytes_per_block == block_bytes(kv_dtype, CONFIG, block_size, torch.bfloat16)
    shape = KvShape(
        num_layers=3, num_attention_heads=6, num_kv_heads=2, head_dim=8, bytes_per_element=2, kv_dtype=kv_dtype,
        block_size=block_size,
    )  # fmt: skip
    tail = kv.tail.nbytes if isinstance(kv, Int4KVCache) else 0
    assert pool_bytes(shape, 7, block_size) == 7 * kv.bytes_per_block == kv.nbytes - tail
    assert shape.bytes_per_token == -(-kv.bytes_per_block // block_size)
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in vars(kv).values() if isinstance(t, torch.Tensor)
    }
    assert sum(held.values()) + tail == kv.nbytes
    assert tail == (2 * 3 * block_size * 2 * 2 * 8 * 2 if kv_dtype == "int4" else 0)


def test_an_unknown_kind_is_refused():
    for make in (lambda: cache("int3"), lambda: block_bytes("int3", CONFIG, 4, torch.float32)):
        with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of .*'int4'.*got 'int3'"):
            make()
    with pytest.raises(ValueError, match="kv_dtype must be one of"):
        KvShape(num_layers=3, num_attention_heads=6, num_kv_heads=2, head_dim=8, bytes_per_element=2, kv_dtype="int3")


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_rows_are_read_back_rounded(kv_dtype):
    kv, rows = cache(kv_dtype), some(10)
    write(kv, [5, 0, 2], 0, rows)
    want = np.apply_along_axis(getattr(naive_kv, kv_dtype), -1, rows.double().numpy())
    np.testing.assert_allclose(read(kv, [5, 0, 2], 10).numpy(), want, rtol=1e-5, atol=1e-7)
    one = cache(kv_dtype)
    for i in range(10):
        write(one, [5, 0, 2], i, rows[:, i : i + 1])
    assert torch.equal(one.codes, kv.codes) and torch.equal(one.scales, kv.scales)
    stored = cache(kv_dtype)
    stored.store(stored.writes([Span(0, 0, 10, block_slots([5, 0, 2], 4)[:10])]), rows[:2])  # the first layers at once
    assert torch.equal(stored.codes[:2], kv.codes[:2]) and not stored.codes[2].any()


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_blocks_are_copied_with_all_they_have_and_filled(kv_dtype):
    kv, rows = cache(kv_dtype), some(8)
    write(kv, [1, 6], 0, rows[:, :7])
    write(kv, [3], 0, some(4, seed=1))
    seen, other = read(kv, [1, 6], 7), read(kv, [3], 4)
    kv.copy_blocks([1, 6, 3], [6, 2, 1])  # sources that are destinations are read first
    assert torch.equal(read(kv, [6, 2], 7), seen)
    assert torch.equal(read(kv, [1], 4), other) and torch.equal(read(kv, [3], 4), other)
    write(kv, [6, 2], 7, rows[:, 7:])
    whole = cache(kv_dtype)
    write(whole, [6, 2], 0, rows)
    assert torch.equal(read(kv, [6, 2], 8), read(whole, [6, 2], 8))
    kv.fill_blocks([2], float("nan"))
    for count, start in ((8, 8), (7, 7)):
        assert read(kv, [6, 2], count, start)[:, 4:].isnan().all() and not read(kv, [6, 2], count)[:, :4].isnan().any()
    assert not read(kv, [3], 4).isnan().any()
    for src, dst in (([0], []), ([0], [8]), ([-1], [0])):
        with pytest.raises(ValueError, match="got"):
            kv.copy_blocks(src, dst)
    kv.copy_blocks([], [])
    kv.move([], [])


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_an_accepted_path_moves(kv_dtype):
    """Five nodes behind three tokens; what is accepted fills the first block and reaches into the second."""
    kv, rows = cache(kv_dtype), some(8)
    write(kv, [4, 5], 0, rows[:, :3])
    write(kv, [4, 5], 3, rows[:, 3:], draft=True)
    slots = block_slots([4, 5], 4)
    kv.move([int(slots[i]) for i in (5, 7)], [int(slots[i]) for i in (3, 4)])
    want = cache(kv_dtype)
    write(want, [4, 5], 0, rows[:, [0, 1, 2, 5, 7]])
    assert torch.equal(read(kv, [4, 5], 5), read(want, [4, 5], 5))
    for src, dst in (([0], []), ([0], [32]), ([1, 2], [5, 5])):
        with pytest.raises(ValueError, match=r"got|named twice"):
            kv.move(src, dst)


# -- the tail --------------------------------------------------------------------------------------------------------------


def test_full_blocks_are_in_4_bits_and_the_rest_is_as_it_was():
    kv, rows = cache("int4"), some(11)
    write(kv, [5, 0, 2], 0, rows)
    got = read(kv, [5, 0, 2], 11)
    torch.testing.assert_close(got[:, :8].double(), rounded(rows[:, :8]), rtol=1e-5, atol=1e-6)
    assert torch.equal(got[:, 8:], rows[:, 8:])
    for step in (1, 2, 3, 5):  # however the tokens come
        other = cache("int4")
        for i in range(0, 11, step):
            write(other, [5, 0, 2], i, rows[:, i : i + step])
        assert torch.equal(other.codes[:, [5, 0]], kv.codes[:, [5, 0]])
        assert torch.equal(read(other, [5, 0, 2], 11), got)


def test_what_is_rejected_is_rounded_again():
    """A draft crosses the block's end twice before the tokens are those that count; then the tail's place is given back."""
    kv, rows = cache("int4"), some(9)
    write(kv, [1, 7, 3], 0, rows[:, :2])
    for seed in (5, 6):
        wrong = torch.cat((rows[:, 2:3], some(5, seed)), 1)
        write(kv, [1, 7, 3], 2, wrong, draft=True)
    write(kv, [1, 7, 3], 3, rows[:, 3:5], draft=True)
    write(kv, [1, 7, 3], 5, rows[:, 5:])
    plain = cache("int4")
    write(plain, [1, 7, 3], 0, rows)
    assert torch.equal(read(kv, [1, 7, 3], 9), read(plain, [1, 7, 3], 9))
    assert not kv.tail.holds(1)
    kv.tail.check_integrity()


def test_guesses_that_go_on_from_guesses_release_nothing():
    kv, rows = cache("int4"), some(6)
    write(kv, [1, 2], 0, rows[:, :3])
    spans = [Span(0, i, 1, block_slots([1, 2], 4)[: i + 1], draft=True) for i in range(3, 6)]
    for span in spans:
        kv.layers[0].index_copy_(0, kv.writes([span], release=False), rows[0, span.start : span.end])
    assert kv.tail.holds(1) and kv.tail.holds(2)
    kv.writes([spans[1]])
    assert not kv.tail.holds(1)


def test_whoever_goes_back_into_a_settled_block_gets_its_tail_from_the_codes():
    kv, rows = cache("int4"), some(9)
    write(kv, [1, 2, 3], 0, rows)
    write(kv, [1, 2, 3], 8, rows[:, 8:])
    assert not kv.tail.holds(1)
    span = write(kv, [1, 2, 3], 2, rows[:, 2:3])
    index = kv.pool.index(kv.pool.slots(span, None))
    got = kv.layers[1].index_select(0, index)
    torch.testing.assert_close(got[:2].double(), rounded(rows[:, :4])[1, :2], rtol=1e-5, atol=1e-6)
    assert torch.equal(got[2], rows[1, 2])
    write(kv, [1, 2, 3], 8, rows[:, 8:])  # the codes of what was behind are still there
    torch.testing.assert_close(read(kv, [1, 2, 3], 8).double(), rounded(rows[:, :8]), rtol=1e-5, atol=1e-6)
    write(kv, [1, 2, 3], 2, rows[:, 2:3])
    with pytest.raises(RuntimeError, match="block 6: 2 tokens should be there"):
        write(kv, [6], 2, rows[:, :1])
    with pytest.raises(RuntimeError, match="block 2 is settled"):
        kv.move([8], [9])


def test_places_come_back_from_blocks_that_nobody_holds():
    kv = cache("int4", num_blocks=40, tail=2)
    counts = [1] * 40
    kv.held_by(counts)
    for block in range(2):
        write(kv, [block], 0, some(1))
    counts[0] = 0
    write(kv, [2], 0, some(1))
    assert kv.tail.num_places == 2 and not kv.tail.holds(0) and kv.tail.holds(1) and kv.tail.holds(2)
    held = read(kv, [1], 1)
    write(kv, [3], 0, some(1))  # all are held: it grows, and keeps what it has
    assert kv.tail.num_places == 4 and torch.equal(read(kv, [1], 1), held)
    for block in range(4, 40):
        write(kv, [block], 0, some(1))
    assert kv.tail.num_places <= 40
    kv.tail.check_integrity()
    kv.tail.of_block[0] = kv.tail.of_block[1]
    with pytest.raises(RuntimeError, match="places of the tail"):
        kv.tail.check_integrity()
