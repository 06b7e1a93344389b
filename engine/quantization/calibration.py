"""What calibration sees of one linear layer's inputs: second moments, column statistics and a sample of the rows.

The output error of a changed weight follows from the second moments alone: for an error E [N, K] and inputs X [rows, K] with
H = 2 X^T X / rows, the mean over rows of ||E x||^2 is tr(E H E^T) / 2. So the methods search and compare with H, exactly and without
the inputs themselves.
"""

import numpy as np
import torch

from engine.quantization.base import Calibration

# Rows that wait until their product is added. Sums of this many products are taken in float32, the sum of the sums in ``dtype``:
# the update of the [K, K] sum costs as much as the product of a few rows, and the rounding error stays that of a short sum.
CHUNK_ROWS = 1024


class Collector:
    """Gathers a ``Calibration`` from batches of inputs. Holds one [K, K] sum, ``CHUNK_ROWS`` rows that wait and ``keep_rows`` that stay.

    The kept rows are a uniform sample without replacement, seeded; neither it nor the statistics depend on how the rows were cut into
    batches (the sums only in their last digits).
    """

    def __init__(self, columns: int, keep_rows: int = 128, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        """``columns``: K. ``dtype``: float64 or float32, of the sums and of the Hessian. ValueError for another dtype or a size below 1."""
        if columns < 1 or keep_rows < 1:
            raise ValueError(f"columns and keep_rows must be at least 1, got {columns} and {keep_rows}")
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"the sums are float32 or float64, got {dtype}")
        self.columns, self.keep_rows, self.rows = columns, keep_rows, 0
        self._products = torch.zeros(columns, columns, dtype=dtype)
        self._abs_sum = torch.zeros(columns, dtype=torch.float64)
        self._abs_max = torch.zeros(columns)
        self._waiting: list[torch.Tensor] = []
        self._random = np.random.default_rng(seed)
        self._kept = torch.empty(0, columns)
        self._keys = torch.empty(0, dtype=torch.float64)

    def add(self, x: torch.Tensor) -> None:
        """``x`` [T, K], any float dtype: T more rows of the layer's input. ValueError for another width, inf or NaN; nothing is then added."""
        if x.dim() != 2 or x.shape[1] != self.columns:
            raise ValueError(f"calibration inputs must be [rows, {self.columns}], got {list(x.shape)}")
        x = x.detach().to("cpu", torch.float32)
        if not x.shape[0]:
            return
        magnitude = x.abs()
        abs_max = magnitude.amax(0)
        if not bool(torch.isfinite(abs_max).all()):  # amax hands NaN on
            bad = int((~torch.isfinite(x)).sum())
            raise ValueError(f"the calibration inputs have {bad:,} values that are inf or NaN, of {x.numel():,}")
        self._abs_sum += magnitude.sum(0, dtype=torch.float64)
        self._abs_max = torch.maximum(self._abs_max, abs_max)
        self._sample(x)
        self.rows += x.shape[0]
        self._waiting.append(x.clone())  # the caller may write its buffer again
        if sum(rows.shape[0] for rows in self._waiting) >= CHUNK_ROWS:
            self._multiply()

    def finish(self) -> Calibration:
        """What was seen so far; more may be added after. ValueError before the first row, or where the inputs' squares overflow ``dtype``."""
        if not self.rows:
            raise ValueError("no calibration inputs were added")
        self._multiply()
        hessian = self._products * (2 / self.rows)
        if not bool(torch.isfinite(hessian).all()):
            raise ValueError(f"the squares of the calibration inputs overflow (largest input {float(self._abs_max.max()):g})")
        return Calibration(self.rows, self._kept.clone(), hessian, (self._abs_sum / self.rows).float(), self._abs_max.clone())

    def _multiply(self) -> None:
        if self._waiting:
            for rows in torch.cat(self._waiting).split(CHUNK_ROWS):
                self._products += rows.T @ rows
            self._waiting = []

    def _sample(self, x: torch.Tensor) -> None:
        """Every row draws a key; the rows with the smallest keys stay, in the order in which they came."""
        keys = torch.cat((self._keys, torch.from_numpy(self._random.random(x.shape[0]))))
        chosen = keys.argsort()[: self.keep_rows].sort().values
        old = int((chosen < len(self._keys)).sum())
        self._kept = torch.cat((self._kept[chosen[:old]], x[chosen[old:] - len(self._keys)]))
        self._keys = keys[chosen]


def check_calibration(calibration: Calibration, columns: int) -> None:
    """ValueError unless ``calibration`` is finite and of a layer with ``columns`` inputs, with a symmetric Hessian."""
    hessian = calibration.hessian
    if list(hessian.shape) != [columns, columns] or list(calibration.abs_mean.shape) != [columns]:
        raise ValueError(
            f"the weight has {columns} columns, the calibration is of a layer with {calibration.abs_mean.shape[0]} inputs "
            f"(Hessian {list(hessian.shape)})"
        )
    if list(calibration.abs_max.shape) != [columns]:
        raise ValueError(f"the weight has {columns} columns, abs_max has {calibration.abs_max.shape[0]}")
    if not all(bool(torch.isfinite(t).all()) for t in (hessian, calibration.abs_mean, calibration.abs_max)):
        raise ValueError("the calibration has values that are inf or NaN")
    if not torch.allclose(hessian, hessian.T, rtol=1e-4, atol=1e-5 * float(hessian.abs().max())):
        raise ValueError("the calibration's Hessian is not symmetric: it must be 2 X^T X / rows")


def output_error(error: torch.Tensor, calibration: Calibration) -> float:
    """Mean over the calibration rows of ||E x||^2, summed over outputs: tr(E H E^T) / 2, for ``error`` E [N, K] (weight minus its rounding)."""
    hessian = calibration.hessian.to(error.dtype)
    return 0.5 * float(((error @ hessian) * error).sum(dtype=torch.float64))


def output_error_by_columns(error: torch.Tensor, calibration: Calibration, order: torch.Tensor | None = None) -> torch.Tensor:
    """``output_error`` after 1, 2, ... K columns (taken in ``order``, int64 [K]; default 0, 1, ...), the others not rounded: float64 [K]."""
    error, hessian = error.double(), calibration.hessian.double()
    if order is not None:
        error, hessian = error[:, order], hessian[order][:, order]
    # the first i columns' error is the sum over a, b <= i of H_ab (E^T E)_ab: the corners of a cumulative sum over both axes
    return 0.5 * (hessian * (error.T @ error)).cumsum(0).cumsum(1).diagonal().clone()
