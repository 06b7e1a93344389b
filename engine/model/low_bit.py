"""Linear layers that hold their weight in few bits and multiply with it as it is. The way depends on the method, the device and
the number of rows:

- **int4_kernel** (affine codes of up to 4 bits) and **int8_kernel** (8-bit codes with a scale for each channel): a few rows go
  through torch's products. From more rows on unpacking once is faster than multiplying packed; see ``Unpacking`` for how long the
  unpacked copy is kept.
- **int8_integers** (W8A8): activations are rounded to 8 bits as the method says, and multiplied as integers.
- **dequantized**: whatever has no such product here. The rounded numbers are held in the model's dtype: the rounding is real, the memory is not saved.
- **dequant_kernel**: on CUDA 8 and 4 bits go through our own kernel (``engine.model.kernel_linear``).
- **unpacked_at_use**: other devices than a CPU, where no kernel fits. The codes are held, and unpacked for each product.

torch's packed products take and give bf16, whatever the model's dtype: a row among a few and the same row among many differ by that.

Shapes: T rows, N out_features, K in_features, G groups.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from engine.hardware import ops_cpu
from engine.kernels.lazy import run_on
from engine.model import kernel_linear, words
from engine.model.linear import Linear, LinearBackend
from engine.model.unpacking import UnpackedCopy, Unpacking
from engine.quantization.base import QuantizedWeight
from engine.quantization.int8 import LARGEST, MIDDLE, quantize_activations

Numbers = Callable[[torch.Tensor], None]
FORMS = ("int4_kernel", "int8_kernel", "int8_integers", "dequantized", "dequant_kernel", "unpacked_at_use")
_SMALLEST = torch.finfo(torch.float32).tiny  # a row of zeros is divided by it


class LowBitLinear(Linear):
    """``form``: which of the ways above; ``nbytes``: of the tensors that a product of few rows reads; ``other_nbytes``: of what
    is held for the other ways (the compiled layer's, many rows), but for an unpacked copy."""

    form: str
    nbytes: int
    other_nbytes: int = 0

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(self(x))

    @property
    def copy_nbytes(self) -> int:
        """Bytes of the unpacked copy that is held at the moment."""
        return 0


class Int4Linear(LowBitLinear):
    """Affine codes of up to 4 bits, in groups that torch's kernel knows; see ``int4_group``."""

    form = "int4_kernel"

    def __init__(
        self, quantized: QuantizedWeight, bias: torch.Tensor | None, backend: LinearBackend, unpacking: Unpacking
    ) -> None:
        self.backend, self.unpacking = backend, unpacking
        self.bias = None if bias is None else backend.tensor(bias)
        self.group_size = int4_group(quantized)
        codes, (scales, exact) = quantized.unpacked(), _per_group(quantized, self.group_size)
        # 16 bits hold the minimum of a grid of our own. With a zero point it is a product, and rounding it would be an error that the
        # many terms of a sum share: where nothing else is rounded, it is held as it is.
        minima = exact.half()
        self._exact_minima = None if torch.equal(minima.float(), exact) else exact
        self.shape = quantized.shape
        self.packed = ops_cpu.pack_int4(codes)
        table = torch.stack((scales.float(), minima.float() + 8 * scales.float()), -1)
        self.table = table.transpose(0, 1).to(torch.bfloat16).contiguous()  # [G, N, 2]
        # What the compiled layer and unpacking read.
        self.words, self.grids = words.pack_int4(codes, self.group_size), words.pack_grids(scales, minima)
        self.inverse = _inverse(quantized)
        self.copy = UnpackedCopy(unpacking, backend)
        self.nbytes = _nbytes(self.packed, self.table)
        self.other_nbytes = _nbytes(self.words, self.grids)
        if self._exact_minima is not None:
            self.other_nbytes += _nbytes(self._exact_minima)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.inverse is not None:
            x = x * self.inverse
        if x.shape[0] > self.unpacking.few:
            return self._many(x)
        out = ops_cpu.int4_linear(x.bfloat16(), self.packed, self.group_size, self.table).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)

    def _many(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.copy.kept(self.unpacked, self.bias)
        return kept(x) if kept is not None else F.linear(x, self.unpacked().to(x.dtype), self.bias)

    def unpacked(self) -> torch.Tensor:
        """The weight as it is multiplied (``input_scales`` not divided out), float32 [N, K]."""
        rows, columns = self.shape
        codes = words.unpack_int4(self.words, self.group_size)
        scales, minima = words.unpack_grids(self.grids)
        if self._exact_minima is not None:
            minima = self._exact_minima
        return torch.addcmul(minima[..., None], codes.float(), scales[..., None]).view(rows, columns)

    @property
    def copy_nbytes(self) -> int:
        return self.copy.nbytes(self.shape)


class Int8Linear(LowBitLinear):
    """Symmetric 8-bit codes with a scale for each channel (or one for all); activations in full."""

    form = "int8_kernel"

    def __init__(
        self, quantized: QuantizedWeight, bias: torch.Tensor | None, backend: LinearBackend, unpacking: Unpacking
    ) -> None:
        self.unpacking = unpacking
        self.bias = None if bias is None else backend.tensor(bias)
        self.codes, self.scales = _signed(quantized)  # int8 [N, K], float32 [N]
        self.inverse = _inverse(quantized)
        self.ones = torch.ones(len(self.scales), dtype=torch.bfloat16)
        self.copy = UnpackedCopy(unpacking, backend)
        self.shape = quantized.shape
        self.nbytes = _nbytes(self.codes, self.scales)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.inverse is not None:
            x = x * self.inverse
        if x.shape[0] > self.unpacking.few:
            kept = self.copy.kept(self.unpacked, self.bias)
            return kept(x) if kept is not None else F.linear(x, self.unpacked().to(x.dtype), self.bias)
        out = (ops_cpu.int8_linear(x.bfloat16(), self.codes, self.ones) * self.scales).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)

    def unpacked(self) -> torch.Tensor:
        """The weight as it is multiplied (``input_scales`` not divided out), float32 [N, K]."""
        return self.codes.float().mul_(self.scales[:, None])

    @property
    def copy_nbytes(self) -> int:
        return self.copy.nbytes(self.shape)


class IntegerLinear(LowBitLinear):
    """W8A8: weights and activations in 8 bits, a scale for each row of either (or one for all activations: static)."""

    form = "int8_integers"

    def __init__(self, quantized: QuantizedWeight, bias: torch.Tensor | None, backend: LinearBackend) -> None:
        self.bias = None if bias is None else backend.tensor(bias)
        codes, scales = _signed(quantized)
        self.inverse = _inverse(quantized)
        self.activation_scale = quantized.activation_scale
        self.columns = quantized.shape[1]
        self.integers = _Integers(codes, scales)
        self.nbytes = _nbytes(codes, scales)

    def weight(self) -> torch.Tensor:
        """codes * scales, float32 [N, K]: read off by multiplying the identity, since only the packed form is held."""
        eye = torch.eye(self.columns, dtype=torch.int8)
        return self.integers.one_digit(eye, torch.ones(1, 1)).t().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.inverse is not None:
            x = x * self.inverse
        if self.activation_scale is None:
            out = self.integers.rounded(x).to(x.dtype)
        else:
            out = self.integers.one_digit(*quantize_activations(x, self.activation_scale)).to(x.dtype)
        return out if self.bias is None else out.add_(self.bias)


class RoundedInputLinear(LowBitLinear):
    """W8A8 where no product of integers is there: both are rounded, and multiplied as floats."""

    form = "dequantized"

    def __init__(
        self, quantized: QuantizedWeight, bias: torch.Tensor | None, backend: LinearBackend, also: Numbers | None = None
    ) -> None:
        codes, scales = _signed(quantized)
        numbers = (codes.float() * scales[:, None]).to(backend.dtype)
        self.linear = backend.pack(numbers, bias)
        if also is not None:
            also(numbers)
        self.inverse = _inverse(quantized)
        self.activation_scale = quantized.activation_scale
        self.nbytes = codes.numel() * backend.dtype.itemsize

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.inverse is not None:
            x = x * self.inverse
        return self.linear(_rounded(x, self.activation_scale).to(x.dtype))


class DequantizedLinear(LowBitLinear):
    form = "dequantized"

    def __init__(
        self, quantized: QuantizedWeight, bias: torch.Tensor | None, backend: LinearBackend, also: Numbers | None = None
    ) -> None:
        numbers = quantized.dequantize().to(backend.dtype)
        self.linear = backend.pack(numbers, bias)
        self.nbytes = quantized.shape[0] * quantized.shape[1] * backend.dtype.itemsize
        if also is not None:
            also(numbers)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.linear.added_to(residual, x)


class UnpackedAtUse(LowBitLinear):
    """The reference for other devices: exact, and slow, since every product unpacks the weight first."""

    form = "unpacked_at_use"

    def __init__(self, quantized: QuantizedWeight, bias: torch.Tensor | None, backend: LinearBackend) -> None:
        self.quantized = quantized.to(backend.device)
        self.bias = None if bias is None else backend.tensor(bias)
        self.nbytes = quantized.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        q = self.quantized
        if q.activation_bits is not None:
            codes, scales = quantize_activations(x if q.input_scales is None else x / q.input_scales, q.activation_scale)
            x = (codes.float() * scales).to(x.dtype)
            if q.input_scales is not None:
                x = x * q.input_scales.to(x.dtype)
        return F.linear(x, q.dequantize().to(x.dtype), self.bias)


class KernelLinear(UnpackedAtUse):
    """By our own kernel, where it takes the weight (``kernel_linear.unfit``)."""

    form = "dequant_kernel"

    def __init__(self, quantized: QuantizedWeight, bias: torch.Tensor | None, backend: LinearBackend) -> None:
        super().__init__(quantized, bias, backend)
        self.product = kernel_linear.KernelProduct(self.quantized, self.bias, backend)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x)


def pack_quantized(
    quantized: QuantizedWeight, bias: torch.Tensor | None, backend: LinearBackend, unpacking: Unpacking,
    also: Numbers | None = None,
) -> LowBitLinear:  # fmt: skip
    """The linear layer of a weight in few bits, by the best way that this device has for it. ``also`` gets the numbers that are
    multiplied, [N, K] in the model's dtype, where the layer runs "dequantized"."""
    if run_on(backend.device) and not kernel_linear.unfit(quantized):
        return KernelLinear(quantized, bias, backend)
    if backend.device.type != "cpu":
        return UnpackedAtUse(quantized, bias, backend)
    if quantized.activation_bits is not None:
        works = ops_cpu.integer_product_works()
        return IntegerLinear(quantized, bias, backend) if works else RoundedInputLinear(quantized, bias, backend, also)
    if int4_group(quantized) and ops_cpu.int4_works():
        return Int4Linear(quantized, bias, backend, unpacking)
    if _is_int8(quantized) and ops_cpu.int8_works():
        return Int8Linear(quantized, bias, backend, unpacking)
    return DequantizedLinear(quantized, bias, backend, also)


def held_as(linear: Linear) -> str:
    """How a compiled product reads its weight, as ``few_rows.weight_kind`` has it; "" where none reads it."""
    if isinstance(linear, Int4Linear):
        kind = f"int4:{linear.group_size}"
    elif isinstance(linear, Int8Linear) and linear.shape[1] % 4 == 0:  # four codes are a word
        kind = "int8"
    elif isinstance(linear, RoundedInputLinear) and linear.activation_scale is None and linear.inverse is None:
        return "plain+rounded"
    else:
        return ""
    return kind if linear.inverse is None else f"{kind}+scaled"


def words_of(linear: Linear, scaled: bool = False) -> list[torch.Tensor]:
    """What a compiled product then takes; empty where none reads the weight, or reads it as plain numbers. ``scaled``: with a factor for
    each column also where there is none, 1."""
    if isinstance(linear, Int4Linear):
        parts = [linear.words, linear.grids]
    elif isinstance(linear, Int8Linear) and held_as(linear):
        parts = [words.as_words(linear.codes), linear.scales]
    else:
        return []
    if linear.inverse is not None:
        return [*parts, linear.inverse]
    return [*parts, torch.ones(linear.shape[1])] if scaled else parts


def int4_group(quantized: QuantizedWeight) -> int:
    """The group size under which torch's 4-bit kernel can run the weight: the largest it knows that every group is a multiple of. 0: none."""
    rows, columns = quantized.shape
    if quantized.levels != "affine" or quantized.bits > 4 or quantized.group_of_column is not None or rows % ops_cpu.INT4_ROWS:
        return 0
    if quantized.scales.dtype != torch.float16:  # beyond the range of what is held for a group
        return 0
    run = quantized.group_size or columns
    fits = [size for size in ops_cpu.INT4_GROUPS if run % size == 0 and columns % size == 0]
    return max(fits, default=0)


def _is_int8(quantized: QuantizedWeight) -> bool:
    per_row = quantized.scales.shape[1] == 1
    symmetric = quantized.zero_points is None and quantized.minima is None
    return quantized.levels == "affine" and quantized.bits == 8 and per_row and symmetric and quantized.group_of_column is None


def _per_group(quantized: QuantizedWeight, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum (the value of code 0) of each run of ``group_size`` columns: float16 and float32 [N, K / group_size]."""
    rows, columns = quantized.shape
    scales = quantized.scales
    if quantized.minima is not None:
        minima = quantized.minima
    elif quantized.zero_points is not None:
        minima = -scales.float() * quantized.zero_points.float()
    else:
        minima = scales.float() * -float(1 << (quantized.bits - 1))
    count = columns // group_size
    repeats = (quantized.group_size or columns) // group_size
    of_runs = [t.repeat_interleave(repeats, 1)[:, :count].expand(rows, -1).contiguous() for t in (scales.half(), minima.float())]
    return of_runs[0], of_runs[1]


def _signed(quantized: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 codes [N, K] and float32 scales [N] of symmetric 8-bit codes."""
    codes = (quantized.unpacked() ^ 128).view(torch.int8)  # 128 is 0
    return codes, quantized.scales.float().expand(quantized.shape[0], 1)[:, 0].contiguous()


def _nbytes(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _inverse(quantized: QuantizedWeight) -> torch.Tensor | None:
    return None if quantized.input_scales is None else 1 / quantized.input_scales.float()


def _rounded(x: torch.Tensor, scale: float | None) -> torch.Tensor:
    """codes * scales of ``quantize_activations(x, scale)`` in fewer operations, each of which counts for a few rows: the same numbers."""
    x = x.float()
    if scale is not None:
        return (x / scale).round_().clamp_(-LARGEST, LARGEST).mul_(scale)
    codes, steps = _by_row(x)
    return codes.mul_(steps)


def _by_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as floats and scales [T, 1] of ``x`` float32 [T, K], as ``quantize_activations`` has them."""
    steps = torch.linalg.vector_norm(x, float("inf"), 1, keepdim=True).div_(LARGEST)
    return (x / steps.clamp_min(_SMALLEST)).round_(), steps


class _Integers:
    """A weight of 8-bit integers and the product of integers with it."""

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.packed = ops_cpu.pack_integers(codes)
        self.scales = scales
        self.zeros = torch.zeros(len(scales), dtype=torch.int32)
        # [N]: what a shift of the activations by ``MIDDLE`` is to take away again.
        self.shift = codes.sum(1, dtype=torch.int32).float().mul_(scales).mul_(-MIDDLE)

    def one_digit(self, codes: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """int8 activations [T, K] and their scales [T, 1] or [1, 1] -> float32 [T, N]."""
        return self._times((codes.view(torch.uint8) ^ 128).contiguous(), steps)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        """``one_digit(*quantize_activations(x))`` in fewer operations, each of which counts for a few rows: the same numbers."""
        codes, steps = _by_row(x.float())
        return self._times(codes.add_(MIDDLE).to(torch.uint8), steps)

    def _times(self, shifted: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        return ops_cpu.integer_product(shifted, self.packed, self.scales, self.zeros, self.shift).mul_(steps)
