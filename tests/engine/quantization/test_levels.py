import pytest
import torch

from engine.quantization import levels
from tests.engine.quantization import packed_values


def test_nf4_is_the_published_table_to_the_last_digit():
    assert levels.NF4.dtype == torch.float32 and levels.NF4.tolist() == packed_values.NF4


def test_nf4_is_made_of_normal_quantiles():
    assert levels.normal_float_levels().tolist() == levels.NF4.tolist()  # every bit of it
    exact = levels.normal_float_levels(dtype=torch.float64)
    assert (exact - levels.NF4.double()).abs().max() < 1.3e-7


@pytest.mark.parametrize("bits", range(2, 9))
def test_normal_float_levels_ascend_with_an_exact_zero_and_one_more_above_it(bits):
    table = levels.normal_float_levels(bits)
    assert len(table) == 2**bits and bool((table.diff() > 0).all())
    assert table[0] == -1 and table[-1] == 1 and (table == 0).sum() == 1 and (table > 0).sum() == 2 ** (bits - 1)


def test_normal_float_of_one_bit_is_refused():
    with pytest.raises(ValueError, match="2 to 8 bits"):
        levels.normal_float_levels(1)


def test_fp8_table_is_the_formats_definition():
    expected = [packed_values.e4m3(code) for code in range(256)]
    codes = torch.arange(256, dtype=torch.uint8)
    for table in (levels.FP8_E4M3, levels.values(codes, "fp8_e4m3", 8)):
        assert [repr(v) for v in table.tolist()] == [repr(v) for v in expected]
    assert max(v for v in expected if v == v) == levels.FP8_E4M3_MAX


def test_affine_levels_are_codes_about_a_zero_point():
    codes = torch.tensor([[0, 5, 15]], dtype=torch.uint8)
    assert levels.values(codes, "affine", 4).tolist() == [[-8, -3, 7]]
    assert levels.values(codes, "affine", 4, 0).tolist() == [[0, 5, 15]]
    assert levels.values(codes, "affine", 4, torch.tensor([[0, 7, 15]], dtype=torch.uint8)).tolist() == [[0, -2, 0]]


@pytest.mark.parametrize("name, bits", [("affine", 8), ("nf4", 4), ("fp8_e4m3", 8)])
def test_values_are_new_and_codes_stay(name, bits):
    codes = torch.full((2, 6), 9, dtype=torch.uint8)
    first = levels.values(codes[:, ::2], name, bits)
    assert first.shape == (2, 3) and first.dtype == torch.float32
    first.fill_(7.0)
    assert bool((codes == 9).all()) and bool((levels.values(codes, name, bits) != 7).all())


def test_unknown_levels_wrong_bits_and_zero_points_of_a_table_are_refused():
    codes = torch.zeros(1, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="affine, nf4, fp8_e4m3, got 'fp4'"):
        levels.values(codes, "fp4", 4)
    with pytest.raises(ValueError, match="nf4 has codes of 4 bits, got 3"):
        levels.values(codes, "nf4", 3)
    with pytest.raises(ValueError, match="no zero points"):
        levels.values(codes, "nf4", 4, torch.zeros(1, 1))
