"""Requests that arrive over time, made from a seed: the same ``Load`` gives the same requests, whoever is driven with them.

Each aspect (times, lengths, tokens, prefixes, priorities, pauses) draws from a stream of its own, so that changing one leaves the others
as they were: the same prompts at twice the rate, the same times with longer outputs.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.load.arrivals import Arrivals, Burst, Poisson
from engine.load.lengths import Drawer, Equal, Lengths
from engine.request import SamplingParams

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand part place case "
    "week company system program question work number night point home water room mother area money story fact month lot right study "
    "book eye job word business issue side kind head house service friend father power hour game line end member law car city name"
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to send. The first turn of a conversation has a time; a later one comes ``think_s`` after the turn before it has ended.

    ``token_ids``: what is new in it. A later turn sends the whole conversation: the prompt of the turn before, the answer that
    came, then this.
    """

    index: int  # in the order of making; of all turns
    time_s: float | None  # since the beginning; None for a later turn
    token_ids: tuple[int, ...]
    params: SamplingParams
    conversation: int
    turn: int = 0
    think_s: float = 0.0
    prefix: int = -1  # which of the common prefixes it begins with
    priority: int = 0  # lower is served first, as in vLLM

    @property
    def max_tokens(self) -> int:
        return self.params.max_tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """Its turns in order; one, where there is nothing to talk about."""

    turns: tuple[Arrival, ...]

    @property
    def time_s(self) -> float:
        assert self.turns[0].time_s is not None
        return self.turns[0].time_s


@dataclass(frozen=True, kw_only=True)
class Load:
    """What to send. It ends after ``num_requests`` first turns or with the last that starts before ``duration_s``, whichever is first.

    ``prompt``: tokens of one's own in each turn; ``output``: tokens to generate. ``prefix_share`` of the conversations begin with one
    of ``num_prefixes`` common prefixes of ``prefix_length`` tokens, put before their own. ``priorities``: {priority: weight}. ``max_model_len``: a
    conversation ends before a turn that would not fit (a first turn that does not fit is a ValueError). ``sampling``: further SamplingParams of
    all requests; by default greedy and exactly as long as drawn. Token ids are drawn from [first_token, vocab_size).
    """

    arrivals: Arrivals = field(default_factory=lambda: Poisson(1.0))
    num_requests: int | None = None
    duration_s: float | None = None
    prompt: Lengths = field(default_factory=lambda: Equal(64))
    output: Lengths = field(default_factory=lambda: Equal(32))
    prefix_share: float = 0.0
    num_prefixes: int = 1
    prefix_length: int = 128
    turns: Lengths = field(default_factory=lambda: Equal(1))
    think_s: float = 0.0  # mean of the exponential pause before a turn
    priorities: dict[int, float] = field(default_factory=lambda: {0: 1.0})
    sampling: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 49152
    first_token: int = 256  # special tokens and single bytes are below it in most vocabularies
    max_model_len: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests is None and self.duration_s is None:
            raise ValueError("a load ends: num_requests or duration_s must be given")
        if self.num_requests is None and isinstance(self.arrivals, Burst) and self.arrivals.size is None:
            raise ValueError("a burst of everything at once needs num_requests")
        checks = (
            ("num_requests", self.num_requests, self.num_requests is None or self.num_requests >= 1, "None or >= 1"),
            ("duration_s", self.duration_s, self.duration_s is None or 0 < self.duration_s < math.inf, "None or seconds > 0"),
            ("prefix_share", self.prefix_share, 0 <= self.prefix_share <= 1, "in [0, 1]"),
            ("num_prefixes", self.num_prefixes, self.num_prefixes >= 1, ">= 1"),
            ("prefix_length", self.prefix_length, self.prefix_length >= 1, ">= 1"),
            ("think_s", self.think_s, 0 <= self.think_s < math.inf, "seconds >= 0"),
            ("first_token", self.first_token, 0 <= self.first_token < self.vocab_size, f"in [0, vocab_size = {self.vocab_size})"),
            ("seed", self.seed, self.seed >= 0, ">= 0"),
        )
        for name, value, ok, allowed in checks:
            if not ok:
                raise ValueError(f"{name} must be {allowed}, got {value!r}")
        weights = self.priorities.values()
        if not weights or not all(0 <= w < math.inf for w in weights) or not sum(weights) > 0:
            raise ValueError(f"priorities must be {{priority: weight >= 0}} with a positive sum, got {self.priorities!r}")
        if "max_tokens" in self.sampling:
            raise ValueError("max_tokens is drawn from output: it cannot be in sampling")
        params = self.base_params()
        if params.n != 1 or params.beam_width is not None:
            raise ValueError("sampling: a load has requests of one sequence (n = 1, no beam_width)")

    def base_params(self) -> SamplingParams:
        """What all requests have in common. ValueError for what is no sampling parameter."""
        try:
            return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **self.sampling})
        except TypeError as error:
            raise ValueError(f"sampling: {error}") from None

    def changed(self, **changes: Any) -> "Load":
        return replace(self, **changes)


def conversations(load: Load) -> Iterator[Conversation]:
    """All of the load, in order of time, made as they are asked for: a long load needs no memory for what is to come."""
    times, prompts, outputs, turns, tokens, prefixes, priorities, pauses = (
        np.random.Generator(np.random.Philox(s)) for s in np.random.SeedSequence(load.seed).spawn(8)
    )
    prompt, output, count = Drawer(load.prompt, prompts), Drawer(load.output, outputs), Drawer(load.turns, turns)
    base = load.base_params()
    common = [
        tuple(prefixes.integers(load.first_token, load.vocab_size, load.prefix_length).tolist()) for _ in range(load.num_prefixes)
    ]
    levels, steps = list(load.priorities), np.cumsum(list(load.priorities.values()))
    made = itertools.count()
    for number, time_s in enumerate(load.arrivals.times(times)):
        if number == load.num_requests or (load.duration_s is not None and time_s >= load.duration_s):
            return
        shared, which = prefixes.random() < load.prefix_share, int(prefixes.integers(load.num_prefixes))
        priority = levels[int(np.searchsorted(steps, steps[-1] * priorities.random(), "right"))]
        parts, length = [], 0
        for turn in range(count()):
            begin = common[which] if shared and turn == 0 else ()
            new = begin + tuple(tokens.integers(load.first_token, load.vocab_size, prompt()).tolist())
            params, think_s = (
                replace(base, max_tokens=output()),
                load.think_s * float(pauses.standard_exponential()) if turn else 0.0,
            )
            length += len(new) + params.max_tokens
            if load.max_model_len is not None and length > load.max_model_len:
                if turn == 0:
                    raise ValueError(
                        f"a request of {len(new)} tokens and {params.max_tokens} to come does not fit in max_model_len = {load.max_model_len}"
                    )
                break
            parts.append(
                Arrival(
                    next(made),
                    time_s if turn == 0 else None,
                    new,
                    params,
                    number,
                    turn,
                    think_s,
                    which if shared else -1,
                    priority,
                )
            )
        yield Conversation(tuple(parts))


def make_load(load: Load) -> list[Arrival]:
    """Every arrival of a load, the turns of a conversation one after the other."""
    return [arrival for conversation in conversations(load) for arrival in conversation.turns]


def as_words(token_ids: tuple[int, ...]) -> str:
    """Text for a server that takes no token ids: a common English word for each, the same for the same. Most vocabularies have each as one token,
    but how many tokens it really is the server says."""
    words = _WORDS.split()
    return " ".join(words[token % len(words)] for token in token_ids)
