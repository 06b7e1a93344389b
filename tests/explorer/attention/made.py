"""An AttentionTraced event, made up but consistent: the records follow the kernel's arithmetic on real numbers."""

from typing import Any

import numpy as np

from engine.events.attention import AttentionTraced, TracedRequest
from engine.kernels.flash_attention.schedule import FlashConfig, tile_schedule
from engine.kernels.tracing import FIELDS, PROGRAM, TILE

BLOCK_M, BLOCK_N, D = 16, 16, 64


def scores_of(q_len: int, kv_len: int, head: int) -> np.ndarray:
    """float64 [q_len, kv_len], causal."""
    rng = np.random.default_rng(head + 100 * kv_len)
    scores = rng.standard_normal((q_len, kv_len)) * 2
    position = np.arange(q_len)[:, None] + kv_len - q_len
    scores[np.arange(kv_len)[None, :] > position] = -np.inf
    return scores


def bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def records(lengths: list[tuple[int, int]], heads: int = 1, sms: int = 0) -> np.ndarray:
    """int64 [R, fields]: of flash_attention, the last row of each tile. ``sms``: multiprocessors, and times; 0: the interpreter's."""
    out: list[dict[str, int]] = []
    clock = 0
    for z, (q_len, kv_len) in enumerate(lengths):
        ranges = tile_schedule(q_len, kv_len, FlashConfig(BLOCK_M, BLOCK_N))
        for head in range(heads):
            scores = scores_of(q_len, kv_len, head)
            for x, found in enumerate(reversed(ranges)):
                row = scores[found.q_start + found.q_rows - 1]
                shared = {
                    "program_x": x, "program_y": head, "program_z": z, "q_start": found.q_start, "q_rows": found.q_rows,
                    "sm": (x + head) % sms if sms else -1,
                }  # fmt: skip
                m = total = 0.0
                for start in found.tiles(BLOCK_N):
                    keys = min(BLOCK_N, found.stop - start)
                    seen = row[: start + keys]
                    m = float(seen.max())
                    total = float(np.exp(seen - m).sum())
                    out.append(
                        {
                            **shared, "kind": TILE, "kv_start": start, "kv_rows": keys, "running_max": bits(m), "running_sum": bits(total),
                            "bytes_loaded": 4 * keys * D, "masked": int(not found.full_start <= start < found.full_stop),
                            "time_start": 1000 * clock if sms else 0, "time_end": 1000 * clock + 900 if sms else 0,
                        }
                    )  # fmt: skip
                    clock += 1
                out.append(
                    {
                        **shared, "kind": PROGRAM, "kv_start": found.start, "kv_rows": found.stop - found.start, "running_max": bits(m),
                        "running_sum": bits(total), "bytes_loaded": found.q_rows * D * 2, "bytes_stored": found.q_rows * (2 * D + 4),
                    }
                )  # fmt: skip
    return np.array([[row.get(name, 0) for name in FIELDS] for row in out], np.int64)


def columns(lengths: list[tuple[int, int]], heads: int = 1, sms: int = 0) -> dict[str, np.ndarray]:
    """The records as ``TraceBuffer.read`` gives them."""
    table = records(lengths, heads, sms)
    floats = ("running_max", "running_sum")
    return {
        name: table[:, i].astype(np.int32).view(np.float32) if name in floats else table[:, i] for i, name in enumerate(FIELDS)
    }


def traced(step: int = 3, trace_id: str = "t", **changes: Any) -> AttentionTraced:
    """Two requests: a whole prompt of 40 tokens, and the last 20 of 70."""
    lengths = [(40, 40), (20, 70)]
    table = records(lengths, 3, changes.pop("sms", 0))
    row = scores_of(20, 70, 0)[-1]
    m = float(row.max())
    total = float(np.exp(row - m).sum())
    facts: dict[str, Any] = {
        "step": step, "time_ns": 1, "trace_id": trace_id, "layer": 2, "kernel": "flash_attention", "where": "interpreter", "device": "cpu",
        "backend": "torch",
        "requests": [TracedRequest("req-0", 40, 40, [4, 9, 2]), TracedRequest("req-1", 20, 70, [7, 1, 12, 5, 8])],
        "requests_left_out": 0, "block_size": 16, "num_blocks": 128, "num_heads": 9, "num_kv_heads": 3, "traced_kv_heads": 1, "head_dim": D,
        "dtype": "bfloat16", "kv_dtype": "auto", "scale": 0.125, "causal": True, "window": 0, "block_m": BLOCK_M, "block_n": BLOCK_N,
        "num_warps": 4, "num_stages": 2, "num_splits": 1, "num_sms": 132, "fields": list(FIELDS), "num_records": len(table),
        "records": np.ascontiguousarray(table.T).tobytes(), "dropped": 0, "row_request": 1, "row": 19, "row_head": 0,
        "row_scores": row.astype("<f4").tobytes(), "row_max": m, "row_sum": total, "row_lse": m + float(np.log(total)),
        "row_output": np.zeros(D, "<f4").tobytes(), "row_expected": np.zeros(D, "<f4").tobytes(), "max_difference": 0.004, "max_error": 0.003,
        "backend_max_error": 0.004, "max_output": 2.5, "bytes_loaded": 100_000, "bytes_stored": 20_000, "formula_loaded": 100_000,
        "formula_stored": 20_000, "standard_loaded": 300_000, "standard_stored": 90_000, "kernel_ms": float("nan"),
        "untraced_ms": float("nan"), "seconds": 1.5,
    }  # fmt: skip
    return AttentionTraced(**{**facts, **changes})
