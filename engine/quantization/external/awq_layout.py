"""AWQ checkpoints in AutoAWQ's "gemm" layout (Lin et al., AWQ, arXiv 2306.00978; the scales of the inputs are already folded in).

For a weight [N, K] in 4 bits: ``qweight`` int32 [K, N / 8], eight outputs of one input in a word; ``qzeros`` int32 [G, N / 8] alike;
``scales`` [G, N]. The value is (code - zero) * scale. Inside a word the outputs are interleaved: the fields, from the lowest bits on,
are outputs 0, 2, 4, 6, 1, 3, 5, 7.

A wrong pack order is noticed by shapes (GPTQ packs along the inputs) and by the version that the configuration names. Codes that were
packed without the interleaving have the same shapes and cannot be told apart.
"""

from collections.abc import Mapping
from typing import Any

import torch

from engine.model.safetensors_file import Entry
from engine.quantization import packing
from engine.quantization.base import QuantizedWeight
from engine.quantization.external.fields import FLOATS, Fields, Loader, Parts, zero_points_or_none

_OUTPUT_OF_FIELD = (0, 2, 4, 6, 1, 3, 5, 7)
_FIELD_OF_OUTPUT = torch.tensor([_OUTPUT_OF_FIELD.index(output) for output in range(8)])


class AWQLayout:
    suffixes: tuple[str, ...] = ("qweight", "qzeros", "scales")

    def __init__(self, fields: Fields) -> None:
        """ValueError for another version than "gemm", another width than 4 bits, or weights without zero points."""
        fields.choice(("bits", "w_bit"), (4,))
        self.group_size = fields.group_size("group_size", "q_group_size")
        if not fields.boolean("zero_point", True):
            raise fields.error("zero_point", False, "true (the gemm layout stores zero points)")
        fields.choice(("version", "checkpoint_format", "format"), ("gemm",), "gemm")
        fields.choice(("backend",), ("autoawq",), "autoawq")
        self.made_by = fields.quantizer()

    def facts(self) -> dict[str, Any]:
        return {
            "method": "awq",
            "format": "gemm",
            "bits": 4,
            "group_size": self.group_size,
            "symmetric": False,
            "desc_act": False,
            "made_by": self.made_by,
            "activations": None,
            "activations_rounded": False,
        }

    def open(self, parts: Parts) -> Loader | None:
        present = [suffix for suffix in self.suffixes if parts.has(suffix)]
        if not present:
            return None
        rows, columns = parts.shape
        words = -(-rows // 8)
        parts.check(
            "qweight",
            present[0],
            ("I32",),
            (columns, words),
            orders={
                (-(-columns // 8), rows): "codes lie along the inputs, as GPTQ packs them; AWQ packs along the outputs",
                (rows, -(-columns // 8)): "the matrix is transposed, as compressed-tensors has it",
            },
        )
        if rows % 8:
            raise parts.error("qweight", f"cannot hold {rows} outputs: they do not fill words of eight")
        groups = -(-columns // (self.group_size or columns))
        parts.check("scales", "qweight", FLOATS, (groups, rows), orders={(rows, groups): "scales are [groups, outputs] in AWQ"})
        parts.check("qzeros", "qweight", ("I32",), (groups, words))
        return lambda: self._load(parts)

    def spare(self, name: str, found: Mapping[str, Entry]) -> bool:
        return False

    def _load(self, parts: Parts) -> QuantizedWeight:
        return QuantizedWeight(
            method="awq",
            shape=parts.shape,
            bits=4,
            levels="affine",
            group_size=min(self.group_size or parts.shape[1], parts.shape[1]),
            codes=packing.pack(_by_output(parts.load("qweight")), 4),
            scales=parts.scales("scales").t().contiguous(),
            zero_points=zero_points_or_none(_by_output(parts.load("qzeros")), 4),
        )


def _by_output(words: torch.Tensor) -> torch.Tensor:
    """int32 [inputs or groups, N / 8] -> uint8 codes [N, inputs or groups]."""
    packed = words.reshape(-1).view(torch.uint8).view(words.shape[0], -1)
    fields = torch.stack((packed & 15, packed >> 4), -1).view(words.shape[0], -1, 8)
    return fields[:, :, _FIELD_OF_OUTPUT].view(words.shape[0], -1).t()
