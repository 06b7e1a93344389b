"""The forward pass on CUDA: its logits are those of the CPU in float32, and nothing in it waits for the device."""

from typing import Any

import pytest
import torch

from engine.attention.base import create_attention
from engine.kvcache.layout import KVCache
from engine.runner import Runner, Scheduled
from tests.gpu.models import random_parts

pytestmark = pytest.mark.gpu
SHAPES = ["tiny", "tiny-window", "tiny-qk-norm"]


class Asked:
    def __init__(self, name: str, token_ids: list[int], block_ids: list[int]) -> None:
        self.request_id, self.token_ids, self.block_ids = name, token_ids, block_ids


def runner(shape: str, device: str, dtype: str, backend: str) -> Runner:
    parts = random_parts(shape, device, dtype, "torch" if device == "cpu" else backend)
    kv = KVCache(parts.model_config, 64, 4, parts.device.torch_device, parts.device.torch_dtype)
    kv.fill_blocks(range(64), float("nan"))
    return Runner(parts.model, kv, create_attention(parts.device.attention_backend, parts.model_config))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_logits(shape: str, backend: str) -> None:
    here, there = runner(shape, "cpu", "float32", backend), runner(shape, "cuda", "float32", backend)
    a = Asked("a", [7 * i % 290 + 3 for i in range(37)], [3, 1, 9, 11, 20, 21, 22, 23, 5, 6])
    b = Asked("b", [5 * i % 290 + 3 for i in range(20)], [30, 40, 31, 32, 50])
    for items in (
        [Scheduled(a, 0, 9, True)],
        [Scheduled(a, 9, 1, True), Scheduled(b, 0, 3, True)],
        [Scheduled(a, 10, 1, True), Scheduled(b, 3, 1, True)],
        [Scheduled(a, 11, 20, True), Scheduled(b, 4, 15, True)],
        [Scheduled(a, 31, 6, True), Scheduled(b, 19, 1, True)],
    ):
        torch.testing.assert_close(there.run(items).cpu(), here.run(items), atol=2e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_and_no_waiting_for_the_device(dtype: str) -> None:
    exact, made = runner("tiny", "cpu", "float32", "torch"), runner("tiny", "cuda", dtype, "triton")
    request = Asked("r", [7 * i % 290 + 3 for i in range(40)], [4, 2, 9, 1, 3, 5, 6, 7, 8, 10])
    steps: list[Any] = [Scheduled(request, 0, 38, True), Scheduled(request, 38, 1, True), Scheduled(request, 39, 1, True)]
    for step in steps[:2]:  # compiles
        exact.run([step])
        made.run([step])
    batch, _ = made._batch(steps[2:])
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            logits = made.model.forward(batch, made.kv)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = exact.run(steps[2:])[0]
    assert (logits[0].float().cpu() - want).abs().max() < 0.1 * want.std()
