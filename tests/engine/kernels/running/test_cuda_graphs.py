"""Decode steps through recorded graphs give what they give without: on CUDA by graphs, under the interpreter by a stand-in that does
the same on the same buffers again."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine import cuda_graphs
from engine.attention.base import create_attention
from engine.cuda_graphs import DecodeGraphs, Outputs, bucket, context_bucket
from engine.kvcache.create import create_kv_cache
from engine.runner import Runner, Scheduled
from tests.engine.kernels.running.cases import INTERPRETED
from tests.gpu.models import random_parts

BLOCK = 4


class Again:
    """Does the function again, into the memory of its first results."""

    def __init__(self, function: Callable[[], Outputs]) -> None:
        self.function, self.outputs = function, function()

    def replay(self) -> None:
        for held, new in zip(self.outputs, self.function(), strict=True):
            held.copy_(new)


class Asked:
    def __init__(self, name: str, blocks: list[int], seed: int) -> None:
        self.request_id, self.block_ids = name, blocks
        self.token_ids = [seed * i % 290 + 3 for i in range(4 * len(blocks))]


def runner(shape: str, kv_dtype: str, device: str, most: int = 8) -> Runner:
    parts = random_parts(shape, device, "float32", "triton")
    kv = create_kv_cache(kv_dtype, parts.model_config, 64, BLOCK, parts.device.torch_device, torch.float32)
    kv.fill_blocks(range(64), float("nan"))
    attention: Any = create_attention("triton", parts.model_config)
    graphs = DecodeGraphs(parts.model, kv, attention, most, 256, None if device == "cuda" else Again)
    return Runner(parts.model, kv, attention, graphs)


@pytest.mark.parametrize(
    ("shape", "kv_dtype"), [("tiny-window", "int8")] if INTERPRETED else [("tiny", "auto"), ("tiny-window", "int8")]
)
def test_a_graph_gives_what_the_kernels_give_one_by_one(
    shape: str, kv_dtype: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "bucket", lambda rows, most: 2)  # so that few rows show all there is
    made = runner(shape, kv_dtype, device)
    requests = [Asked("a", [5, 9, 1], 7), Asked("b", [2, 40, 41], 11)]
    for r in requests:
        made.run([Scheduled(r, 0, 6, False)])
    graphs = made.graphs
    assert graphs is not None and len(graphs) == 0  # prompts are not recorded

    def step(items: list[Scheduled]) -> None:
        got = made.run_with_features(items)
        made.graphs = None
        want = made.run_with_features(items)
        made.graphs = graphs
        for a, b in zip(got, want, strict=True):
            assert torch.isfinite(b).all()
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-5)

    a, b = requests
    step([Scheduled(a, 6, 1, True), Scheduled(b, 6, 1, True)])
    step([Scheduled(a, 7, 1, True)])  # the other row is nobody's now, and must not be written where it was
    step([Scheduled(b, 7, 1, True), Scheduled(a, 8, 1, True)])  # another order, other blocks
    assert len(graphs) == 1 and not graphs.failed
    step([Scheduled(b, 8, 1, True), Scheduled(a, 9, 2, True)])  # not only decodes
    assert len(graphs) == 1


class Once:
    """Does the function once and keeps, as a graph does, nothing of it but its results."""

    def __init__(self, function: Callable[[], Outputs]) -> None:
        self.outputs = function()

    def replay(self) -> None:
        pass


def test_what_a_graph_reads_is_kept(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner("tiny", "auto", device)
    assert made.graphs is not None
    made.graphs._record = Once
    read: list[Any] = []
    forward = made.model.forward_with_features

    def looked_at(batch: Any, kv: Any) -> Outputs:
        plan = batch.plan[0]
        tensors = (batch.token_ids, batch.positions, batch.slots, plan.cu_seqlens_q, plan.seq_lens, plan.block_tables)
        read.extend(weakref.ref(tensor) for tensor in tensors)
        return forward(batch, kv)

    monkeypatch.setattr(made.model, "forward_with_features", looked_at)
    r = Asked("a", [1, 2], 7)
    made.run([Scheduled(r, 0, 4, False)])
    made.run([Scheduled(r, 4, 1, True)])
    gc.collect()
    assert [held() is not None for held in read] == [True] * 6


def test_other_weights_are_recorded_anew(device: str) -> None:
    made = runner("tiny", "auto", device)
    r = Asked("a", [1, 2], 7)
    made.run([Scheduled(r, 0, 4, False)])
    first = made.run([Scheduled(r, 4, 1, True)])
    made.model.set_layers(random_parts("tiny", device, "float32", "triton", seed=1).model.layers, None)
    second = made.run([Scheduled(r, 4, 1, True)])
    made.graphs, graphs = None, made.graphs
    torch.testing.assert_close(second, made.run([Scheduled(r, 4, 1, True)]), atol=1e-4, rtol=1e-5)
    assert graphs is not None and len(graphs) == 1 and (first - second).abs().max() > 0.1


def test_what_cannot_be_recorded_runs_as_before(device: str, caplog: pytest.LogCaptureFixture) -> None:
    made = runner("tiny", "auto", device)
    assert made.graphs is not None

    def fails(function: Callable[[], Outputs]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    made.graphs._record = fails
    r = Asked("a", [1, 2], 7)
    made.run([Scheduled(r, 0, 4, False)])
    for _ in range(2):
        assert torch.isfinite(made.run([Scheduled(r, 4, 1, True)])).all()
    assert "not permitted" in made.graphs.failed
    assert [record.message.startswith("decode steps run without CUDA graphs") for record in caplog.records] == [True]


def test_the_number_of_graphs_is_bounded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST_GRAPHS", 1)
    made = runner("tiny", "auto", device)
    requests = [Asked("a", [5, 9], 7), Asked("b", [2, 40], 11)]
    for r in requests:
        made.run([Scheduled(r, 0, 6, False)])
    for items in (requests, requests[:1], requests):
        made.run([Scheduled(r, 6, 1, True) for r in items])
        assert made.graphs is not None and len(made.graphs) == 1


def test_a_batch_size_that_was_raised_since_is_recorded_too(device: str) -> None:
    made = runner("tiny", "auto", device, most=1)
    requests = [Asked("a", [5, 9], 7), Asked("b", [2, 40], 11)]
    for r in requests:
        made.run([Scheduled(r, 0, 6, False)])
    for items in (requests[:1], requests):
        assert torch.isfinite(made.run([Scheduled(r, 6, 1, True) for r in items])).all()
    assert made.graphs is not None and len(made.graphs) == 2


def test_buckets() -> None:
    assert [bucket(n, 256) for n in (1, 2, 3, 4, 5, 8, 9, 17, 64, 65, 200)] == [1, 2, 4, 4, 8, 8, 16, 24, 64, 96, 224]
    assert bucket(5, 6) == 6 and bucket(6, 6) == 6
    assert [context_bucket(n, 10_000) for n in (1, 512, 513, 2049, 9000)] == [512, 512, 2048, 8192, 10_000]
