import pytest
import torch

from engine.quantization import rounding


def test_groups_that_divide_the_width_are_a_view():
    w = torch.arange(24.0).view(2, 12)
    groups = rounding.grouped(w, 4)
    assert groups.shape == (2, 3, 4) and groups.data_ptr() == w.data_ptr()
    assert torch.equal(rounding.ungrouped(groups, 12), w)


def test_a_short_last_group_is_filled_up_with_its_own_last_value():
    w = torch.tensor([[5.0, -7.0, 1.0, 3.0, -2.0]])
    groups = rounding.grouped(w, 3)
    assert groups.tolist() == [[[5, -7, 1], [3, -2, -2]]]
    assert torch.equal(rounding.ungrouped(groups, 5), w)


def test_absolute_maximum_is_of_either_sign():
    assert rounding.absolute_maximum(torch.tensor([[1.0, -3.0], [2.0, 0.5], [0.0, 0.0], [-1.0, -2.0]])).tolist() == [3, 2, 0, 2]


@pytest.mark.parametrize(
    "scales, dtype",
    [
        ([1.0, 6e-5, 0.0, -3.0, 65504.0], torch.float16),
        ([2.0**-24], torch.float16),  # the least subnormal, held exactly
        ([1.0, 65520.0], torch.float32),  # would become inf
        ([1.0, 1.4e-6], torch.float32),  # a subnormal that would move by more than a part in 512
        ([1e-9], torch.float32),  # would become 0
        ([1e38, -1e38], torch.float32),
    ],
)
def test_scales_are_held_in_float16_where_it_can(scales, dtype):
    exact = torch.tensor(scales, dtype=torch.float64)
    stored = rounding.stored_scales(exact)
    assert stored.dtype == dtype and bool(torch.isfinite(stored).all())
    assert bool(((stored.double() - exact).abs() <= exact.abs() / 512).all())


@pytest.mark.parametrize(
    "minimum, scale, dtype", [(-7.0, 1.0, torch.float16), (1000.3, 1.0, torch.float32), (0.1, 0.0, torch.float32)]
)
def test_minima_are_held_in_float16_where_they_stay_within_an_eighth_of_a_step(minimum, scale, dtype):
    stored = rounding.stored_minima(torch.tensor([minimum], dtype=torch.float64), torch.tensor([scale], dtype=torch.float64))
    assert stored.dtype == dtype


def test_nearest_integer_breaks_ties_to_even_and_stays_in_range():
    groups = torch.tensor([[[0.5, 1.5, 2.5, -0.5, -1.5, 99.0, -99.0, 2.49]]])
    one = torch.ones(1, 1, dtype=torch.float16)
    assert rounding.nearest(groups, one, None, -8, 7).tolist() == [[[0, 2, 2, 0, -2, 7, -8, 2]]]
    assert rounding.nearest(groups, one * 0.5, one, 0, 15).tolist() == [[[0, 1, 3, 0, 0, 15, 0, 3]]]


@pytest.mark.parametrize("size", [0, -1, 1.0, "32", True, None])
def test_group_sizes_that_do_not_exist_are_refused(size):
    with pytest.raises(ValueError, match="1 column or more"):
        rounding.checked_group_size(size, 576)


@pytest.mark.parametrize("bits", [1, 9, 0, -4, 4.0, True, None, "int4"])
def test_bit_widths_that_do_not_exist_are_refused(bits):
    with pytest.raises(ValueError, match="2, 3, 4, 5, 6, 7 or 8 bits"):
        rounding.checked_bits(bits)


def test_weights_whose_differences_overflow_are_refused():
    edge = torch.tensor([[2.0**126, -(2.0**126)]])
    assert torch.equal(rounding.checked(edge), edge)
    with pytest.raises(ValueError, match="as large as"):
        rounding.checked(edge * 1.01)
