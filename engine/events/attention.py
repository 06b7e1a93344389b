"""The event of one attention kernel's tile schedule. See ``engine.events.types`` for what holds for all events.

H is the number of query heads, K of KV heads, G = H / K, D the head size. Arrays are little-endian and C-contiguous.
"""

from typing import Any

import msgspec
import numpy as np

from engine.events.event import Event

FLOAT_FIELDS = ("running_max", "running_sum")  # of the records: float32 bits in an int64


class TracedRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request of the launch: its last ``q_len`` tokens attend to all its ``kv_len`` ones."""

    request_id: str
    q_len: int
    kv_len: int
    block_ids: list[int]  # as in its block table, enough for kv_len tokens
    row_bits: list[int] = []  # of a tree of drafts: which of the q_len tokens each sees, bit j for the j-th; []: causal


class AttentionTraced(Event, frozen=True, kw_only=True):
    """The attention call of one layer in one step, run by a kernel of ours that recorded its tiles, on the step's own Q, K, V and
    block tables. A step with prompts and decodes has a launch of each kernel, and so two of these. Recorded under
    ``trace_attention``.

    Programs are numbered as launched. flash_attention: (query tile from the end, head, request); paged_decode: (part of the
    context, KV head, request), its rows are token * G + head within the group.
    """

    trace_id: str  # as asked; the same in all launches of the step
    layer: int
    kernel: str  # "flash_attention" | "paged_decode"
    where: str  # "cuda": on the engine's own device; "interpreter": on the CPU in a process of its own, order only and no times
    device: str  # name
    backend: str  # the attention backend that the step itself ran with
    requests: list[TracedRequest]
    requests_left_out: int  # of the step, for the bound on a trace's size; the last ones
    block_size: int
    num_blocks: int  # of the pool
    num_heads: int  # H, of the model
    num_kv_heads: int  # K, of the model
    traced_kv_heads: int  # the first so many KV heads (with their G query heads each) were run
    head_dim: int  # D
    dtype: str  # of Q: "bfloat16", ...
    kv_dtype: str  # of what the kernel read, as EngineConfig.kv_cache_dtype; "auto": that of Q (flash_attention's keys are dequantised before)
    scale: float  # of the logits
    causal: bool
    window: int  # keys that a query sees, itself included; 0: all
    block_m: int  # rows of a query tile
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    num_splits: int  # parts of the context (paged_decode); 1: not split
    num_sms: int  # multiprocessors that the splits were chosen for
    fields: list[str]  # engine.kernels.tracing.FIELDS
    num_records: int  # R
    records: bytes  # int64 [len(fields), R], in the order of recording; see ``records_of``
    dropped: int  # records that found the buffer full
    # The chosen row, and its softmax whole.
    row_request: int  # index in requests
    row: int  # of the request's q_len rows
    row_head: int  # query head
    row_scores: bytes  # float32 [kv_len]: scaled logits, natural units; -inf where hidden. Computed in float64
    row_max: float  # of them; the kernel's own running ones end there
    row_sum: float  # sum of exp(score - max), in float64
    row_lse: float  # log-sum-exp, as the kernel gave it
    row_output: bytes  # float32 [D], as the kernel gave it
    row_expected: bytes  # float32 [D], softmax(scores) V in float64, rounded
    # The whole result.
    max_difference: float  # largest |kernel - what the step's own backend computed|
    max_error: float  # largest |kernel - attention in float64|
    backend_max_error: float  # largest |step's backend - attention in float64|
    max_output: float  # largest |output| in float64
    # Bytes to and from device memory, of Q, K, V, output and log-sum-exp (scales of a KV cache in few bits counted; what merging the
    # parts of a split context moves is not).
    bytes_loaded: int  # counted: the sum of the records'
    bytes_stored: int
    formula_loaded: int  # from lengths and tile sizes alone
    formula_stored: int
    standard_loaded: int  # of attention that writes the scores: formula, at the same query tiles; S and P in Q's dtype
    standard_stored: int
    kernel_ms: float  # traced, compilation not counted; NaN under the interpreter
    untraced_ms: float  # the same launch without tracing; NaN under the interpreter
    seconds: float  # that the whole study took


def records_of(event: AttentionTraced) -> dict[str, "np.ndarray[Any, Any]"]:
    """The records by field: int64 [R], and float32 for those of ``FLOAT_FIELDS``. ValueError where the bytes do not fit."""
    count = len(event.fields)
    if event.num_records < 0 or len(event.records) != 8 * count * event.num_records:
        raise ValueError(f"{count} fields of {event.num_records} records take other than {len(event.records)} bytes")
    table = np.frombuffer(event.records, "<i8").reshape(count, event.num_records)
    return {
        name: column.astype("<i4").view("<f4") if name in FLOAT_FIELDS else column for name, column in zip(event.fields, table)
    }


def row_scores_of(event: AttentionTraced) -> "np.ndarray[Any, Any]":
    """float32 [kv_len]: the chosen row's scaled logits."""
    return np.frombuffer(event.row_scores, "<f4")
