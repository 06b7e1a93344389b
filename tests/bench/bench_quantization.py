"""Weights in few bits: how long a change takes, what they weigh, how fast they decode, against the engine's own bf16.

    python -m tests.bench.bench_quantization [--methods int8 int4 ...] [--tokens 96] [--batch 32] [--rounds 3] [--threads 2] [--calibrated] [--memory]

The default model. Methods take turns in every round, and between them the engine's bf16; shown is the best of the rounds. One request of
``--tokens`` tokens, then ``--batch`` requests of half as many, timed once all prompts are read, what is compiled is compiled, and
``WARM`` steps have passed (from the third step of many rows on, unpacked copies are kept). ``--methods int4:64+head``: groups of 64
and the head too. Weight bytes: those of the linear layers as held for a product, beside the
arithmetic. ``--memory``: resident memory of a process of its own with each. ``--calibrated``: GPTQ and AWQ too, made anew.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.weights import disk
from engine.weights.disk import shapes_of

ROUNDED = ("int8", "int8_w8a8", "int4", "nf4", "fp8")
SPEEDS_TOO = ("int8+head", "int4:64", "int4:64+head")  # decode speed alone
WARM = 8
# Bits of a weight: codes, and a float16 scale (and minimum) for each channel or group; NF4's are themselves in 8 bits.
ARITHMETIC = {
    "int8": lambda k: 8 + 16 / k,
    "int8_w8a8": lambda k: 8 + 16 / k,
    "fp8": lambda k: 16,  # runs dequantised here
    "nf4": lambda k: 16,
    "int4": lambda k: 4 + 32 / 32,
    "gptq": lambda k: 4 + 32 / 64,
    "awq": lambda k: 4 + 32 / 64,
}
_PROMPT = "The engineer walked along the river every morning and wrote down what the gauges said, because"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=list(ROUNDED))
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--calibrated", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--resident", metavar="METHOD", help="print the resident memory of this process with it, and end")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.resident is not None:
        print(json.dumps(resident(None if arguments.resident == "bf16" else arguments.resident)))
        return
    methods = [*arguments.methods, *(("gptq", "awq") if arguments.calibrated else ())]
    engine = Engine(EngineConfig(dtype="bfloat16", device="cpu", max_num_seqs=arguments.batch))
    with tempfile.TemporaryDirectory() as empty:
        disk.directory = lambda: disk.Path(empty)  # nothing is taken from an earlier run
        change(engine, methods)
    speeds(engine, [*methods, *(SPEEDS_TOO if methods == list(ROUNDED) else ())], arguments)
    if arguments.memory:
        memory(methods)


def change(engine: Engine, methods: list[str]) -> None:
    print(f"{'method':>10} {'seconds':>8} {'runs as':>14} {'linear MB':>10} {'arithmetic':>11} {'off by':>7} {'bits/weight':>12}")
    shapes = shapes_of(engine.model_config).values()
    for method in methods:
        begun = time.perf_counter()
        engine.reconfigure(**knobs(method))
        seconds = time.perf_counter() - begun
        method = method.partition("+")[0].partition(":")[0]
        facts = engine.parts.weights
        wanted = sum(n * k * ARITHMETIC[method](k) / 8 for n, k in shapes)
        print(
            f"{method:>10} {seconds:8.1f} {'+'.join(facts.forms):>14} {facts.linear_bytes / 1e6:10.1f} {wanted / 1e6:11.1f} "
            f"{facts.linear_bytes / wanted - 1:+7.1%} {facts.bits_per_weight:12.3f}", flush=True,
        )  # fmt: skip
        wait_compiled(engine)
    engine.reconfigure(quantization=None)
    wait_compiled(engine)


def knobs(spec: str) -> dict[str, Any]:
    """ "int4:64+head" as what reconfigure takes; "bf16": the checkpoint's own."""
    name, _, head = spec.partition("+")
    method, _, group = name.partition(":")
    return {
        "quantization": None if method == "bf16" else method, "quantization_group_size": int(group) if group else None,
        "quantization_options": {"head": True} if head else None,
    }  # fmt: skip


def wait_compiled(engine: Engine) -> None:
    engine.parts.model.wait_compiled(600)


def speeds(engine: Engine, methods: list[str], arguments: argparse.Namespace) -> None:
    best: dict[tuple[str, int], float] = {}
    for _ in range(arguments.rounds):
        for method in ("bf16", *methods):
            engine.reconfigure(**knobs(method))
            wait_compiled(engine)
            for batch in (1, arguments.batch):
                tokens = arguments.tokens if batch == 1 else arguments.tokens // 2
                best[method, batch] = max(best.get((method, batch), 0.0), decode(engine, batch, tokens))
    print(f"\n{'method':>10} {'batch 1: tok/s':>15} {'of bf16':>8} {f'batch {arguments.batch}: tok/s':>18} {'of bf16':>8}")
    for method in ("bf16", *methods):
        cells = [(best[method, b], best[method, b] / best["bf16", b]) for b in (1, arguments.batch)]
        print(f"{method:>10} {cells[0][0]:15.1f} {cells[0][1]:8.2f} {cells[1][0]:18.1f} {cells[1][1]:8.2f}")


def decode(engine: Engine, batch: int, tokens: int) -> float:
    """Tokens a second once all prompts are read."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for i in range(batch):
        engine.add_request(f"{i}. {_PROMPT}", params)
    while any(r.num_tokens == r.num_prompt_tokens for r in (*engine.scheduler.running, *engine.scheduler.waiting)):
        engine.step()
    for _ in range(WARM):
        engine.step()
    before = sum(r.num_tokens for r in engine.scheduler.running)
    begun, made = time.perf_counter(), 0
    while engine.has_unfinished():
        made += sum(len(out.new_token_ids) for out in engine.step())
    assert before
    return made / (time.perf_counter() - begun)


def resident(method: str | None) -> dict[str, float]:
    engine = Engine(EngineConfig(dtype="bfloat16", device="cpu", **knobs(method or "bf16")))
    wait_compiled(engine)
    decode(engine, 1, 4 * WARM)
    memory = psutil.Process().memory_full_info()
    return {"rss": memory.rss / 2**20, "uss": memory.uss / 2**20}


def memory(methods: list[str]) -> None:
    print(f"\n{'method':>10} {'resident MiB':>13} {'its own (USS)':>14}")
    for method in ("bf16", *methods):
        command = [sys.executable, "-m", "tests.bench.bench_quantization", "--resident", method]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        print(f"{method:>10} {found['rss']:13.0f} {found['uss']:14.0f}", flush=True)


if __name__ == "__main__":
    main()
