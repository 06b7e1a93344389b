"""Greedy requests to the tiny model, and what transformers answers."""

import functools
import random

from engine import SamplingParams
from tests.engine.engines import tiny_parts
from tests.engine.equal_tokens import assert_equal_tokens

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def prompt(seed: int, length: int, *, shared: int = 0) -> list[int]:
    """Token ids; the first ``shared`` are the same for every seed."""
    common = random.Random(0)
    own = random.Random(seed + 1)
    return [common.randrange(3, 256) for _ in range(shared)] + [own.randrange(3, 256) for _ in range(length - shared)]


@functools.cache
def oracle(token_ids: tuple[int, ...], count: int = 12) -> tuple[list[int], list[float]]:
    """(greedy continuation, margins) by transformers, computed from scratch for each token."""
    _, made = tiny_parts()
    ids, margins = list(token_ids), []
    for _ in range(count):
        top = made.logits(ids)[-1].topk(2)
        ids.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
    return ids[len(token_ids) :], margins


def check_against_oracle(outputs, prompts, count=12):
    for output, ids in zip(outputs, prompts, strict=True):
        want, margins = oracle(tuple(ids), count)
        assert_equal_tokens(output.token_ids, want, margins, output.request_id)
