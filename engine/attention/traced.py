"""One launch of an attention kernel, run under tracing on tensors that were taken from a step, and what is to be told of it.

On a CPU the kernel needs Triton's interpreter, which a process has from its start or not at all: ``run_apart`` runs a job in a
child. No pickle: a job is a numpy archive and JSON.
"""

import contextlib
import io
import itertools
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.kernels.flash_attention import FlashConfig, gather_paged, naive_flash_attention, tile_schedule
from engine.kernels.interpreter import environment, is_interpreted, patch_once
from engine.kernels.lazy import load, triton_version
from engine.kernels.paged_decode import DecodeConfig, dequantize_pool, naive_paged_decode, split_ranges
from engine.kernels.tracing import FIELDS, TraceBuffer

CHILD_SECONDS = 300.0  # that a child may take
_TENSORS = ("q", "pool", "scales", "block_tables", "cu_seqlens_q", "seq_lens", "tree", "positions", "expected")
_LOOK_SECONDS = 0.1
_RUNS = 5  # of which the median is told


@dataclass(frozen=True)
class Job:
    """A launch. H' and K' are the heads that were kept; ``expected`` is what the step's own backend gave."""

    kernel: str
    q: torch.Tensor  # [T, H', D]
    pool: torch.Tensor  # [slots, 2 K', D], numbers, or codes with scales; only blocks of the launch, in order of their ids
    scales: torch.Tensor | None  # [slots, 2 K']
    block_tables: torch.Tensor  # int32 [B, most blocks], into ``pool``
    cu_seqlens_q: torch.Tensor  # int32 [B + 1]
    seq_lens: torch.Tensor  # int32 [B]
    tree: torch.Tensor | None  # int64 [T]
    positions: torch.Tensor | None  # int32 [T]
    expected: torch.Tensor  # [T, H', D]
    options: dict[str, Any] = field(default_factory=dict)
    # block_size, window (0: none), num_splits, block_m, block_n, num_warps, num_stages, capacity; row_request, row, row_head

    @property
    def group(self) -> int:
        return self.q.shape[1] // (self.pool.shape[1] // 2)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(first row, rows) of each request in q."""
        cu = self.cu_seqlens_q.tolist()
        return [(a, b - a) for a, b in itertools.pairwise(cu)]


def study(job: Job) -> dict[str, Any]:
    """Run the job where its tensors are: the fields of an AttentionTraced that follow from it."""
    out, lse, trace, times = _run(job)
    o = job.options
    exact, row = _exact(job), _row(job)
    at = job.spans[o["row_request"]][0] + o["row"]
    where = out[at, o["row_head"]].float()
    loaded, stored = formula(job)
    standard = standard_formula(job)
    table = np.stack([_as_int64(trace[name]) for name in FIELDS])
    return {
        "fields": list(FIELDS), "num_records": len(trace), "records": table.astype("<i8").tobytes(), "dropped": trace.dropped,
        **row, "row_lse": float(lse[o["row_head"], at]), "row_output": where.cpu().numpy().astype("<f4").tobytes(),
        "max_difference": _most(out, job.expected), "max_error": _most(out, exact), "backend_max_error": _most(job.expected, exact),
        "max_output": float(exact.abs().max()) if exact.numel() else 0.0,
        "bytes_loaded": int(trace["bytes_loaded"].sum()), "bytes_stored": int(trace["bytes_stored"].sum()),
        "formula_loaded": loaded, "formula_stored": stored, "standard_loaded": standard[0], "standard_stored": standard[1],
        "kernel_ms": times[0], "untraced_ms": times[1],
    }  # fmt: skip


def _as_int64(column: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    return column.view(np.int32).astype(np.int64) if column.dtype == np.float32 else column


def _most(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def _run(job: Job) -> tuple[torch.Tensor, torch.Tensor, Any, tuple[float, float]]:
    """Output, log-sum-exp, trace, and milliseconds with and without tracing (NaN without a GPU)."""
    o = job.options
    row = o["row"] % o["block_m"] if job.kernel == "flash_attention" else o["row"] * job.group + o["row_head"] % job.group
    buffer = TraceBuffer(job.q.device, o["capacity"], row)
    where = (job.q, job.pool, job.block_tables, job.cu_seqlens_q, job.seq_lens)
    shared: dict[str, Any] = {
        "block_size": o["block_size"],
        "window": o["window"] or None,
        "max_seqlen_q": max(n for _, n in job.spans),
    }
    if job.kernel == "flash_attention":
        kernel = load("engine.kernels.flash_attention.triton").flash_attention
        shared |= {"config": FlashConfig(o["block_m"], o["block_n"], o["num_warps"], o["num_stages"])}
    else:
        kernel = load("engine.kernels.paged_decode.triton").paged_decode
        shared |= {
            "config": DecodeConfig(o["block_n"], o["num_warps"], o["num_stages"]), "num_splits": o["num_splits"],
            "kv_scales": job.scales, "tree": job.tree, "positions": job.positions if o["window"] else None,
        }  # fmt: skip

    def launch(trace: TraceBuffer | None) -> Any:
        return kernel(*where, **shared, trace=trace)

    if not job.q.is_cuda:
        out, lse = launch(buffer)
        return out, lse, buffer.read(), (math.nan, math.nan)
    untraced = _median_ms(lambda: launch(None))
    traced = _median_ms(lambda: launch(buffer))
    buffer.clear()
    out, lse = launch(buffer)
    return out, lse, buffer.read(), (traced, untraced)


def _median_ms(launch: Callable[[], Any]) -> float:
    launch()  # compiles
    times = []
    for _ in range(_RUNS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return sorted(times)[_RUNS // 2]


def _numbers(job: Job) -> torch.Tensor:
    return dequantize_pool(job.pool, job.scales)


def _exact(job: Job) -> torch.Tensor:
    """The output in float64 [T, H', D], on the CPU's or the GPU's own arithmetic."""
    window = job.options["window"] or None
    tables, lens, size = job.block_tables, job.seq_lens, job.options["block_size"]
    if job.tree is None:
        k, v, cu_k = gather_paged(_numbers(job), tables, lens, size)
        return naive_flash_attention(job.q, k, v, job.cu_seqlens_q, cu_k, window=window)[0]
    ancestors: list[torch.Tensor | None] = [_ancestors(job, start, n) for start, n in job.spans]
    scales = None if job.scales is None else job.scales.cpu()
    positions = None if job.positions is None else job.positions.cpu()
    moved = (t.cpu() for t in (job.q, job.pool, tables, job.cu_seqlens_q, lens))
    return naive_paged_decode(
        *moved, block_size=size, kv_scales=scales, window=window, ancestors=ancestors, positions=positions
    )[0].to(job.q.device)  # fmt: skip


def _ancestors(job: Job, start: int, n: int) -> torch.Tensor:
    assert job.tree is not None
    words = job.tree[start : start + n].cpu()
    return torch.stack([(words >> j) & 1 for j in range(n)], 1).bool()


def _row(job: Job) -> dict[str, Any]:
    """The chosen row's scores and its softmax whole, in float64."""
    o = job.options
    start, n = job.spans[o["row_request"]]
    length = int(job.seq_lens[o["row_request"]])
    row, head, size = o["row"], o["row_head"], o["block_size"]
    table = job.block_tables[o["row_request"]].cpu().long()
    at = torch.arange(length)
    slots = (table[at // size] * size + at % size).to(job.pool.device)
    kv = dequantize_pool(job.pool[slots], None if job.scales is None else job.scales[slots]).cpu()
    kv_heads = kv.shape[1] // 2
    k, v = kv[:, head // job.group], kv[:, kv_heads + head // job.group]
    scores = k @ job.q[start + row, head].cpu().double() / math.sqrt(job.q.shape[2])
    scores[~_seen(job, start, n, length)] = -math.inf
    largest = float(scores.max()) if length else -math.inf
    weights = torch.exp(scores - largest) if math.isfinite(largest) else torch.zeros(length, dtype=torch.float64)
    total = float(weights.sum())
    output = weights @ v / total if total else torch.zeros(job.q.shape[2], dtype=torch.float64)
    return {
        "row_scores": scores.numpy().astype("<f4").tobytes(), "row_max": largest, "row_sum": total,
        "row_expected": output.numpy().astype("<f4").tobytes(),
    }  # fmt: skip


def _seen(job: Job, start: int, n: int, length: int) -> torch.Tensor:
    """bool [length]: which keys the chosen row sees."""
    row, window = job.options["row"], job.options["window"]
    key = torch.arange(length)
    own, seen = length - n + row, key <= length - n + row
    if job.tree is not None and job.positions is not None:
        seen = torch.cat([torch.ones(length - n, dtype=torch.bool), _ancestors(job, start, n)[row]])
        positions = job.positions[start : start + n].cpu().long()
        key, own = torch.cat([key[: length - n], positions]), int(positions[row])
    return seen & (key > own - window) if window else seen


def formula(job: Job) -> tuple[int, int]:
    """Bytes loaded and stored, from lengths and tile sizes alone."""
    o, dim, size = job.options, job.q.shape[2], job.q.element_size()
    heads, kv_heads = job.q.shape[1], job.pool.shape[1] // 2
    of_key = 2 * (dim * job.pool.element_size() + (0 if job.scales is None else job.scales.element_size()))
    window = o["window"] or None
    loaded = stored = 0
    for (_, n), length in zip(job.spans, job.seq_lens.tolist()):
        if job.kernel == "flash_attention":
            config = FlashConfig(o["block_m"], o["block_n"], o["num_warps"], o["num_stages"])
            for tile in tile_schedule(n, length, config, True, window):
                loaded += heads * (tile.q_rows * dim * size + max(tile.stop - tile.start, 0) * of_key)
                stored += heads * tile.q_rows * (dim * size + 4)
        else:
            splits = o["num_splits"]
            for start, stop in split_ranges(length, n, splits, o["block_n"], window):
                loaded += kv_heads * (n * job.group * dim * size + (stop - start) * of_key)
                stored += kv_heads * n * job.group * (dim * (4 if splits > 1 else size) + 4)
    return loaded, stored


def standard_formula(job: Job) -> tuple[int, int]:
    """Bytes that attention would move that writes the scores S = Q K^T, reads them, writes P = softmax(S) and reads it (Dao et al.,
    arXiv 2205.14135, algorithm 0), all keys for each query tile, S and P in the dtype of Q."""
    dim, size = job.q.shape[2], job.q.element_size()
    heads, kv_heads = job.q.shape[1], job.pool.shape[1] // 2
    of_key = 2 * (dim * job.pool.element_size() + (0 if job.scales is None else job.scales.element_size()))
    loaded = stored = 0
    for (_, n), length in zip(job.spans, job.seq_lens.tolist()):
        passes = heads * -(-n // job.options["block_m"]) if job.kernel == "flash_attention" else kv_heads
        scores = 2 * heads * n * length * size
        loaded += heads * n * dim * size + passes * length * of_key + scores
        stored += heads * n * dim * size + scores
    return loaded, stored


# -- a process of its own -------------------------------------------------------------------------------------------------


def pack(job: Job) -> bytes:
    """``unpack`` gives it back."""
    arrays: dict[str, Any] = {}
    dtypes = {}
    for name in _TENSORS:
        tensor = getattr(job, name)
        if tensor is not None:
            dtypes[name] = str(tensor.dtype).removeprefix("torch.")
            tensor = tensor.detach().cpu().contiguous()
            arrays[name] = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    meta = json.dumps({"kernel": job.kernel, "options": job.options, "dtypes": dtypes})
    file = io.BytesIO()
    np.savez(file, meta=np.frombuffer(meta.encode(), np.uint8), **arrays)
    return file.getvalue()


def unpack(data: bytes) -> Job:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        meta = json.loads(arrays["meta"].tobytes())
        tensors: dict[str, Any] = dict.fromkeys(_TENSORS)
        for name, dtype in meta["dtypes"].items():
            tensor = torch.from_numpy(arrays[name].copy())
            tensors[name] = tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor
    return Job(kernel=meta["kernel"], options=meta["options"], **tensors)


def run_apart(
    job: Job, cancelled: Callable[[], bool] = lambda: False, program: Sequence[str] = ("-m", "engine.attention.traced")
) -> dict[str, Any] | None:
    """``study`` in a child process whose kernels are interpreted ones; None when it was cancelled meanwhile.

    RuntimeError where Triton is not installed, or with the child's last words where it failed or took longer than CHILD_SECONDS.
    """
    if triton_version() is None:
        load("triton")  # says what is missing
    env = environment() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = ":".join(filter(None, (root, env.get("PYTHONPATH"))))
    command = [sys.executable, *program]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as got, tempfile.TemporaryFile() as said:
        given.write(pack(job))
        given.seek(0)
        child = subprocess.Popen(command, stdin=given, stdout=got, stderr=said, env=env)
        deadline = time.monotonic() + CHILD_SECONDS
        try:
            while child.poll() is None:
                if cancelled():
                    return None
                if time.monotonic() > deadline:
                    raise RuntimeError(f"tracing took more than {CHILD_SECONDS:.0f} s under the interpreter")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK_SECONDS)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        got.seek(0)
        said.seek(0)
        if child.returncode:
            raise RuntimeError(f"tracing failed in its process: {said.read().decode(errors='replace').strip()[-500:]}")
        out = got.read()
    with np.load(io.BytesIO(out), allow_pickle=False) as arrays:
        fields: dict[str, Any] = json.loads(arrays["meta"].tobytes())
        return fields | {name: arrays[name].tobytes() for name in arrays.files if name != "meta"}


def main() -> None:
    patch_once()
    assert is_interpreted()
    fields = study(unpack(sys.stdin.buffer.read()))
    large: dict[str, Any] = {name: np.frombuffer(value, np.uint8) for name, value in fields.items() if isinstance(value, bytes)}
    meta = json.dumps({name: value for name, value in fields.items() if name not in large})
    file = io.BytesIO()
    np.savez(file, meta=np.frombuffer(meta.encode(), np.uint8), **large)
    sys.stdout.buffer.write(file.getvalue())


if __name__ == "__main__":
    main()
