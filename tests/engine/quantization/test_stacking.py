"""Stacked matrices have the rows they were stacked from."""

from dataclasses import replace

import pytest
import torch

from engine.quantization import packing
from engine.quantization.base import QuantizedWeight
from engine.quantization.stacking import concatenate


def made(
    rows: int, *, bits: int = 4, group: int = 8, zeros: bool = False, minima: bool = False, seed: int = 0
) -> QuantizedWeight:
    """A weight [rows, 24]; ``group`` 0: one scale for the matrix."""
    random = torch.Generator().manual_seed(seed * 100 + rows)
    shape = (rows, -(-24 // group)) if group else (1, 1)
    return QuantizedWeight(
        method=f"int{bits}",
        shape=(rows, 24),
        bits=bits,
        levels="affine",
        group_size=group,
        codes=packing.pack(torch.randint(0, 1 << bits, (rows, 24), generator=random), bits),
        scales=(torch.rand(shape, generator=random) + 0.1).half(),
        zero_points=torch.randint(0, 1 << bits, shape, generator=random).to(torch.uint8) if zeros else None,
        minima=torch.randn(shape, generator=random).half() if minima else None,
    )


def check(*weights: QuantizedWeight) -> QuantizedWeight:
    stacked = concatenate(weights)
    assert stacked is not None and stacked.shape == (sum(w.shape[0] for w in weights), 24)
    assert torch.equal(stacked.dequantize(), torch.cat([weight.dequantize() for weight in weights]))
    start = 0
    for weight in weights:
        rows = stacked.rows(start, start + weight.shape[0])
        assert torch.equal(rows.dequantize(), weight.dequantize())
        start += weight.shape[0]
    return stacked


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [0, 7, 8, 24])
def test_rows_stay_what_they_were(bits: int, group: int) -> None:
    check(*(made(rows, bits=bits, group=group) for rows in (6, 2, 3)))
    check(*(made(rows, bits=bits, group=group, zeros=True) for rows in (6, 2, 3)))
    check(*(made(rows, bits=bits, group=group, minima=True) for rows in (6, 2)))


def test_one_alone_is_itself() -> None:
    weight = made(4, group=0)
    assert concatenate([weight]) is weight


def test_symmetric_beside_asymmetric() -> None:
    assert check(made(4), made(3, zeros=True)).zero_points is not None
    assert check(made(4), made(3)).zero_points is None


def test_one_scale_for_the_matrix_beside_one_for_each_row() -> None:
    stacked = check(made(4, group=0), made(3, group=24))
    assert stacked.group_size == 24 and stacked.scales.shape == (7, 1)


def test_the_wider_dtype_of_scales() -> None:
    weight = made(4)
    assert check(made(3), replace(weight, scales=weight.scales.float() * 1.0001)).scales.dtype == torch.float32


def test_columns_out_of_order_and_scaled_inputs() -> None:
    order = torch.arange(24, dtype=torch.int32).flip(0) // 8
    inputs = torch.rand(24) + 0.5
    a, b = (replace(made(rows), group_of_column=order, input_scales=inputs.clone()) for rows in (4, 3))
    stacked = check(a, b)
    assert stacked.group_of_column is not None and torch.equal(stacked.group_of_column, order)
    assert concatenate([a, replace(b, group_of_column=order.flip(0))]) is None
    assert concatenate([a, replace(b, group_of_column=None)]) is None
    assert concatenate([a, replace(b, input_scales=inputs + 1)]) is None
    assert concatenate([replace(a, input_scales=None), b]) is None


def test_what_no_single_weight_can_stand_for() -> None:
    weight = made(4)
    for other in (
        made(3, bits=8),
        made(3, group=12),
        made(3, group=24),
        made(3, minima=True),
        replace(made(3), method="awq"),
        replace(made(3), activation_bits=8),
        replace(made(3), nested=object()),
    ):
        assert concatenate([weight, other]) is None
    static = replace(weight, activation_bits=8, activation_scale=0.5)
    assert concatenate([static, static]) is not None
    assert concatenate([static, replace(static, activation_scale=0.25)]) is None


def test_errors() -> None:
    with pytest.raises(ValueError, match="at least one matrix"):
        concatenate([])
    narrow = replace(made(4), shape=(4, 22), codes=made(4).codes[:, :11])
    with pytest.raises(ValueError, match=r"same in_features, got \[22, 24\]"):
        concatenate([made(4), narrow])
