"""The forward pass with what the head reads, with its first layers only, and over a tree: against transformers in float32."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.base import Span, create_attention, tree_rows
from engine.kvcache.layout import KVCache, block_slots
from engine.model.checkpoint import load_checkpoint
from engine.model.llama import Batch, Model
from tests.engine.model import tiny

TOLERANCE = 1e-4


class Pass:
    """One request on blocks in random order, in a pool full of NaN."""

    def __init__(self, made: tiny.Tiny) -> None:
        checkpoint = load_checkpoint(made.path)
        self.made = made
        self.model = Model(checkpoint.config, checkpoint.tensors, "cpu", torch.float32)
        self.kv = KVCache(checkpoint.config, 24, 4, "cpu", torch.float32)
        self.kv.fill_blocks(range(24), float("nan"))
        self.attention = create_attention("torch", checkpoint.config)
        self.slots = block_slots(random.Random(0).sample(range(24), 24), 4)

    def batch(
        self, tokens: list[int], start: int, parents: list[int] | None = None, sample_rows: list[int] | None = None
    ) -> Batch:
        """``tokens`` from position ``start`` on, or the tree of ``parents`` whose root is the first of them."""
        end = start + len(tokens)
        span = Span(0, start, len(tokens), self.slots[:end])
        positions = np.arange(start, end)
        if parents is not None:
            seen, depth = tree_rows(parents)
            positions = start + depth
            span = Span(0, start, len(tokens), self.slots[:end], seen, positions)
        return Batch(
            torch.tensor(tokens),
            torch.from_numpy(positions),
            torch.from_numpy(self.slots[start:end].copy()),
            None if sample_rows is None else torch.tensor(sample_rows, dtype=torch.int64),
            int(positions.max()) + 1,
            self.attention,
            self.attention.plan([span], self.kv.tensor, torch.float32),
        )

    def hidden(self, tokens: list[int]) -> list[torch.Tensor]:
        """The embeddings, then what comes out of each layer [T, E]; the last one after the final norm."""
        with torch.no_grad():
            states = self.made.model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return [state[0] for state in states]


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3-tied"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tiny.Tiny:
    return tiny.make(request.param, Path(tmp_path_factory.mktemp(request.param)))


def tokens_of(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(count)]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("sample_rows", [None, [], [4], [1, 8]])
@torch.inference_mode()
def test_features_are_what_the_head_reads_at_every_row(made, sample_rows):
    one, tokens = Pass(made), tokens_of(12)
    one.model.forward(one.batch(tokens[:3], 0), one.kv)
    batch = one.batch(tokens[3:], 3, sample_rows=sample_rows)
    logits, features = one.model.forward_with_features(batch, one.kv)
    rows = list(range(9)) if sample_rows is None else sample_rows
    assert logits.shape == (len(rows), 320)
    close(features, one.hidden(tokens)[-1][3:])
    close(logits, made.logits(tokens)[3:][rows])
    close(one.model.forward(batch, one.kv), logits)


@torch.inference_mode()
def test_the_first_layers_alone(made):
    one, tokens = Pass(made), tokens_of(11)
    for count in (1, 2):
        x = one.model.first_layers(one.batch(tokens, 0), one.kv, count)
        close(x, one.hidden(tokens)[count])
        assert one.kv.layers[count][one.slots[:11]].isnan().all()  # nobody wrote there
    close(one.model.norm(one.model.first_layers(one.batch(tokens, 0), one.kv, 3)), one.hidden(tokens)[-1])
    for count in (0, 4):
        with pytest.raises(ValueError, match=r"must lie in \[1, 3\]"):
            one.model.first_layers(one.batch(tokens, 0), one.kv, count)


@pytest.mark.parametrize("seed", range(4))
@torch.inference_mode()
def test_a_tree_and_going_on_from_its_accepted_path(made, seed):
    rng = random.Random(seed)
    one, tokens = Pass(made), tokens_of(14, seed)
    one.model.forward(one.batch(tokens[:-1], 0), one.kv)
    parents = [rng.randrange(-1, i) for i in range(rng.choice((3, 8, 20)))]
    drafted = tokens_of(len(parents), seed + 100)
    logits = one.model.forward(one.batch([tokens[-1], *drafted], 13, parents), one.kv)
    deepest: list[int] = []
    for node in range(-1, len(parents)):
        path = [node] if node >= 0 else []
        while path and parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        close(logits[node + 1], made.logits(tokens + [drafted[i] for i in path])[-1])
        deepest = max(deepest, path, key=len)
    kept = tokens + [drafted[i] for i in deepest]
    one.kv.move([int(one.slots[14 + i]) for i in deepest], [int(one.slots[14 + i]) for i in range(len(deepest))])
    kept.append(7)
    close(one.model.forward(one.batch([7], len(kept) - 1), one.kv)[0], made.logits(kept)[-1])
