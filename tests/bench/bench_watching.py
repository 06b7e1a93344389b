"""What watching costs the engine: nobody, a log, a log with every token's probability.

    python -m tests.bench.bench_watching [--batch 8] [--tokens 64] [--rounds 5] [--dtype auto] [--threads 2]

"Nobody" has no engine without instrumentation to be compared with, so it is derived: the branches taken in a step are
counted, a branch is timed, and their product is set against the step. The others are measured, in turns with "nobody".
"""

import argparse
import statistics
import time
import timeit

import torch

from engine import Engine, EngineConfig, EventLog, SamplingParams
from engine.events.recorder import Recorder
from tests.bench.prompts import bench_prompts


class CountingRecorder(Recorder):
    """Counts how often somebody asks whether anybody watches."""

    reads = 0

    @property  # type: ignore[override]
    def on(self) -> bool:
        CountingRecorder.reads += 1
        return False

    @on.setter
    def on(self, value: bool) -> None:
        pass


def tokens_per_second(engine: Engine, prompts: list[list[int]], count: int) -> float:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    engine.reconfigure(enable_prefix_caching=False)
    start = time.perf_counter()
    engine.generate(prompts, params)
    return len(prompts) * count / (time.perf_counter() - start)


def branches_per_step(engine: Engine, prompts: list[list[int]]) -> float:
    plain = engine.recorder
    counting = CountingRecorder()
    owners = (engine, engine.pool, engine.scheduler)
    for owner in owners:
        owner.recorder = counting
    CountingRecorder.reads = 0
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    steps = counting.step
    for owner in owners:
        owner.recorder = plain
    return CountingRecorder.reads / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    engine = Engine(EngineConfig(dtype=args.dtype, max_num_seqs=args.batch))
    prompts = bench_prompts(args.batch)

    results: dict[str, list[float]] = {"nobody": [], "log": [], "log + tokens": []}
    tokens_per_second(engine, prompts, 8)
    for _ in range(args.rounds):
        results["nobody"].append(tokens_per_second(engine, prompts, args.tokens))
        log = EventLog(capacity=1_000_000)
        engine.recorder.attach(log.append)
        results["log"].append(tokens_per_second(engine, prompts, args.tokens))
        engine.watch("tokens", top=0)
        results["log + tokens"].append(tokens_per_second(engine, prompts, args.tokens))
        engine.unwatch("tokens")
        engine.recorder.detach(log.append)

    nobody = statistics.median(results["nobody"])
    print(
        f"batch {args.batch}, {args.tokens} tokens each, {engine.config.dtype}, {args.threads} threads, medians of {args.rounds} rounds"
    )
    for name, rates in results.items():
        ratios = [rate / base for rate, base in zip(rates, results["nobody"])]
        print(
            f"{name:14} {statistics.median(rates):8.1f} tok/s   ratio to nobody {statistics.median(ratios):.3f}  ({min(ratios):.3f} .. {max(ratios):.3f})"
        )
    branches = branches_per_step(engine, prompts)
    branch_ns = 1e9 * min(timeit.repeat("if r.on: pass", globals={"r": Recorder()}, number=1_000_000, repeat=3)) / 1e6
    step_ns = 1e9 * args.batch / nobody
    print(
        f"nobody, derived: {branches:.1f} branches a step x {branch_ns:.1f} ns = {100 * branches * branch_ns / step_ns:.4f}% of a step of {step_ns / 1e6:.1f} ms"
    )


if __name__ == "__main__":
    main()
