"""Which kernel takes which spans of a step, and the tables that its launch reads. Plain arithmetic on the host.

One or a few query tokens go to paged_decode, which reads K and V once for all of them; longer spans to flash_attention. Neighbours in
the batch for which the same kernel would be compiled share a launch.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.attention.base import FEW, Span

DECODE_ROWS = 128  # query rows of a KV head that paged_decode takes: tokens times G
WIDE_ROWS = 32  # of float32 in heads of more than 64: more would not fit the 99 KiB of shared memory of sm_86, sm_89 and sm_120
DECODE_TREE = 64  # nodes of a tree


@dataclass(frozen=True, slots=True)
class Launch:
    """``kernel``: "flash_attention" or "paged_decode"; "" for a tree that is too large for either. ``spans``: neighbours in the batch."""

    kernel: str
    spans: tuple[Span, ...]

    @property
    def rows(self) -> slice:
        last = self.spans[-1]
        return slice(self.spans[0].row, last.row + last.num_tokens)

    @property
    def max_seqlen_q(self) -> int:
        return max(s.num_tokens for s in self.spans)

    @property
    def max_seq_len(self) -> int:
        return max(s.end for s in self.spans)

    @property
    def has_tree(self) -> bool:
        return any(s.ancestors is not None for s in self.spans)


@dataclass(frozen=True, slots=True)
class Tables:
    """What a launch of B requests reads, as the kernels take it."""

    cu_seqlens_q: "np.ndarray[Any, np.dtype[np.int32]]"  # [B + 1]
    seq_lens: "np.ndarray[Any, np.dtype[np.int32]]"  # [B]
    block_tables: "np.ndarray[Any, np.dtype[np.int32]]"  # [B, most blocks]
    tree: "np.ndarray[Any, np.dtype[np.int64]] | None"  # [T], see engine.kernels.paged_decode.tree_bits
    positions: "np.ndarray[Any, np.dtype[np.int32]] | None"  # [T], with a tree


def decode_rows(head_dim: int, dtype: torch.dtype) -> int:
    """How many query rows of a KV head paged_decode is given, for queries of ``dtype``."""
    return WIDE_ROWS if dtype == torch.float32 and head_dim > 64 else DECODE_ROWS


def kernel_of(span: Span, group: int, most_rows: int = DECODE_ROWS) -> tuple[str, int]:
    """The kernel for a span, and the query rows of a program: what is compiled for. ``most_rows``: see ``decode_rows``."""
    n = span.num_tokens
    if span.ancestors is not None:
        if n > DECODE_TREE or n * group > most_rows:
            return "", 0
    elif n > FEW or n * group > most_rows:
        return "flash_attention", 0
    return "paged_decode", max(16, 1 << (n * group - 1).bit_length())


def split(spans: Sequence[Span], group: int, most_rows: int = DECODE_ROWS) -> list[Launch]:
    """The launches of a step, in order of the batch's rows. ``group``: query heads to a KV head; ``most_rows``: see ``decode_rows``."""
    out: list[Launch] = []

    def key(span: Span) -> tuple[str, int, bool]:
        return *kernel_of(span, group, most_rows), span.ancestors is not None

    for (kernel, _, _), some in itertools.groupby(sorted(spans, key=lambda s: s.row), key):
        together = tuple(some)
        out += [Launch(kernel, together)] if kernel else [Launch("", (span,)) for span in together]
    return out


def run_of(block_size: int) -> int:
    """Tokens of a block as the kernels know it: they want a power of two, and a block of 12 is three of 4 in a row."""
    return block_size & -block_size


def tables(launch: Launch, run: int) -> Tables:
    """``run``: tokens that lie one after another, see ``run_of``."""
    spans = launch.spans
    counts = [s.num_tokens for s in spans]
    cu = np.zeros(len(spans) + 1, dtype=np.int32)
    np.cumsum(counts, out=cu[1:])
    lens = np.array([s.end for s in spans], dtype=np.int32)
    blocks = np.zeros((len(spans), -(-int(lens.max()) // run)), dtype=np.int32)
    for row, span in zip(blocks, spans):
        own = span.slots[: span.end : run] // run
        row[: len(own)] = own
    if not launch.has_tree:
        return Tables(cu, lens, blocks, None, None)
    words = [word for span in spans for word in row_bits(span)]
    positions = np.concatenate([np.arange(s.start, s.end) if s.positions is None else s.positions for s in spans])
    return Tables(cu, lens, blocks, np.array(words, dtype=np.uint64).view(np.int64), positions.astype(np.int32))


def row_bits(span: Span) -> list[int]:
    """Which of a span's own tokens each of them sees, bit j for the j-th."""
    if span.ancestors is None:
        return [(2 << i) - 1 for i in range(span.num_tokens)]
    return [sum(1 << j for j, seen in enumerate(row) if seen) for row in span.ancestors.tolist()]
