"""What the kernels and the engine reach on this GPU, against what torch reaches and what its memory can do. One function a subject."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.engine import Engine
from engine.kernels.dequant_matmul import MatmulConfig, dequant_matmul
from engine.kernels.flash_attention import FlashConfig, flash_attention, flash_attention_tma, flash_attention_varlen
from engine.kernels.paged_decode import DecodeConfig, paged_decode
from engine.kernels.tracing import TraceBuffer
from engine.request import SamplingParams
from tests.gpu.models import best_parts, engine_config, random_parts
from tests.gpu.timing import Bench

BLOCK = 16
FLASH = [FlashConfig(128, 64, 4, 3), FlashConfig(128, 128, 8, 2), FlashConfig(128, 64, 8, 3), FlashConfig(128, 128, 8, 3)]
DECODE = [
    DecodeConfig(64, 4, 3),
    DecodeConfig(128, 4, 3),
    DecodeConfig(128, 8, 2),
    DecodeConfig(32, 4, 4),
    DecodeConfig(64, 2, 4),
]
MATVEC = [
    MatmulConfig(1, n, k, w, s)
    for n, k, w, s in ((16, 512, 4, 2), (16, 256, 4, 3), (32, 256, 4, 3), (16, 1024, 8, 2), (32, 512, 8, 2))
]


def copy_bandwidth(b: Bench) -> float:
    """Bytes a second of a copy, read and written together: what the others are measured by."""
    size = 1 << (16 if b.dry else 30)
    source = torch.empty(size, dtype=torch.int8, device=b.device)
    target = torch.empty_like(source)
    rate = 2 * size / (1e-3 * b.ms(lambda: target.copy_(source), cold=True))
    b.add("copy bandwidth", f"{size >> 20} MiB, read and written", rate / 1e9, "GB/s")
    return rate


def prefill(b: Bench, bandwidth: float) -> None:
    """Causal attention of whole prompts against torch's two fast backends, operations as usually counted (half the square)."""
    for case in [(1, 40, 2, 64)] if b.dry else [(8, 2048, 16, 128), (2, 8192, 16, 128), (8, 2048, 16, 64), (2, 8192, 16, 64)]:
        _prefill(b, *case)


def _prefill(b: Bench, batch: int, length: int, heads: int, dim: int) -> None:
    dtype = torch.float32 if b.dry else torch.bfloat16
    shape = f"{batch} x {length:,}, {heads} heads of {dim}, causal, {str(dtype).removeprefix('torch.')}"
    flops = 4 * batch * heads * dim * length * length / 2
    q, k, v = (torch.randn(batch * length, heads, dim, dtype=dtype, device=b.device) for _ in range(3))
    cu = torch.arange(batch + 1, dtype=torch.int32, device=b.device) * length
    as_torch = [t.view(batch, length, heads, dim).transpose(1, 2) for t in (q, k, v)]
    theirs: dict[str, float] = {}
    for name, backend in (("FlashAttention-2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        try:
            with sdpa_kernel(backend):
                theirs[name] = b.ms(lambda: F.scaled_dot_product_attention(*as_torch, is_causal=True))
            b.add(f"prefill, torch {name}", shape, flops / theirs[name] / 1e9, "TFLOP/s")
        except RuntimeError as error:
            b.add(f"prefill, torch {name}", shape, math.nan, "TFLOP/s", note=str(error).splitlines()[0][:100])
    pages = -(-length // BLOCK)
    pool = torch.randn(batch * pages * BLOCK, 2 * heads, dim, dtype=dtype, device=b.device)
    tables = torch.randperm(batch * pages, device=b.device).int().view(batch, pages)
    lens = torch.full((batch,), length, dtype=torch.int32, device=b.device)
    options: dict[str, Any] = {"max_seqlen_q": length, "validate": False}
    ways: dict[str, Callable[[FlashConfig], Any]] = {
        "contiguous": lambda c: flash_attention_varlen(q, k, v, cu, cu, config=c, **options),
        "paged": lambda c: flash_attention(q, pool, tables, cu, lens, block_size=BLOCK, config=c, **options),
        "tensor descriptors": lambda c: flash_attention_tma(q, k, v, cu, cu, config=c, **options),
    }
    if not b.dry and torch.cuda.get_device_capability() < (9, 0):
        del ways["tensor descriptors"]
    for name, way in ways.items():
        if b.left < 45:
            return
        config, took = b.best([(str(c), partial(way, c)) for c in FLASH])
        ratios = {f"of {other}": ms / took for other, ms in theirs.items()}
        target = {"target": {"of FlashAttention-2": 1.0}} if name == "contiguous" else {}
        b.add(f"prefill, ours, {name}", shape, flops / took / 1e9, "TFLOP/s", config=config, **ratios, **target)


def decode(b: Bench, bandwidth: float) -> None:
    """A token for each of a batch: bytes of K and V a second over those of a copy."""
    shapes = [(2, 70, 4, 2, 64, None)] if b.dry else [
        (64, 4096, 32, 8, 128, None), (8, 16384, 32, 8, 128, None), (64, 4096, 32, 8, 128, torch.int8), (32, 2048, 9, 3, 64, None),
    ]  # fmt: skip
    dtype = torch.float32 if b.dry else torch.bfloat16
    for batch, length, heads, kv_heads, dim, codes in shapes:
        if b.left < 40:
            return
        pages = length // BLOCK + (length % BLOCK > 0)
        form = (batch * pages * BLOCK, 2 * kv_heads, dim)
        q = torch.randn(batch, heads, dim, dtype=dtype, device=b.device)
        scales = None
        if codes is None:
            pool = torch.randn(form, dtype=dtype, device=b.device)
        else:
            pool = torch.randint(-127, 128, form, dtype=codes, device=b.device)
            scales = torch.full(form[:2], 0.01, dtype=torch.bfloat16, device=b.device)
        tables = torch.randperm(batch * pages, device=b.device).int().view(batch, pages)
        cu = torch.arange(batch + 1, dtype=torch.int32, device=b.device)
        lens = torch.full((batch,), length, dtype=torch.int32, device=b.device)
        moved = batch * length * 2 * kv_heads * (dim * pool.element_size() + (0 if scales is None else 2))

        def work(c: DecodeConfig, q: Any = q, pool: Any = pool, tables: Any = tables, cu: Any = cu, lens: Any = lens,
                 scales: Any = scales, length: int = length) -> Any:  # fmt: skip
            return paged_decode(
                q,
                pool,
                tables,
                cu,
                lens,
                block_size=BLOCK,
                max_seqlen_q=1,
                max_seq_len=length,
                kv_scales=scales,
                config=c,
                validate=False,
            )

        config, took = b.best([(str(c), partial(work, c)) for c in DECODE], cold=True)
        kind = str(pool.dtype).removeprefix("torch.")
        shape = f"{batch} x {length:,}, {heads} / {kv_heads} heads of {dim}, {kind}"
        rate = moved / (1e-3 * took)
        # The small model's K and V are a few MB: launches are what takes the time there.
        target = {"target": {"of copy": 0.85}} if moved > 1 << 28 else {}
        b.add("paged decode", shape, rate / 1e9, "GB/s", config=config, **{"of copy": rate / bandwidth}, **target)


def matvec(b: Bench, bandwidth: float) -> None:
    """One row times a weight in few bits."""
    sizes = [(64, 128)] if b.dry else [(14336, 4096), (8192, 8192), (28672, 8192)]
    for rows, columns in sizes:
        for kind, bits, group in (("int4", 4, 32), ("nf4", 4, 64), ("int8", 8, columns)):
            if b.left < 40:
                return
            codes = torch.randint(0, 256, (rows, columns * bits // 8), dtype=torch.uint8, device=b.device)
            scales = torch.full((rows, columns // group), 0.01, dtype=torch.float16, device=b.device)
            more: dict[str, Any] = {}
            if kind == "int4":
                more["minima"] = torch.zeros_like(scales)
            if kind == "nf4":
                more["levels"] = torch.linspace(-1, 1, 16, device=b.device)
            x = torch.randn(1, columns, dtype=torch.float32 if b.dry else torch.bfloat16, device=b.device)
            moved = codes.nbytes + scales.nbytes * (2 if "minima" in more else 1) + 2 * (rows + columns)

            def work(c: MatmulConfig, x: Any = x, codes: Any = codes, scales: Any = scales, bits: int = bits, group: int = group,
                     more: dict[str, Any] = more) -> Any:  # fmt: skip
                return dequant_matmul(x, codes, scales, bits=bits, group_size=group, config=c, **more)

            config, took = b.best([(str(c), partial(work, c)) for c in MATVEC], cold=True)
            rate = moved / (1e-3 * took)
            target = {"target": {"of copy": 0.85}} if kind == "int4" else {}
            b.add(f"{kind} matrix-vector", f"{rows:,} x {columns:,}, groups of {group:,}", rate / 1e9, "GB/s", config=config,
                  **{"of copy": rate / bandwidth}, **target)  # fmt: skip


def tracing(b: Bench, bandwidth: float) -> None:
    """How much recording its tiles slows a kernel down."""
    length, heads, dim = (40, 2, 64) if b.dry else (4096, 16, 128)
    dtype = torch.float32 if b.dry else torch.bfloat16
    q, k, v = (torch.randn(length, heads, dim, dtype=dtype, device=b.device) for _ in range(3))
    cu = torch.tensor([0, length], dtype=torch.int32, device=b.device)
    trace = TraceBuffer(b.device)

    def work(buffer: TraceBuffer | None) -> None:
        if buffer is not None:
            buffer.clear()
        flash_attention_varlen(q, k, v, cu, cu, max_seqlen_q=length, trace=buffer, validate=False)

    off, on = b.ms(lambda: work(None)), b.ms(lambda: work(trace))
    read = trace.read()
    b.add(
        "tracing",
        f"flash_attention, {length:,} tokens, {heads} heads of {dim}, {len(read):,} records",
        on / off,
        "times the time without",
    )


def engine(b: Bench, bandwidth: float) -> None:
    """Decode steps with CUDA graphs and without, of the checkpoint that is given or of random weights of the default's shape."""
    parts = random_parts("tiny", "cpu", "float32", "triton") if b.dry else best_parts("cuda", "bfloat16")
    for batch in (2,) if b.dry else (1, 8, 32):
        rates = {}
        for name, eager in (("graphs", False), ("eager", True)):
            if b.left < 30:
                return
            config = engine_config(
                device=b.device if b.dry else "cuda", dtype=parts.device.dtype, max_num_seqs=batch, max_model_len=256, num_kv_blocks=batch * 20,
                block_size=BLOCK, enforce_eager=eager, enable_prefix_caching=False, attention_backend="triton",
            )  # fmt: skip
            made = Engine(config, parts=parts)
            count = 3 if b.dry else 96
            for i in range(batch):
                prompt = [(7 * j + i) % 290 + 3 for j in range(20)]
                made.add_request(prompt, SamplingParams(temperature=0, max_tokens=2 * count, ignore_eos=True))
            warm = 1 if b.dry else count // 2
            for _ in range(warm):
                made.step()
            _wait(b)
            began = time.perf_counter()
            for _ in range(count):
                made.step()
            _wait(b)
            rates[name] = batch * count / (time.perf_counter() - began)
            graphs = made.runner.graphs
            note = {"note": graphs.failed} if graphs is not None and graphs.failed else {}
            b.add(
                f"engine decode, {name}", f"batch {batch}, {parts.model_facts['name']} weights", rates[name], "tokens/s", **note
            )
            made.close()
            b.rows[-1]["ms a step"] = 1e3 * batch / rates[name]
        b.add("engine decode, graphs over eager", f"batch {batch}", rates["graphs"] / rates["eager"], "times")


def _wait(b: Bench) -> None:
    if not b.dry:
        torch.cuda.synchronize()


ALL: tuple[Callable[[Bench, float], None], ...] = (prefill, decode, matvec, tracing, engine)
