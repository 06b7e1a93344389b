"""The model as this package sees it: a function from the tokens of one sequence to the logits after each of them."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Logits(Protocol):
    """``logits(token_ids)``: float [len(token_ids), vocab_size]; row i is what the model predicts after tokens 0 .. i.

    An object that also has ``rows_from(token_ids, first)``, the rows from ``first`` on, is asked for those alone: the head is a
    quarter of a small model's work, and a thousand rows of 49,152 logits are 200 MB.
    """

    def __call__(self, token_ids: list[int]) -> torch.Tensor: ...


class Tokenizing(Protocol):
    """What is needed of a tokenizer. One that has a ``chat_template`` is also asked to apply it."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


def rows_from(logits: Logits, token_ids: list[int], first: int) -> torch.Tensor:
    """The rows ``first`` .. len - 1 of ``logits(token_ids)``: [len(token_ids) - first, vocab_size].

    ValueError where the function gives another number of rows, or no matrix.
    """
    some: Any = getattr(logits, "rows_from", None)
    if some is not None:
        rows, wanted = some(token_ids, first), len(token_ids) - first
    else:
        rows, wanted = logits(token_ids), len(token_ids)
    if rows.dim() != 2 or rows.shape[0] != wanted:
        raise ValueError(
            f"logits of {len(token_ids)} tokens from row {first} on must be [{wanted}, vocab_size], got {list(rows.shape)}"
        )
    return rows if some is not None else rows[first:]


def check_finite(rows: torch.Tensor, positions: Sequence[int], text: str) -> None:
    """ValueError unless all of ``rows`` [R, vocab_size] is finite. ``positions`` [R]: the tokens of ``text`` that they predict."""
    finite = torch.isfinite(rows)
    if bool(finite.all()):
        return
    bad = (~finite).sum(-1)
    row = int(bad.nonzero()[0])
    raise ValueError(
        f"{text}: {int(bad[row]):,} of {rows.shape[-1]:,} logits that predict token {positions[row]} are inf or NaN "
        f"(so are some in {int((bad > 0).sum()) - 1} more rows of this window)"
    )
