"""What a pass over a few rows of one request costs (a decode: 1; a draft of K tokens to verify: 1 + K), compiled and not.

    python -m tests.bench.bench_rows [--rows 1 2 3 4 5 6 7 8 9] [--context 170] [--threads 2] [--rounds 20] [--cpu-time]

bf16, the default model. Both ways take turns in every round. Shown is the best of the rounds (whatever else the machine does
only ever adds time), the median, and what the rows cost of one row's cost. ``--cpu-time``: the processor time of a
single thread instead of the clock's, for a machine that is busy with other things; compare such figures only with each other.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from engine import EngineConfig, SamplingParams
from engine.kvcache.layout import KVCache
from engine.loading import Parts, load_parts
from engine.model.store import resolve_model
from engine.request import Request
from engine.runner import Runner, Scheduled
from engine.speculation.base import Draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(1, 10)))
    parser.add_argument("--context", type=int, default=170)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--model", type=Path, default=None)
    arguments = parser.parse_args()
    clock = time.perf_counter
    if arguments.cpu_time:
        arguments.threads, clock = 1, time.thread_time
    torch.set_num_threads(arguments.threads)
    parts = load_parts(EngineConfig(model=str(arguments.model or resolve_model("smollm2-135m")), dtype="bfloat16", device="cpu"))
    compiled = parts.model.compiled
    if compiled is None or not compiled.wait(1200):
        raise SystemExit(f"nothing is compiled here: {parts.device_facts['single_row']}")
    print(f"milliseconds after a context of {arguments.context}, {arguments.threads} threads")
    runner, request = filled(parts, arguments.context)
    ms: dict[tuple[int, bool], list[float]] = {}
    with torch.inference_mode():
        for _ in range(arguments.rounds):
            for rows in arguments.rows:
                draft = Draft.chain([7 * i + 3 for i in range(rows - 1)])
                run = Scheduled(request, arguments.context, rows, True, rows - 1, draft)
                for parts.model.compiled in (compiled, None):
                    begun = clock()
                    runner.run([run])
                    ms.setdefault((rows, parts.model.compiled is not None), []).append(1e3 * (clock() - begun))
    show(arguments.rows, ms)


def filled(parts: Parts, context: int) -> tuple[Runner, Request]:
    """A runner with a request whose first ``context`` tokens are computed, and one that is not."""
    blocks = -(-(context + 20) // 16)
    runner = Runner(parts.model, KVCache(parts.model_config, blocks, 16, "cpu", torch.bfloat16))
    request = Request("r", [(7 * i + 11) % 4000 for i in range(context + 1)], SamplingParams(), 0)
    request.block_ids = list(range(blocks))
    runner.run([Scheduled(request, 0, context, False)])
    return runner, request


def show(rows: list[int], ms: dict[tuple[int, bool], list[float]]) -> None:
    print(
        f"{'rows':>4} {'compiled: best':>15} {'median':>8} {'of one':>7} {'not compiled: best':>20} {'median':>8} {'of one':>7}"
    )
    for n in rows:
        cells = []
        for side in (True, False):
            times = ms[n, side]
            cells.append((min(times), statistics.median(times), min(times) / min(ms[rows[0], side])))
        (a, b, c), (d, e, f) = cells
        print(f"{n:4} {a:15.1f} {b:8.1f} {c:7.2f} {d:20.1f} {e:8.1f} {f:7.2f}")


if __name__ == "__main__":
    main()
