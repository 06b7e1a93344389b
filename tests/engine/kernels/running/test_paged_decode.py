"""The decode kernel and its merge against float64: chains and trees, windows, 8-bit pools, any number and order of splits."""

import math

import pytest
import torch

from engine.kernels.paged_decode import (
    DecodeConfig,
    choose_splits,
    merge_splits,
    naive_merge,
    naive_paged_decode,
    paged_decode,
    paged_decode_partial,
    split_ranges,
    tree_bits,
)
from engine.kernels.tracing import PROGRAM, TILE, TraceBuffer
from tests.engine.kernels.running.cases import INTERPRETED, NAN, assert_attention, paged

SMALL = DecodeConfig(16, 2, 1)
LENGTHS = [(1, 1), (0, 9), (1, 63), (3, 33), (5, 17), (1, 16), (2, 1)]  # the last: more queries than keys
CODES = [None, torch.int8, torch.uint8]


def largest_value(case):
    values = case.pool[:, case.pool.shape[1] // 2 :]
    if case.scales is None:
        return values.nan_to_num().abs().max().item()
    return 2.0  # codes times scales, by how they are made


def check(case, num_splits, shift=0.0, **options):
    naive = {name: options[name] for name in ("window", "positions") if name in options}
    want = naive_paged_decode(
        *(t.cpu() for t in case.args), block_size=4, kv_scales=None if case.scales is None else case.scales.cpu(),
        ancestors=options.pop("ancestors", None), **{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in naive.items()},
    )  # fmt: skip
    out = torch.full_like(case.q, NAN)
    got, lse = paged_decode(
        *case.args, block_size=4, num_splits=num_splits, kv_scales=case.scales, config=SMALL, out=out, **options
    )
    assert got is out
    assert_attention(out.cpu(), lse.cpu(), *want, largest_value(case), shift)
    return out


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chains(dtype, codes, window, num_splits, device):
    check(paged(LENGTHS, 6, 2, 64, dtype, device, codes=codes), num_splits, window=window)


@pytest.mark.parametrize(
    ("dim", "dtype", "heads"), [(80, torch.float16, 8), (96, torch.float32, 4), (128, torch.bfloat16, 2), (80, torch.float32, 9)]
)
def test_head_sizes_and_groups(dim, dtype, heads, device):
    check(paged([(2, 19), (1, 30)], heads, 1, dim, dtype, device, codes=torch.int8), 2)
    check(paged([(2, 19)], heads, heads, dim, dtype, device), 2)


def random_tree(n):
    ancestors, depth = torch.eye(n, dtype=torch.bool), [0] * n
    for i in range(1, n):
        parent = int(torch.randint(0, i, ()))
        ancestors[i] |= ancestors[parent]
        depth[i] = depth[parent] + 1
    return ancestors, depth


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("codes", [None, torch.int8])
def test_trees(codes, window, num_splits, device):
    lengths = [(1, 1), (7, 22), (5, 5), (0, 3), (6, 37)]
    case = paged(lengths, 6, 2, 64, torch.float32, device, codes=codes)
    trees = [random_tree(n) for n, _ in lengths]
    options = {"tree": torch.cat([tree_bits(t) for t, _ in trees]).to(device), "ancestors": [t for t, _ in trees]}
    if window:
        positions = [k - n + d for (n, k), (_, depth) in zip(lengths, trees, strict=True) for d in depth]
        options["positions"] = torch.tensor(positions, dtype=torch.int32, device=device)
    check(case, num_splits, window=window, **options)


def test_the_last_of_64_drafts(device):
    """Bit 63 of a word is its sign."""
    case = paged([(64, 70)], 1, 1, 64, torch.float32, device)
    ancestors = torch.eye(64, dtype=torch.bool)
    ancestors[63, 62] = True
    check(case, 2, tree=tree_bits(ancestors).to(device), ancestors=[ancestors])


def test_logits_shifted_by_10000(device):
    case = paged([(2, 40)], 2, 1, 64, torch.float32, device)
    real = ~case.pool[:, 0, 0].isnan()
    case.q.copy_(torch.randint(-2, 3, case.q.shape))
    case.pool[real] = torch.randint(-3, 4, case.pool[real].shape).to(case.pool)
    case.q[..., 0], case.pool[real, 0, 0] = 250, 320
    check(case, 1, shift=1e4)
    # The parts' log-sum-exps are float32: a step of 1e-3 there is the weight of a part off by 5e-4.
    whole = paged_decode(*case.args, block_size=4, num_splits=1, config=SMALL)[0]
    cut = paged_decode(*case.args, block_size=4, num_splits=3, config=SMALL)[0]
    assert (whole - cut).abs().max() < 3 * 1e-3


def test_any_number_and_order_of_splits(device):
    hypothesis = pytest.importorskip("hypothesis")
    strategies = hypothesis.strategies
    case = paged([(2, 61), (1, 3), (1, 0)], 2, 1, 64, torch.float32, device)
    whole, lse = paged_decode(*case.args, block_size=4, num_splits=1, config=SMALL)

    @hypothesis.settings(max_examples=12, deadline=None, database=None)
    @hypothesis.given(strategies.integers(1, 9).flatmap(lambda n: strategies.permutations(range(n))))
    def holds(order):
        parts, sums = paged_decode_partial(*case.args, block_size=4, num_splits=len(order), config=SMALL)
        parts, sums = parts[order].contiguous(), sums[order].contiguous()
        out, merged = merge_splits(parts, sums, torch.full_like(case.q, NAN))
        torch.testing.assert_close(out, whole, atol=1e-6, rtol=0)
        torch.testing.assert_close(merged, lse, atol=1e-6, rtol=0)
        naive, naive_lse = naive_merge(parts.transpose(1, 2).double(), sums.double())
        torch.testing.assert_close(out.double(), naive.transpose(0, 1), atol=1e-6, rtol=0)
        torch.testing.assert_close(merged.double(), naive_lse, atol=1e-6, rtol=0)

    holds()


@pytest.mark.parametrize("window", [None, 20])
def test_the_trace_is_the_cut(window, device):
    lengths = [(1, 63), (3, 33)]
    case = paged(lengths, 4, 2, 64, torch.float32, device, codes=torch.int8)
    trace = TraceBuffer(device, 1000)
    out = check(case, 3, window=window, trace=trace)
    assert torch.equal(
        out,
        paged_decode(*case.args, block_size=4, num_splits=3, kv_scales=case.scales, config=SMALL, window=window)[0],
    )
    read = trace.read()
    tiles, programs = list(read.of(TILE).rows()), list(read.of(PROGRAM).rows())
    for request, (rows, keys) in enumerate(lengths):
        for split, (start, stop) in enumerate(split_ranges(keys, rows, 3, 16, window)):
            for head in range(2):
                at = {"program_x": split, "program_y": head, "program_z": request}
                mine = [t for t in tiles if all(t[name] == value for name, value in at.items())]
                assert [t["kv_start"] for t in mine] == list(range(start, stop, 16))
                assert sum(t["bytes_loaded"] for t in mine) == (stop - start) * 2 * (64 + 2)
                (end,) = [t for t in programs if all(t[name] == value for name, value in at.items())]
                assert end["kv_rows"] == stop - start
    assert read.dropped == 0 and math.isfinite(read["running_sum"].sum())


def test_without_numbers_of_splits(device):
    check(paged(LENGTHS, 4, 2, 64, torch.float32, device), None, num_sms=4)
    assert choose_splits(7, 2, 63, 4, 16) > 0


class TestBadInput:
    @pytest.fixture
    def case(self, device):
        return paged([(1, 11), (2, 6)], 4, 2, 64, torch.float32, device)

    def refused(self, case, match, **options):
        with pytest.raises(ValueError, match=match):
            paged_decode(*case.args, **{"block_size": 4, "num_splits": 1, "config": SMALL, "validate": True, **options})

    def test_options(self, case, device):
        self.refused(case, r"num_splits must be an integer in \[1, 128\], got 0", num_splits=0)
        self.refused(case, "block_n must be a power of two", config=DecodeConfig(17))
        self.refused(case, "int8 and uint8 pools come with kv_scales", kv_scales=torch.ones(24, 4, device=device))
        self.refused(case, "a window over a tree", window=3, tree=torch.zeros(3, dtype=torch.int64, device=device))
        self.refused(case, "tree must be int64", tree=torch.zeros(3, device=device))

    def test_too_many_rows(self, device):
        self.refused(paged([(65, 65)], 2, 1, 64, torch.float32, device), "at most 64 new tokens for 2 query heads")

    def test_a_table_that_points_outside_the_pool(self, case):
        case.tables[0, 2] = 99
        self.refused(case, "request 0: its block table points outside the pool of 8 blocks: .99.")
        if INTERPRETED:
            with pytest.raises(Exception, match="Assume failed"):
                paged_decode(*case.args, block_size=4, num_splits=1, config=SMALL, validate=False)
