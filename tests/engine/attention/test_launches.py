"""Which kernel takes which span."""

import numpy as np
import pytest
import torch

from engine.attention.base import Span
from engine.attention.launches import decode_rows, kernel_of, split


def span(num_tokens: int, tree: bool = False, row: int = 0) -> Span:
    ancestors = np.tril(np.ones((num_tokens, num_tokens), dtype=bool)) if tree else None
    return Span(row, 100, num_tokens, np.arange(100 + num_tokens), ancestors)


@pytest.mark.parametrize(
    ("head_dim", "dtype", "num_tokens", "tree", "kernel"),
    [
        (128, torch.bfloat16, 16, False, ("paged_decode", 64)),
        (128, torch.bfloat16, 17, False, ("flash_attention", 0)),
        (128, torch.float32, 8, False, ("paged_decode", 32)),
        (128, torch.float32, 9, False, ("flash_attention", 0)),
        (64, torch.float32, 16, False, ("paged_decode", 64)),
        (128, torch.float32, 8, True, ("paged_decode", 32)),
        (128, torch.float32, 9, True, ("", 0)),
        (128, torch.bfloat16, 32, True, ("paged_decode", 128)),
        (128, torch.bfloat16, 33, True, ("", 0)),
    ],
)
def test_what_is_too_many_rows_for_a_decode_goes_elsewhere(
    head_dim: int, dtype: torch.dtype, num_tokens: int, tree: bool, kernel: tuple[str, int]
) -> None:
    assert kernel_of(span(num_tokens, tree), 4, decode_rows(head_dim, dtype)) == kernel


def test_neighbours_for_the_same_kernel_share_a_launch() -> None:
    spans = [span(1), span(1, row=1), span(9, row=2), span(1, row=11)]
    made = [(launch.kernel, len(launch.spans)) for launch in split(spans, 4, decode_rows(128, torch.float32))]
    assert made == [("paged_decode", 2), ("flash_attention", 1), ("paged_decode", 1)]
