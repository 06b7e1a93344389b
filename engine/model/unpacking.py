"""When weights in few bits are unpacked for steps of many rows, and how long the unpacked copies are kept."""

from collections.abc import Callable

import torch

from engine.hardware.device import has_native_bf16
from engine.model.linear import Linear, LinearBackend

# Rows up to which torch's packed products are faster than the other way. Measured: 5 to 8 with AVX512, about 10 with AMX.
_FEW = 4
_FEW_NATIVE = 8


class Unpacking:
    """Whether layers keep what they unpacked for steps of many rows. One for all layers of a model.

    A prompt comes once: its layers unpack one after another, and let go. When such steps follow one another (many requests decode), the
    copies stay, and go when steps have been small for a while.
    """

    KEEP_AFTER = 3  # steps of many rows one after another
    DROP_AFTER = 64  # steps of few rows one after another

    def __init__(self, few: int) -> None:
        self.few = few
        self.keep = False
        self._streak = 0  # > 0: steps of many rows, < 0: of few

    def step(self, rows: int) -> None:
        """A forward pass of ``rows`` rows begins."""
        if rows > self.few:
            self._streak = max(self._streak, 0) + 1
            self.keep = self.keep or self._streak >= self.KEEP_AFTER
        else:
            self._streak = min(self._streak, 0) - 1
            self.keep = self.keep and self._streak > -self.DROP_AFTER


class UnpackedCopy:
    """The unpacked copy of one weight, while ``Unpacking`` wants it kept."""

    def __init__(self, unpacking: Unpacking, backend: LinearBackend) -> None:
        self.unpacking, self.backend = unpacking, backend
        self._linear: Linear | None = None

    def kept(self, unpacked: Callable[[], torch.Tensor], bias: torch.Tensor | None) -> Linear | None:
        """For a product of many rows; None: it is not to be kept, or no longer."""
        if not self.unpacking.keep:
            self._linear = None
            return None
        linear = self._linear  # once: a study in another thread may let it go
        if linear is None:
            linear = self._linear = self.backend.pack(unpacked(), bias)
        return linear

    def nbytes(self, shape: tuple[int, int]) -> int:
        return 0 if self._linear is None else shape[0] * shape[1] * self.backend.dtype.itemsize


def create_unpacking(device: torch.device) -> Unpacking:
    return Unpacking(_FEW_NATIVE if has_native_bf16(device) else _FEW)
