"""Stage 1: the target writes the training text. One file a shard of texts, with its features in another; what is there is kept."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from engine.speculation.files import write_atomically
from engine.speculation.training.modules import Target
from engine.speculation.training.prompts import Prompt, prompts, words_of
from engine.speculation.training.writer import Written, write_texts

SHARD = 192  # texts written at once
HELD_OUT = "heldout"
TRAINING = "text"
# (temperature, share of the texts): greedy text is what most people look at first, and it repeats itself.
TEMPERATURES = ((0.0, 0.5), (0.7, 0.3), (1.0, 0.2))
MAX_TOKENS = 192
HELD_OUT_TOKENS = 128
_GOES_ON_EVERY = 4  # one text in so many goes on after its end, as benchmarks do
_WINDOW = 8  # shards whose prompts are sorted by length together


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


def temperature_of(index: int) -> float:
    """Of the training text with this number: a low-discrepancy sequence, so that every shard has its mixture."""
    share = (index * 0.6180339887498949) % 1.0
    edges = accumulate(width for _, width in TEMPERATURES)
    return next((t for (t, _), edge in zip(TEMPERATURES, edges) if share < edge), TEMPERATURES[-1][0])


def make_shard(
    target: Target, tokenizer: Any, number: int, size: int, exit_layer: int, *, held_out: bool = False, seed: int = 0
) -> tuple[list[Text], list[Written]]:
    """The texts of shard ``number``, ``size`` of them, and what a drafter learns from. Held-out texts are all greedy and do
    not end early."""
    if held_out:
        chosen = list(range(number * size, (number + 1) * size))
    else:  # prompts of similar length, so that nobody waits for the longest one to be read
        first = number // _WINDOW * _WINDOW * size
        chosen = list(range(first, first + _WINDOW * size))
    words = [] if held_out else words_of(tokenizer.vocabulary())
    asked = dict(zip(chosen, islice(prompts(seed, held_out, words), chosen[0], chosen[-1] + 1), strict=True))
    ids = {index: encode(tokenizer, prompt) for index, prompt in asked.items()}
    if not held_out:
        at = number % _WINDOW * size
        chosen = sorted(chosen, key=lambda index: (len(ids[index]), index))[at : at + size]
    heat = [0.0 if held_out else temperature_of(index) for index in chosen]
    tokens = HELD_OUT_TOKENS if held_out else MAX_TOKENS
    written = write_texts(target, [ids[index] for index in chosen], heat, tokens, exit_layer, seed * 1_000_003 + number)
    texts, kept = [], []
    for index, temperature, each in zip(chosen, heat, written, strict=True):
        given, length = len(ids[index]), len(each.features)
        if not held_out and index % _GOES_ON_EVERY:
            ends = (i + 1 for i in range(given, length) if each.token_ids[i] in tokenizer.eos_token_ids)
            length = next(ends, length)
        texts.append(Text(each.token_ids[:length], given, temperature))
        kept.append(Written(each.token_ids[:length], each.features[:length], each.left[:length]))
    return texts, kept


def generate(
    target: Target, tokenizer: Any, directory: Path, exit_layer: int, *, tokens: int, held_out: int = 64,
    minutes: float | None = None, seed: int = 0, shard: int = SHARD,
) -> None:  # fmt: skip
    """Write shards until there are ``tokens`` tokens of training text (or the minutes are over; at least one shard then).

    ``held_out``: number of held-out prompts, a shard of their own that comes first; the same for every ``seed``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if not shard_path(directory, HELD_OUT, 0).exists():
        made = make_shard(target, tokenizer, 0, held_out, exit_layer, held_out=True)
        write_shard(shard_path(directory, HELD_OUT, 0), *made, exit_layer)
    have = sum(len(text.token_ids) for text in read_texts(directory, TRAINING))
    number, new, began = 0, 0, time.monotonic()
    while have < tokens:
        path = shard_path(directory, TRAINING, number)
        number += 1
        if path.exists():
            continue
        texts, written = make_shard(target, tokenizer, number - 1, shard, exit_layer, seed=seed)
        write_shard(path, texts, written, exit_layer)
        count = sum(len(text.token_ids) for text in texts)
        new, have, elapsed = new + count, have + count, time.monotonic() - began
        left = max(0.0, (tokens - have) * elapsed / new)
        print(f"text: {have:,} of {tokens:,} tokens, {new / elapsed:.0f} tokens/s, {left / 60:.1f} min to go", flush=True)
        if minutes is not None and elapsed > 60 * minutes:
            print(f"text: stopped after {minutes:g} minutes", flush=True)
            break


def features_path(text_path: Path, exit_layer: int) -> Path:
    return text_path.with_name(f"features{exit_layer}-{text_path.name}")


def shard_path(directory: Path, kind: str, number: int) -> Path:
    return directory / f"{kind}-{number:04d}.safetensors"


def write_shard(path: Path, texts: list[Text], written: list[Written], exit_layer: int) -> None:
    """The texts, after the file with their features: where there are texts, there are features."""
    features = {
        "features": torch.cat([each.features for each in written]),
        "left": torch.cat([each.left for each in written]),
    }
    write_atomically(features_path(path, exit_layer), features)
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
