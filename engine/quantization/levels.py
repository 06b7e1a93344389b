"""What a code stands for before its scale: integers about a zero point, NF4's quantiles, FP8's floating-point values."""

from statistics import NormalDist

import torch

# The sixteen levels of the 4-bit NormalFloat, as published (Dettmers et al., QLoRA, arXiv 2305.14314, appendix E): float32 values.
NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    dtype=torch.float32,
)

# The 256 values of float8_e4m3fn (Micikevicius et al., FP8 formats, arXiv 2209.05433, table 1): no infinity, largest 448.
# Codes 0x7f and 0xff are its two NaNs, and no method here writes them.
FP8_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
FP8_E4M3_MAX = 448.0

NAMES = ("affine", "nf4", "fp8_e4m3")


def normal_float_levels(bits: int = 4, offset: float = 0.9677083, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The levels of a NormalFloat of ``bits`` bits, from the quantiles of a normal distribution: 2**bits ascending in [-1, 1].

    2**(bits - 1) of them lie above 0, one fewer below, and 0 itself is a level, so that a zero weight stays zero. Each side takes the
    quantiles at evenly spaced probabilities from ``offset`` down to 1/2 (whose quantile is that zero), and all are divided by the
    largest (QLoRA, section 3, "4-bit NormalFloat quantization"). ``offset`` keeps the outermost quantile finite; the default, the
    mean of 1 - 1/30 and 1 - 1/32 to seven digits, is the published table's, which was made with float32 probabilities and quotients:
    in float64 the last digits differ, by at most 1.2e-7. ValueError for other than 2 to 8 bits.
    """
    if not isinstance(bits, int) or not 2 <= bits <= 8:
        raise ValueError(f"a NormalFloat has 2 to 8 bits, got {bits!r}")

    def side(count: int) -> list[float]:
        probabilities = torch.linspace(offset, 0.5, count + 1, dtype=dtype)[:-1]
        return [NormalDist().inv_cdf(p) for p in probabilities.tolist()]

    above, below = side(1 << (bits - 1)), side((1 << (bits - 1)) - 1)
    quantiles = torch.tensor([*(-q for q in below), 0.0, *reversed(above)], dtype=dtype)
    return quantiles / quantiles[-1]


def nf4_pairs(packed: torch.Tensor) -> torch.Tensor:
    """The levels of packed NF4 codes, uint8 [N, W] with two codes a byte (see ``packing``): float32 [N, 2 W]. One look-up for two."""
    pairs = torch.stack((NF4.repeat(16), NF4.repeat_interleave(16)), -1).view(torch.float64).view(-1)  # 8 bytes a byte
    found = pairs.to(packed.device).index_select(0, packed.reshape(-1).to(torch.int32))
    return found.view(torch.float32).view(packed.shape[0], -1)


def values(codes: torch.Tensor, levels: str, bits: int, zero_points: torch.Tensor | int | None = None) -> torch.Tensor:
    """The level of each code: a new float32 tensor, shaped as ``codes`` (uint8, any shape).

    ``levels``: one of ``NAMES``. "affine" is code - zero point; ``zero_points`` is an integer or a tensor that broadcasts against the
    codes (a zero point for each column), None the middle code 2**(bits - 1). The tables take no zero points. ValueError for an
    unknown name, for "nf4" not in 4 bits and for "fp8_e4m3" not in 8.
    """
    if levels == "affine":
        zero = (1 << (bits - 1)) if zero_points is None else zero_points
        level = codes.to(torch.float32)
        if isinstance(zero, int):
            return level.sub_(zero) if zero else level
        return level.sub_(zero.to(torch.float32))
    if levels not in NAMES:
        raise ValueError(f"levels are one of {', '.join(NAMES)}, got {levels!r}")
    width = 4 if levels == "nf4" else 8
    if bits != width:
        raise ValueError(f"{levels} has codes of {width} bits, got {bits!r}")
    if zero_points is not None:
        raise ValueError(f"{levels} has no zero points: its codes stand for the levels of a table")
    if levels == "fp8_e4m3":
        return _fp8_values(codes)
    # int32 indices: half of what is written and read with int64.
    return NF4.to(codes.device).index_select(0, codes.reshape(-1).to(torch.int32)).view(codes.shape)


def _fp8_values(codes: torch.Tensor) -> torch.Tensor:
    """By their bits, which is several times faster than a look-up: a float16 has the same sign and mantissa, and 8 more between
    its exponents and theirs. What would be 480 is NaN."""
    bits = (codes.view(torch.int8).to(torch.int16) << 7) & ~0x4000  # the sign is spread over two bits: the lower one goes
    found = bits.view(torch.float16).float().mul_(256.0)
    if codes.numel() and int((codes & 0x7F).amax()) == 0x7F:
        found.masked_fill_(found.abs() == 480.0, torch.nan)
    return found
