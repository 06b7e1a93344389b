"""What every weight method gives: a weight in few bits, and the way back to numbers.

Shapes: a weight is [N, K] = [out_features, in_features], as torch's linear has it. A *group* is a run of ``group_size``
columns of one row that share a scale; the last group of a row is shorter where the group does not divide K. G = ceil(K / group_size).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.quantization import levels, packing
from engine.quantization.catalogue import METHODS

__all__ = ["METHODS", "Calibration", "QuantizedWeight", "check_weight"]


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight [N, K] in few bits. ``dequantize()`` says what it stands for; ``bits_per_weight`` what it really takes.

    The value of a code is ``level(code) * scale + minimum`` for its row and group. ``levels``: "affine" (level(code) = code -
    zero_point, see below), "nf4" or "fp8_e4m3" (tables of ``engine.quantization.levels``).

    An affine code's zero point is an integer where ``zero_points`` has one; without ``zero_points`` and ``minima`` it is the middle
    code 2**(bits - 1) (symmetric); with ``minima`` it is 0 and the minimum is added (asymmetric, as GGUF's Q4_1 and torch's int4 kernel).
    """

    method: str  # one of METHODS
    shape: tuple[int, int]  # (N, K)
    bits: int  # of a code
    levels: str  # "affine" | "nf4" | "fp8_e4m3"
    group_size: int  # columns that share a scale; K: one scale a row; 0: one scale for the whole matrix
    codes: torch.Tensor  # uint8 [N, ceil(K * bits / 8)], see packing
    scales: torch.Tensor  # float16 (float32 where float16 cannot hold them) [N, G]; [1, 1] for the whole matrix
    zero_points: torch.Tensor | None = None  # uint8, shaped as scales
    minima: torch.Tensor | None = None  # float16 or float32, shaped as scales
    nested: Any = None  # NF4's double quantisation: what the scales are held in instead (see nf4); ``scales`` is then derived
    group_of_column: torch.Tensor | None = None  # int32 [K]: each column's group where they are not in order (GPTQ's act order)
    input_scales: torch.Tensor | None = None  # float32 [K]: the codes stand for W * input_scales (AWQ, SmoothQuant)
    activation_scale: float | None = None  # W8A8 with static activations: the input is rounded to int8 at this scale
    activation_bits: int | None = None  # 8: W8A8, the input is rounded too

    def unpacked(self) -> torch.Tensor:
        """The codes, uint8 [N, K]."""
        return packing.unpack(self.codes, self.bits, self.shape[1])

    def dequantize(self) -> torch.Tensor:
        """What the weight has become: float32 [N, K], in the units of the original (``input_scales`` divided out)."""
        of_group: Callable[[Any], Any] = self.per_column
        shape: tuple[int, ...] = self.shape
        if self._groups_are_even():  # then a scale meets its group in a view, and no [N, K] copy of the scales is made
            of_group, shape = _beside_columns, (self.shape[0], -1, self.group_size)
        zero_points = 0 if self.zero_points is None and self.minima is not None else of_group(self.zero_points)
        if self.levels == "nf4" and zero_points is None and self.shape[1] % 2 == 0:
            weight = levels.nf4_pairs(self.codes).view(shape)
        else:
            weight = levels.values(self.unpacked().view(shape), self.levels, self.bits, zero_points)
        weight.mul_(of_group(self.scales).float())
        if self.minima is not None:
            weight.add_(of_group(self.minima).float())
        weight = weight.view(self.shape)
        return weight if self.input_scales is None else weight.div_(self.input_scales)

    def _groups_are_even(self) -> bool:
        """Whether each row is several whole groups, one after another."""
        return self.group_of_column is None and self.scales.shape[1] > 1 and self.shape[1] % self.group_size == 0

    def per_column(self, of_groups: Any) -> Any:
        """What is held for each group [N or 1, G], for each column: [N or 1, K] (or [N or 1, 1] where one serves the row). None: None."""
        if of_groups is None or of_groups.shape[1] == 1:
            return of_groups
        if self.group_of_column is not None:
            return of_groups[:, self.group_of_column.long()]
        return of_groups.repeat_interleave(self.group_size, 1)[:, : self.shape[1]]

    def rows(self, start: int, stop: int) -> "QuantizedWeight":
        """The rows ``start .. stop - 1`` alone (one of the matrices that were stacked)."""

        def cut(t: Any) -> Any:
            return t if t is None or t.shape[0] == 1 else t[start:stop]

        return replace(
            self,
            shape=(stop - start, self.shape[1]),
            codes=self.codes[start:stop],
            scales=cut(self.scales),
            zero_points=cut(self.zero_points),
            minima=cut(self.minima),
            nested=None if self.nested is None else self.nested.rows(start, stop, self.shape),
        )

    def to(self, device: torch.device) -> "QuantizedWeight":
        """The same on another device."""
        names = ("codes", "scales", "zero_points", "minima", "group_of_column", "input_scales")
        moved: dict[str, Any] = {name: None if (t := getattr(self, name)) is None else t.to(device) for name in names}
        return replace(self, **moved)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held: codes, scales, zeros, order, input scales."""
        scales = [self.scales] if self.nested is None else self.nested.tensors()
        held = [self.codes, *scales, self.zero_points, self.minima, self.group_of_column, self.input_scales]
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    @property
    def bits_per_weight(self) -> float:
        """Bits truly used for a weight, scales and all else counted."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])


def _beside_columns(of_groups: Any) -> Any:
    """What is held for each group [N, G], to broadcast against the columns of each: [N, G, 1]. None: None."""
    return None if of_groups is None else of_groups[:, :, None]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What calibration saw of the inputs of one linear layer. Float32 but for the Hessian.

    ``hessian``: 2 X^T X / rows, float64 or float32 [K, K] (GPTQ, arXiv 2210.17323, section 3); ``inputs``: some of the rows, [R, K];
    ``abs_mean`` and ``abs_max``: of each column over all rows, [K].
    """

    rows: int
    inputs: torch.Tensor
    hessian: torch.Tensor
    abs_mean: torch.Tensor
    abs_max: torch.Tensor


def check_weight(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` as float32 [N, K]. ValueError for another rank, an empty matrix, inf or NaN."""
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(f"a weight must be a matrix [out_features, in_features], got shape {list(weight.shape)}")
    weight = weight.float()
    low, high = torch.aminmax(weight)  # NaN comes through
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = int((~torch.isfinite(weight)).sum())
        raise ValueError(f"the weight has {bad:,} values that are inf or NaN, of {weight.numel():,}: it cannot be quantised")
    return weight
