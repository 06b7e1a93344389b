"""A process that runs or compiles kernels for the page: ``python -m explorer.attention.worker interpret`` (or ``compile``).

A line of JSON comes in, a line goes out: ``Shape.asdict()`` against what was found, or {"error": words}. It ends with its input. Kernels are
interpreted or compiled by what the environment said when Triton was imported, so there is a process for each.
"""

import base64
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from explorer.attention.memory import buffers
from explorer.attention.shape import Shape, inputs

WITHOUT = ("sass", "ptx", "ttgir")  # of a report: too long to show


def interpret(shape: Shape) -> dict[str, Any]:
    """Run the kernel under the interpreter: its records, how long that took, and how far the output is from float64's."""
    import torch

    from engine.kernels.flash_attention import FlashConfig, flash_attention_varlen, naive_flash_attention
    from engine.kernels.interpreter import patch_once
    from engine.kernels.tracing import TraceBuffer

    patch_once()
    q, k, v = (torch.from_numpy(x) for x in inputs(shape))
    offsets = torch.tensor([0, shape.seq_len], dtype=torch.int32)
    trace = TraceBuffer("cpu", row=shape.block_m - 1)
    config = FlashConfig(shape.block_m, shape.block_n, shape.num_warps, shape.num_stages)
    begin = time.perf_counter()
    out, _lse = flash_attention_varlen(
        q, k, v, offsets, offsets, causal=shape.causal, window=shape.window or None, config=config, trace=trace
    )
    seconds = time.perf_counter() - begin
    right, _lse = naive_flash_attention(q, k, v, offsets, offsets, causal=shape.causal, window=shape.window or None)
    found = trace.read()
    return {
        "columns": {name: encoded(column) for name, column in found.columns.items()},
        "dropped": found.dropped,
        "seconds": seconds,
        "error_max": float((out.double() - right).abs().max()),
        "output_max": float(right.abs().max()),
    }


def compiled(shape: Shape) -> dict[str, Any]:
    """What the kernel becomes for the shape's GPU, and the buffers that the compiler made."""
    import torch

    from engine.kernels.flash_attention import FlashConfig, forward_spec
    from engine.kernels.report import report_of
    from engine.model.store import cache_directory

    config = FlashConfig(shape.block_m, shape.block_n, shape.num_warps, shape.num_stages)
    options: dict[str, Any] = {
        "group": shape.group, "causal": shape.causal, "window": shape.window or None, "config": config,
    }  # fmt: skip
    if shape.descriptors:
        from engine.kernels.flash_attention.tma import tma_spec

        spec = tma_spec(shape.head_dim, torch.float16, **options)
    else:
        spec = forward_spec(shape.head_dim, torch.float16, block_size=shape.block_size, **options)
    begin = time.perf_counter()
    report = report_of(
        spec, shape.target, max_shared=shape.chip.limits.shared_per_block, cache=cache_directory() / "reports" / "explorer"
    )
    facts = {name: value for name, value in asdict(report).items() if name not in WITHOUT}
    return {**facts, "buffers": [asdict(b) for b in buffers(report.ttgir)], "seconds": time.perf_counter() - begin}


DOES: dict[str, Callable[[Shape], dict[str, Any]]] = {"interpret": interpret, "compile": compiled}


def encoded(column: np.ndarray) -> list[str]:
    return [column.dtype.str, base64.b64encode(np.ascontiguousarray(column).tobytes()).decode()]


def decoded(parts: list[str]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(parts[1]), parts[0])


def main(kind: str) -> None:
    do, answers = DOES[kind], sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    for line in sys.stdin:
        try:
            found = do(Shape(**json.loads(line)))
        except (ValueError, RuntimeError) as error:  # told to whoever asked; the next job is another one
            found = {"error": str(error)}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
