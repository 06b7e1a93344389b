"""What a recorded token says of its candidates: their share before and after each processor. Pure, on a TokenSampled."""

import math

from engine.events.types import TokenSampled
from engine.sampling.processors import ORDER

STAGES = ("raw", *ORDER)
_FILTERS = ("min_p", "top_k", "top_p")  # TokenSampled.kept_sizes and kept_masses have one entry for each


def shares(e: TokenSampled) -> dict[str, list[float]]:
    """The probability of each of ``e.top`` in each of ``STAGES``; 0 from the processor on that removed it.

    Measured for the raw distribution, after the penalties and after the temperature; after a filter it is what was left
    of the tempered one, renormalised by the mass that was recorded. NaN where the event does not say (a log of before).
    """
    out = {
        "raw": [math.exp(c.logprob) for c in e.top],
        "penalties": [math.exp(c.penalised) for c in e.top],
        "temperature": [c.tempered for c in e.top],
    }
    gone = {"temperature"}
    for i, name in enumerate(_FILTERS):
        gone.add(name)
        mass = e.kept_masses[i] if e.kept_masses else math.nan
        out[name] = [0.0 if c.removed_by in gone else c.tempered / mass for c in e.top]
    return out


def left(e: TokenSampled, vocab_size: int) -> dict[str, int]:
    """How many tokens each of ``STAGES`` left, of the whole vocabulary; nothing is known of filters in a log of before."""
    sizes = dict(zip(_FILTERS, e.kept_sizes, strict=False))
    greedy = e.u is None
    return {"raw": vocab_size, "penalties": vocab_size, "temperature": 1 if greedy else vocab_size, **sizes}
