"""The engine against transformers' ``generate`` on the same weights, side by side, in turns.

    python -m tests.bench.bench_throughput [--dtype bfloat16|float32] [--threads 2] [--rounds 3] [--only "batch 8" ...] [--chat]

Greedy, 128 new tokens, EOS ignored, prefill included, prefix cache off. ``--chat``: the prompts through the chat template,
temperature 0.8, EOS respected; only tokens really produced count. Shown is the best of the rounds for each side (whatever
else the machine does only ever adds time) and the ratio of the two; the ratio of the medians tells how noisy it was.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.model.checkpoint import load_checkpoint
from engine.model.store import resolve_model
from tests.bench.prompts import bench_prompts, bench_texts, long_prompt

NEW_TOKENS = 128
# case -> (the ratio asked for, in bf16; what is counted)
TARGETS = {
    "batch 1": (1.8, "tokens/s"),
    "batch 8": (2.1, "tokens/s"),
    "batch 32": (2.8, "tokens/s"),
    "prefill 2048": (1.6, "tokens/s"),
    "TTFT 512": (1.7, "ms"),
}
Generate = Callable[[list[list[int]], int, bool], int]  # prompts, new tokens, chat -> tokens produced


def load_transformers(dtype: torch.dtype) -> Any:
    """transformers' model with the tensors that our loader read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint = load_checkpoint(resolve_model("smollm2-135m"))
    facts = checkpoint.config
    config = AutoConfig.for_model(
        facts.architecture, vocab_size=facts.vocab_size, hidden_size=facts.hidden_size, intermediate_size=facts.intermediate_size,
        num_hidden_layers=facts.num_layers, num_attention_heads=facts.num_attention_heads,
        num_key_value_heads=facts.num_kv_heads, head_dim=facts.head_dim, rms_norm_eps=facts.rms_norm_eps,
        rope_theta=facts.rope_theta, max_position_embeddings=facts.max_position_embeddings,
        tie_word_embeddings=facts.tie_word_embeddings, bos_token_id=facts.bos_token_id, eos_token_id=list(facts.eos_token_ids),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    left_out = model.load_state_dict(dict(checkpoint.tensors), strict=False)
    if left_out.unexpected_keys or set(left_out.missing_keys) - {"lm_head.weight"}:
        raise RuntimeError(f"the checkpoint does not fit transformers' model: {left_out}")
    return model.to(dtype).eval()


def transformers_side(dtype: torch.dtype) -> Generate:
    model = load_transformers(dtype)
    eos = set(model.config.eos_token_id)

    def generate(prompts: list[list[int]], count: int, chat: bool) -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        how = (
            {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 1.0}
            if chat
            else {"do_sample": False, "eos_token_id": None}
        )
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=count, pad_token_id=0, **how)
        return sum(_until(row[longest:].tolist(), eos if chat else set()) for row in out)

    return generate


def _until(tokens: list[int], ends: set[int]) -> int:
    """How many tokens up to the first of ``ends``, that one included."""
    for i, token in enumerate(tokens):
        if token in ends:
            return i + 1
    return len(tokens)


def engine_side(dtype: str) -> tuple[Generate, Engine]:
    engine = Engine(EngineConfig(dtype=dtype, device="cpu", max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=4096,
                                 num_kv_blocks=1024, enable_prefix_caching=False))  # fmt: skip
    if engine.parts.model.compiled is not None:  # the first time ever it is being compiled
        engine.parts.model.compiled.wait(600)

    def generate(prompts: list[list[int]], count: int, chat: bool) -> int:
        how: dict[str, Any] = {"temperature": 0.8} if chat else {"temperature": 0, "ignore_eos": True}
        outputs = engine.generate(prompts, SamplingParams(max_tokens=count, **how))
        return sum(len(o.token_ids) for o in outputs)

    return generate, engine


def cases(engine: Engine, chat: bool) -> dict[str, tuple[list[list[int]], int]]:
    """case -> (prompts, new tokens)."""
    if chat:
        texts = bench_texts(32)
        prompts = [engine.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
        return {f"batch {n}": (prompts[:n], NEW_TOKENS) for n in (1, 8, 32)}
    made = {f"batch {n}": (bench_prompts(n), NEW_TOKENS) for n in (1, 8, 32)}
    return {**made, "prefill 2048": ([long_prompt(2048)], 1), "TTFT 512": ([long_prompt(512)], 1)}


def measure(generate: Generate, prompts: list[list[int]], count: int, chat: bool) -> tuple[float, int]:
    """(seconds, tokens produced)."""
    begun = time.perf_counter()
    produced = generate(prompts, count, chat)
    return time.perf_counter() - begun, produced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=tuple(TARGETS), help="these cases")
    parser.add_argument("--chat", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    begun = time.perf_counter()
    ours, engine = engine_side(arguments.dtype)
    print(f"engine ready after {time.perf_counter() - begun:.1f} s: {engine.parts.device_facts}")
    theirs = transformers_side(getattr(torch, arguments.dtype))
    sides = {"engine": ours, "transformers": theirs}
    chosen = {name: case for name, case in cases(engine, arguments.chat).items() if name in (arguments.only or TARGETS)}
    for generate in sides.values():  # warm both up
        generate(bench_prompts(1), 4, False)
    seconds: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for _ in range(arguments.rounds):
        for name, (prompts, count) in chosen.items():
            for side, generate in sides.items():
                seconds.setdefault((name, side), []).append(measure(generate, prompts, count, arguments.chat))
    print(f"{'case':14} {'unit':9} {'engine':>9} {'transformers':>13} {'ratio':>6} {'of medians':>11}  asked (bf16)")
    for name, (prompts, _) in chosen.items():
        print(row(name, sum(map(len, prompts)), seconds[name, "engine"], seconds[name, "transformers"]))
    engine.close()


def row(name: str, prompt_tokens: int, ours: list[tuple[float, int]], theirs: list[tuple[float, int]]) -> str:
    target, unit = TARGETS[name]
    if unit == "ms":
        a, b = ([1e3 * s for s, _ in side] for side in (ours, theirs))
        best, median = (min(a), min(b)), (statistics.median(a), statistics.median(b))
        ratio, of_medians = best[1] / best[0], median[1] / median[0]
    else:
        a, b = ([(prompt_tokens if name.startswith("prefill") else n) / s for s, n in side] for side in (ours, theirs))
        best, median = (max(a), max(b)), (statistics.median(a), statistics.median(b))
        ratio, of_medians = best[0] / best[1], median[0] / median[1]
    return f"{name:14} {unit:9} {best[0]:9.1f} {best[1]:13.1f} {ratio:6.2f} {of_medians:11.2f}  {target}"


if __name__ == "__main__":
    main()
