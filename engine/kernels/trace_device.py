"""The tracing code of kernels: called under ``if TRACE`` alone. The columns are those of ``tracing.FIELDS``. Imports Triton."""

import triton
import triton.language as tl

from engine.kernels.device import INTERPRETED, LN_2

_WIDTH = tl.constexpr(18)


@triton.jit
def clock():
    """int64: cycles of this multiprocessor. The interpreter has no inline assembly: 0."""
    if INTERPRETED:
        return tl.full([], 0, tl.int64)
    else:
        return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def timer():
    """int64: the GPU's global timer, ns."""
    if INTERPRETED:
        return tl.full([], 0, tl.int64)
    else:
        return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def multiprocessor():
    """int64: the number of the multiprocessor."""
    if INTERPRETED:
        return tl.full([], -1, tl.int64)
    else:
        sm = tl.inline_asm_elementwise("mov.u32 $0, %smid;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        return sm.to(tl.int64)


@triton.jit
def of_row(values, row):
    """One element of a vector [M] as a scalar."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == row, values, 0.0), 0)


@triton.jit
def _bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)


@triton.jit
def record(
    trace_ptr,  # int64 [1 + CAPACITY, 18]; [0, 0] counts the records
    CAPACITY: tl.constexpr, kind, q_start, q_rows, kv_start, kv_rows, m, total, loaded, stored, masked, clock_start, time_start,
):  # fmt: skip
    """Append a record. ``m``: the chosen row's running maximum in base 2; ``total``: its sum."""
    clock_end, time_end = clock(), timer()
    index = tl.atomic_add(trace_ptr, tl.full([], 1, tl.int64))
    if index < CAPACITY:
        row = trace_ptr + (index + 1) * _WIDTH
        tl.store(row, kind)
        tl.store(row + 1, tl.program_id(0))
        tl.store(row + 2, tl.program_id(1))
        tl.store(row + 3, tl.program_id(2))
        tl.store(row + 4, q_start)
        tl.store(row + 5, q_rows)
        tl.store(row + 6, kv_start)
        tl.store(row + 7, kv_rows)
        tl.store(row + 8, _bits(m * LN_2))
        tl.store(row + 9, _bits(total))
        tl.store(row + 10, loaded)
        tl.store(row + 11, stored)
        tl.store(row + 12, masked)
        tl.store(row + 13, multiprocessor())
        tl.store(row + 14, clock_start)
        tl.store(row + 15, clock_end)
        tl.store(row + 16, time_start)
        tl.store(row + 17, time_end)
