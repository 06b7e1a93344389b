"""A model's forward pass as the function that this package measures, on a KV cache of its own."""

from dataclasses import dataclass, field

import torch

from engine.kvcache.layout import KVCache
from engine.runner import Runner, Scheduled


@dataclass(slots=True)
class _Sequence:
    token_ids: list[int]
    block_ids: list[int]
    request_id: str = field(default="quality")


class ModelLogits:
    """``rows.Logits`` of a runner. Its KV cache must be a scratch one: every call overwrites it from the first block on."""

    def __init__(self, runner: Runner, chunk: int | None = None) -> None:
        """``chunk``: tokens the model reads at a time; None: a sequence at once. With a KV cache in few bits it matters: what a
        chunk reads of itself was not rounded yet, what it reads of earlier chunks was."""
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, got {chunk}")
        self.runner = runner
        self.chunk = chunk

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that its KV cache holds."""
        kv: KVCache = self.runner.kv
        return kv.num_blocks * kv.block_size

    def __call__(self, token_ids: list[int]) -> torch.Tensor:
        """Float32 [len(token_ids), vocab_size]. ValueError for a sequence that does not fit."""
        return self.rows_from(token_ids, 0)

    def rows_from(self, token_ids: list[int], first: int) -> torch.Tensor:
        """The rows from ``first`` on: float32 [len(token_ids) - first, vocab_size]."""
        if not 0 <= first < len(token_ids) <= self.max_length:
            raise ValueError(f"got {len(token_ids)} tokens from row {first} on, the KV cache has room for {self.max_length}")
        kv = self.runner.kv
        sequence = _Sequence(list(token_ids), list(range(-(-len(token_ids) // kv.block_size))))
        parts = []
        for start in range(0, len(token_ids), self.chunk or len(token_ids)):
            stop = min(len(token_ids), start + (self.chunk or len(token_ids)))
            features = self.runner.run_with_features([Scheduled(sequence, start, stop - start, False)])[1]
            parts.append(features[max(0, first - start) :])
        self.runner.forget(sequence.request_id)
        with torch.inference_mode():
            return self.runner.model.head(torch.cat(parts)).float()
