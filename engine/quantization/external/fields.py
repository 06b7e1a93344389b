"""Reading a checkpoint's quantisation: its configuration, and the tensors of one linear layer, each checked where it is taken.

Legend: a linear layer's weight is [N, K] = [out_features, in_features]; G groups of columns share a scale. A *word* is an int32 that
holds several codes, the first in its lowest bits.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.model.safetensors_file import Entry
from engine.quantization import packing
from engine.quantization.base import QuantizedWeight

BITS = (2, 3, 4, 8)  # widths that these layouts define and a method here runs
FLOATS = ("F16", "BF16", "F32")
Loader = Callable[[], QuantizedWeight]


class Fields:
    """One JSON object of the configuration. ``where`` names file and key in errors."""

    def __init__(self, raw: Any, where: str) -> None:
        if not isinstance(raw, Mapping):
            raise ValueError(f"{where} must be a JSON object, got {_shown(raw)}")
        self.raw, self.where = raw, where

    def error(self, key: str, got: Any, allowed: str) -> ValueError:
        return ValueError(f"{self.where}.{key} must be {allowed}, got {_shown(got)}")

    def first(self, *keys: str, default: Any = None) -> Any:
        """The value of the first of ``keys`` that is there and not null: tools have renamed some."""
        return next((self.raw[key] for key in keys if self.raw.get(key) is not None), default)

    def choice(self, keys: tuple[str, ...], allowed: Iterable[Any], default: Any = None) -> Any:
        """A value out of ``allowed``, texts without regard to case; ``default`` where the key is absent (None: it must be there)."""
        value = self.first(*keys, default=default)
        value = value.lower() if isinstance(value, str) else value
        allowed = tuple(allowed)
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise self.error(keys[0], self.first(*keys), "one of " + ", ".join(map(repr, allowed)))
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.first(key, default=default)
        if not isinstance(value, bool):
            raise self.error(key, value, "true or false")
        return value

    def group_size(self, *keys: str) -> int | None:
        """Columns that share a scale; None: the whole row (written as -1)."""
        value = self.first(*keys)
        if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or 1 <= value <= 1 << 24):
            raise self.error(keys[0], value, "a positive integer, or -1 for one group a row")
        return None if value == -1 else value

    def quantizer(self) -> str | None:
        """The tools that made the checkpoint, where ``meta`` names them."""
        meta = self.first("meta", default={})
        maker = meta.get("quantizer") if isinstance(meta, Mapping) else None
        return ", ".join(map(str, maker)) if isinstance(maker, list) else maker if isinstance(maker, str) else None

    def nothing(self, *keys: str) -> None:
        """ValueError where one of ``keys`` asks for something that changes the weights or the layer and is not supported."""
        for key in keys:
            if self.raw.get(key):
                raise self.error(key, self.raw[key], "absent (not supported)")


@dataclass(frozen=True)
class Parts:
    """The tensors of the linear layer ``module`` (its name without ".weight"), whose weight is ``shape`` [N, K]."""

    module: str
    shape: tuple[int, int]
    found: Mapping[str, Entry]

    def has(self, suffix: str) -> bool:
        return f"{self.module}.{suffix}" in self.found

    def name(self, suffix: str) -> str:
        return f"{self.module}.{suffix}"

    def get(self, suffix: str, beside: str) -> Entry:
        """The tensor; ValueError where it is missing although ``beside`` is there."""
        entry = self.found.get(self.name(suffix))
        if entry is None:
            raise ValueError(
                f"{self.found[self.name(beside)].file}: tensor {self.name(suffix)!r} missing beside {self.name(beside)!r}"
            )
        return entry

    def error(self, suffix: str, problem: str) -> ValueError:
        return ValueError(f"{self.found[self.name(suffix)].file}: tensor {self.name(suffix)!r} {problem}")

    def check(
        self,
        suffix: str,
        beside: str,
        dtypes: tuple[str, ...],
        *shapes: tuple[int, ...],
        orders: Mapping[tuple[int, ...], str] | None = None,
    ) -> None:
        """The tensor is there, of one of ``dtypes`` and ``shapes``. ``orders``: other shapes, and what each gives away."""
        entry = self.get(suffix, beside)
        if entry.dtype not in dtypes:
            raise self.error(suffix, f"has dtype {entry.dtype}, expected {' or '.join(dtypes)}")
        if entry.shape not in shapes:
            why = (orders or {}).get(entry.shape)
            raise self.error(
                suffix,
                f"has shape {list(entry.shape)}, expected {' or '.join(str(list(shape)) for shape in shapes)} "
                f"for a weight of {list(self.shape)}" + (f": wrong pack order, {why}" if why else ""),
            )

    def load(self, suffix: str) -> torch.Tensor:
        return self.found[self.name(suffix)].load()

    def scales(self, suffix: str) -> torch.Tensor:
        """The tensor as scales are held: float16 where that is exact, else float32. ValueError for inf or NaN."""
        scales = self.load(suffix)
        bad = int((~torch.isfinite(scales)).sum())
        if bad:
            raise self.error(suffix, f"has {bad:,} scales that are inf or NaN, of {scales.numel():,}")
        exact = scales.to(torch.float16)
        return exact if torch.equal(exact.float(), scales.float()) else scales.float()

    def group_of_column(self, suffix: str, groups: int, group_size: int) -> torch.Tensor | None:
        """``g_idx`` [K] as int32; None where the groups are in order. ValueError for a group that does not exist."""
        order = self.load(suffix).to(torch.int32)
        if int(order.min()) < 0 or int(order.max()) >= groups:
            raise self.error(suffix, f"names groups {int(order.min())} to {int(order.max())}, there are 0 to {groups - 1}")
        in_order = torch.arange(self.shape[1], dtype=torch.int32) // group_size
        return None if torch.equal(order, in_order) else order


class Layout(Protocol):
    """How one tool lays the codes of a linear layer out in safetensors."""

    suffixes: tuple[str, ...]  # of the tensors of a quantised layer

    def facts(self) -> dict[str, Any]:
        """What the configuration says, in plain values for a screen (see ``Checkpoint.quantization``)."""
        ...

    def open(self, parts: Parts) -> Loader | None:
        """What reads the layer's weight, names and shapes checked from the file's header; None where it is an ordinary weight."""
        ...

    def spare(self, name: str, found: Mapping[str, Entry]) -> bool:
        """Whether the tensor ``name``, which has no place in the model, may be left out without a loss."""
        ...


def words_of(codes: int, bits: int) -> int:
    """int32 words that hold ``codes`` codes in a row, none wasted."""
    return -(-codes * bits // 32)


def bytes_of_words(words: torch.Tensor, codes: int, bits: int) -> torch.Tensor:
    """int32 [rows, words] -> uint8 [rows, ceil(codes * bits / 8)], codes as ``engine.quantization.packing`` has them.

    The codes of a word follow from its lowest bit on and run across words without a gap, in little-endian memory just as
    ``packing`` orders them: only the padding of the last word is cut off.
    """
    packed = words.reshape(-1).view(torch.uint8).view(words.shape[0], -1)[:, : packing.packed_width(codes, bits)].contiguous()
    used = codes * bits % 8
    if used:
        packed[:, -1] &= (1 << used) - 1
    return packed


def zero_points_or_none(zero_points: torch.Tensor, bits: int) -> torch.Tensor | None:
    """None where every zero point is the middle code, which is what a symmetric ``QuantizedWeight`` means anyway."""
    return None if bool((zero_points == 1 << (bits - 1)).all()) else zero_points.contiguous()


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) < 200 else shown[:200] + "..."
