"""What sampling costs at batch 32 and a vocabulary of 49,152: ``python -m tests.bench.bench_sampling [threads]``.

First the sampler alone. Wall time and the CPU time of all threads, the median of many calls and the least; on a busy machine only
the least means something. Logits fall with the logarithm of the rank, rows from sharp to flat as the default model's are (at
temperature 0.8 a nucleus of 0.95 holds a few tokens in most rows, over 64 in about a tenth).

Then in the engine, on the default model: the CPU and the wall time of whole decode steps of 32 requests and of what follows the
forward pass in them (sampling, text, events), with the chain, unobserved and with the top 8 and 20 recorded, in turns; the least of
each. Threads that wait for work count as CPU time: set GOMP_SPINCOUNT=10000, as the engine's own process has it. Budgets: the chain
<= 10 % of a step, recording the top 20 <= 3 % more.
"""

import sys
import time

import numpy as np
import torch

from engine import Engine, EngineConfig
from engine.request import SamplingParams
from engine.sampling.processors import TokenCounts
from engine.sampling.sampler import Sampler, SampleRow

ROWS, VOCAB = 32, 49152
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "temperature 1": SamplingParams(temperature=1),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k, top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "all but penalties": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02),
    "full chain": SamplingParams(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02, **PENALTIES),
}


def logits() -> torch.Tensor:
    """float32 [32, 49152]."""
    rng = np.random.default_rng(0)
    slope = np.quantile([1.1, 1.25, 1.5, 2.0, 3.0, 4.0], np.linspace(0, 1, ROWS))
    x = -slope[:, None] * np.log(np.arange(1, VOCAB + 1)) + rng.normal(0, 0.2, (ROWS, VOCAB))
    return torch.from_numpy(np.stack([rng.permutation(row) for row in x]).astype(np.float32))


def rows(params: SamplingParams) -> list[SampleRow]:
    prompt, output = list(range(500)), list(range(400, 600))
    return [SampleRow(params, i, 0, 700, prompt, output, TokenCounts(prompt, output)) for i in range(ROWS)]


def milliseconds(run, seconds: float = 1.0) -> tuple[float, float, float]:
    """Least wall time, median wall time and least CPU time of a call."""
    for _ in range(5):
        run()
    wall, cpu = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(wall) < 20:
        w, c = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - w)
        cpu.append(time.process_time() - c)
    return min(wall) * 1e3, float(np.median(wall)) * 1e3, min(cpu) * 1e3


def in_the_engine(case: str, rounds: int = 8, steps: int = 6) -> None:
    engine = Engine(EngineConfig(max_num_seqs=ROWS, max_num_batched_tokens=2048, max_model_len=2048, num_kv_blocks=1024))
    for i in range(ROWS):
        prompt = f"Tell me a long story about the number {i} and its friends. " * 6
        engine.add_request(prompt, CASES[case].changed(max_tokens=1000, ignore_eos=True, seed=i))
    commit, spent = engine.committer.commit, (0.0, 0.0)

    def now() -> tuple[float, float]:
        return time.process_time(), time.perf_counter()

    def since(start: tuple[float, float]) -> tuple[float, float]:
        return time.process_time() - start[0], time.perf_counter() - start[1]

    def timed(*args):
        nonlocal spent
        start = now()
        try:
            return commit(*args)
        finally:
            spent = since(start)

    engine.committer.commit = timed  # type: ignore[method-assign]
    events: list = []
    engine.recorder.attach(events.append)
    for _ in range(4):
        engine.step()
    found: dict[int | None, list[tuple[float, ...]]] = {None: [], 0: [], 8: [], 20: []}
    for _ in range(rounds):
        for top, times in found.items():
            engine.unwatch("tokens") if top is None else engine.watch("tokens", top=top)
            for _ in range(steps):
                start = now()
                engine.step()
                times.append((*since(start), *spent))
            events.clear()
    least = {top: [1e3 * min(each) for each in zip(*times, strict=True)] for top, times in found.items()}
    step_cpu, step_wall, after_cpu, after_wall = least[None]
    print(f"\ndecode step of the default model, batch {ROWS}, {case}: {step_cpu:.1f} ms CPU, {step_wall:.1f} ms")
    print(f"  sampling and all that follows it: {after_cpu:.2f} ms CPU = {100 * after_cpu / step_cpu:.1f} % of the step's")
    for top in (0, 8, 20):
        cpu, wall = least[top][2] - after_cpu, least[top][3] - after_wall
        print(
            f"  recording tokens, top {top:2}: {cpu:+.2f} ms CPU = {100 * cpu / step_cpu:+.1f} %, "
            f"{wall:+.2f} ms = {100 * wall / step_wall:+.1f} % of the time"
        )


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
    x, sampler = logits(), Sampler(VOCAB)
    print(f"{ROWS} rows x {VOCAB} tokens, {torch.get_num_threads()} threads; ms: least wall, median wall, least CPU")
    print(f"{'':24}" + "".join(f"{title:^26}" for title in ("not observed", "observe_top=0", "observe_top=20")))
    for name, params in CASES.items():
        batch = rows(params)
        times = [milliseconds(lambda: sampler.sample(x, batch, observe)) for observe in (None, 0, 20)]  # noqa: B023
        print(f"{name:24}" + "".join(f"{a:8.2f} {b:8.2f} {c:8.2f} " for a, b, c in times), flush=True)
    bf16, batch = x.bfloat16(), rows(CASES["greedy"])
    a, b, c = milliseconds(lambda: sampler.sample(bf16, batch))
    print(f"{'greedy, bfloat16':24}{a:8.2f} {b:8.2f} {c:8.2f}")
    for case in ("all but penalties", "full chain"):
        in_the_engine(case)


if __name__ == "__main__":
    main()
