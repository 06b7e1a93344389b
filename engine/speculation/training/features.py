"""Stage 2: the draft vocabulary, and what a drafter learns from: what the target's head reads and what the exit sees.

Text comes with its features; those of another exit layer take a pass of the target over all text.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from engine.speculation.files import write_atomically
from engine.speculation.training.generate import HELD_OUT, TRAINING, Text, features_path, read_shard
from engine.speculation.training.modules import Target
from engine.speculation.training.writer import divided

_BATCH_TOKENS = 4096  # of a forward pass, padding included


def draft_vocabulary(texts: Iterable[Text], size: int, vocab_size: int, special: Iterable[int]) -> torch.Tensor:
    """int32 [min(size, vocab_size)], ascending: all special tokens, then those that occur most often in the texts; where the
    texts have fewer, the smallest ids (a byte-pair vocabulary is numbered in the order in which its pairs were merged: the
    frequent ones come first)."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.token_ids)
    chosen = dict.fromkeys(token for token in special if token < vocab_size)
    for token in [*sorted(counts, key=lambda t: (-counts[t], t)), *range(vocab_size)]:
        if len(chosen) >= size:
            break
        chosen[token] = None
    return torch.tensor(sorted(chosen), dtype=torch.int32)


def coverage(texts: Iterable[Text], vocab: torch.Tensor) -> float:
    """Share of the written (not the given) tokens that the draft vocabulary has."""
    known = set(vocab.tolist())
    written = [token for text in texts for token in text.token_ids[text.num_prompt_tokens :]]
    return sum(token in known for token in written) / max(1, len(written))


def special_ids(tokenizer: Any) -> list[int]:
    """Ids of the tokens that a tokenizer marks as special, ends of text included."""
    added = tokenizer._backend.get_added_tokens_decoder()
    return sorted({i for i, token in added.items() if token.special} | set(tokenizer.eos_token_ids))


def compute_features(target: Target, directory: Path, exit_layer: int) -> None:
    """For every shard of text a file with ``features`` and ``left``, float16 [tokens, E]; those that are there are kept."""
    paths = sorted([*directory.glob(f"{HELD_OUT}-*.safetensors"), *directory.glob(f"{TRAINING}-*.safetensors")])
    todo = [path for path in paths if not features_path(path, exit_layer).exists()]
    began, done = time.monotonic(), 0
    for i, path in enumerate(todo):
        texts = list(read_shard(path))
        features, left = features_of(target, [text.token_ids for text in texts], exit_layer)
        write_atomically(features_path(path, exit_layer), {"features": torch.cat(features), "left": torch.cat(left)})
        done += sum(len(text.token_ids) for text in texts)
        elapsed = time.monotonic() - began
        left_s = elapsed / (i + 1) * (len(todo) - i - 1)
        print(f"features: {i + 1} of {len(todo)} files, {done / elapsed:.0f} tokens/s, {left_s / 60:.1f} min to go", flush=True)


def features_of(target: Target, token_ids: list[list[int]], exit_layer: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """float16 [T, E] each, in the order of the texts: features, and the hidden state before the exit layer divided by its
    root mean square (some of its entries are too large for 16 bits, and the exit's norm divides by it anyway)."""
    features: list[torch.Tensor] = [torch.empty(0)] * len(token_ids)
    left: list[torch.Tensor] = [torch.empty(0)] * len(token_ids)
    for rows in batches_by_length([len(ids) for ids in token_ids], _BATCH_TOKENS):
        with torch.inference_mode():
            feature, state = target(padded([torch.tensor(token_ids[i]) for i in rows]), exit_layer)
            state = divided(state, target.config.rms_norm_eps)
        for row, i in enumerate(rows):
            features[i] = feature[row, : len(token_ids[i])].half()
            left[i] = state[row, : len(token_ids[i])].half()
    return features, left


def batches_by_length(lengths: list[int], tokens: int) -> Iterator[list[int]]:
    """Indices in batches of similar length, each of at most ``tokens`` with its padding (or of one text)."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > tokens:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    """[B, longest, ...], zeros at the end."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@dataclass(frozen=True)
class Example:
    """A text with its features; float16 [T, E] each."""

    token_ids: torch.Tensor  # int64 [T]
    num_prompt_tokens: int
    features: torch.Tensor
    left: torch.Tensor


@dataclass(frozen=True)
class ExampleBatch:
    """Padded examples; float32."""

    token_ids: torch.Tensor  # int64 [B, T]
    lengths: torch.Tensor  # int64 [B]
    features: torch.Tensor  # [B, T, E]
    left: torch.Tensor  # [B, T, E]

    @classmethod
    def of(cls, examples: list[Example]) -> "ExampleBatch":
        return cls(
            padded([e.token_ids for e in examples]),
            torch.tensor([len(e.token_ids) for e in examples]),
            padded([e.features for e in examples]).float(),
            padded([e.left for e in examples]).float(),
        )


def read_examples(directory: Path, kind: str, exit_layer: int) -> list[Example]:
    """All examples of this kind whose features have been computed."""
    out = []
    for path in sorted(directory.glob(f"{kind}-*.safetensors")):
        if not features_path(path, exit_layer).exists():
            continue
        tensors, start = load_file(features_path(path, exit_layer)), 0
        for text in read_shard(path):
            rows = slice(start, start + len(text.token_ids))
            start = rows.stop
            out.append(
                Example(torch.tensor(text.token_ids), text.num_prompt_tokens, tensors["features"][rows], tensors["left"][rows])
            )
    return out
