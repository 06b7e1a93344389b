"""Text that the target wrote, to be searched for what followed the last tokens: a drafter without arithmetic.

REST (He et al., arXiv 2311.08252): the longest suffix of the context that occurs in the datastore decides, found by binary search
in a suffix array; of what followed its occurrences the most frequent token is proposed. Here token after token, each with what was
proposed before it as its context.

File: safetensors with ``tokens`` int32 [N], texts one after the other with -1 between them; metadata as in ``files``.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from engine.model.config import ModelConfig
from engine.speculation.files import FORMAT, REST, VERSION, check_metadata, write_atomically

END = -1  # between two texts
LONGEST = 6  # suffix that is looked for
_LOOKED_AT = 256  # occurrences of a suffix, at most: evenly spread over all that there are


class Datastore:
    """``tokens`` int32 [N]."""

    def __init__(self, tokens: "np.ndarray[Any, np.dtype[np.int32]]", card: str = "") -> None:
        self.tokens = tokens
        self.card = card
        self._text = array("i", tokens.tobytes())

    @cached_property
    def _order(self) -> "array[int]":
        """Positions, sorted by the ``LONGEST + 1`` tokens from there on. Behind the end nothing follows, as between texts."""
        padded = np.concatenate((self.tokens, np.full(LONGEST, END, dtype=np.int32)))
        count = len(self.tokens)
        columns = [padded[i : count + i] for i in range(LONGEST, -1, -1)]  # the first one is the last key
        return array("i", np.lexsort(columns).astype(np.int32).tobytes())

    def find(self, context: Sequence[int]) -> tuple[int, float] | None:
        """The likeliest next token and its share of what followed the longest known suffix (one more than the occurrences that
        were looked at, so that a single one is not taken for certain); None: not even the last token is known."""
        for n in range(min(LONGEST, len(context)), 0, -1):
            wanted = array("i", context[-n:])
            key = lambda at, n=n: self._text[at : at + n]
            low = bisect_left(self._order, wanted, key=key)
            high = bisect_right(self._order, wanted, low, key=key)
            found = self._most_frequent(low, high, n)
            if found is not None:
                return found
        return None

    def _most_frequent(self, low: int, high: int, n: int) -> tuple[int, float] | None:
        """Of the tokens that follow the suffixes ``low .. high - 1``, which begin with n equal tokens."""
        if low == high:
            return None
        step = -(-(high - low) // _LOOKED_AT)
        counts: dict[int, int] = {}
        for i in range(low, high, step):
            at = self._order[i] + n
            token = self._text[at] if at < len(self._text) else END
            if token != END:
                counts[token] = counts.get(token, 0) + 1
        if not counts:
            return None
        token = max(counts, key=lambda t: (counts[t], -t))
        return token, counts[token] / (sum(counts.values()) + 1)

    def follow(self, context: Sequence[int], count: int, confidence: float = 0.0) -> tuple[list[int], list[float]]:
        """Up to ``count`` tokens that may come after ``context``, and their shares; the last is the one at which the product of the
        shares falls below ``confidence``."""
        tokens, product = list(context[-LONGEST:]), 1.0
        shares: list[float] = []
        first = len(tokens)
        while len(shares) < count and product >= confidence:
            found = self.find(tokens)
            if found is None:
                break
            tokens.append(found[0])
            shares.append(found[1])
            product *= found[1]
        return tokens[first:], shares


def write_datastore(
    path: Path, texts: Sequence[Sequence[int]], *, config: ModelConfig, target: str, target_sha256: str, card: str = ""
) -> None:
    """``texts``: token ids each. ValueError where there is none, or an id that the target does not have."""
    pieces = [np.asarray([*text, END], dtype=np.int64) for text in texts if len(text)]
    if not pieces:
        raise ValueError(f"{path}: a datastore needs text, got none")
    tokens = np.concatenate(pieces)[:-1]
    metadata = {
        "format": FORMAT, "version": VERSION, "method": REST, "target": target, "target_sha256": target_sha256,
        "hidden_size": str(config.hidden_size), "card": card,
    }  # fmt: skip
    _check_tokens(path, tokens, config.vocab_size)
    write_atomically(path, {"tokens": torch.from_numpy(tokens.astype(np.int32))}, metadata)


def read_datastore(path: str | Path, config: ModelConfig, target_sha256: str) -> Datastore:
    """The datastore at ``path`` for this target.

    ValueError, naming the file: not a whole safetensors file, not a datastore of ours, made for another target, or with ids that the
    target does not have.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such datastore")
    try:
        with safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            check_metadata(path, metadata, REST, config, target_sha256)
            names = list(file.keys())
            if names != ["tokens"]:
                raise ValueError(f"{path}: a datastore has one tensor, 'tokens', this file has {names}")
            tokens = file.get_tensor("tokens")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: not a whole safetensors file: {error}") from error
    if tokens.dtype != np.int32 or tokens.ndim != 1 or not len(tokens):
        raise ValueError(f"{path}: tokens must be int32 of one dimension and not empty, got {tokens.dtype} {list(tokens.shape)}")
    _check_tokens(path, tokens, config.vocab_size)
    return Datastore(tokens, metadata.get("card", ""))


def _check_tokens(path: Path, tokens: "np.ndarray[Any, Any]", vocab_size: int) -> None:
    if int(tokens.min()) < END or int(tokens.max()) >= vocab_size:
        raise ValueError(f"{path}: token ids must lie in [0, {vocab_size}), or be {END} between texts")
