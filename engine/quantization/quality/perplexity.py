"""Perplexity of a text by sliding windows, as Hugging Face's documentation describes the strided evaluation
("Perplexity of fixed-length models", https://huggingface.co/docs/transformers/perplexity).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.quantization.quality.rows import Logits, check_finite, rows_from

WINDOW, STRIDE = 512, 256
_ROWS = 64  # at a time in float64: 64 x 49,152 are 25 MB

# (positions of the predicted tokens, rows of logits that predict them [R, vocab_size])
Watch = Callable[[range, torch.Tensor], None]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Window:
    """The model reads tokens ``start .. stop - 1`` and is scored on ``first .. stop - 1``."""

    start: int
    stop: int
    first: int


def windows(length: int, window: int, stride: int) -> Iterator[Window]:
    """The windows over ``length`` tokens: every token but those that begin a context is scored in exactly one.

    A window begins every ``stride`` tokens and scores what none before it reached: so with at least window - stride tokens of
    context, and in the first window, where there are none before it, with what there is. Token 0 has no context and is not scored;
    with stride = window the windows are disjoint and neither is the first token of any. ValueError for sizes that are not possible.
    """
    if window < 2 or not 1 <= stride <= window:
        raise ValueError(f"window must be at least 2 and stride lie in [1, window], got window {window} and stride {stride}")
    if length < 2:
        raise ValueError(f"a text must have at least 2 tokens to be scored, got {length}")
    reached = 0
    for start in range(0, length, stride):
        stop = min(start + window, length)
        first = max(reached, start + 1)
        if first < stop:  # a last window of one token has nothing to score
            yield Window(start, stop, first)
        reached = stop
        if stop == length:
            return


@dataclass(frozen=True, eq=False, slots=True)
class Perplexity:
    """How well a model predicts a text. Logarithms are natural: nll is in nats.

    ``nlls`` float64 [tokens]: -log p of each scored token; ``positions`` int64 [tokens]: where they stand in the text.
    """

    text: str
    window: int
    stride: int
    positions: torch.Tensor
    nlls: torch.Tensor

    @property
    def tokens(self) -> int:
        """Tokens that were scored."""
        return len(self.nlls)

    @property
    def nll(self) -> float:
        """The sum over all scored tokens, in nats."""
        return math.fsum(self.nlls.tolist())

    @property
    def perplexity(self) -> float:
        """exp(nll / tokens); inf where that is beyond a float."""
        mean = self.nll / self.tokens
        return math.exp(mean) if mean < 700 else math.inf


def perplexity(
    logits: Logits,
    token_ids: Sequence[int],
    *,
    window: int = WINDOW,
    stride: int = STRIDE,
    text: str = "text",
    watch: Watch | None = None,
    progress: Progress | None = None,
) -> Perplexity:
    """The perplexity of ``token_ids`` under a model. ``text`` names it in the result and in errors.

    ``watch`` is shown the rows that predict the scored tokens, window by window, and must not keep them; ``progress(done, total)``
    counts tokens that the model has read. ValueError: see ``windows``; a token outside the vocabulary; logits that are inf or NaN.
    """
    ids = list(token_ids)
    plan = list(windows(len(ids), window, stride))
    total, done = cost(len(ids), window, stride), 0
    positions, nlls = [], []
    for w in plan:
        rows = rows_from(logits, ids[w.start : w.stop], w.first - 1 - w.start)[:-1]  # nothing follows the last token
        targets = range(w.first, w.stop)
        check_finite(rows, targets, text)
        nlls.append(token_nlls(rows, ids[w.first : w.stop]))
        positions.append(torch.arange(w.first, w.stop))
        if watch is not None:
            watch(targets, rows)
        done += w.stop - w.start
        if progress is not None:
            progress(done, total)
    return Perplexity(text, window, stride, torch.cat(positions), torch.cat(nlls))


def cost(length: int, window: int, stride: int) -> int:
    """Tokens that a model reads for ``perplexity`` of a text of ``length`` tokens."""
    return sum(w.stop - w.start for w in windows(length, window, stride))


def token_nlls(rows: torch.Tensor, targets: Sequence[int]) -> torch.Tensor:
    """-log softmax(rows[i])[targets[i]] in nats, float64 [R] on the CPU, of ``rows`` [R, vocab_size].

    ValueError for a target outside the vocabulary.
    """
    if targets and not 0 <= min(targets) <= max(targets) < rows.shape[-1]:
        raise ValueError(f"token ids must lie in [0, {rows.shape[-1]}), got {min(targets)} to {max(targets)}")
    parts = []
    for start in range(0, len(targets), _ROWS):
        x = rows[start : start + _ROWS].double()
        index = torch.tensor(targets[start : start + _ROWS], device=x.device)[:, None]
        parts.append((x.logsumexp(-1) - x.gather(-1, index)[:, 0]).cpu())
    return torch.cat(parts)
