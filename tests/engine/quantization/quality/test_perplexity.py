"""Strided perplexity against brute force in float64: each scored token on its own, from a window found by trying all."""

import math

import numpy as np
import pytest
import torch

from engine.quantization.quality.perplexity import cost, perplexity, windows
from tests.engine.quantization.quality.models import Bigrams, Bytes, transformer

TEXT = "A kettle sings before it boils, and a wise cook listens. " * 3


def brute_force(logits, ids: list[int], window: int, stride: int) -> dict[int, float]:
    """position -> nll: the first window (begun at a multiple of stride) that holds the token behind another one, numpy float64."""
    found = {}
    for t in range(len(ids)):
        for start in range(0, len(ids), stride):
            if start < t < start + window:
                row = logits(ids[start : min(len(ids), start + window)])[t - 1 - start].numpy().astype(np.float64)
                top = row.max()
                found[t] = float(np.log(np.exp(row - top).sum()) + top - row[ids[t]])
                break
    return found


@pytest.mark.parametrize("window, stride", [(16, 16), (16, 8), (16, 1), (16, 11), (512, 256), (2, 1), (40, 13)])
def test_equals_brute_force(window, stride):
    for logits, ids in ((Bigrams(TEXT), Bytes().encode(TEXT)[:90]), (transformer()[0], transformer()[1].encode(TEXT)[:45])):
        want = brute_force(logits, ids, window, stride)
        got = perplexity(logits, ids, window=window, stride=stride, text="kettle")
        assert got.positions.tolist() == sorted(want)
        torch.testing.assert_close(
            got.nlls, torch.tensor([want[t] for t in sorted(want)], dtype=torch.float64), atol=2e-5, rtol=0
        )
        assert got.nll == pytest.approx(sum(want.values()), abs=1e-3) and got.tokens == len(want)
        assert got.perplexity == pytest.approx(math.exp(sum(want.values()) / len(want)), rel=1e-5)
        assert (got.text, got.window, got.stride, got.nlls.dtype) == ("kettle", window, stride, torch.float64)


@pytest.mark.parametrize("window", [2, 3, 8])
@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 16, 17, 31])
def test_each_token_once_with_enough_context(length, window):
    for stride in range(1, window + 1):
        plan = list(windows(length, window, stride))
        scored = [t for w in plan for t in range(w.first, w.stop)]
        assert len(scored) == len(set(scored))
        without = set(range(0, length, stride)) if stride == window else {0}
        assert set(scored) == set(range(length)) - without
        for w in plan:
            assert w.stop - w.start <= window and w.start < w.first < w.stop
            assert w.start == 0 or w.first - w.start >= max(1, window - stride)


def test_stride_of_a_window_is_disjoint_chunks():
    model, ids = Bigrams(TEXT), Bytes().encode(TEXT)[:50]
    got = perplexity(model, ids, window=16, stride=16)
    assert model.calls == [ids[:16], ids[16:32], ids[32:48], ids[48:]]
    assert got.tokens == 50 - 4


def test_uniform_logits_give_the_vocabulary():
    got = perplexity(lambda ids: torch.zeros(len(ids), 97), list(range(60)), window=20, stride=10)
    assert got.perplexity == pytest.approx(97, rel=1e-12) and got.tokens == 59


def test_a_hopeless_model_is_infinite_not_an_error():
    def logits(ids):
        rows = torch.zeros(len(ids), 3)
        rows[:, 0] = 1e6
        return rows

    assert perplexity(logits, [1, 2, 1, 2]).perplexity == math.inf


def test_only_the_rows_that_are_scored_are_asked_for():
    class Some(Bigrams):
        def rows_from(self, ids, first):
            asked.append((len(ids), first))
            return self(ids)[first:]

    asked: list = []
    model, ids = Some(TEXT), Bytes().encode(TEXT)[:40]
    seen, told = [], []
    got = perplexity(
        model, ids, window=16, stride=8,
        watch=lambda targets, rows: seen.append((targets, rows.shape)), progress=lambda *a: told.append(a),
    )  # fmt: skip
    assert asked == [(16, 0), (16, 7), (16, 7), (16, 7)]
    assert [t for targets, _ in seen for t in targets] == got.positions.tolist()
    assert all(shape == (len(targets), 256) for targets, shape in seen)
    assert told == [(16, 64), (32, 64), (48, 64), (64, 64)] and cost(40, 16, 8) == 64
    torch.testing.assert_close(got.nlls, perplexity(Bigrams(TEXT), ids, window=16, stride=8).nlls, atol=0, rtol=0)


@pytest.mark.parametrize("window, stride", [(8, 9), (8, 0), (1, 1), (8, -1)])
def test_impossible_windows(window, stride):
    with pytest.raises(ValueError, match=r"stride lie in \[1, window\]"):
        perplexity(Bigrams(TEXT), [1, 2, 3], window=window, stride=stride)


@pytest.mark.parametrize("ids", [[], [7]])
def test_too_short(ids):
    with pytest.raises(ValueError, match=f"at least 2 tokens to be scored, got {len(ids)}"):
        perplexity(Bigrams(TEXT), ids)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_named(bad):
    def logits(ids):
        rows = torch.zeros(len(ids), 9)
        if 5 in ids:
            rows[ids.index(5), 2] = bad
        return rows

    ids = [1] * 30 + [5] + [1] * 10
    with pytest.raises(ValueError, match="kettle: 1 of 9 logits that predict token 31 are inf or NaN"):
        perplexity(logits, ids, window=16, stride=8, text="kettle")


def test_wrong_rows_and_tokens():
    with pytest.raises(ValueError, match=r"must be \[3, vocab_size\], got \[2, 9\]"):
        perplexity(lambda ids: torch.zeros(2, 9), [1, 2, 3])
    with pytest.raises(ValueError, match=r"must lie in \[0, 9\), got 2 to 12"):
        perplexity(lambda ids: torch.zeros(len(ids), 9), [1, 2, 12])
