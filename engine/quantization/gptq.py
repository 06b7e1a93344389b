"""GPTQ: rounds a weight column by column and lets the columns not yet rounded make up for the error (arXiv 2210.17323, section 3).

For inputs X the layer's output error is tr(E H E^T) / 2 with H = 2 X^T X / rows and E the change of the weight. When column i is fixed at
its rounded value, the change of the columns after it that makes this error least is -(w_i - q_i) / [H^-1]_ii * [H^-1]_i,: (optimal brain
surgeon, equation 2), with the inverse of H over the columns that are left. All these inverses are in one factor: H^-1 = U^T U, U upper
triangular, and row i of U is [H^-1]_i,: / sqrt([H^-1]_ii) for the columns from i on (section 3, step 3).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.quantization import packing, rounding
from engine.quantization.base import Calibration, QuantizedWeight
from engine.quantization.calibration import check_calibration
from engine.quantization.intn import Grid, grid

# What the damping is raised to, one after another, while H is not positive definite: shares of its mean diagonal.
RAISED_DAMPING = (0.01, 0.1, 1.0)


@dataclass(frozen=True, slots=True)
class GptqTrace:
    """One matrix's rounding, column by column. "Step i" is the i-th column rounded, ``order[i]`` its place in the weight."""

    quantized: QuantizedWeight
    weight: torch.Tensor  # float32 [N, K]: what was rounded: the original, its dead columns set to 0
    order: torch.Tensor  # int64 [K]
    damping: float  # as used: more than was asked for where the Hessian was not positive definite
    errors: torch.Tensor  # float32 [K, N]: of each step (w - q) / U_ii, the weight as compensated so far minus its rounding
    factor: torch.Tensor  # float64 [K, K]: U, in the order of the steps

    def rounding_errors(self) -> torch.Tensor:
        """||w - q|| over the rows, of each step: float64 [K]."""
        return self.errors.double().norm(dim=1) * self.factor.diagonal()

    def compensations(self) -> torch.Tensor:
        """[i, j]: by how much (the norm over rows) step i moved the column ``order[j]``, for j > i, else 0: float64 [K, K]."""
        return self.errors.double().norm(dim=1)[:, None] * self.factor.abs().triu(1)

    def output_errors(self, calibration: Calibration) -> torch.Tensor:
        """``output_error`` of the whole weight after each step, the columns not yet rounded as compensated: float64 [K].

        After i steps E is the sum over a <= i of errors_a U_a, so tr(E H E^T) is a sum over pairs of steps, cumulative over both.
        """
        hessian = calibration.hessian.double()[self.order][:, self.order]
        steps = (self.factor @ hessian @ self.factor.T) * (self.errors @ self.errors.T).double()
        return 0.5 * steps.cumsum(0).cumsum(1).diagonal().clone()

    def weights_after(self, steps: int) -> torch.Tensor:
        """The weight float32 [N, K] after so many steps: some columns rounded, the others as compensated. ValueError outside 0 to K."""
        if not 0 <= steps <= len(self.order):
            raise ValueError(f"there are 0 to {len(self.order)} steps, got {steps}")
        moved = torch.empty_like(self.weight)
        moved[:, self.order] = self.errors[:steps].T @ self.factor[:steps].float()
        return self.weight - moved


def quantize_gptq(
    weight: torch.Tensor,
    calibration: Calibration,
    bits: int = 4,
    group_size: int = 64,
    symmetric: bool = False,
    damping: float = 0.01,
    act_order: bool = False,
    static_groups: bool = False,
    block_columns: int = 128,
) -> QuantizedWeight:
    """``weight`` [N, K] (any float dtype) rounded so that the output error on the calibration inputs is small.

    The grid of a group is ``quantize_int``'s for its columns as compensated when the first of them is rounded; the last group is shorter
    where the group does not divide K. ``damping``: this share of H's mean diagonal is added to its diagonal; where H is not positive
    definite with it, 0.01, 0.1 and 1 are tried in turn. A dead column (H_ii = 0: its input was always 0) is set to 0 before rounding, as
    the paper's code does: its weight changes no output on the calibration inputs and would only widen its group's range.

    ``act_order``: columns in descending order of H_ii. Groups are then runs of columns in that order, and ``group_of_column`` says which
    (a running layer needs that gather). ``static_groups``: they are runs of columns as they stand, in either order, on ``quantize_int``'s
    grids of the original weight. On those the output error stays below plain rounding's in practice; on grids found on the way usually, but
    compensation widens the range of the columns that come late, which at 2 bits can cost more than was won.
    ``block_columns``: the columns whose compensation of those after them is put off and done by one product; any number gives the
    same codes, up to near ties. Float32 but for the factor.

    ValueError: inf or NaN, a calibration of another width, bits not 2 to 8, a group or block below 1, a negative damping, a Hessian that is
    not positive definite even with damping 1.
    """
    return gptq_trace(
        weight, calibration, bits, group_size, symmetric, damping, act_order, static_groups, block_columns
    ).quantized


def gptq_trace(
    weight: torch.Tensor,
    calibration: Calibration,
    bits: int = 4,
    group_size: int = 64,
    symmetric: bool = False,
    damping: float = 0.01,
    act_order: bool = False,
    static_groups: bool = False,
    block_columns: int = 128,
) -> GptqTrace:
    """``quantize_gptq`` with all that happened on the way. Takes and raises the same."""
    weight = rounding.checked(weight)
    rows, columns = weight.shape
    check_calibration(calibration, columns)
    rounding.checked_bits(bits)
    size = rounding.checked_group_size(group_size, columns)
    if block_columns < 1 or not 0 <= damping < float("inf"):
        raise ValueError(f"block_columns must be at least 1 and damping at least 0, got {block_columns!r} and {damping!r}")

    diagonal = calibration.hessian.diagonal()
    natural = torch.arange(columns)
    order = diagonal.argsort(descending=True, stable=True) if act_order else natural
    weight = torch.where(diagonal == 0, 0.0, weight)
    factor, damping = inverse_factor(calibration.hessian[order][:, order], damping)

    groups = order // size if static_groups else natural // size  # the group of each step's column
    fixed = grid(rounding.grouped(weight, size), bits, symmetric) if static_groups else None
    sweep = _Sweep(weight.T[order].contiguous(), factor.float(), groups, fixed)
    of_groups = sweep.run(bits, size, symmetric, block_columns)
    if not bool(torch.isfinite(sweep.errors).all()):
        raise ValueError(
            f"the compensated weights overflow with damping {damping:g}: the Hessian is too ill-conditioned, raise the damping"
        )

    codes = torch.empty(rows, columns, dtype=torch.uint8)
    codes[:, order] = sweep.codes.T
    group_of_column = None
    if act_order and not static_groups:
        group_of_column = torch.empty(columns, dtype=torch.int32)
        group_of_column[order] = groups.int()
    quantized = QuantizedWeight(
        method="gptq",
        shape=(rows, columns),
        bits=bits,
        levels="affine",
        group_size=size,
        codes=packing.pack(codes, bits),
        scales=of_groups.scales,
        minima=of_groups.minima,
        group_of_column=group_of_column,
    )
    return GptqTrace(quantized, weight, order, damping, sweep.errors, factor)


def inverse_factor(hessian: torch.Tensor, damping: float) -> tuple[torch.Tensor, float]:
    """U float64 [K, K], upper triangular with U^T U = (H + damping * mean(diagonal) * I)^-1, and the damping used.

    H = R R^T with R upper triangular (a Cholesky factor taken from the last column to the first), and U = R^-1: no inverse is
    ever formed and factored anew. Dead columns stay out of the mean and get it as their diagonal (alone in their row and column, any
    positive number would do). Where a pivot is not positive, or is lost in rounding, ``RAISED_DAMPING`` is tried; ValueError in the end.
    """
    hessian = hessian.double()
    diagonal = hessian.diagonal()
    live = diagonal != 0
    mean = float(diagonal[live].mean()) if bool(live.any()) else 1.0
    if mean <= 0:
        raise ValueError(f"the Hessian is not positive definite: its mean diagonal is {mean:g}")
    base = hessian + torch.diag(torch.where(live, 0.0, mean))
    tried = [damping, *(d for d in RAISED_DAMPING if d > damping)]
    for share in tried:
        damped = base + torch.diag(torch.full_like(diagonal, share * mean))
        lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
        noise = len(diagonal) * torch.finfo(torch.float64).eps * float(damped.diagonal().max())
        if not int(failed) and float(lower.diagonal().square().min()) > noise:
            identity = torch.eye(len(diagonal), dtype=torch.float64)
            return torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True), share
    raise ValueError(
        f"the Hessian is not positive definite with {', '.join(f'{d:g}' for d in tried)} times its mean diagonal added: "
        "it must be 2 X^T X / rows"
    )


class _Sweep:
    """The pass over the columns, in the order of the steps. Transposed, so that a column lies in memory as one run."""

    def __init__(self, weight: torch.Tensor, factor: torch.Tensor, groups: torch.Tensor, fixed: Grid | None) -> None:
        """``weight`` [K, N], changed in place; ``factor`` U [K, K]; ``groups`` int64 [K]; ``fixed``: the grids, None: found on the way."""
        self.weight, self.factor, self.groups, self.fixed = weight, factor, groups.tolist(), fixed
        self.codes = torch.empty(weight.shape, dtype=torch.uint8)
        self.errors = torch.empty_like(weight)

    def run(self, bits: int, size: int, symmetric: bool, block_columns: int) -> Grid:
        """Fills ``codes`` and ``errors``; returns the grids [N, G]."""
        middle = 1 << (bits - 1) if symmetric else 0
        found: list[Grid] = [] if self.fixed is None else [_column(self.fixed, g) for g in range(self.fixed.scales.shape[1])]
        for start, stop in _blocks(len(self.groups), size, block_columns):
            for i in range(start, stop):
                if self.groups[i] == len(found):  # its first column: all its columns are up to date, see _blocks
                    found.append(grid(self.weight[i : i + size].T[:, None, :], bits, symmetric))
                self._round(i, stop, found[self.groups[i]], middle)
            # what was put off: one product for all columns after the block (section 3, step 2)
            self.weight[stop:].addmm_(self.factor[start:stop, stop:].T, self.errors[start:stop], alpha=-1)
        if self.fixed is not None:
            return self.fixed
        minima = None if symmetric else torch.cat([g.minima for g in found if g.minima is not None], 1)
        return Grid(bits, torch.cat([g.scales for g in found], 1), minima)  # float32 where one group needs it

    def _round(self, i: int, stop: int, of_group: Grid, middle: int) -> None:
        column = self.weight[i]
        codes = of_group.codes(column[:, None, None])[:, 0, 0]
        value = codes * of_group.scales[:, 0].float()
        if of_group.minima is not None:
            value += of_group.minima[:, 0].float()
        self.codes[i] = codes + middle
        error = torch.div(column - value, self.factor[i, i], out=self.errors[i])
        self.weight[i:stop].addr_(self.factor[i, i:stop], error, alpha=-1)


def _column(of_groups: Grid, g: int) -> Grid:
    minima = of_groups.minima
    return Grid(of_groups.bits, of_groups.scales[:, g : g + 1], None if minima is None else minima[:, g : g + 1])


def _blocks(columns: int, size: int, block_columns: int) -> Iterator[tuple[int, int]]:
    """Blocks of about ``block_columns``: whole groups, or parts of one. A group starts with its block or lies within it, so its grid is
    found when nothing is put off for any of its columns."""
    span = size * max(1, block_columns // size)
    step = span if size <= block_columns else block_columns
    for first in range(0, columns, span):
        last = min(first + span, columns)
        for start in range(first, last, step):
            yield start, min(start + step, last)
