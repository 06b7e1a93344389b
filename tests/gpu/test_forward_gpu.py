"""The same forward pass on CUDA: tiny models against transformers on the CPU, and no synchronisation inside."""

from pathlib import Path

import pytest
import torch

from engine.kvcache.layout import KVCache
from engine.model.checkpoint import load_checkpoint
from engine.model.llama import Model
from engine.runner import Runner, Scheduled
from tests.engine.model import tiny
from tests.engine.test_forward import FakeRequest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_float32_logits(family, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    made = tiny.make(family, tmp_path)
    checkpoint = load_checkpoint(made.path)
    model = Model(checkpoint.config, checkpoint.tensors, "cuda", torch.float32)
    kv = KVCache(checkpoint.config, 64, 4, "cuda", torch.float32)
    kv.fill_blocks(range(64), float("nan"))
    runner = Runner(model, kv)
    a = FakeRequest("a", [7 * i % 311 + 3 for i in range(37)], [3, 1, 9, 11, 20, 21, 22, 23, 5, 6])
    b = FakeRequest("b", [5 * i % 307 + 3 for i in range(20)], [30, 40, 31, 32, 50])
    want_a, want_b = made.logits(a.token_ids), made.logits(b.token_ids)
    for items, want in (
        ([Scheduled(a, 0, 9, True)], [want_a[8]]),
        ([Scheduled(a, 9, 1, True), Scheduled(b, 0, 3, True)], [want_a[9], want_b[2]]),
        ([Scheduled(a, 10, 1, True), Scheduled(b, 3, 1, True)], [want_a[10], want_b[3]]),
        ([Scheduled(a, 11, 20, True), Scheduled(b, 4, 15, True)], [want_a[30], want_b[18]]),
        ([Scheduled(a, 31, 6, True), Scheduled(b, 19, 1, True)], [want_a[36], want_b[19]]),
    ):
        torch.testing.assert_close(runner.run(items).cpu(), torch.stack(want), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_no_waiting_for_the_device(dtype, tmp_path: Path):
    made = tiny.make("llama", tmp_path, dtype=dtype)
    checkpoint = load_checkpoint(made.path)
    model = Model(checkpoint.config, checkpoint.tensors, "cuda", dtype)
    runner = Runner(model, KVCache(checkpoint.config, 16, 16, "cuda", dtype))
    request = FakeRequest("r", [7 * i % 311 + 3 for i in range(40)], [4, 2, 9])
    runner.run([Scheduled(request, 0, 39, True)])
    batch = runner._batch([Scheduled(request, 39, 1, True)])
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            logits = model.forward(batch, runner.kv)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    exact = made.logits(request.token_ids)[39]
    assert (logits[0].float().cpu() - exact).abs().max() < 0.1 * exact.std()
