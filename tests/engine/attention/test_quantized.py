"""Attention over pools in few bits against float64: every token of every form of work sees what the pool's rule says it sees."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import FEW, Span, create_attention
from engine.kvcache.create import create_kv_cache
from engine.kvcache.layout import block_slots
from tests.engine.attention.test_torch import model_config, naive
from tests.engine.quantization import naive_kv

BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
WINDOWS = (None, 6)
CONFIG = model_config(HEADS, KV_HEADS, DIM, WINDOWS)


class Life:
    """Requests whose K and V are known beforehand, computed in steps of any shape; each row is checked."""

    def __init__(self, kv_dtype: str, lengths: list[int], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        blocks = [-(-n // BLOCK) for n in lengths]
        free = torch.randperm(sum(blocks) + 9, generator=generator).tolist()
        self.tables = [[free.pop() for _ in range(n)] for n in blocks]
        self.kv_dtype = kv_dtype
        self.kv = create_kv_cache(kv_dtype, CONFIG, sum(blocks) + 9, BLOCK, "cpu", torch.float32, 1)
        self.kv.fill_blocks(range(sum(blocks) + 9), float("nan"))
        self.qkv = [torch.randn(n, HEADS + 2 * KV_HEADS, DIM, generator=generator) for n in lengths]
        self.seen = [self._rounded(qkv[:, HEADS:].double().numpy()) for qkv in self.qkv]
        self.attention = create_attention("torch", CONFIG)

    def _rounded(self, kv: np.ndarray) -> np.ndarray:
        """[n, 2 K, D]: as it is read once it is rounded. (In 4 bits: of the complete blocks.)"""
        if self.kv_dtype != "int4":
            return np.apply_along_axis(getattr(naive_kv, self.kv_dtype), -1, kv)
        out = kv.copy()
        for first in range(0, len(kv) - BLOCK + 1, BLOCK):
            block = kv[first : first + BLOCK]
            out[first : first + BLOCK, :KV_HEADS] = naive_kv.keys_int4(block[:, :KV_HEADS])
            out[first : first + BLOCK, KV_HEADS:] = naive_kv.values_int4(block[:, KV_HEADS:])
        return out

    def step(self, runs: list[tuple[int, int, int]], draft: bool = False, wrong_from: int = 1 << 30) -> None:
        """``runs``: (request, start, tokens), the fewest tokens first. ``wrong_from``: rows of a draft that are noise, and not checked."""
        spans, rows, row = [], [], 0
        for request, start, n in runs:
            slots = block_slots(self.tables[request], BLOCK)[: start + n]
            spans.append(Span(row, start, n, slots, draft=draft))
            own = self.qkv[request][start : start + n].clone()
            own[wrong_from:] = torch.randn_like(own[wrong_from:])
            rows.append(own)
            row += n
        qkv = torch.cat(rows)
        writes = self.kv.writes(spans)
        plan = self.attention.plan(spans, self.kv.pool, torch.float32)
        for layer, window in enumerate(WINDOWS):
            pool = self.kv.layers[layer]
            pool.index_copy_(0, writes, qkv[:, HEADS:])
            got = self.attention.run(plan, layer, qkv, qkv, pool)
            for span, (request, start, n) in zip(spans, runs):
                for i in range(min(n, wrong_from)):
                    self._check(got[span.row + i], request, start + i, window)

    def _check(self, got: torch.Tensor, request: int, position: int, window: int | None) -> None:
        exact = self.qkv[request].double()
        kv = torch.from_numpy(self.seen[request])[: position + 1].clone()
        if self.kv_dtype == "int4":
            first = position // BLOCK * BLOCK
            kv[first:] = exact[first : position + 1, HEADS:]
        want = naive(exact[position, :HEADS], kv[:, :KV_HEADS], kv[:, KV_HEADS:], position, window)
        torch.testing.assert_close(got.double(), want.flatten(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8", "int4"])
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_token_sees_the_same_however_it_is_computed(kv_dtype, data):
    """Chunks, few rows and single tokens of several requests, side by side, with drafts that come to nothing between."""
    lengths = data.draw(st.lists(st.integers(1, 3 * FEW), min_size=1, max_size=3))
    life = Life(kv_dtype, lengths, data.draw(st.integers(0, 99)))
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths)):
        runs = []
        for i, (d, n) in enumerate(zip(done, lengths)):
            count = data.draw(st.sampled_from([2 * FEW, FEW + 1, FEW, 7, 3, 2, 1, 1, 0]))
            if d < n and count:
                runs.append((i, d, min(count, n - d)))
        runs.sort(key=lambda run: run[2])
        if not runs:
            continue
        if data.draw(st.booleans()):  # the first row is the request's, the rest is taken back
            life.step(runs, draft=True, wrong_from=1)
            runs = [(i, start + 1, n - 1) for i, start, n in runs if n > 1]
            for i, _, _ in runs:
                done[i] += 1
        if runs:
            life.step(runs, draft=data.draw(st.booleans()))
        for i, start, n in runs:
            done[i] = start + n


def test_rows_of_a_draft_on_both_sides_of_a_block_see_both_forms_of_it():
    life = Life("int4", [14])
    life.step([(0, 0, 6)])
    life.step([(0, 6, 8)], draft=True)
    span = Span(0, 6, 8, block_slots(life.tables[0], BLOCK)[:14])
    assert not life.kv.in_order(span) and len(life.kv.pool.slots(span, None)) == 14 + 8  # positions 4 to 11 twice
    assert life.kv.in_order(Span(0, 6, 2, span.slots[:8])) and len(life.kv.pool.slots(Span(0, 6, 2, span.slots[:8]), None)) == 8


def test_a_tree_sees_its_own_block_and_all_its_nodes_as_computed():
    life = Life("int4", [7])
    life.step([(0, 0, 7)])
    nodes: Any = torch.randn(3, HEADS + 2 * KV_HEADS, DIM)
    life.tables[0].append(life.tables[0][0] ^ 1 if life.tables[0][0] ^ 1 not in life.tables[0] else 0)
    seen = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=np.bool_)  # a root and two children
    span = Span(0, 7, 3, block_slots(life.tables[0], BLOCK)[:10], seen, np.array([7, 8, 8]), draft=True)
    writes = life.kv.writes([span])
    plan = life.attention.plan([span], life.kv.pool, torch.float32)
    pool = life.kv.layers[0]
    pool.index_copy_(0, writes, nodes[:, HEADS:])
    got = life.attention.run(plan, 0, nodes, nodes, pool)
    context = np.concatenate((life.seen[0][:4], life.qkv[0][4:, HEADS:].double().numpy()))
    for i in range(3):
        kv = torch.from_numpy(np.concatenate((context, nodes[seen[i], HEADS:].double().numpy())))
        want = naive(nodes[i, :HEADS].double(), kv[:, :KV_HEADS], kv[:, KV_HEADS:], len(kv) - 1, None)
        torch.testing.assert_close(got[i].double(), want.flatten(), atol=2e-5, rtol=0)
