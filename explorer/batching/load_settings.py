"""What a load form says, as a ``Load``. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.load.arrivals import Arrivals, Burst, Constant, Poisson
from engine.load.generate import Load
from engine.load.lengths import Equal, Exponential, Lengths, Uniform
from explorer.i18n import _

ARRIVALS = {"poisson": _("Poisson"), "constant": _("evenly spaced"), "burst": _("in bursts of 8"), "at once": _("all at once")}
SHAPES = {"equal": _("all equal"), "uniform": _("uniform"), "exponential": _("exponential")}
RATES = (0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)  # arrivals a second
BURST = 8
THINK_S = 0.3  # mean pause before a further turn


@dataclass(frozen=True)
class Settings:
    """Lengths are means, in tokens. ``queue_limit`` 0: none; ``prefix_share`` in [0, 1]."""

    arrivals: str = "poisson"
    rate: float = 4.0
    num_requests: int = 48
    prompt_shape: str = "uniform"
    prompt_tokens: int = 64
    output_shape: str = "exponential"
    output_tokens: int = 32
    prefix_share: float = 0.0
    prefix_tokens: int = 64
    turns: int = 1
    queue_limit: int = 0
    seed: int = 0

    def changed(self, **changes: Any) -> "Settings":
        return replace(self, **changes)


def lengths(shape: str, mean: int, most: int) -> Lengths:
    """Uniform ones lie between half and one and a half of the mean; none is above ``most``."""
    mean = max(1, min(mean, most))
    if shape == "equal":
        return Equal(mean)
    if shape == "uniform":
        return Uniform(max(1, mean // 2), min(most, max(1, mean + mean // 2)))
    return Exponential(mean, most)


def arrivals(kind: str) -> Arrivals:
    """At one a second, whatever the rate: it is set, and moved, where the load is sent."""
    made: dict[str, Arrivals] = {
        "poisson": Poisson(1.0),
        "constant": Constant(1.0),
        "burst": Burst(1.0, BURST),
        "at once": Burst(),
    }
    return made[kind]


def to_load(settings: Settings, model: Mapping[str, Any], max_model_len: int) -> Load:
    """``model``: as EngineStarted has it. Lengths are cut so that every first turn fits. ValueError for what is no load."""
    vocabulary = int(model.get("vocab_size") or 49152)
    room = max(4, max_model_len - 2)
    prefix = min(settings.prefix_tokens, room // 3) if settings.prefix_share > 0 else 1
    left = room - (prefix if settings.prefix_share > 0 else 0)
    prompt = min(settings.prompt_tokens * 3, left * 2 // 3)
    return Load(
        arrivals=arrivals(settings.arrivals), num_requests=settings.num_requests,
        prompt=lengths(settings.prompt_shape, settings.prompt_tokens, max(1, prompt)),
        output=lengths(settings.output_shape, settings.output_tokens, max(1, min(left - prompt, settings.output_tokens * 8))),
        prefix_share=settings.prefix_share, prefix_length=max(1, prefix), turns=Equal(settings.turns), think_s=THINK_S if settings.turns > 1 else 0.0,
        vocab_size=vocabulary, first_token=min(256, vocabulary // 4), max_model_len=max_model_len, seed=settings.seed,
    )  # fmt: skip
