"""The codecs of K and V against float64, one group at a time, and their bounds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.hardware.cost import SCALE_BYTES, VALUE_GROUP
from engine.quantization import kv
from tests.engine.quantization import naive_kv

ROWS = {"int8": (kv.quantize_int8, kv.dequantize_int8), "fp8": (kv.quantize_fp8, kv.dequantize_fp8)}


def tensors(*shape: int) -> st.SearchStrategy[torch.Tensor]:
    """Random numbers of very different sizes, some rows with an outlier, some of zeros."""

    def make(seed: int, exponent: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(*shape, generator=generator) * 10.0**exponent
        x[..., 0] *= torch.randint(0, 2, shape[:-1], generator=generator) * 30 + 1
        return x * torch.randint(0, 5, (*shape[:-1], 1), generator=generator).clamp(max=1)

    return st.builds(make, st.integers(0, 1 << 30), st.integers(-8, 3))


def half_ulp(x: torch.Tensor) -> torch.Tensor:
    """Of a bfloat16: half the distance to the next."""
    return x.abs().float() * 2.0**-8


@settings(max_examples=60, deadline=None)
@given(x=tensors(3, 2, 8), name=st.sampled_from(["int8", "fp8"]))
def test_a_vector_has_one_scale(x, name):
    there, back = ROWS[name]
    codes, scales = there(x)
    assert codes.element_size() == 1 and codes.shape == x.shape and scales.shape == (3, 2, 1) and scales.dtype == torch.bfloat16
    got = back(codes, scales, torch.float32)
    for row, out in zip(x.view(-1, 8), got.view(-1, 8), strict=True):
        np.testing.assert_allclose(out.numpy(), getattr(naive_kv, name)(row.double().numpy()), rtol=1e-6, atol=0)


@settings(max_examples=60, deadline=None)
@given(x=tensors(4, 3, 8))
def test_eight_bits_are_off_by_half_a_step(x):
    codes, scales = kv.quantize_int8(x)
    error = (kv.dequantize_int8(codes, scales, torch.float32) - x).abs()
    assert (error <= 0.5001 * scales.float()).all()
    codes, scales = kv.quantize_fp8(x)
    x = x.clamp(-57_344, 57_344)  # where it saturates
    error = (kv.dequantize_fp8(codes, scales, torch.float32) - x).abs()
    assert (error <= torch.maximum(x.abs() / 16, scales.float() * 2.0**-10) * 1.0001).all()
    assert (kv.quantize_int8(torch.zeros(2, 8))[0] == 0).all()


@settings(max_examples=60, deadline=None)
@given(x=tensors(5, 2, 6))
def test_keys_have_a_group_for_each_channel(x):
    codes, affine = kv.quantize_keys_int4(x)
    assert codes.shape == (5, 2, 3) and affine.shape == (2, 2, 6) and affine.dtype == torch.bfloat16
    got = kv.dequantize_keys_int4(codes, affine, out=torch.empty_like(x))
    bound = 0.5001 * affine[0].float() + half_ulp(affine[1])
    assert ((got - x).abs() <= bound + 1e-30).all()
    close(got, naive_kv.keys_int4(x.double().numpy()), affine[0].float())


@settings(max_examples=40, deadline=None)
@given(data=st.data(), dim=st.sampled_from([6, 32, 64]))
def test_values_have_groups_of_channels(data, dim):
    x = data.draw(tensors(3, 2, dim))
    codes, affine = kv.quantize_values_int4(x)
    groups = {6: 1, 32: 1, 64: 2}[dim]
    assert codes.shape == (3, 2, dim // 2) and affine.shape == (3, 2, 2, groups)
    got = kv.dequantize_values_int4(codes, affine, out=torch.empty_like(x))
    scales, minima = affine.repeat_interleave(dim // groups, -1).unbind(1)
    assert ((got - x).abs() <= 0.5001 * scales.float() + half_ulp(minima) + 1e-30).all()
    close(got, naive_kv.values_int4(x.double().numpy()), scales.float())


def close(got: torch.Tensor, want: np.ndarray, scales: torch.Tensor) -> None:
    """Equal but for float32's own rounding, which next to a minimum may be large against a scale, never against a step."""
    assert (np.abs(got.double().numpy() - want) <= 1e-6 * np.abs(want) + 1e-5 * scales.double().numpy()).all()


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_number_is_rounded_once(name, dtype):
    codes, scales = ROWS[name][0](torch.randn(50, 4, 16))
    values = codes.float() if name == "int8" else codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(ROWS[name][1](codes, scales, dtype), (values * scales.float()).to(dtype))


def test_all_fp8_codes_are_read_as_torch_reads_them():
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    finite = numbers.isfinite()
    assert int(finite.sum()) == 254
    for dtype in (torch.bfloat16, torch.float32):
        for scale in (1.0, 2.0**-90, 128.0):
            got = kv.dequantize_fp8(codes, torch.tensor([scale], dtype=torch.bfloat16), dtype)
            assert torch.equal(got[finite].float(), numbers[finite] * scale)
    assert torch.equal(kv.to_fp8(numbers[finite]).view(torch.float8_e4m3fn).float(), numbers[finite])


def test_fp8_saturates_and_is_never_nan():
    huge = torch.tensor([1e4, 448.0, 449.0, 480.0, 1e38, float("inf"), -500.0, -float("inf")])
    got = kv.to_fp8(huge).view(torch.float8_e4m3fn).float()
    assert got.tolist() == [448.0] * 6 + [-448.0] * 2
    x = torch.stack((huge, torch.full((8,), 1e38), torch.full((8,), float("-inf")), torch.zeros(8)))
    out = kv.dequantize_fp8(*kv.quantize_fp8(x), torch.bfloat16)
    assert out.isfinite().all() and float(out.abs().max()) == 448 * 128 and (out[3] == 0).all()


@pytest.mark.parametrize("name", [*ROWS, "int4"])
def test_what_is_nan_stays_nan_and_zeros_stay_zeros(name):
    x = torch.randn(4, 2, 8)
    x[1, 0, 3], x[2] = float("nan"), 0.0
    if name == "int4":
        v = kv.dequantize_values_int4(*kv.quantize_values_int4(x), out=torch.empty_like(x))
        k = kv.dequantize_keys_int4(*kv.quantize_keys_int4(x), out=torch.empty_like(x))
        assert k[:, 0, 3].isnan().all() and int(k.isnan().sum()) == 4
        constant = torch.full((4, 2, 8), 3.5)
        assert torch.equal(kv.dequantize_keys_int4(*kv.quantize_keys_int4(constant), out=torch.empty_like(x)), constant)
    else:
        v = ROWS[name][1](*ROWS[name][0](x), torch.float32)
    assert v[1, 0].isnan().all() and int(v.isnan().sum()) == 8 and (v[2] == 0).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), dim=st.sampled_from([2, 6, 64]))
def test_four_bits_pack_all_codes(seed, dim):
    codes = torch.randint(0, 16, (3, 2, dim), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed = kv.pack4(codes)
    assert packed.shape == (3, 2, dim // 2) and torch.equal(kv.unpack4(packed), codes)
    assert torch.equal(packed & 15, codes[..., ::2])


def test_the_arithmetic_of_hardware_knows_these_numbers():
    assert (kv.SCALE_DTYPE.itemsize, kv.VALUE_GROUP) == (SCALE_BYTES, VALUE_GROUP)
