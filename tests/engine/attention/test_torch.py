"""The torch backend against attention written out in float64."""

import random
from typing import Any

import numpy as np
import pytest
import torch

import engine.attention.torch as backend
from engine.attention.base import Attention, Span, create_attention
from engine.model.config import ModelConfig


def model_config(heads: int, kv_heads: int, head_dim: int, windows: tuple[int | None, ...]) -> ModelConfig:
    raw = {
        "model_type": "llama", "vocab_size": 8, "hidden_size": heads * head_dim, "intermediate_size": 8, "head_dim": head_dim,
        "num_hidden_layers": len(windows), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
    }  # fmt: skip
    config = ModelConfig.from_hf(raw, "test")
    object.__setattr__(config, "sliding_windows", windows)
    return config


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, position: int, window: int | None) -> torch.Tensor:
    """One query [H, D] at ``position`` over k, v [position + 1, K, D], float64."""
    first = 0 if window is None else max(0, position + 1 - window)
    k, v = (t[first:].repeat_interleave(q.shape[0] // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("hd,lhd->hl", q, k) / q.shape[1] ** 0.5
    return torch.einsum("hl,lhd->hd", scores.softmax(-1), v)


class Case:
    """Spans with random tables over a pool that is NaN everywhere else, and what must come out."""

    def __init__(self, config: ModelConfig, runs: list[tuple[int, int]], contiguous: bool, kv_dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        heads, kv_heads, dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
        total = sum(start + n for start, n in runs)
        slots = list(range(3, total + 3)) if contiguous else random.Random(1).sample(range(total + 50), total)
        # [layers, blocks, block size, 2, K, D]; the same in each layer
        self.kv = torch.full((len(config.sliding_windows), total + 60, 1, 2, kv_heads, dim), float("nan"), dtype=kv_dtype)
        self.qkv = torch.randn(sum(n for _, n in runs), heads + 2 * kv_heads, dim)
        self.q = self.qkv[:, :heads]
        self.spans, self.want = [], {window: torch.empty(len(self.q), heads * dim) for window in config.sliding_windows}
        row = 0
        for start, n in runs:
            own, slots = np.array(slots[: start + n], dtype=np.int64), slots[start + n :]
            kv = torch.randn(start + n, 2, kv_heads, dim).to(kv_dtype)
            self.kv[:, torch.from_numpy(own), 0] = kv
            self.qkv[row : row + n, heads:] = kv[start:].flatten(1, 2).float()
            self.spans.append(Span(row, start, n, own))
            for i in range(n):
                past = kv[: start + i + 1].double()
                for window, want in self.want.items():
                    want[row + i] = naive(self.q[row + i].double(), past[:, 0], past[:, 1], start + i, window).flatten()
            row += n

    def run(self, attention: Attention, layer: int, plan: Any = None) -> torch.Tensor:
        if plan is None:
            plan = attention.plan(self.spans, self.kv, torch.float32)
        return attention.run(
            plan,
            layer,
            self.qkv,
            self.qkv.to(self.kv.dtype),
            self.kv[layer].view(-1, *self.qkv[:, -2 * self.kv.shape[4] :].shape[1:]),
        )


RUNS = {
    "one decode": [(20, 1)],
    "first token": [(0, 1)],
    "decodes": [(5, 1), (5, 1), (20, 1), (33, 1), (0, 1)],
    "prompt": [(0, 17)],
    "chunk": [(9, 8)],
    "everything": [(12, 1), (0, 9), (7, 1), (30, 5), (2, 1), (0, 1), (1, 2)],
}


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 8), (9, 3, 64), (6, 1, 20)])
def test_against_float64(heads, kv_heads, dim, contiguous, runs):
    config = model_config(heads, kv_heads, dim, (None, 1, 6))
    case = Case(config, runs, contiguous, torch.float32)
    attention = create_attention("torch", config)
    for layer, window in enumerate(config.sliding_windows):
        got = case.run(attention, layer)
        torch.testing.assert_close(got, case.want[window], atol=1e-5, rtol=0)


@pytest.mark.parametrize("limit", [1, 4000, 1 << 30])
def test_grouping_changes_nothing(monkeypatch, limit):
    monkeypatch.setattr(backend, "_GATHER_BYTES", limit)
    config = model_config(4, 2, 8, (None,))
    case = Case(config, [(i * 7 % 23, 1) for i in range(20)], False, torch.float32)
    attention = create_attention("auto", config)
    plan = attention.plan(case.spans, case.kv, torch.float32)
    assert (len(plan[None]) == 20) == (limit == 1)
    got = case.run(attention, 0, plan)
    torch.testing.assert_close(got, case.want[None], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_a_pool_narrower_than_the_queries(kv_dtype, tolerance):
    config = model_config(4, 2, 16, (None, 5))
    case = Case(config, RUNS["everything"], False, kv_dtype)
    attention = create_attention("torch", config)
    for layer, window in enumerate(config.sliding_windows):
        got = case.run(attention, layer)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, case.want[window], atol=tolerance, rtol=0)


def test_a_contiguous_table_is_read_in_place():
    config = model_config(4, 2, 8, (None,))
    attention = create_attention("torch", config)
    plans = {}
    for contiguous in (True, False):
        case = Case(config, [(30, 1)], contiguous, torch.float32)
        plans[contiguous] = attention.plan(case.spans, case.kv, torch.float32)[None][0]
        if contiguous:
            assert plans[True].keys[0].untyped_storage().data_ptr() == case.kv.untyped_storage().data_ptr()
            assert plans[True].values[0].shape == (1, 2, 31, 8)
    assert isinstance(plans[False].slots, torch.Tensor)


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="attention_backend must be one of"):
        create_attention("flash", model_config(4, 2, 8, (None,)))
    with pytest.raises(ValueError, match=r"the kernels have head sizes \(64, 80, 96, 128\), this model has 8"):
        create_attention("triton", model_config(4, 2, 8, (None,)))
