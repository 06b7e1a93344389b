"""Functions that several kernels call. Imports Triton."""

import triton
import triton.language as tl

# Whether the kernels of this process run under Triton's interpreter. As a compile-time constant it leaves no trace in compiled code.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NEG_INF = tl.constexpr(float("-inf"))
# 1.5 * 2**23: a float32 below 2**22 added to it and taken away again is a whole number, ties to even.
ROUND = tl.constexpr(12582912.0)


@triton.jit
def narrow(x, DTYPE: tl.constexpr):
    """float32 or float64 -> DTYPE, to nearest even (the interpreter's own conversion to bfloat16 cuts off instead)."""
    if INTERPRETED and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x.to(tl.float32))
    return x.to(DTYPE)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b in the precision of ``acc`` (never in TF32). The interpreter would multiply the bits of bfloat16 as integers."""
    if INTERPRETED:
        return acc + tl.dot(a.to(acc.dtype), b.to(acc.dtype), input_precision="ieee", out_dtype=acc.dtype)
    else:
        return tl.dot(a, b, acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def table_slots(table_ptr, n, valid, num_blocks, BLOCK_SIZE: tl.constexpr):
    """int64: the slots of positions ``n`` of the request whose row of the block table begins at ``table_ptr``.

    A block outside the pool stops the interpreter (Triton's device_assert does nothing there), and on CUDA a kernel that was
    launched with ``debug=True``.
    """
    blocks = tl.load(table_ptr + n // BLOCK_SIZE, mask=valid, other=0)
    if INTERPRETED:
        tl.assume((blocks >= 0) & (blocks < num_blocks))
    else:
        tl.device_assert((blocks >= 0) & (blocks < num_blocks), "block table points outside the pool")
    return blocks.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE


@triton.jit
def load_rows(ptr, rows, stride, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, CHECK_ROWS: tl.constexpr):
    """[rows, BLOCK_D]: HEAD_DIM numbers at ``ptr + row * stride`` each; what is masked is 0, and not read."""
    d = tl.arange(0, BLOCK_D)
    at = ptr + rows[:, None] * stride + d[None, :]
    if BLOCK_D > HEAD_DIM:
        if CHECK_ROWS:
            return tl.load(at, mask=valid[:, None] & (d[None, :] < HEAD_DIM), other=0.0)
        else:
            return tl.load(at, mask=d[None, :] < HEAD_DIM, other=0.0)
    else:
        if CHECK_ROWS:
            return tl.load(at, mask=valid[:, None], other=0.0)
        else:
            return tl.load(at)


@triton.jit
def online_softmax(s, m, total, scale):
    """One step of the online softmax (arXiv 2307.08691, alg. 1, lines 9 and 10), in base 2.

    s [M, N]: logits before scaling, -inf where hidden; m, total [M]: running maximum (scaled) and sum; scale: a scalar, times log2(e).
    Returns p [M, N], the new m and total, and what the accumulator is to be multiplied with.
    """
    m_new = tl.maximum(m, tl.max(s, 1) * scale)
    origin = tl.where(m_new == NEG_INF, 0.0, m_new)  # of a row that has seen nothing yet: -inf less -inf would be NaN
    p = tl.exp2(tl.fma(s, tl.zeros_like(s) + scale, tl.zeros_like(s) - origin[:, None]))
    alpha = tl.exp2(m - origin)
    return p, m_new, total * alpha + tl.sum(p, 1), alpha


@triton.jit
def widen(x, QUANT: tl.constexpr, DTYPE: tl.constexpr):
    """Stored numbers -> DTYPE, exact. QUANT: 0 (numbers of DTYPE as they are), 1 (int8 codes), 2 (uint8 codes of e4m3)."""
    if QUANT == 0:
        return x
    elif QUANT == 1:
        if INTERPRETED:  # which has no way from an integer to bfloat16
            return x.to(tl.float32).to(DTYPE)
        else:
            return x.to(DTYPE)
    else:
        return e4m3_to_float(x).to(DTYPE)


@triton.jit
def e4m3_to_float(code):
    """uint8 codes of float8_e4m3fn -> float16, exact. By its bits: sm_80 has no instruction for it, nor has the interpreter NaN."""
    code = code.to(tl.uint16)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 7)  # exponent and mantissa of float16, whose bias is 8 larger
    value = bits.to(tl.uint16).to(tl.float16, bitcast=True) * 256.0
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def float_to_e4m3(x):
    """float32 -> uint8 codes of float8_e4m3fn, to nearest even, values beyond 448 to 448. By its bits, see above."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    small = (size * 512.0 + ROUND) - ROUND  # below 2**-6 codes are multiples of 2**-9
    raw = size.to(tl.uint32, bitcast=True)
    rounded = (raw + 0x7FFFF + ((raw >> 20) & 1)) >> 20  # 3 bits of mantissa; a carry goes into the exponent as it should
    normal = rounded - (120 << 3)  # exponent bias 127 -> 7
    code = tl.where(size < 0.015625, small.to(tl.uint32), normal)
    return tl.where(x == x, sign | code, 0x7F).to(tl.uint8)
