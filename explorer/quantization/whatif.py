"""One matrix under any method, without an engine: from what MatrixObserved carries. Torch is imported when the first is looked at.

Shapes: N output channels, K input channels, R rows of inputs, G groups a row.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from engine.events.types import MatrixObserved
from explorer.i18n import _
from explorer.quantization.labels import TITLES

LEVELS = ("int", "nf4", "fp8")  # kinds of grids
BITS = (2, 3, 4, 5, 6, 7, 8)
ROW = 0  # as a group size: the whole row
GROUP_SIZES = (16, 32, 64, 128, 192, 576, ROW)
MOST = 4_000_000  # weights that are looked at; of a larger matrix evenly spaced output channels
BINS = 121  # of the normalised weights: odd, and 120 divides by 15, so that each of 16 even levels has a bin of its own
ERROR_BINS, SCALE_BINS = 81, 48
REACH = 1 + 1 / (BINS - 1)  # the outermost bins have their middle on -1 and 1
LIVE_BITS = {2: "int2", 3: "int3", 4: "int4"}


@dataclass(frozen=True)
class How:
    """A grid to try: ``levels`` one of LEVELS; bits and symmetry count for "int" only."""

    levels: str = "int"
    bits: int = 4
    group_size: int = 32  # ROW: one scale a row
    symmetric: bool = False

    @property
    def label(self) -> str:
        group = _("whole rows") if self.group_size == ROW else _("groups of {n}").format(n=self.group_size)
        if self.levels == "fp8":
            return TITLES["fp8"]
        if self.levels == "nf4":
            return f"NF4, {group}"
        return f"int{self.bits}, {group}, " + (_("symmetric") if self.symmetric else _("asymmetric"))

    @property
    def code_bits(self) -> int:
        return {"nf4": 4, "fp8": 8}.get(self.levels, self.bits)

    @property
    def about_zero(self) -> bool:
        """Whether the grid has its middle at 0."""
        return self.levels != "int" or self.symmetric


# What every matrix is compared under. The first is the grid of a GGUF file's Q4_1.
COMPARED = (
    How("int", 4, 32), How("int", 4, 32, True), How("nf4", 4, 32), How("nf4", 4, 64), How("int", 4, 128), How("int", 3, 32), How("int", 2, 32),
    How("fp8"), How("int", 8, ROW, True),
)  # fmt: skip


def live_knobs(how: How) -> tuple[dict[str, Any] | None, str]:
    """What ``reconfigure`` takes to run the whole model so; (None, why not) where the engine has no such method."""
    knobs: dict[str, Any] = {"quantization_group_size": None, "quantization_options": None}
    if how.levels == "fp8":
        return {**knobs, "quantization": "fp8"}, ""
    if how.levels == "int" and how.bits == 8:
        if how.group_size == ROW and how.symmetric:
            return {**knobs, "quantization": "int8"}, ""
        return None, _("The engine's int8 has one symmetric scale for each output channel: choose whole rows, symmetric.")
    if how.levels == "int" and how.bits not in LIVE_BITS:
        return None, _("The engine has no method with {n} bits; it has 2, 3, 4 and 8.").format(n=how.bits)
    if how.group_size == ROW:
        return None, _("A model's matrices differ in width: choose a group size to run it so.")
    knobs["quantization_group_size"] = how.group_size
    if how.levels == "nf4":
        return {**knobs, "quantization": "nf4"}, ""
    return {
        **knobs, "quantization": LIVE_BITS[how.bits], "quantization_options": {"symmetric": True} if how.symmetric else None,
    }, ""  # fmt: skip


@dataclass(frozen=True)
class Histogram:
    """Counts between ``edges`` (one more than counts)."""

    edges: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class Tried:
    """What one grid does to one matrix. Errors in the units of the weights; shares and output error in [0, 1]; decibels."""

    how: How
    sqnr_db: float
    max_error: float
    rms_error: float
    output_error: float
    bits_per_weight: float
    normalized: Histogram  # the weights, each in units of half its group's range about its middle: [-1, 1]
    levels: np.ndarray  # on the same axis, ascending
    errors: Histogram
    by_output: np.ndarray  # root mean square error, [N]
    by_input: np.ndarray  # [K]
    scales: Histogram
    step: float  # median distance of two levels, in the units of the weights; of uneven grids the mean distance


class Matrix:
    """The tensors of one observed matrix. ValueError where the bytes do not fit the shape."""

    def __init__(self, event: MatrixObserved) -> None:
        import torch

        self.event, self._torch = event, torch
        whole = self._tensor(event.weight, event.dtype, (event.rows, event.columns), "weight")
        self.inputs = self._tensor(event.inputs, "float16", (event.input_rows, event.columns), "inputs").float()
        every = max(1, -(-event.rows * event.columns // MOST))
        self.every = every  # which output channels are looked at
        self.weight = whole[::every].float().contiguous()
        self.running = None
        if event.running_dtype:
            self.running = self._tensor(event.running, event.running_dtype, (event.rows, event.columns), "running")[
                ::every
            ].float()

    def _tensor(self, raw: bytes, dtype: str, shape: tuple[int, int], what: str) -> Any:
        kind = {"float16": np.float16, "float32": np.float32}.get(dtype)
        if kind is None or len(raw) != shape[0] * shape[1] * np.dtype(kind).itemsize:
            raise ValueError(
                f"{what} must be {shape[0]} x {shape[1]} numbers of float16 or float32, got {len(raw):,} bytes of {dtype!r}"
            )
        found = self._torch.from_numpy(np.frombuffer(raw, kind).reshape(shape).copy())
        if not bool(self._torch.isfinite(found).all()):
            raise ValueError(f"{what} has values that are inf or NaN")
        return found

    @cached_property
    def energy(self) -> float:
        return float(self._torch.linalg.vector_norm(self.weight, dtype=self._torch.float64)) ** 2

    @cached_property
    def output_norm(self) -> float:
        return float(self._torch.linalg.vector_norm(self.inputs @ self.weight.T))

    def numbers(self, rounded: Any, bits_per_weight: float) -> dict[str, float]:
        """The numbers alone: of a comparison."""
        torch = self._torch
        error = rounded - self.weight
        noise = float(torch.linalg.vector_norm(error, dtype=torch.float64)) ** 2
        lost = float(torch.linalg.vector_norm(self.inputs @ error.T))
        return {
            "sqnr_db": math.inf if noise == 0 else 10 * math.log10(self.energy / noise) if self.energy else -math.inf,
            "max_error": float(error.abs().max()), "rms_error": math.sqrt(noise / error.numel()),
            "output_error": lost / self.output_norm if self.output_norm else (math.inf if lost else 0.0),
            "bits_per_weight": bits_per_weight,
        }  # fmt: skip

    def _rounded(self, how: How) -> tuple[Any, Any, Any, float]:
        """(numbers [N, K], scales [N, G], minima or None, bits per weight)."""
        columns = self.weight.shape[1]
        size = min(columns, how.group_size) if how.group_size else columns
        if how.levels == "int":
            from engine.quantization.methods import what_if

            made = what_if(self.weight, how.bits, size, how.symmetric)
            return made.dequantized, made.scales.float(), made.minima, made.bits_per_weight
        if how.levels == "nf4":
            from engine.quantization.nf4 import quantize_nf4

            packed = quantize_nf4(self.weight, size)
        else:
            from engine.quantization.fp8 import quantize_fp8

            packed = quantize_fp8(self.weight)
        return packed.dequantize(), packed.scales.float(), None, packed.bits_per_weight

    def compare(self, how: How) -> dict[str, float]:
        rounded, _scales, _minima, bits = self._rounded(how)
        return self.numbers(rounded, bits)

    def compare_running(self, bits_per_weight: float) -> dict[str, float] | None:
        """What runs at the moment, as it was observed; None where the checkpoint's own weights run."""
        return None if self.running is None else self.numbers(self.running, bits_per_weight)

    def tried(self, how: How) -> Tried:
        torch = self._torch
        rounded, scales, _minima, bits = self._rounded(how)
        numbers = self.numbers(rounded, bits)
        error = rounded.sub_(self.weight)
        squares = error.square()
        most = numbers["max_error"] or 1e-12
        size = how.group_size if how.group_size and how.levels != "fp8" else self.weight.shape[1]
        levels, step = levels_of(how), float(scales.abs().median())
        per_scale = {"nf4": 2 / 15, "fp8": 2 * 448 / 252}.get(how.levels, 1.0)  # mean distance of two levels for a scale of 1
        return Tried(
            how=how, **numbers, normalized=self._histogram(self.normalized(size, how.about_zero, how.levels == "int"), BINS, -REACH, REACH),
            levels=levels, errors=self._histogram(error, ERROR_BINS, -most, most),
            by_output=squares.mean(1).sqrt_().numpy(), by_input=squares.mean(0).sqrt_().numpy(),
            scales=self._histogram(scales.abs(), SCALE_BINS, 0.0, float(scales.abs().max()) or torch.finfo(torch.float32).tiny),
            step=step * per_scale,
        )  # fmt: skip

    def normalized(self, size: int, about_zero: bool, signed: bool = False) -> Any:
        """The weights by group in [-1, 1]: divided by the group's largest magnitude (``signed``: so that it stands at -1, where a
        symmetric grid has its extra code), or from the group's least to its largest. All-zero and constant groups: 0."""
        torch = self._torch
        rows, columns = self.weight.shape
        size = min(size, columns)
        missing = -columns % size
        w = self.weight
        if missing:  # the last group is shorter: repeating its last weight changes neither extreme
            w = torch.cat((w, w[:, -1:].expand(rows, missing)), 1)
        groups = w.view(rows, -1, size)
        low, high = torch.aminmax(groups, dim=-1, keepdim=True)
        if about_zero:
            middle, half = 0.0, torch.maximum(-low, high)
            if signed:
                half = torch.where(-low >= high, half, -half)
        else:
            middle, half = (high + low) / 2, (high - low) / 2
        half = torch.where(half == 0, torch.ones_like(half), half)
        return ((groups - middle) / half).reshape(rows, -1)[:, :columns]

    def _histogram(self, values: Any, bins: int, low: float, high: float) -> Histogram:
        counts = self._torch.histc(values.reshape(-1), bins, low, high)
        return Histogram(np.linspace(low, high, bins + 1), counts.numpy().astype(np.int64))

    def compare_levels(self, size: int) -> tuple[Histogram, np.ndarray, np.ndarray]:
        """The weights by group over their largest magnitude, and the levels of symmetric int4 and of NF4 on that axis.

        Of int4's two outermost levels a group has the one on the side of its largest weight.
        """
        values = self.normalized(size or self.weight.shape[1], True)
        return self._histogram(values, BINS, -REACH, REACH), np.arange(-8, 9) / 8, levels_of(How("nf4", 4, size))


def levels_of(how: How) -> np.ndarray:
    """Where the grid's levels stand in a group, in units of half its range about its middle: ascending, in [-1, 1]."""
    if how.levels == "int":
        codes = np.arange(1 << how.bits)
        if how.symmetric:
            half = 1 << (how.bits - 1)
            return (codes - half) / half
        return 2 * codes / (len(codes) - 1) - 1
    from engine.quantization import levels

    if how.levels == "nf4":
        return levels.NF4.double().numpy()
    table = levels.FP8_E4M3.double().numpy()
    return np.unique(table[np.isfinite(table)]) / levels.FP8_E4M3_MAX
