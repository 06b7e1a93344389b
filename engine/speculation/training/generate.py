"""Stage 1: the target writes the training text. One file a shard of requests; a shard that is there is not made again."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from engine.engine import Engine
from engine.request import SamplingParams
from engine.speculation.files import write_atomically
from engine.speculation.training.prompts import Prompt, prompts

SHARD = 256  # requests
HELD_OUT = "heldout"
TRAINING = "text"
# (temperature, share of the requests): greedy text is what most people look at first, and it repeats itself.
TEMPERATURES = ((0.0, 0.4), (0.7, 0.3), (1.0, 0.3))
MAX_TOKENS = 192
HELD_OUT_TOKENS = 128
_IGNORE_EOS_EVERY = 4  # one request in so many goes on after the end of its text, as benchmarks do


@dataclass(frozen=True)
class Text:
    """One sequence: ``token_ids``, of which the first ``num_prompt_tokens`` were given."""

    token_ids: list[int]
    num_prompt_tokens: int
    temperature: float


def encode(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Through the checkpoint's chat template where the prompt wants it and there is one."""
    if prompt.chat and tokenizer.chat_template is not None:
        return tokenizer.apply_chat_template([{"role": "user", "content": prompt.text}])
    return tokenizer.encode(prompt.text)


def params_of(index: int, held_out: bool, seed: int) -> SamplingParams:
    """Of the request with this number; held-out prompts are all greedy and never end early."""
    if held_out:
        return SamplingParams(temperature=0, max_tokens=HELD_OUT_TOKENS, ignore_eos=True)
    # Low-discrepancy, so that every shard has its mixture.
    share = (index * 0.6180339887498949) % 1.0
    edges = list(accumulate(width for _, width in TEMPERATURES))
    temperature = next((t for (t, _), edge in zip(TEMPERATURES, edges) if share < edge), TEMPERATURES[-1][0])
    ignore = index % _IGNORE_EOS_EVERY == 0
    return SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, ignore_eos=ignore, seed=seed * 1_000_003 + index)


def make_shard(engine: Engine, number: int, size: int, *, held_out: bool = False, seed: int = 0) -> list[Text]:
    """The texts of shard ``number``, which has ``size`` requests."""
    first = number * size
    asked = list(islice(prompts(seed, held_out), first, first + size))
    ids = [encode(engine.tokenizer, prompt) for prompt in asked]
    params = [params_of(first + i, held_out, seed) for i in range(size)]
    outputs = engine.generate(ids, params)
    return [
        Text(list(given) + list(output.outputs[0].token_ids), len(given), each.temperature)
        for given, output, each in zip(ids, outputs, params, strict=True)
    ]


def generate(
    engine: Engine, directory: Path, *, tokens: int, held_out: int = 64, minutes: float | None = None, seed: int = 0,
    shard: int = SHARD,
) -> None:  # fmt: skip
    """Write shards until there are ``tokens`` tokens of training text (or the minutes are over; at least one shard then).

    ``held_out``: number of held-out prompts, a shard of their own that comes first.
    """
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    if not shard_path(directory, HELD_OUT, 0).exists():
        write_shard(shard_path(directory, HELD_OUT, 0), make_shard(engine, 0, held_out, held_out=True, seed=seed))
        print(f"text: {held_out} held-out prompts continued in {time.monotonic() - began:.0f} s", flush=True)
    have = sum(len(text.token_ids) for text in read_texts(directory, TRAINING))
    number, made, began = 0, 0, time.monotonic()
    while have < tokens:
        path = shard_path(directory, TRAINING, number)
        number += 1
        if path.exists():
            continue
        texts = make_shard(engine, number - 1, shard, seed=seed)
        write_shard(path, texts)
        made += sum(len(text.token_ids) for text in texts)
        have += sum(len(text.token_ids) for text in texts)
        elapsed = time.monotonic() - began
        left = max(0.0, (tokens - have) * elapsed / made)
        print(f"text: {have:,} of {tokens:,} tokens, {made / elapsed:.0f} tokens/s, {left / 60:.1f} min to go", flush=True)
        if minutes is not None and elapsed > 60 * minutes:
            print(f"text: stopped after {minutes:g} minutes", flush=True)
            break


def shard_path(directory: Path, kind: str, number: int) -> Path:
    return directory / f"{kind}-{number:04d}.safetensors"


def write_shard(path: Path, texts: list[Text]) -> None:
    tensors = {
        "token_ids": torch.tensor([token for text in texts for token in text.token_ids], dtype=torch.int32),
        "lengths": torch.tensor([len(text.token_ids) for text in texts], dtype=torch.int32),
        "prompt_lengths": torch.tensor([text.num_prompt_tokens for text in texts], dtype=torch.int32),
        "temperatures": torch.tensor([text.temperature for text in texts], dtype=torch.float32),
    }
    write_atomically(path, tensors)


def read_texts(directory: Path, kind: str) -> Iterator[Text]:
    """Every text of the shards of this kind, in order."""
    for path in sorted(directory.glob(f"{kind}-*.safetensors")):
        yield from read_shard(path)


def read_shard(path: Path) -> Iterator[Text]:
    tensors = load_file(path)
    start = 0
    fields = (tensors[name].tolist() for name in ("lengths", "prompt_lengths", "temperatures"))
    for length, prompt_length, temperature in zip(*fields, strict=True):
        yield Text(tensors["token_ids"][start : start + length].tolist(), prompt_length, temperature)
        start += length
