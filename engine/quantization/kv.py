"""Codecs of K and V in few bits: numbers to codes, scales and minima, and back. Pure functions; the pool that holds them is
``engine.kvcache.quantized``.

- int8 and fp8 (e4m3, arXiv 2209.05433, section 3): a token's vector of one head has one scale, symmetric: absmax / 127, absmax / 448.
- int4 as KIVI (arXiv 2402.02750, section 3): keys have channels that are large in every token, so they are rounded per channel,
  over a group of tokens; values have none, so they are rounded per token, over groups of channels. Both asymmetric: a scale and a minimum.

Scales and minima are bfloat16: two bytes as float16, with the range of float32. A code is chosen for the scale as it is held, so
that rounding the scale costs no accuracy. Where bfloat16 comes out, a value is rounded once from code * scale (+ minimum).

A vector or group that holds a NaN comes back as NaN, so that broken K or V shows as it would without rounding.

Shapes: D head_dim, K KV heads, G groups of channels in a head.
"""

import torch

SCALE_DTYPE = torch.bfloat16
INT8_MAX = 127
FP8_MAX = 448.0  # the largest e4m3 number
INT4_MAX = 15
VALUE_GROUP = 32  # channels of a value that share a scale in 4 bits (KIVI's G)
# No scale is smaller: below it a vector counts as zero, and nothing is divided by 0.
_LEAST_SCALE = 1e-30
# No fp8 scale is larger, so that scale * 2**120 stays finite (see ``dequantize_fp8``): beyond 448 * 128 = 57,344 K and V saturate.
_MOST_FP8_SCALE = 128.0
_FP8_BIAS = 2.0**120  # the exponent biases of bfloat16 and e4m3 differ by 127 - 7


def value_groups(head_dim: int) -> int:
    """G: groups of 32 channels where that divides the head, else one."""
    return head_dim // VALUE_GROUP if head_dim % VALUE_GROUP == 0 else 1


# -- 8 bits: one scale for a token's vector of one head -------------------------------------------------------------------


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [..., D] -> codes int8 [..., D] in [-127, 127], scales [..., 1]. Off by at most half a scale."""
    scales = _symmetric_scales(x, INT8_MAX)
    return torch.div(x, scales.float()).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), scales


def dequantize_int8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., D] in ``dtype``."""
    wide = _wide(dtype)
    return _as(codes.to(wide).mul_(scales.to(wide)), dtype)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` [..., D] -> codes uint8 [..., D], the bits of e4m3 numbers, and scales [..., 1].

    Off by at most a sixteenth of the value or 2**-10 of the scale. Infinity and what lies beyond 57,344 saturate there.
    """
    scales = _symmetric_scales(x, FP8_MAX).clamp_max_(_MOST_FP8_SCALE)
    return to_fp8(torch.div(x, scales.float())), scales


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """The nearest e4m3 numbers, saturating at 448 (torch's own conversion makes NaN of what is larger): uint8, shaped as ``x``."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def dequantize_fp8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., D] in ``dtype``.

    torch converts e4m3 one number at a time. Moved to the places of sign, exponent and mantissa of a bfloat16 (or float32)
    its seven bits are the same number times 2**-120, subnormal ones included, and the scale makes up for that.
    """
    wide = _wide(dtype)
    if wide == torch.bfloat16:
        bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(0x87F0 - 0x10000)
    else:
        bits = codes.view(torch.int8).to(torch.int32).bitwise_left_shift_(20).bitwise_and_(0x87F00000 - 0x100000000)
    out = bits.view(wide).mul_(scales.to(wide) * _FP8_BIAS)
    return _as(out, dtype)


def _symmetric_scales(x: torch.Tensor, largest: float) -> torch.Tensor:
    """[..., 1]. To the nearest bfloat16: where that is smaller, the largest value is cut by less than half a step."""
    absmax = torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True, dtype=torch.float32)
    return absmax.mul_(1 / largest).clamp_min_(_LEAST_SCALE).to(SCALE_DTYPE)


# -- 4 bits: a scale and a minimum -----------------------------------------------------------------------------------------


def quantize_keys_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of a group of tokens, ``x`` [..., tokens, K, D] -> codes uint8 [..., tokens, K, D / 2], two channels a byte, and the
    scale and minimum of each channel, [..., 2, K, D]. Off by at most half a scale, and half a unit in the last place of the minimum."""
    codes, affine = _quantize_int4(x, -3)
    return pack4(codes), affine.squeeze(-3).movedim(0, -3).contiguous()


def dequantize_keys_int4(codes: torch.Tensor, affine: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The inverse of ``quantize_keys_int4``, into ``out`` [..., tokens, K, D]."""
    scales, minima = affine.movedim(-3, 0).unsqueeze(-3)
    return _affine(unpack4(codes), scales, minima, out)


def quantize_values_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, ``x`` [..., K, D] -> codes uint8 [..., K, D / 2] and the scale and minimum of each group of a head, [..., 2, K, G].
    Accuracy as for keys."""
    groups = value_groups(x.shape[-1])
    codes, affine = _quantize_int4(x.unflatten(-1, (groups, -1)), -1)
    return pack4(codes.flatten(-2)), affine.squeeze(-1).movedim(0, -3).contiguous()


def dequantize_values_int4(codes: torch.Tensor, affine: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The inverse of ``quantize_values_int4``, into ``out`` [..., K, D]."""
    size = out.shape[-1] // affine.shape[-1]
    # Repeated first: with a group's scale broadcast over its channels the sum below takes several times as long.
    scales, minima = affine.to(_wide(out.dtype))[..., None].expand(*affine.shape, size).flatten(-2).movedim(-3, 0)
    return _affine(unpack4(codes), scales, minima, out)


def _quantize_int4(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8, shaped as ``x``; [2, ...] scales and minima of the groups that lie along ``dim`` (kept, of size 1)."""
    x = x.float()
    low, high = torch.aminmax(x, dim=dim, keepdim=True)
    minima = low.to(SCALE_DTYPE)
    scales = (high - minima.float()).mul_(1 / INT4_MAX).clamp_min_(_LEAST_SCALE).to(SCALE_DTYPE)
    codes = (x - minima.float()).div_(scales.float()).round_().clamp_(0, INT4_MAX).to(torch.uint8)
    return codes, torch.stack((scales, minima))


def _affine(codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    wide = _wide(out.dtype)
    codes, scales, minima = codes.to(wide), scales.to(wide), minima.to(wide)
    if out.dtype == wide:
        return torch.addcmul(minima, codes, scales, out=out)
    return out.copy_(torch.addcmul(minima, codes, scales))


def pack4(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., D] in [0, 15] -> uint8 [..., D / 2], the even channel in the low half (as ``engine.quantization.packing``)."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack4(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of ``pack4``. A byte hl, widened and spread to 0l 0h, is two bytes in order (as long as the machine is little-endian)."""
    wide = packed.to(torch.int16)
    return (wide << 4).bitwise_or_(wide).bitwise_and_(0x0F0F).view(torch.uint8)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What is computed in: bfloat16 holds every code exactly, so it needs no wider one; float16's range is too small for scales."""
    return dtype if dtype == torch.bfloat16 else torch.float32


def _as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else x.to(dtype)
