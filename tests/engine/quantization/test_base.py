from dataclasses import replace

import pytest
import torch

from engine.quantization.base import QuantizedWeight, check_weight
from engine.quantization.fp8 import quantize_fp8
from engine.quantization.int8 import quantize_int8, quantize_int8_w8a8
from engine.quantization.intn import quantize_int
from engine.quantization.nf4 import quantize_nf4
from engine.quantization.packing import pack
from tests.engine.quantization import packed_values


def weight(rows: int = 3, columns: int = 70, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def with_zero_points(group_size: int, **more) -> QuantizedWeight:
    """Codes with an integer zero point for each group, as GPTQ and AWQ checkpoints have them."""
    random = torch.Generator().manual_seed(1)
    groups = -(-70 // group_size)
    return QuantizedWeight(
        method="gptq",
        shape=(3, 70),
        bits=4,
        levels="affine",
        group_size=group_size,
        codes=pack(torch.randint(0, 16, (3, 70), generator=random), 4),
        scales=torch.rand(3, groups, generator=random).half(),
        zero_points=torch.randint(0, 16, (3, groups), generator=random).to(torch.uint8),
        **more,
    )


def formats() -> dict[str, QuantizedWeight]:
    w, random = weight(), torch.Generator().manual_seed(2)
    order = torch.randint(0, 3, (70,), generator=random).to(torch.int32)
    smooth = torch.rand(70, generator=random) + 0.5
    made = {f"int{bits}-{size}": quantize_int(w, bits, size) for bits in range(2, 9) for size in (32, 35, 70)}
    made |= {
        f"int{bits}-{size}-symmetric": quantize_int(w, bits, size, symmetric=True)
        for bits in (2, 3, 4, 8)
        for size in (32, 35, 70)
    }
    made |= {f"nf4-{size}-{double}": quantize_nf4(w, size, double) for size in (32, 35, 64, 70) for double in (False, True)}
    made |= {f"int8-{per}": quantize_int8(w, per) for per in ("channel", "tensor")}
    made |= {f"fp8-{per}": quantize_fp8(w, per) for per in ("channel", "tensor")}
    made["w8a8-smooth"] = quantize_int8_w8a8(w, smooth=smooth)
    made |= {f"zero-points-{size}": with_zero_points(size) for size in (32, 35, 70)}
    made["zero-points-order"] = with_zero_points(32, group_of_column=order)
    made["zero-points-input-scales"] = with_zero_points(35, input_scales=smooth)
    made["int4-order"] = replace(quantize_int(w, 4, 32), group_of_column=order)
    return made


FORMATS = formats()


@pytest.mark.parametrize("name", FORMATS)
def test_product_in_few_bits_is_that_of_the_definition(name):
    q = FORMATS[name]
    x = weight(2, 70, seed=3)
    expected = torch.tensor(packed_values.product(x.tolist(), q), dtype=torch.float64)
    got = x.double() @ q.dequantize().double().T
    assert torch.allclose(got, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.parametrize("name", FORMATS)
def test_dequantized_is_each_code_at_its_scale(name):
    q = FORMATS[name]
    got = q.dequantize()
    expected = torch.tensor([[packed_values.value(q, n, k) for k in range(70)] for n in range(3)], dtype=torch.float64)
    assert got.dtype == torch.float32 and got.shape == q.shape and got.is_contiguous()
    assert torch.allclose(got.double(), expected, rtol=1e-6, atol=1e-6 * float(q.scales.abs().max()))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_alone_stand_for_the_same(name):
    q = FORMATS[name]
    part = q.rows(1, 3)
    assert part.shape == (2, 70) and torch.equal(part.dequantize(), q.dequantize()[1:])
    assert part.rows(1, 2).dequantize().equal(q.dequantize()[2:])


@pytest.mark.parametrize("name", FORMATS)
def test_dequantize_leaves_what_is_held_as_it_was(name):
    q = FORMATS[name]
    first = q.dequantize()
    kept = first.clone()
    first.zero_()
    assert torch.equal(q.dequantize(), kept)


@pytest.mark.parametrize(
    "q, bits",
    [
        (quantize_int(weight(8, 576), 4, 32), 4 + 32 / 32),
        (quantize_int(weight(8, 576), 4, 32, symmetric=True), 4 + 16 / 32),
        (quantize_int(weight(8, 576), 3, 64), 3 + 32 / 64),
        (quantize_int(weight(8, 576), 2, 576, symmetric=True), 2 + 16 / 576),
        (quantize_int8(weight(8, 576)), 8 + 16 / 576),
        (quantize_int8(weight(8, 576), "tensor"), 8 + 16 / (8 * 576)),
        (quantize_int8_w8a8(weight(8, 576), smooth=torch.ones(576)), 8 + 16 / 576 + 32 / 8),
        (quantize_fp8(weight(8, 576)), 8 + 16 / 576),
        (quantize_nf4(weight(8, 576), double=False), 4 + 32 / 64),
        (quantize_nf4(weight(256, 512)), 4 + 8 / 64 + 32 / (64 * 256) + 32 / (256 * 512)),
    ],
)
def test_bits_per_weight_count_all_that_is_held(q, bits):
    assert q.bits_per_weight == pytest.approx(bits, rel=1e-12)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 17, 69])
def test_a_weight_with_inf_or_nan_is_refused(bad, place):
    w = weight()
    w[1, place] = bad
    with pytest.raises(ValueError, match="1 values that are inf or NaN, of 210"):
        check_weight(w)


@pytest.mark.parametrize("shape", [(4,), (2, 3, 4), (0, 4), (4, 0)])
def test_what_is_not_a_matrix_is_refused(shape):
    with pytest.raises(ValueError, match="must be a matrix"):
        check_weight(torch.zeros(shape))


def test_a_weight_in_16_bits_is_taken_as_float32():
    assert check_weight(weight().bfloat16()).dtype == torch.float32
