"""What the tests of beam search share: requests, transformers' answer to them, and what "the same beams" means."""

import functools
import random
from typing import Any

import pytest
import torch

from engine import SamplingParams
from engine.request import RequestOutput
from tests.engine.engines import tiny_parts

END = (115, 43, 293)  # tokens that the tiny model often comes to


def prompt(seed: int, length: int = 9) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 256) for _ in range(length)]


def beams(width: int, **kw: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "beam_width": width, "n": width, "max_tokens": 10, **kw})


@functools.cache
def reference(token_ids: tuple[int, ...], params: SamplingParams) -> list[tuple[list[int], float]]:
    """(output tokens, score) of transformers' beam search, best first."""
    _, made = tiny_parts()
    eos = [*params.stop_token_ids, *([] if params.ignore_eos else [2])]
    with torch.no_grad():
        out = made.model.generate(
            torch.tensor([token_ids]), attention_mask=torch.ones(1, len(token_ids), dtype=torch.long), do_sample=False,
            num_beams=params.beam_width, num_return_sequences=params.n, max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty, early_stopping=params.early_stopping, repetition_penalty=params.repetition_penalty,
            eos_token_id=eos or None, pad_token_id=0, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(token_ids) :]
        end = next((i + 1 for i, t in enumerate(tokens) if t in eos), len(tokens))
        found.append((tokens[:end], score))
    return found


def assert_same_beams(output: RequestOutput, want: list[tuple[list[int], float]]) -> None:
    """Scores to 1e-4, or to a millionth where a length penalty makes them large (theirs are float32, and so are the logits); the same
    sequences, in the same order wherever two scores are further apart than that."""
    for o, (_, score) in zip(output.outputs, want, strict=True):
        assert o.score == pytest.approx(score, rel=1e-6, abs=1e-4)
        assert o.token_ids in [tokens for tokens, other in want if other == pytest.approx(o.score, rel=1e-6, abs=1e-4)], (o, want)
    assert len({tuple(o.token_ids) for o in output.outputs}) == len(want)
