"""Quantised matrices of one input stacked into one (query, key and value; gate and up)."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.quantization.base import QuantizedWeight

_SAME = ("method", "bits", "levels", "activation_scale", "activation_bits")  # what no two stacked matrices may differ in
_TENSORS = ("group_of_column", "input_scales")


def concatenate(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """The matrices [N_i, K] one below the other: [sum of N_i, K], each row's values exactly as before.

    A scale for a whole matrix becomes one for each row, and a symmetric matrix gets zero points where another has some. None where no
    single ``QuantizedWeight`` can stand for them: methods, bits, levels, groups, the columns' order, input scales or the rounding of the
    inputs differ, only some have minima, or scales are held in another form (``nested``). ValueError for no matrices or different widths.
    """
    if not weights:
        raise ValueError("at least one matrix is needed, got none")
    widths = sorted({weight.shape[1] for weight in weights})
    if len(widths) > 1:
        raise ValueError(f"matrices that are stacked have the same in_features, got {widths}")
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(getattr(weight, name) != getattr(first, name) for weight in weights for name in _SAME):
        return None
    if any(not _equal(getattr(weight, name), getattr(first, name)) for weight in weights for name in _TENSORS):
        return None
    if any(weight.nested is not None or (weight.minima is None) != (first.minima is None) for weight in weights):
        return None
    sizes = {weight.group_size or weight.shape[1] for weight in weights}
    if len(sizes) > 1:
        return None
    with_zeros = any(weight.zero_points is not None for weight in weights)
    return replace(
        first,
        shape=(sum(weight.shape[0] for weight in weights), widths[0]),
        group_size=sizes.pop(),
        codes=torch.cat([weight.codes for weight in weights]),
        scales=_stacked(weights, [weight.scales for weight in weights]),
        zero_points=_stacked(weights, [_zero_points(weight) for weight in weights]) if with_zeros else None,
        minima=None
        if first.minima is None
        else _stacked(weights, [weight.minima for weight in weights if weight.minima is not None]),
    )


def _equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _zero_points(weight: QuantizedWeight) -> torch.Tensor:
    if weight.zero_points is not None:
        return weight.zero_points
    return torch.full(weight.scales.shape, 1 << (weight.bits - 1), dtype=torch.uint8)


def _stacked(weights: Sequence[QuantizedWeight], parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """For every row what it had; [1, 1] is written out. torch.cat takes the wider of two dtypes."""
    return torch.cat([part.expand(weight.shape[0], -1) for weight, part in zip(weights, parts)])
