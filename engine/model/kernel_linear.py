"""Linear layers of 8-bit and 4-bit weights by our own kernel (``engine.kernels.dequant_matmul``): the codes are read as they are, and
become numbers in registers."""

import torch
import torch.nn.functional as F

from engine.kernels.lazy import load
from engine.model.linear import LinearBackend
from engine.quantization import levels
from engine.quantization.base import QuantizedWeight

# Rows beyond which reading a weight that was unpacked once is taken over unpacking it again for every tile of rows: as many as
# make a product bound by arithmetic on an A100 or H100 (a few hundred operations for each byte).
MANY = 256


class KernelProduct:
    """A weight as the kernel takes it."""

    def __init__(self, quantized: QuantizedWeight, bias: torch.Tensor | None, backend: LinearBackend) -> None:
        """ValueError for a weight that ``fits`` refuses."""
        why = unfit(quantized)
        if why:
            raise ValueError(f"the kernel does not take this weight: {why}")
        held = quantized.to(backend.device)
        rows, columns = held.shape
        self.codes, self.bits = held.codes.contiguous(), held.bits
        self.group_size = held.group_size or columns
        of_rows = [None if t is None else t.expand(rows, -1).contiguous() for t in (held.scales, held.zero_points, held.minima)]
        self.scales, self.zero_points, self.minima = of_rows
        table = {"nf4": levels.NF4, "fp8_e4m3": levels.FP8_E4M3}.get(held.levels)
        # Codes of NaN are never written; as numbers they would still meet what is masked.
        self.levels = None if table is None else table.nan_to_num().to(backend.device)
        self.inverse = None if held.input_scales is None else 1 / held.input_scales.float()
        self.bias = bias
        self.held = held

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > MANY:
            return F.linear(x, self.held.dequantize().to(x.dtype), self.bias)
        if self.inverse is not None:
            x = (x * self.inverse).to(x.dtype)
        out: torch.Tensor = load("engine.kernels.dequant_matmul.triton").dequant_matmul(
            x, self.codes, self.scales, bits=self.bits, group_size=self.group_size, zero_points=self.zero_points, minima=self.minima,
            levels=self.levels, bias=self.bias,
        )  # fmt: skip
        return out


def unfit(quantized: QuantizedWeight) -> str:
    """Why the kernel does not take a weight; empty when it does."""
    group, columns = quantized.group_size or quantized.shape[1], quantized.shape[1]
    if quantized.activation_bits is not None:
        return "its activations are rounded too"
    if quantized.bits not in (4, 8):
        return f"codes of {quantized.bits} bits"
    if quantized.group_of_column is not None:
        return "its groups are not in order"
    if group != columns and (group < 16 or group & (group - 1)):
        return f"groups of {group} columns"
    return ""
