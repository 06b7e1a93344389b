"""Models for tests of quality: a table of bigrams that has "learnt" a text, the tiny transformer, and damage to either."""

import copy

import torch

from tests.engine.engines import tiny_parts


class Bytes:
    """A tokenizer: a token for each byte."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids) -> str:
        return bytes(token_ids).decode(errors="replace")


class Bigrams:
    """Logits after a token depend on it and, a little, on how many tokens were read (so that context shows)."""

    def __init__(self, text: str, vocab: int = 256) -> None:
        counts = torch.full((vocab, vocab), 0.02)
        ids = Bytes().encode(text)
        counts.index_put_((torch.tensor(ids[:-1]), torch.tensor(ids[1:])), torch.ones(len(ids) - 1), accumulate=True)
        self.table = counts.log()
        self.calls: list[list[int]] = []

    def __call__(self, token_ids: list[int]) -> torch.Tensor:
        self.calls.append(list(token_ids))
        read = torch.arange(len(token_ids)).float()[:, None]
        return self.table[torch.tensor(token_ids)] * (1 + 0.1 * torch.tanh(read / 8))

    def damaged(self, noise: float, seed: int = 0) -> "Bigrams":
        other = copy.copy(self)
        other.table = self.table + noise * torch.randn(self.table.shape, generator=torch.Generator().manual_seed(seed))
        return other


def transformer():
    """(logits function, tokenizer) of the tiny float32 model as transformers runs it."""
    parts, made = tiny_parts()
    return made.logits, parts.tokenizer
