"""The forward kernel against float64: odd lengths, all head sizes and dtypes, masks, what must not be read, and its trace."""

import math

import pytest
import torch

from engine.kernels.flash_attention import (
    FlashConfig,
    flash_attention,
    flash_attention_tma,
    flash_attention_varlen,
    gather_paged,
    naive_flash_attention,
    tile_schedule,
)
from engine.kernels.tracing import PROGRAM, TILE, TraceBuffer
from tests.engine.kernels.running.cases import INTERPRETED, NAN, assert_attention, paged, rounded_before, varlen

SMALL = FlashConfig(16, 16, 2, 1)
# (rows, keys): nothing, one, a block of 4 and a tile of 16 less one, whole, and one more, 63; rows <, = and > keys
LENGTHS = [(0, 5), (1, 1), (1, 17), (15, 16), (16, 16), (17, 33), (63, 63), (20, 7), (3, 0)]
MASKS = [(True, None), (False, None), (True, 7), (True, 1)]


def both(case, causal=True, window=None, config=SMALL, **options):
    k, v, cu_k = gather_paged(case.pool, case.tables, case.lens, case.block_size)
    want = naive_flash_attention(case.q, k, v, case.cu, cu_k, causal=causal, window=window)
    out = torch.full_like(case.q, NAN)
    lse = torch.full((case.q.shape[1], case.q.shape[0]), NAN, device=case.q.device)
    got = flash_attention(
        *case.args, block_size=case.block_size, causal=causal, window=window, config=config, out=out, lse=lse, **options
    )
    assert got[0] is out and got[1] is lse
    return out, lse, *want, v.abs().max().item() if v.numel() else 0.0


@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_lengths(dtype, causal, window, device):
    assert_attention(*both(paged(LENGTHS, 2, 1, 64, dtype, device), causal, window))


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (64, torch.float16),
        (80, torch.float32),
        (80, torch.bfloat16),
        (96, torch.float16),
        (128, torch.float32),
        (128, torch.float16),
    ],
)
def test_head_sizes(dim, dtype, device):
    assert_attention(*both(paged([(5, 19), (17, 17)], 6, 2, dim, dtype, device), window=9))
    assert_attention(*both(paged([(5, 19)], 2, 2, dim, dtype, device)))


@pytest.mark.parametrize("config", [FlashConfig(32, 16), FlashConfig(16, 64), FlashConfig(64, 32)])
def test_tile_sizes_change_nothing(config, device):
    case = paged([(40, 70), (7, 33)], 2, 1, 64, torch.float32, device, block_size=8)
    assert_attention(*both(case, True, 21, config))
    assert_attention(*both(case, True, None, config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_shifted_by_10000(dtype, device):
    # Whole numbers, so that all products and sums are exact, and the shift is: 250 * 320 / sqrt(64) = 10,000.
    case = paged([(9, 37)], 2, 1, 64, dtype, device)
    case.q.copy_(torch.randint(-2, 3, case.q.shape))
    real = ~case.pool[:, 0, 0].isnan()
    case.pool[real] = torch.randint(-3, 4, case.pool[real].shape).to(case.pool)
    case.q[..., 0] = 250
    case.pool[real, 0, 0] = 0
    plain, lse, *_ = both(case)
    case.pool[real, 0, 0] = 320
    out, shifted, *want = both(case)
    assert_attention(out, shifted, *want, shift=1e4)
    apart = 3 * (2.0**-7 if dtype == torch.bfloat16 else 3e-6 + rounded_before(1e4))
    assert (out.double() - plain.double()).abs().max() <= apart
    assert (shifted - lse - 10000).abs().max() < 4e-3  # steps of float32 there: 1e-3


def test_queries_may_be_a_view_of_qkv(device):
    case = paged([(3, 11)], 4, 2, 64, torch.float32, device)
    packed = torch.full((3, 8, 64), NAN, device=device)
    packed[:, :4] = case.q
    want = flash_attention(*case.args, block_size=4, config=SMALL)[0]
    case.q = packed[:, :4]
    assert torch.equal(flash_attention(*case.args, block_size=4, config=SMALL)[0], want)


def test_contiguous_keys_give_the_same_bits(device):
    case = paged(LENGTHS, 2, 1, 64, torch.float32, device)
    k, v, cu_k = gather_paged(case.pool, case.tables, case.lens, 4)
    a = flash_attention(*case.args, block_size=4, config=SMALL, window=9)
    b = flash_attention_varlen(case.q, k.contiguous(), v.contiguous(), case.cu, cu_k, config=SMALL, window=9)
    assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])


def test_float64(device):
    if not INTERPRETED:
        pytest.skip("float64 is for the interpreter")
    q, k, v, cu_q, cu_k = varlen(LENGTHS, 2, 1, 80, torch.float64, device)
    out, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, config=SMALL)
    assert_attention(out, lse, *naive_flash_attention(q, k, v, cu_q, cu_k), v.abs().max().item())


def test_nothing_to_do(device):
    case = paged([(0, 4)], 2, 1, 64, torch.float32, device)
    out, lse = flash_attention(*case.args, block_size=4)
    assert out.shape == (0, 2, 64) and lse.shape == (2, 0)


@pytest.mark.parametrize(("causal", "window"), MASKS[:3])
def test_the_trace_is_the_schedule(causal, window, device):
    lengths = [(0, 5), (33, 50), (20, 7), (1, 17)]
    case = paged(lengths, 4, 2, 80, torch.float16, device)
    trace = TraceBuffer(device, 1000, row=2)
    out, lse, *want = both(case, causal, window, trace=trace)
    assert_attention(out, lse, *want)
    plain = flash_attention(*case.args, block_size=4, causal=causal, window=window, config=SMALL)
    assert torch.equal(plain[0], out) and torch.equal(plain[1], lse)
    read = trace.read()
    assert read.dropped == 0
    tiles, programs = list(read.of(TILE).rows()), list(read.of(PROGRAM).rows())
    loaded = stored = 0
    for request, (rows, keys) in enumerate(lengths):
        for head in range(4):
            for part in tile_schedule(rows, keys, SMALL, causal, window):
                at = {"program_y": head, "program_z": request, "q_start": part.q_start, "q_rows": part.q_rows}
                mine = [t for t in tiles if all(t[name] == value for name, value in at.items())]
                assert [t["kv_start"] for t in mine] == part.tiles(16)
                assert [t["kv_rows"] for t in mine] == [min(16, part.stop - n) for n in part.tiles(16)]
                assert [t["masked"] for t in mine] == [int(not part.full_start <= n < part.full_stop) for n in part.tiles(16)]
                (end,) = [t for t in programs if all(t[name] == value for name, value in at.items())]
                assert end["kv_rows"] == max(part.stop - part.start, 0)
                token = int(case.cu[request]) + part.q_start + min(2, part.q_rows - 1)
                total = end["running_max"] + (math.log(end["running_sum"]) if end["running_sum"] else 0.0)
                assert total == pytest.approx(lse[head, token].item(), abs=1e-5)
                loaded += part.q_rows * 160 + 2 * 160 * max(part.stop - part.start, 0)
                stored += part.q_rows * (160 + 4)
    assert read["bytes_loaded"].sum() == loaded and read["bytes_stored"].sum() == stored
    if INTERPRETED:
        assert set(read["sm"]) == {-1} and not read["clock_end"].any()
    else:
        assert (read["sm"] >= 0).all() and (read["clock_end"] > read["clock_start"]).all()
        assert (read["time_end"] >= read["time_start"]).all() and read["time_start"].all()


def test_counting_for_standard_attention(device):
    """The same kernel, the same results; the bytes of algorithm 0: S and P are written and read, for keys that nobody sees, too."""
    lengths, causal, window = [(17, 40), (20, 20), (1, 17), (3, 0)], True, 9
    case = paged(lengths, 4, 2, 64, torch.float16, device)
    plain, standard = TraceBuffer(device, 1000), TraceBuffer(device, 1000, standard=True)
    out, lse, *want = both(case, causal, window, trace=standard)
    assert_attention(out, lse, *want)
    flash_attention(*case.args, block_size=4, causal=causal, window=window, config=SMALL, trace=plain)
    read = standard.read()
    loaded = sum(4 * (n * 64 * 2 + -(-n // 16) * 2 * keys * 64 * 2 + 2 * n * keys * 2) for n, keys in lengths)
    stored = sum(4 * (n * (64 * 2 + 4) + 2 * n * keys * 2) for n, keys in lengths)
    assert (read["bytes_loaded"].sum(), read["bytes_stored"].sum()) == (loaded, stored)
    assert len(read.of(TILE)) == sum(4 * -(-n // 16) * -(-keys // 16) for n, keys in lengths)
    assert plain.read()["bytes_loaded"].sum() < loaded


def test_standard_attention_grows_with_the_square_of_the_length(device):
    def moved(n: int, standard: bool) -> int:
        case = paged([(n, n)], 1, 1, 64, torch.float16, device)
        trace = TraceBuffer(device, 4000, standard=standard)
        flash_attention(*case.args, block_size=4, config=FlashConfig(128, 16, 4, 1), trace=trace)
        read = trace.read()
        return int(read["bytes_loaded"].sum() + read["bytes_stored"].sum())

    assert moved(128, True) / moved(64, True) == pytest.approx(4, rel=0.5)
    assert moved(128, False) / moved(64, False) == pytest.approx(2, rel=0.05)  # a single tile of queries: K and V once


@pytest.mark.parametrize(
    ("dtype", "causal", "window"), [(torch.bfloat16, True, None), (torch.bfloat16, True, 7), (torch.float32, False, None)]
)
def test_tensor_descriptors_change_nothing(dtype, causal, window, device):
    if not INTERPRETED and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor descriptors are for sm_90 and later")
    lengths = [(0, 5), (1, 17), (17, 33), (20, 7), (3, 0)]
    q, k, v, cu_q, cu_k = varlen(lengths, 2, 1, 80, dtype, device)
    got = flash_attention_tma(q, k, v, cu_q, cu_k, causal=causal, window=window, config=FlashConfig(16, 16, 4, 2))
    want = naive_flash_attention(q, k, v, cu_q, cu_k, causal=causal, window=window)
    assert_attention(*got, *want, v.abs().max().item())


def test_what_descriptors_refuse(device):
    q, k, v, cu_q, cu_k = varlen([(3, 5)], 2, 1, 64, torch.float16, device)
    shifted = torch.empty(k.numel() + 1, dtype=k.dtype, device=device)[1:].view(k.shape)
    with pytest.raises(ValueError, match="must begin at a multiple of 16 bytes"):
        flash_attention_tma(q, shifted, v, cu_q, cu_k)
    with pytest.raises(ValueError, match="k must be contiguous"):
        flash_attention_tma(q, torch.cat([k, k], 2)[..., :64], v, cu_q, cu_k)


def test_the_running_maximum_and_sum_of_a_row(device):
    case = paged([(16, 48)], 1, 1, 64, torch.float32, device)
    trace = TraceBuffer(device, 100, row=5)
    flash_attention(*case.args, block_size=4, causal=False, config=SMALL, trace=trace)
    k = gather_paged(case.pool, case.tables, case.lens, 4)[0]
    logits = (k[:, 0].double() @ case.q[5, 0].double()) / 8
    for i, tile in enumerate(trace.read().of(TILE).rows()):
        so_far = logits[: 16 * (i + 1)]
        assert tile["running_max"] == pytest.approx(so_far.max().item(), abs=1e-5)
        assert tile["running_sum"] == pytest.approx((so_far - so_far.max()).exp().sum().item(), rel=1e-5)


def test_a_full_trace_says_how_much_it_dropped(device):
    case = paged([(33, 50)], 2, 1, 64, torch.float32, device)
    whole, short = TraceBuffer(device, 1000), TraceBuffer(device, 5)
    a = flash_attention(*case.args, block_size=4, config=SMALL, trace=whole)
    b = flash_attention(*case.args, block_size=4, config=SMALL, trace=short)
    assert torch.equal(a[0], b[0])
    read = short.read()
    assert len(read) == 5 and read.dropped == len(whole.read()) - 5 > 0
    short.clear()
    assert len(short.read()) == 0 and short.read().dropped == 0


class TestBadInput:
    @pytest.fixture
    def case(self, device):
        return paged([(3, 11), (2, 6)], 4, 2, 64, torch.float32, device)

    def refused(self, case, match, **options):
        with pytest.raises(ValueError, match=match):
            flash_attention(*case.args, **{"block_size": 4, "config": SMALL, "validate": True, **options})

    def test_tiles(self, case):
        self.refused(case, "block_m must be a power of two in .16, 256., got 24", config=FlashConfig(24, 16))
        self.refused(case, "block_n must be a power of two in .16, 256., got 8", config=FlashConfig(16, 8))
        self.refused(case, "num_warps", config=FlashConfig(16, 16, 3))
        self.refused(case, "num_stages", config=FlashConfig(16, 16, 4, 0))
        self.refused(case, "block_size must be a power of two in .1, 1024., got 6", block_size=6)

    def test_options(self, case):
        self.refused(case, "scale must be a positive number, got 0", scale=0.0)
        self.refused(case, "window must be None or an integer >= 1, got 0", window=0)
        self.refused(case, "out must have shape", out=case.q[:1])

    def test_head_size(self, device):
        self.refused(
            paged([(3, 11)], 2, 1, 72, torch.float32, device), r"the head size must be one of \(64, 80, 96, 128\), got 72"
        )

    def test_heads_and_dtypes(self, case):
        case.q = case.q[:, :3].contiguous()
        self.refused(case, "the query heads must be a multiple of the KV heads, got 3 and 2")
        case.q = case.q.half()
        self.refused(case, "kv_pool must be float16, got torch.float32")

    def test_lengths(self, case):
        case.lens[1] = 13
        self.refused(case, "request 1: 13 tokens in blocks of 4 take 4 blocks, its block table has 3")
        case.cu[-1] = 6
        self.refused(case, r"cu_seqlens_q must rise from 0 to 5, the number of rows, got \[0, 3, 6\]")

    @pytest.mark.parametrize("bad", [-1, 8])
    def test_a_table_that_points_outside_the_pool(self, case, bad):
        assert case.pool.shape[0] == 8 * 4
        case.tables[1, 0] = bad
        self.refused(case, f"request 1: its block table points outside the pool of 8 blocks: .{bad}.")
        if INTERPRETED:  # and where nobody looked before, the interpreter stops instead of reading what is not there
            with pytest.raises(Exception, match="Assume failed"):
                flash_attention(*case.args, block_size=4, config=SMALL, validate=False)
