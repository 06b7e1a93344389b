"""Speculative decoding against the engine's own plain decoding, drafter by drafter, in turns.

    python -m tests.bench.bench_speculation [--prompts 32] [--tokens 64] [--k 4] [--threads 2] [--sets greedy chat copy] [--drafters eagle ngram ...]

Batch 1, bf16, prefix cache off, prefill included. Sets: ``greedy`` the shared prompts, EOS ignored; ``chat`` the same through the chat
template at temperature 1, EOS respected (greedy loops flatter n-gram); ``copy`` passages that the text goes on to repeat. Every
prompt is run with every drafter before the next one comes, so that what else the machine does hits all alike. ``auto``: K is chosen
by the engine. ``lookup``: a draft is made from the request's own text where that has something to offer. A rate counts the tokens that were produced; accepted is the mean
number of drafted tokens kept a draft, and by position.
"""

import argparse
import time
from typing import Any

import torch

from engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from engine.events.types import StepDone
from tests.bench.prompts import bench_prompts, bench_texts, long_prompt

PLAIN = "plain"
ASKED = {"greedy": "one of the drafters >= 1.6", "copy": "ngram >= 2.0", "chat": ""}


def drafters(k: int) -> dict[str, SpeculativeConfig | None]:
    def of(method: str, **more: Any) -> SpeculativeConfig:
        return SpeculativeConfig(method, **{"num_speculative_tokens": k, **more})

    return {
        PLAIN: None,
        "ngram": of("ngram"),
        "ngram, K = 7": of("ngram", num_speculative_tokens=7),
        "rest": of("rest", num_speculative_tokens=7),
        "lookup, rest": of("rest", num_speculative_tokens=7, prompt_lookup=True),
        "lookahead": of("lookahead"),
        "layer_skip": of("layer_skip"),
        "layer_skip, untrained": of("layer_skip", trained_exit=False),
        "draft_model": of("draft_model"),
        "medusa": of("medusa"),
        "medusa, tree": of("medusa", tree=(4, 3, 2, 1)),
        "eagle": of("eagle"),
        "eagle, tree": of("eagle", tree=(4, 3, 2, 1)),
        "eagle, wide tree": of("eagle", tree=(8, 8, 8, 8)),
        "eagle, widest tree": of("eagle", tree=(16, 16, 16, 16)),
        "lookup, eagle": of("eagle", prompt_lookup=True, draft_confidence=0.5),
        "lookup, eagle, tree": of("eagle", prompt_lookup=True, tree=(4, 3, 2, 1)),
        "lookup, eagle, wide": of("eagle", prompt_lookup=True, tree=(8, 8, 8, 8)),
        "lookup, medusa": of("medusa", prompt_lookup=True),
        "eagle, coupled": of("eagle", acceptance="coupled"),
        "ngram, auto": of("ngram", num_speculative_tokens="auto"),
        "lookup, rest, auto": of("rest", num_speculative_tokens="auto", prompt_lookup=True),
        "medusa, auto": of("medusa", num_speculative_tokens="auto"),
        "eagle, auto": of("eagle", num_speculative_tokens="auto"),
    }


def prompt_sets(engine: Engine, count: int) -> dict[str, tuple[list[list[int]], dict[str, Any]]]:
    """set -> (prompts, sampling parameters)."""
    chat = [engine.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in bench_texts(count)]
    text = long_prompt(2048)
    passages = [text[i * 120 : i * 120 + 100] for i in range(min(count, 16))]
    return {
        "greedy": (bench_prompts(count), {"temperature": 0, "ignore_eos": True}),
        "chat": (chat, {"temperature": 1.0, "seed": 1}),
        "copy": ([passage + passage + passage[:12] for passage in passages], {"temperature": 0, "ignore_eos": True}),
    }


class Tally:
    """What one drafter did on one set."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.tokens = 0
        self.draft_ms: list[float] = []
        self.forward_ms: list[float] = []
        self.counts: dict[str, Any] = {}

    def add(self, engine: Engine, prompt: list[int], params: SamplingParams) -> None:
        before = engine.metrics()
        with engine.record() as log:
            begun = time.perf_counter()
            output = engine.generate([prompt], params)[0]
            self.seconds += time.perf_counter() - begun
        self.tokens += len(output.token_ids)
        for e in log:
            if isinstance(e, StepDone) and all(run.phase == "decode" for run in e.runs):
                self.draft_ms.append(e.draft_ms)
                self.forward_ms.append(e.forward_ms)
        for name, value in engine.metrics().items():
            old = before[name]
            if isinstance(value, list):
                have = self.counts.setdefault(name, [])
                have += [0] * (len(value) - len(have))
                for i, n in enumerate(value):
                    have[i] += n - (old[i] if i < len(old) else 0)
            else:
                self.counts[name] = self.counts.get(name, 0) + value - old

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def row(self, name: str, plain: "Tally") -> str:
        drafts = self.counts.get("vllm:spec_decode_num_drafts", 0)
        accepted = self.counts.get("vllm:spec_decode_num_accepted_tokens", 0)
        per_pos = [n / drafts for n in self.counts.get("vllm:spec_decode_num_accepted_tokens_per_pos", [])] if drafts else []
        shares = " ".join(f"{share:.2f}" for share in per_pos if share)
        steps = max(1, len(self.forward_ms))
        return (
            f"{name:22} {self.rate:8.1f} {self.rate / plain.rate:6.2f} {self.tokens / steps:9.2f} "
            f"{accepted / drafts if drafts else 0:9.2f} {median(self.draft_ms):8.2f} {median(self.forward_ms):8.2f}   {shares}"
        )


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sets", nargs="+", choices=tuple(ASKED), default=list(ASKED))
    parser.add_argument("--drafters", nargs="+", choices=[name for name in drafters(4) if name != PLAIN])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    engine = Engine(EngineConfig(dtype="bfloat16", device="cpu", max_num_seqs=1, num_kv_blocks=256, enable_prefix_caching=False))
    if engine.parts.model.compiled is not None:
        engine.parts.model.compiled.wait(600)
    print(f"{engine.parts.device_facts}")
    wanted = {n: c for n, c in drafters(arguments.k).items() if n == PLAIN or n in (arguments.drafters or drafters(4))}
    engine.generate(bench_prompts(1), SamplingParams(temperature=0, max_tokens=8))
    for set_name, (prompts, how) in prompt_sets(engine, arguments.prompts).items():
        if set_name not in arguments.sets:
            continue
        tallies = {name: Tally() for name in wanted}
        for prompt in prompts:
            for name, config in wanted.items():
                engine.reconfigure(speculative=config)
                tallies[name].add(engine, prompt, SamplingParams(max_tokens=arguments.tokens, **how))
        print(
            f"\n{set_name}: {len(prompts)} prompts, up to {arguments.tokens} tokens each, K = {arguments.k}. Asked: {ASKED[set_name] or '-'}"
        )
        print(
            f"{'drafter':22} {'tokens/s':>8} {'ratio':>6} {'tok/pass':>9} {'accepted':>9} {'draft ms':>8} {'pass ms':>8}   kept by position"
        )
        for name, tally in tallies.items():
            print(tally.row(name, tallies[PLAIN]))
    engine.close()


if __name__ == "__main__":
    main()
