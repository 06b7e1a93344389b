"""The prompts all benchmarks share: tests/data/bench_prompts.json (token ids of the default model)."""

import functools
import json
from pathlib import Path
from typing import Any

_FILE = Path(__file__).parents[1] / "data" / "bench_prompts.json"


@functools.cache
def _data() -> dict[str, Any]:
    return json.loads(_FILE.read_text())


def bench_prompts(count: int) -> list[list[int]]:
    """The first ``count`` of 32 prompts, as token ids."""
    return _data()["prompt_ids"][:count]


def bench_texts(count: int) -> list[str]:
    return _data()["prompts"][:count]


def long_prompt(length: int) -> list[int]:
    """One prompt of 512 or 2048 tokens."""
    return _data()[f"p{length}"]
