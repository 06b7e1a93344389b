"""Placeholder until the tokenizer lands."""

from typing import Any


class Tokenizer:
    @classmethod
    def from_directory(cls, path: Any, config: Any) -> "Tokenizer":
        raise ValueError(f"{path}: no tokenizer")

    @classmethod
    def from_gguf(cls, metadata: Any, source: str, config: Any) -> "Tokenizer":
        raise ValueError(f"{source}: no tokenizer")
