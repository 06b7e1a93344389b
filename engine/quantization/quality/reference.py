"""The 16-bit model's side of a comparison: kept for a stated number of positions, or computed side by side.

Kept rows are whole, so the divergence from them is exact up to how they are held. (The likeliest few hundred tokens and the rest as
one lump would take less, but give only a lower bound of the divergence, by the data-processing inequality.)
"""

import hashlib
from collections.abc import Mapping, Sequence

import torch

from engine.quantization.quality.divergence import TOP_P, Accumulator, Divergence
from engine.quantization.quality.perplexity import STRIDE, WINDOW, Watch, windows
from engine.quantization.quality.rows import Logits, check_finite, rows_from

POSITIONS = 256  # with 49,152 tokens 25 MB


def spread(length: int, window: int, stride: int, count: int) -> list[int]:
    """``count`` of the tokens that ``perplexity`` scores in a text of ``length`` tokens, evenly spread; all, where there are fewer."""
    scored = [t for w in windows(length, window, stride) for t in range(w.first, w.stop)]
    if count < 1:
        raise ValueError(f"the number of positions must be at least 1, got {count}")
    count = min(count, len(scored))
    return [scored[(2 * i + 1) * len(scored) // (2 * count)] for i in range(count)]


class Reference:
    """One model's rows of logits at some positions of some texts, each minus its largest, in float16.

    The largest taken away (which changes no probability), what matters lies near 0, where float16 is finest: the divergence of a
    model from its own kept rows is some 2e-7 nats (tests hold it below 1e-6), far below what any quantisation does. Small divergences
    are blurred by it at single positions, by about 2 sqrt(2e-7 KL) either way (3% of 1e-3 nats); their mean is not.
    """

    def __init__(
        self, texts: Mapping[str, Sequence[int]], window: int = WINDOW, stride: int = STRIDE, positions: int = POSITIONS
    ) -> None:
        """``texts``: name -> token ids, as they will be scored; ``positions``: in all, the same number in each text.

        ValueError without texts, or for fewer positions than texts.
        """
        if not texts or positions < len(texts):
            raise ValueError(
                f"a reference needs texts and at least a position in each, got {len(texts)} texts, {positions} positions"
            )
        self.fingerprint = fingerprint(texts, window, stride)
        share, more = divmod(positions, len(texts))
        self.positions = {
            name: spread(len(ids), window, stride, share + (i < more)) for i, (name, ids) in enumerate(texts.items())
        }
        self._rows: dict[tuple[str, int], int] = {
            key: i for i, key in enumerate((name, t) for name, there in self.positions.items() for t in there)
        }
        self._kept = torch.empty(0)
        self._filled: set[tuple[str, int]] = set()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self._kept.numel() * self._kept.element_size()

    @property
    def complete(self) -> bool:
        """Whether every position has its row."""
        return len(self._filled) == len(self._rows)

    @property
    def held(self) -> str:
        """In words, for ``Divergence.kept``."""
        return f"{len(self)} whole rows in float16, relative to each row's largest logit"

    def recorder(self, text: str) -> Watch:
        """What ``perplexity`` is to show the reference model's rows of ``text`` to."""
        return lambda targets, rows: self._record(text, targets, rows)

    def comparer(self, text: str, into: Accumulator) -> Watch:
        """What ``perplexity`` is to show another model's rows of ``text`` to. RuntimeError when the reference was not recorded."""
        if not self.complete:
            raise RuntimeError(f"the reference has rows for {len(self._filled)} of its {len(self)} positions")

        def compare(targets: range, rows: torch.Tensor) -> None:
            at = self._in(text, targets)
            if at:
                mine = self._kept[[self._rows[text, t] for t in at]].to(rows.device)
                into.add(mine, rows[[t - targets.start for t in at]], at, text)

        return compare

    def _record(self, text: str, targets: range, rows: torch.Tensor) -> None:
        at = self._in(text, targets)
        if not at:
            return
        if not self._kept.numel():
            self._kept = torch.empty(len(self), rows.shape[-1], dtype=torch.float16)
        found = rows[[t - targets.start for t in at]].double()
        check_finite(found, at, text)
        self._kept[[self._rows[text, t] for t in at]] = (found - found.amax(-1, keepdim=True)).half().cpu()
        self._filled.update((text, t) for t in at)

    def _in(self, text: str, targets: range) -> list[int]:
        return [t for t in self.positions[text] if t in targets]


def fingerprint(texts: Mapping[str, Sequence[int]], window: int, stride: int) -> str:
    """SHA-256 of what is scored and how: two measurements can be compared when theirs are equal."""
    what = repr((window, stride, [(name, list(ids)) for name, ids in texts.items()]))
    return hashlib.sha256(what.encode()).hexdigest()


def in_lockstep(
    reference: Logits,
    logits: Logits,
    token_ids: Sequence[int],
    *,
    window: int = WINDOW,
    stride: int = STRIDE,
    top_p: float = TOP_P,
    text: str = "text",
) -> Divergence:
    """The divergence at every scored position of a text, both models at hand: exact, and no more than a window's rows are held.

    ValueError: see ``windows`` and ``Accumulator.add``.
    """
    ids, found = list(token_ids), Accumulator(top_p)
    for w in windows(len(ids), window, stride):
        part, first = ids[w.start : w.stop], w.first - 1 - w.start
        p, q = rows_from(reference, part, first)[:-1], rows_from(logits, part, first)[:-1]
        check_finite(p, range(w.first, w.stop), f"{text} (the reference)")
        found.add(p, q, range(w.first, w.stop), text)
    return found.result()
