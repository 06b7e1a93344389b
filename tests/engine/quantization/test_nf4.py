import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from engine.quantization import levels
from engine.quantization.nf4 import nearest_level, nest, quantize_nf4
from tests.engine.quantization import packed_values


def weight(rows: int = 4, columns: int = 192, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def midpoints() -> torch.Tensor:
    return ((levels.NF4[1:].double() + levels.NF4[:-1].double()) / 2).float()


def test_nearest_level_is_the_nearest_of_sixteen():
    x = torch.cat((torch.linspace(-1, 1, 20_001), torch.arange(-32, 33) / 32, levels.NF4))
    off = (x.double()[:, None] - levels.NF4.double()).abs()
    chosen = off.gather(1, nearest_level(x).long()[:, None])[:, 0]
    assert bool((chosen <= off.amin(1) + 1e-8).all())


def test_a_tie_takes_the_lower_level_and_a_hair_above_the_upper():
    middle = midpoints()
    assert nearest_level(middle).tolist() == list(range(15))
    assert nearest_level(torch.nextafter(middle, torch.tensor(2.0))).tolist() == list(range(1, 16))
    assert nearest_level(torch.nextafter(middle, torch.tensor(-2.0))).tolist() == list(range(15))


def test_all_sixteen_codes_come_back_and_shapes_are_kept():
    assert nearest_level(levels.NF4).tolist() == list(range(16))
    assert nearest_level(levels.NF4.view(2, 8).T).tolist() == torch.arange(16).view(2, 8).T.tolist()
    assert nearest_level(torch.tensor([-5.0, 5.0])).tolist() == [0, 15]
    w = levels.NF4.repeat(1, 8) * torch.tensor([[0.5], [3.0]])
    q = quantize_nf4(w, 64, double=False)
    assert torch.equal(q.dequantize(), w) and q.unpacked().tolist() == [list(range(16)) * 8] * 2


@pytest.mark.parametrize("size", [1, 16, 50, 64, 192, 1000])
def test_scales_are_the_blocks_largest_magnitudes_and_codes_the_nearest_levels(size):
    w = weight()
    q = quantize_nf4(w, size, double=False)
    assert q.scales.dtype == torch.float32 and q.nested is None
    codes = q.unpacked()
    for n in range(4):
        for g, start in enumerate(range(0, 192, size)):
            block = w[n, start : start + size]
            assert float(q.scales[n, g]) == float(block.abs().max())
            off = (block.double()[:, None] / float(q.scales[n, g]) - levels.NF4.double()).abs()
            chosen = off.gather(1, codes[n, start : start + size].long()[:, None])[:, 0]
            assert bool((chosen <= off.amin(1) + 1e-7).all())


def test_double_quantisation_is_the_mean_and_8_bit_floats_in_blocks_of_256():
    w = weight(20, 64 * 18, seed=1)  # 360 scales: one whole block and a part
    plain, q = quantize_nf4(w, double=False), quantize_nf4(w)
    assert torch.equal(plain.codes, q.codes)  # rounding the scales does not move the codes
    flat = plain.scales.double().flatten()
    mean = flat.mean()
    assert float(q.nested.mean) == pytest.approx(float(mean), rel=1e-6)
    for block, start in enumerate(range(0, 360, 256)):
        off_mean = flat[start : start + 256] - mean
        scale = float(off_mean.abs().max()) / 448
        assert float(q.nested.block_scales[block]) == pytest.approx(scale, rel=1e-5)
        codes = q.nested.codes.flatten()[start : start + 256].tolist()
        got = torch.tensor([packed_values.e4m3(c) for c in codes], dtype=torch.float64)
        # Three mantissa bits: half a step is a 16th of the value, and below 2**-6 half of 2**-9.
        assert bool(((got * scale - off_mean).abs() <= (off_mean.abs() / 16).clamp_min(scale * 2.0**-10) * 1.001).all())
        again = (got * float(q.nested.block_scales[block]) + float(q.nested.mean)).clamp_min(0)
        assert torch.allclose(q.scales.double().flatten()[start : start + 256], again, rtol=1e-5, atol=1e-7)
    assert len(q.nested.block_scales) == 2 and sum(t.numel() * t.element_size() for t in q.nested.tensors()) == 360 + 2 * 4 + 4


@pytest.mark.parametrize("start, stop", [(0, 20), (0, 3), (14, 15), (13, 20), (15, 17), (19, 20)])
def test_rows_cut_across_the_blocks_of_scales_stand_for_the_same(start, stop):
    q = quantize_nf4(weight(20, 64 * 18, seed=1))
    part = q.rows(start, stop)
    assert torch.equal(part.nested.scales(), q.nested.scales()[start:stop])
    assert torch.equal(part.dequantize(), q.dequantize()[start:stop])
    if stop - start > 1:
        assert torch.equal(part.rows(1, stop - start).nested.scales(), q.nested.scales()[start + 1 : stop])


def test_a_scale_far_below_the_mean_never_turns_negative():
    scales = torch.rand(4, 64, generator=torch.Generator().manual_seed(3)) * 1e-3
    scales[0, 0] = 3.0
    assert bool((nest(scales).scales() >= 0).all())
    equal = torch.full((2, 300), 0.25)
    assert torch.equal(nest(equal).scales(), equal)


@pytest.mark.parametrize("double", [False, True])
def test_all_zero_blocks_and_matrices_come_back_as_zeros(double):
    w = weight()
    w[1, 64:128] = 0
    w[3] = 0
    back = quantize_nf4(w, double=double).dequantize()
    assert bool((back[1, 64:128] == 0).all()) and bool((back[3] == 0).all()) and bool(torch.isfinite(back).all())
    assert bool((quantize_nf4(torch.zeros(2, 64), double=double).dequantize() == 0).all())


@settings(max_examples=100)
@given(
    hnp.arrays("float32", st.tuples(st.integers(1, 3), st.integers(1, 9)), elements=st.floats(-(2.0**126), 2.0**126, width=32)),
    st.integers(1, 9),
)
def test_any_finite_weight_stays_finite_and_within_half_the_widest_gap(w, size):
    w = torch.from_numpy(w)
    back = quantize_nf4(w, size, double=False).dequantize().double()
    nested = quantize_nf4(w, size)
    assert bool(torch.isfinite(nested.dequantize()).all()) and bool(torch.isfinite(nested.scales).all())
    for start in range(0, w.shape[1], size):
        block = w[:, start : start + size].double()
        widest = (1 - 0.6961928009986877) / 2  # between the two lowest levels
        bound = block.abs().amax(1, keepdim=True) * (widest + 1e-6) + 2.0**-149
        assert bool(((back[:, start : start + size] - block).abs() <= bound).all())


def test_less_is_lost_than_with_int4_on_normal_weights():
    from engine.quantization.intn import what_if

    w = weight(256, 576)
    lost = float((quantize_nf4(w, 64).dequantize() - w).norm())
    assert lost < float((what_if(w, 4, 64, symmetric=True).dequantized - w).norm())


def test_bad_input_is_refused():
    w = weight()
    for size in (0, -1, 6.4):
        with pytest.raises(ValueError, match=f"group_size={size}"):
            quantize_nf4(w, size)
    w[0, 0] = float("inf")
    with pytest.raises(ValueError, match="inf or NaN"):
        quantize_nf4(w)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_are_bitsandbytes(dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    w = weight(64, 576, seed=5)
    w[:15, 0], w[:15, 1:64] = 1.0, 0.0
    w[:15, 1] = midpoints()  # ties included
    w = w.to(dtype)
    packed, state = functional.quantize_4bit(w, blocksize=64, quant_type="nf4", compress_statistics=False)
    codes = torch.stack((packed.view(-1) >> 4, packed.view(-1) & 15), -1).view(64, 576)  # theirs: the first in the high half
    q = quantize_nf4(w, 64, double=False)
    assert torch.equal(q.unpacked(), codes)
    assert torch.equal(q.scales, state.absmax.view(64, 9)) and torch.equal(levels.NF4, state.code.cpu())
    if dtype == torch.float32:
        assert torch.equal(q.dequantize(), functional.dequantize_4bit(packed, state))
