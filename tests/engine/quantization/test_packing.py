import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.quantization.packing import pack, packed_width, unpack


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_code_comes_back_at_every_place_in_a_byte(bits):
    codes = torch.arange(1 << bits, dtype=torch.uint8)
    for shift in range(8):
        row = torch.cat((torch.zeros(shift, dtype=torch.uint8), codes, codes.flip(0)))[None]
        assert torch.equal(unpack(pack(row, bits), bits, row.shape[1]), row)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 8), st.integers(1, 4), st.integers(1, 21))
def test_packed_is_a_little_endian_stream_of_bits_and_comes_back(data, bits, rows, columns):
    codes = data.draw(
        st.lists(st.lists(st.integers(0, (1 << bits) - 1), min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    )
    packed = pack(torch.tensor(codes), bits)
    width = -(-columns * bits // 8)
    expected = [list(sum(c << (j * bits) for j, c in enumerate(row)).to_bytes(width, "little")) for row in codes]
    assert packed.dtype == torch.uint8 and packed.tolist() == expected and packed_width(columns, bits) == width
    assert unpack(packed, bits, columns).tolist() == codes


def test_a_slice_of_packed_rows_comes_back():
    codes = torch.randint(0, 8, (7, 13), generator=torch.Generator().manual_seed(0))
    assert unpack(pack(codes, 3)[2:5], 3, 13).tolist() == codes[2:5].tolist()


@pytest.mark.parametrize("bits", [0, 9, -1, 4.0, None])
def test_other_widths_of_a_code_are_refused(bits):
    with pytest.raises(ValueError, match="1 to 8 bits"):
        pack(torch.zeros(1, 8, dtype=torch.uint8), bits)
    with pytest.raises(ValueError, match="1 to 8 bits"):
        unpack(torch.zeros(1, 8, dtype=torch.uint8), bits, 8)


@pytest.mark.parametrize("code", [-1, 16, 300])
def test_a_code_out_of_range_is_refused(code):
    with pytest.raises(ValueError, match=r"lie in \[0, 15\]"):
        pack(torch.tensor([[0, code]]), 4)


def test_packed_codes_of_another_shape_or_dtype_are_refused():
    packed = pack(torch.zeros(2, 10, dtype=torch.uint8), 4)
    with pytest.raises(ValueError, match=r"take uint8 \[N, 6\]"):
        unpack(packed, 4, 11)
    with pytest.raises(ValueError, match=r"int32"):
        unpack(packed.int(), 4, 10)
