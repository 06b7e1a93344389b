"""Attention over trees of drafted tokens: every row as if its path from the root were a chain, in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.base import FEW, Span, create_attention, tree_rows
from engine.attention.torch import _Chunk, _Few
from tests.engine.attention.test_torch import model_config, naive

WINDOWS = (None, 3, 9)


@st.composite
def trees(draw: Any, most: int = 2 * FEW) -> list[int]:
    return [draw(st.integers(-1, i - 1)) for i in range(draw(st.integers(0, most)))]


class Forest:
    """Requests with a context and a tree each (None: a plain chain of that many rows), in slots at random over NaN."""

    def __init__(
        self, seed: int, requests: list[tuple[int, list[int] | int]], dtype: torch.dtype, contiguous: bool = False
    ) -> None:
        self.config = model_config(6, 2, 8, WINDOWS)
        generator = np.random.default_rng(seed)
        torch.manual_seed(seed)
        sizes = [more if isinstance(more, int) else 1 + len(more) for _, more in requests]
        total = sum(start for start, _ in requests) + sum(sizes)
        slots = np.arange(5, total + 5) if contiguous else generator.permutation(total + 30)[:total]
        self.kv = torch.full((len(WINDOWS), total + 40, 1, 2, 2, 8), float("nan"), dtype=dtype)
        self.qkv = torch.randn(sum(sizes), 10, 8)
        self.spans: list[Span] = []
        self.want = {window: torch.empty(len(self.qkv), 48) for window in WINDOWS}
        row = 0
        for (start, more), n in zip(requests, sizes):
            own, slots = slots[: start + n].astype(np.int64), slots[start + n :]
            kv = torch.randn(start + n, 2, 2, 8).to(dtype)
            self.kv[:, torch.from_numpy(own), 0] = kv
            self.qkv[row : row + n, 6:] = kv[start:].flatten(1, 2).float()
            if isinstance(more, int):
                self.spans.append(Span(row, start, n, own))
                paths = [list(range(i + 1)) for i in range(n)]
            else:
                seen, depth = tree_rows(more)
                self.spans.append(Span(row, start, n, own, seen, start + depth))
                paths = [_path(more, i) for i in range(n)]
            for i, path in enumerate(paths):
                past = torch.cat((kv[:start], kv[[start + j for j in path]])).double()
                for window in WINDOWS:
                    q = self.qkv[row + i, :6].double()
                    self.want[window][row + i] = naive(q, past[:, 0], past[:, 1], len(past) - 1, window).flatten()
            row += n

    def check(self, tolerance: float) -> list[Any]:
        attention = create_attention("torch", self.config)
        plan = attention.plan(self.spans, self.kv, torch.float32)
        for layer, window in enumerate(WINDOWS):
            got = attention.run(plan, layer, self.qkv, self.qkv.to(self.kv.dtype), self.kv[layer].view(-1, 4, 8))
            torch.testing.assert_close(got, self.want[window], atol=tolerance, rtol=0)
        return plan[None]


def _path(parents: list[int], row: int) -> list[int]:
    """Rows from the root to ``row``."""
    path = [row]
    while path[0]:
        path.insert(0, parents[path[0] - 1] + 1)
    return path


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 24), st.one_of(trees(), st.integers(1, 20))), min_size=1, max_size=5), st.booleans())
def test_random_trees_equal_their_paths(requests, contiguous):
    Forest(len(requests), requests, torch.float32, contiguous).check(1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_trees_in_a_narrow_pool(dtype, tolerance):
    wide = [-1] * (FEW + 3)
    Forest(0, [(20, [-1, -1, 0, 0, 2]), (7, [-1, 0, 1, 2, 3]), (11, wide), (0, [-1, 0, -1])], dtype).check(tolerance)


def test_requests_with_equally_many_rows_share_a_call():
    requests: list[tuple[int, list[int] | int]] = [
        (9, [-1, -1]),
        (12, 3),
        (30, [-1, 0]),
        (4, 5),
        (6, 1),
        (3, FEW + 1),
        (0, [-1]),
    ]
    items = Forest(0, requests, torch.float32).check(1e-5)
    assert [(type(i).__name__, i.rows.stop - i.rows.start) for i in items[1:]] == [
        ("_Few", 9),
        ("_Few", 5),
        ("_Chunk", FEW + 1),
        ("_Chunk", 2),
    ]


def test_one_contiguous_request_is_read_in_place():
    forest = Forest(0, [(9, [-1, -1, 1])], torch.float32, contiguous=True)
    (item,) = forest.check(1e-5)
    assert isinstance(item, _Few) and isinstance(item.keys, tuple)
    assert item.keys[0].untyped_storage().data_ptr() == forest.kv.untyped_storage().data_ptr()
    assert isinstance(Forest(0, [(9, [-1] * FEW)], torch.float32, contiguous=True).check(1e-5)[0], _Chunk)


def test_tree_rows_see_their_ancestors():
    seen, depth = tree_rows([-1, -1, 0, 2])
    assert depth.tolist() == [0, 1, 1, 2, 3]
    assert [np.flatnonzero(row).tolist() for row in seen] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]
    for wrong in ([0], [-1, 1], [-2]):
        with pytest.raises(ValueError, match="the parent of node"):
            tree_rows(wrong)
