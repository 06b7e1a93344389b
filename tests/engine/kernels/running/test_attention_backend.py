"""The engine's attention by our kernels, every form of work in one step: each row against float64, over pools of every form."""

import math

import numpy as np
import pytest
import torch

from engine.attention.base import Span, create_attention, tree_rows
from engine.attention.triton import Chunks, Decode, TritonAttention, _Delegated
from engine.kvcache.create import create_kv_cache
from engine.kvcache.layout import block_slots
from engine.model.config import ModelConfig
from engine.model.llama import Rope, rotate_
from tests.gpu.models import SHAPES

HEADS, KV_HEADS, DIM = 6, 2, 64
WINDOWS = (None, 5)
# context, and new tokens or the parents of a tree's nodes: decodes, drafts, trees, prompts, chunks
STEP: list[tuple[int, int | list[int]]] = [
    (0, 1),
    (7, 1),
    (33, 1),
    (9, 4),
    (20, [-1, 0, 0, 1]),
    (5, [-1, -1, 1]),
    (0, 3),
    (13, 18),
    (0, 37),
]


def config() -> ModelConfig:
    raw = {
        **SHAPES["tiny"],
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "num_hidden_layers": 2,
    }
    made = ModelConfig.from_hf({**raw, "hidden_size": HEADS * DIM}, "test")
    return ModelConfig(**{f: getattr(made, f) for f in made.__dataclass_fields__} | {"sliding_windows": WINDOWS})


class Step:
    """Requests in a pool of NaN, their context written; and what each new row must give, from the numbers that the pool reads back."""

    def __init__(self, kv_dtype: str, block_size: int, device: str, requests: list[tuple[int, int | list[int]]]) -> None:
        self.config = config()
        sizes = [n if isinstance(n, int) else 1 + len(n) for _, n in requests]
        need = [-(-(start + n) // block_size) for (start, _), n in zip(requests, sizes)]
        free = torch.randperm(sum(need) + 5).tolist()
        self.kv = create_kv_cache(kv_dtype, self.config, sum(need) + 5, block_size, device, torch.float32)
        self.kv.fill_blocks(range(sum(need) + 5), math.nan)
        self.past: list[torch.Tensor] = []
        self.spans: list[Span] = []
        row = 0
        for (start, more), n, blocks in zip(requests, sizes, need):
            slots = block_slots([free.pop() for _ in range(blocks)], block_size)[: start + n]
            if isinstance(more, int):
                self.spans.append(Span(row, start, n, slots))
            else:
                seen, depth = tree_rows(more)
                self.spans.append(Span(row, start, n, slots, seen, start + depth, draft=True))
            context = torch.randn(2, start, 2 * KV_HEADS, DIM, device=device)
            self._write([Span(0, 0, start, slots[:start])], context) if start else None
            self.past.append(context)
            row += n
        self.qkv = torch.randn(2, row, HEADS + 2 * KV_HEADS, DIM, device=device)

    def _write(self, spans: list[Span], rows: torch.Tensor) -> None:
        writes = self.kv.writes(spans)
        for layer, pool in enumerate(self.kv.layers):
            pool.index_copy_(0, writes, rows[layer])

    def check(self, attention: TritonAttention, tolerance: float) -> list[object]:
        writes = self.kv.writes(self.spans)
        plan = attention.plan(self.spans, self.kv.pool, torch.float32)
        for layer, (window, pool) in enumerate(zip(WINDOWS, self.kv.layers)):
            qkv = self.qkv[layer]
            pool.index_copy_(0, writes, qkv[:, HEADS:])
            got = attention.run(plan, layer, qkv, qkv, pool).view(-1, HEADS, DIM).double().cpu()
            torch.testing.assert_close(got, self.want(layer, window), atol=tolerance, rtol=0)
        return plan

    def want(self, layer: int, window: int | None) -> torch.Tensor:
        out = []
        for span in self.spans:
            index = torch.from_numpy(span.slots).to(self.kv.device)
            kv = self.kv.layers[layer].index_select(0, index).double().cpu()
            positions = np.arange(span.start, span.end) if span.positions is None else span.positions
            for i in range(span.num_tokens):
                own = range(i + 1) if span.ancestors is None else np.flatnonzero(span.ancestors[i])
                keys = list(range(span.start)) + [span.start + int(j) for j in own]
                stands = [j if j < span.start else int(positions[j - span.start]) for j in keys]
                keys = [k for k, p in zip(keys, stands) if window is None or p > int(positions[i]) - window]
                q = self.qkv[layer, span.row + i, :HEADS].double().cpu()
                k = kv[keys, :KV_HEADS].repeat_interleave(HEADS // KV_HEADS, 1)
                v = kv[keys, KV_HEADS:].repeat_interleave(HEADS // KV_HEADS, 1)
                weights = torch.softmax(torch.einsum("hd,khd->hk", q, k) / math.sqrt(DIM), -1)
                out.append(torch.einsum("hk,khd->hd", weights, v))
        return torch.stack(out)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
def test_a_step_of_everything(kv_dtype: str, device: str) -> None:
    step = Step(kv_dtype, 4, device, STEP)
    plan = step.check(TritonAttention(step.config, num_sms=3), 3e-6 if device == "cpu" else 1e-5)
    assert [type(item) for item in plan] == [Decode, Decode, Decode, Chunks]  # chains, trees, a prompt of 3 tokens, long ones


def test_splits_and_blocks_that_are_no_power_of_two(device: str) -> None:
    step = Step("auto", 12, device, [(200, 1), (90, 1), (0, 20)])
    (decodes, _) = step.check(TritonAttention(step.config, num_sms=16), 3e-6 if device == "cpu" else 1e-5)
    assert decodes.splits[None] > 1 and decodes.run_length == 4


def test_what_does_not_fit_is_the_torch_backends(device: str) -> None:
    chain = list(range(-1, 69))
    step = Step("auto", 4, device, [(6, 1), (3, chain)])
    plan = step.check(TritonAttention(step.config), 3e-6 if device == "cpu" else 1e-5)
    assert [type(item) for item in plan] == [Decode, _Delegated]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_rotating_and_storing_in_one_pass(kv_dtype: str, device: str) -> None:
    step = Step(kv_dtype, 4, device, [(3, 2), (0, 5)])
    attention = create_attention("triton", step.config)
    rope = Rope(step.config, torch.device(device), torch.float32)
    positions = torch.tensor([3, 4, 0, 1, 2, 3, 4], device=device)
    cos, sin = rope.at(positions, 5)
    writes, pool = step.kv.writes(step.spans), step.kv.layers[0]
    qkv, want = step.qkv[0].clone(), step.qkv[0].clone()
    rotate_(want[:, : HEADS + KV_HEADS], cos, sin)
    assert attention.stores(qkv, pool)
    attention.store(qkv, cos, sin, writes, pool)
    torch.testing.assert_close(qkv[:, :HEADS], want[:, :HEADS])
    got = pool.index_select(0, writes)
    pool.index_copy_(0, writes, want[:, HEADS:])
    torch.testing.assert_close(got, pool.index_select(0, writes), atol=1e-5 if kv_dtype == "auto" else 0.05, rtol=0)
    assert not attention.stores(qkv.half(), pool) or kv_dtype != "auto"  # numbers of another dtype are written by the layer
