"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them (Frantar et al., GPTQ, arXiv 2210.17323).

For a weight [N, K] in b bits: ``qweight`` int32 [K b / 32, N], codes of a column of words one input after another; ``qzeros`` int32
[G, N b / 32], along the outputs; ``scales`` [G, N]; ``g_idx`` int32 [K], each input's group. The value is (code - zero) * scale.
With 3 bits 32 codes take three words, and two of them lie across a border.

Two conventions for the zeros: "gptq" (v1) stores zero - 1, "gptq_v2" the zero itself.

A wrong pack order is noticed by shapes (AWQ's and compressed-tensors' differ from these), by what the configuration says (formats,
pack_dtype), and for symmetric weights by zeros that are off by one everywhere. An order inside a word that is wrong has the same
shapes and cannot be noticed here.
"""

from collections.abc import Mapping
from typing import Any

import torch

from engine.model.safetensors_file import Entry
from engine.quantization import packing
from engine.quantization.base import QuantizedWeight
from engine.quantization.external.fields import (
    BITS,
    FLOATS,
    Fields,
    Loader,
    Parts,
    bytes_of_words,
    words_of,
    zero_points_or_none,
)


class GPTQLayout:
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, fields: Fields) -> None:
        """ValueError for a format, bit width or option that this layout does not have."""
        self.bits: int = fields.choice(("bits",), BITS)
        self.group_size = fields.group_size("group_size")
        self.desc_act = fields.boolean("desc_act", False)
        self.symmetric = fields.boolean("sym", True)
        self.format: str = fields.choice(("checkpoint_format", "format"), ("gptq", "gptq_v2"), "gptq")
        fields.choice(("pack_dtype",), ("int32",), "int32")
        fields.nothing("is_marlin_format", "adapter")
        self.dynamic = fields.first("dynamic") is not None  # widths and group sizes by layer: shapes tell them
        self.made_by = fields.quantizer()
        # GPTQModel takes 1 from each field of a v1 checkpoint by one subtraction from the word, so that a zero of 0 borrows from the
        # next field; all other tools wrap each field by itself. Without a zero of 0 both are the same.
        self.borrows = "gptqmodel" in (self.made_by or "").lower()

    def facts(self) -> dict[str, Any]:
        return {
            "method": "gptq",
            "format": self.format,
            "bits": self.bits,
            "group_size": self.group_size,
            "symmetric": self.symmetric,
            "desc_act": self.desc_act,
            "made_by": self.made_by,
            "activations": None,
            "activations_rounded": False,
        }

    def open(self, parts: Parts) -> Loader | None:
        present = [suffix for suffix in self.suffixes if parts.has(suffix)]
        if not present:
            return None
        rows, columns = parts.shape
        words = parts.get("qweight", present[0])
        bits = self._bits(words, columns)
        parts.check(
            "qweight",
            present[0],
            ("I32",),
            (words_of(columns, bits), rows),
            orders={
                (columns, words_of(rows, bits)): "codes lie along the outputs, as AWQ packs them; GPTQ packs along the inputs",
                (rows, words_of(columns, bits)): "the matrix is transposed, as compressed-tensors has it",
            },
        )
        size = self._group_size(parts, columns)
        groups = -(-columns // size)
        parts.check("scales", "qweight", FLOATS, (groups, rows), orders={(rows, groups): "scales are [groups, outputs] in GPTQ"})
        parts.check("qzeros", "qweight", ("I32",), (groups, words_of(rows, bits)))
        if self.desc_act or parts.has("g_idx"):
            parts.check("g_idx", "qweight", ("I32",), (columns,))
        return lambda: self._load(parts, bits, size)

    def spare(self, name: str, found: Mapping[str, Entry]) -> bool:
        """A bias of zeros: early AutoGPTQ gave one to every layer it quantised, also where the model has none."""
        module, _, suffix = name.rpartition(".")
        return suffix == "bias" and f"{module}.qweight" in found and not bool(found[name].load().any())

    def _bits(self, words: Entry, columns: int) -> int:
        if not self.dynamic:
            return self.bits
        return next((bits for bits in BITS if words.shape and words.shape[0] * 32 == columns * bits), self.bits)

    def _group_size(self, parts: Parts, columns: int) -> int:
        if not self.dynamic:
            return min(self.group_size or columns, columns)
        scales = parts.get("scales", "qweight")
        groups = scales.shape[0] if scales.shape else 0
        if not groups or columns % groups:
            raise parts.error("scales", f"has shape {list(scales.shape)}, which makes no equal groups of {columns} inputs")
        return columns // groups

    def _load(self, parts: Parts, bits: int, size: int) -> QuantizedWeight:
        rows, columns = parts.shape
        scales = parts.scales("scales").t().contiguous()
        order = parts.group_of_column("g_idx", scales.shape[1], size) if parts.has("g_idx") else None
        return QuantizedWeight(
            method="gptq",
            shape=parts.shape,
            bits=bits,
            levels="affine",
            group_size=size,
            codes=bytes_of_words(parts.load("qweight").t(), columns, bits),
            scales=scales,
            zero_points=zero_points_or_none(self._zero_points(parts, bits, rows), bits),
            group_of_column=order,
        )

    def _zero_points(self, parts: Parts, bits: int, rows: int) -> torch.Tensor:
        """uint8 [N, G]. ValueError where the weights are symmetric and all zeros are one beside the middle: the other convention."""
        words, stored_less_one = parts.load("qzeros"), self.format == "gptq"
        if stored_less_one and self.borrows and bits != 3:
            # (int32 wraps, and what is carried out of the last field is lost, as it was when it was taken)
            words = (words.to(torch.int64) + sum(1 << shift for shift in range(0, 32, bits))).to(torch.int32)
        zero_points = packing.unpack(bytes_of_words(words, rows, bits), bits, rows)
        if stored_less_one and not (self.borrows and bits != 3):
            zero_points = (zero_points + 1) & ((1 << bits) - 1)
        middle = 1 << (bits - 1)
        if (
            self.symmetric
            and bool((zero_points == zero_points[0, 0]).all())
            and int(zero_points[0, 0]) in (middle - 1, middle + 1)
        ):
            raise parts.error(
                "qzeros",
                f"gives zero point {int(zero_points[0, 0])} everywhere as {self.format!r} stores them, but symmetric weights of {bits} "
                f"bits have {middle}: the zeros are stored by the other convention ('gptq' stores zero - 1, 'gptq_v2' the zero)",
            )
        return zero_points.t()
