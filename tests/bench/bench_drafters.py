"""What a drafted token costs on the default model: ``python -m tests.bench.bench_drafters [threads] [context] [eager]``.

Each drafter with a model proposes K = 4 tokens for 1 and for 8 requests, again and again from the same place; milliseconds a
token (of each request), greedy and drawn at temperature 0.8: the least wall time and the least CPU time of all threads. Beside them
attention over the rows of a draft: 5 rows of one request in one call, against 5 calls of a row, all 30 layers. On a busy machine
only the CPU time means something, and with one thread it is what a quiet machine would take.

Where a trained drafter is not there, one of random weights takes its place (it costs the same), and the line says so.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from engine.attention.base import Span, create_attention
from engine.config import EngineConfig
from engine.events.recorder import Recorder
from engine.kvcache.layout import KVCache
from engine.kvcache.pool import BlockPool
from engine.loading import Parts, load_parts
from engine.request import Request, SamplingParams
from engine.runner import Runner, Scheduled
from engine.speculation.base import Computed, Drafter, Wanted
from engine.speculation.config import SpeculativeConfig
from engine.speculation.files import shipped_drafter, tensor_shapes, write_drafter
from engine.speculation.head import Target
from engine.speculation.speculator import create_drafter

K, VOCAB = 4, 8192


def file(method: str, parts: Parts, folder: Path) -> tuple[str, str]:
    """Path of a drafter, and what to say of it."""
    if shipped_drafter(method).is_file():
        return str(shipped_drafter(method)), ""
    config = parts.model_config
    settings = {"draft_model": {"num_layers": 2}, "layer_skip": {"exit_layer": 8}}.get(method, {})
    shapes = tensor_shapes(method, config, num_layers=2 if method == "draft_model" else 1, num_heads=4)
    path = folder / f"{method}.safetensors"
    write_drafter(
        path, method, {name: 0.02 * torch.randn(shape) for name, shape in shapes.items()}, torch.arange(VOCAB), config=config,
        target="", target_sha256=parts.model_facts["sha256"], settings=settings,
    )  # fmt: skip
    return str(path), "random weights"


def measured(call: Callable[[], object], seconds: float = 0.5) -> tuple[float, float]:
    """Least wall and CPU milliseconds."""
    for _ in range(3):
        call()
    wall, cpu = [], []
    end = time.process_time() + seconds
    while time.process_time() < end or len(wall) < 15:
        start, start_cpu = time.perf_counter(), time.process_time()
        call()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    return 1e3 * min(wall), 1e3 * min(cpu)


class Place:
    """Requests whose context the target has computed, and the drafter knows."""

    def __init__(self, parts: Parts, config: SpeculativeConfig, context: int, count: int, params: SamplingParams) -> None:
        self.pool = BlockPool(1024, 16, Recorder())
        self.kv = KVCache(parts.model_config, 1024, 16, "cpu", parts.device.torch_dtype)
        self.model = parts.model

        class Engine:  # what ``Target.of`` reads
            pass

        engine = Engine()
        engine.parts, engine.kv, engine.pool = parts, self.kv, self.pool  # type: ignore[attr-defined]
        assert Target.of(engine).pool is self.pool
        self.drafter: Drafter = create_drafter(config, engine)  # type: ignore[arg-type]
        runner = Runner(parts.model, self.kv)
        rng = np.random.default_rng(0)
        self.requests = []
        for i in range(count):
            request = Request(f"r{i}", rng.integers(20, 8000, context).tolist(), params, i)
            request.block_ids = self.pool.allocate(request.request_id, 0, (context + K) // 16 + 1)
            _, features = runner.run_with_features([Scheduled(request, 0, context - 1, False)])
            request.num_computed_tokens = context - 1
            self.drafter.observe(
                [Computed(request, 0, list(range(context - 1)))], features if self.drafter.needs_features else None
            )
            self.requests.append(request)

    def propose(self) -> None:
        drafts = self.drafter.propose([Wanted(request, K) for request in self.requests])
        if any(draft.failure or not len(draft) for draft in drafts):
            raise RuntimeError(f"no draft: {drafts}")


def attention(parts: Parts, context: int) -> None:
    config = parts.model_config
    kv = KVCache(config, 256, 16, "cpu", parts.device.torch_dtype)
    backend = create_attention("torch", config)
    heads = config.num_attention_heads + 2 * config.num_kv_heads
    dtype = parts.model.compute_dtype
    qkv = torch.randn(5, heads, config.head_dim).to(dtype)
    slots = np.arange(context + 5)

    def run(spans: list[Span], rows: torch.Tensor) -> None:
        plan = backend.plan(spans, kv.tensor, dtype)
        stored = rows.to(kv.tensor.dtype)
        for layer in range(config.num_layers):
            backend.run(plan, layer, rows, stored, kv.layers[layer])

    together = measured(lambda: run([Span(0, context, 5, slots)], qkv))
    one = measured(lambda: run([Span(0, context + 4, 1, slots)], qkv[:1]))
    print(
        f"attention, {context} tokens, CPU ms: 5 rows together {together[1]:.1f}, one row {one[1]:.1f}, 5 of them {5 * one[1]:.1f}",
        flush=True,
    )


@torch.inference_mode()
def main(threads: int, context: int, eager: bool) -> None:
    torch.set_num_threads(threads)
    parts = load_parts(EngineConfig(dtype="bfloat16", enforce_eager=eager))
    if parts.model.compiled is not None and not parts.model.compiled.wait(1200):
        raise RuntimeError(f"no compiled layer: {parts.model.compiled.state}")
    print(
        f"{threads} threads, {parts.model.linear_backend}, {context} tokens of context, K = {K}{', nothing compiled' if eager else ''}; ms a drafted token: wall / CPU"
    )
    for length in (300, 1000):
        attention(parts, length)
    with tempfile.TemporaryDirectory() as folder:
        for method in ("eagle", "draft_model", "medusa", "layer_skip"):
            model, note = file(method, parts, Path(folder))
            for temperature in (0.0, 0.8):
                line = f"{method:12} temperature {temperature}: "
                for count in (1, 8):
                    params = SamplingParams(temperature=temperature, max_tokens=100)
                    place = Place(parts, SpeculativeConfig(method, model=model), context, count, params)
                    wall, cpu = measured(place.propose)
                    line += f"  {count} requests {wall / K:6.2f} / {cpu / K:6.2f}"
                print(line, f" ({note})" if note else "", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2, int(sys.argv[2]) if len(sys.argv) > 2 else 300, "eager" in sys.argv)
