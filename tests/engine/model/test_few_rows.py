"""A layer for a few rows of one request, as torch runs it: against transformers, and against the way of any number of rows."""

import dataclasses
import random
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.kvcache.layout import KVCache
from engine.model.checkpoint import load_checkpoint
from engine.model.compiled import Shape
from engine.model.few_rows import ProductShape
from engine.model.llama import Model
from engine.model.low_bit import pack_quantized
from engine.model.unpacking import Unpacking
from engine.quantization.methods import quantize
from engine.request import Request, SamplingParams
from engine.runner import Runner, Scheduled
from engine.speculation.base import Draft
from tests.engine.model import tiny

ROWS = 5


class Uncompiled:
    """Stands in for CompiledLayer: the same function, as torch runs it; more than one row are filled up to ROWS."""

    state = "compiled"

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.calls: list[int] = []  # the rows of each

    def function(self, rows: int):
        if rows > ROWS:
            return None
        size = 1 if rows == 1 else ROWS
        return size, partial(self._run, size)

    def _run(self, size: int, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        self.calls.append(size)
        return self.shape.run(size, *inputs)


def _request(length: int, blocks: list[int]) -> Request:
    request = Request("r", [(5 * i + 3) % 300 for i in range(length)], SamplingParams(), 0)
    request.block_ids = blocks
    return request


def _runner(path: Path, compiled: type | None) -> Runner:
    """On a pool of blocks of 4 tokens, full of NaN."""
    checkpoint = load_checkpoint(path)
    kv = KVCache(checkpoint.config, 16, 4, "cpu", torch.float32)
    kv.fill_blocks(range(16), float("nan"))
    return Runner(Model(checkpoint.config, checkpoint.tensors, "cpu", torch.float32, compiled), kv)


@pytest.mark.parametrize("blocks", [[6, 1, 3, 0, 9, 8], [4, 5, 6, 7, 8, 9]], ids=["scattered", "contiguous"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_logits_are_those_of_transformers(family: str, blocks: list[int], tmp_path: Path) -> None:
    made = tiny.make(family, tmp_path)
    runner, request = _runner(tmp_path, Uncompiled), _request(24, blocks)
    counts = [9, 1, 1, 4, 1, 5, 3]
    starts = [sum(counts[:i]) for i in range(len(counts))]
    got = torch.cat([runner.run([Scheduled(request, s, n, True)]) for s, n in zip(starts, counts, strict=True)])
    layers = runner.model.config.num_layers
    assert runner.model.compiled.calls == [size for size in (1, 1, 5, 1, 5, 5) for _ in range(layers)]  # but not the prefill
    want = made.logits(request.token_ids)[[s + n - 1 for s, n in zip(starts, counts, strict=True)]]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-window", "qwen3"])
def test_a_draft_is_verified_as_by_the_other_way(family: str, tmp_path: Path) -> None:
    """Chains and trees of 1 to 4 nodes: logits and features of all rows, and K and V in the pool, NaN in all free slots."""
    tiny.make(family, tmp_path)
    few, many = _runner(tmp_path, Uncompiled), _runner(tmp_path, None)
    rng = random.Random(0)
    for length in (3, 4, 9, 15, 16, 17):
        request = _request(length, [6, 1, 3, 0, 9, 8])
        nodes = rng.randint(1, 4)
        draft = Draft([rng.randrange(300) for _ in range(nodes)], [rng.randrange(-1, i) for i in range(nodes)])
        results = []
        for runner in (few, many):
            runner.forget("r")
            runner.run([Scheduled(request, 0, length - 1, True)])
            results.append(runner.run_with_features([Scheduled(request, length - 1, nodes + 1, True, nodes, draft)]))
            assert results[-1][0].isfinite().all()
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        torch.testing.assert_close(few.kv.tensor, many.kv.tensor, atol=1e-5, rtol=0, equal_nan=True)
        for runner in (few, many):
            runner.kv.fill_blocks(range(16), float("nan"))
    assert few.model.compiled.calls and set(few.model.compiled.calls) == {ROWS}


def test_what_it_does_not_take(tmp_path: Path) -> None:
    """Too little context, too many rows, several requests; only the rows that are wanted come back."""
    tiny.make("mistral", tmp_path, sliding_window=2)
    runner, request = _runner(tmp_path, Uncompiled), _request(8, [0, 1])
    runner.run([Scheduled(request, 0, 4, True)])
    runner.run([Scheduled(request, 4, 1, True)])  # the window leaves a single token of context
    assert runner.model.compiled.calls == []
    tiny.make("llama", tmp_path / "other")
    runner, other = _runner(tmp_path / "other", Uncompiled), _request(8, [2, 3])
    other.request_id = "other"
    runner.run([Scheduled(request, 0, 1, True)])
    runner.run([Scheduled(request, 1, 1, True)])
    assert runner.model.compiled.calls == []
    runner.run([Scheduled(request, 2, 6, True)])
    runner.run([Scheduled(other, 0, 4, True)])
    runner.run([Scheduled(request, 7, 1, True), Scheduled(other, 4, 1, True)])
    assert runner.model.compiled.calls == []
    assert runner.run([Scheduled(other, 4, 3, True)]).shape[0] == 1 and runner.model.compiled.calls
    assert runner.run([Scheduled(other, 4, 3, False)]).shape[0] == 0


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_a_head_in_few_bits_goes_through_its_own_function_for_one_row(method: str, tmp_path: Path) -> None:
    tiny.make("llama", tmp_path)
    model, made = _runner(tmp_path, None).model, []
    model._make_compiled = lambda shape: made.append(Uncompiled(shape)) or made[-1]
    size = model.config.hidden_size
    table = torch.randn(48, size, generator=torch.Generator().manual_seed(0))
    head = pack_quantized(quantize(table, method, 32 if method == "int4" else None), None, model.backend, Unpacking(0))
    model.config = dataclasses.replace(model.config, vocab_size=48)
    model.set_layers(model.layers, None, head)
    (own,) = [one for one in made if isinstance(one.shape, ProductShape)]
    own.function = lambda rows: (1, partial(own._run, 1)) if rows == 1 else None
    features = torch.randn(3, size, generator=torch.Generator().manual_seed(1))
    want = features @ head.unpacked().T
    torch.testing.assert_close(model.logits(features[:1]), want[:1], atol=1e-4, rtol=1e-4)
    assert own.calls == [1]
    torch.testing.assert_close(model.logits(features), want, atol=1e-4, rtol=1e-4)
    assert own.calls == [1]
    assert model.apart()._compiled_head is None
