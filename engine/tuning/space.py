"""What a search may choose from: values for each knob, and what a choice makes of a configuration."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from engine.config import EngineConfig
from engine.load.generate import Load, conversations

Knobs = dict[str, Any]

POOL_SHARE = "pool_share"  # of the tokens that the default configuration's KV pool holds
_FIXED = (
    "model",
    "device",
    "seed",
    "num_kv_blocks",
)  # num_kv_blocks: by pool_share, since a pool has to hold the same whatever its blocks
# knob -> (the knob that it belongs to, the value of that one with which it has an effect)
_ONLY_WITH = {"batching_timeout_ms": ("batching", "dynamic")}
_NAMES = tuple(f.name for f in fields(EngineConfig))


@dataclass(frozen=True)
class Space:
    """``choices``: knob -> its values; a knob is a field of EngineConfig, or "pool_share" in (0, 1]. ValueError for any other."""

    choices: Mapping[str, tuple[Any, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "choices", {name: _unique(values) for name, values in self.choices.items()})
        for name, values in self.choices.items():
            if name != POOL_SHARE and (name not in _NAMES or name in _FIXED):
                allowed = [POOL_SHARE, *(n for n in _NAMES if n not in _FIXED)]
                raise ValueError(f"{name!r} cannot be tuned; knobs: {', '.join(allowed)}")
            if not values:
                raise ValueError(f"{name} needs at least one value to choose from")
            for value in values if name == POOL_SHARE else ():
                if not is_number(value) or not 0 < value <= 1:
                    raise ValueError(f"{POOL_SHARE} must lie in (0, 1], got {value!r}")

    def check(self, config: EngineConfig) -> None:
        """ValueError for a value that ``config`` cannot take, also beside any one value of another knob."""
        for name, values in self.choices.items():
            for value in values if name != POOL_SHARE else ():
                why = _refusal(config, {name: value})
                others = [(other, v) for other, vs in self.choices.items() if other not in (name, POOL_SHARE) for v in vs]
                if why and all(_refusal(config, {name: value, other: v}) for other, v in others):
                    raise ValueError(why)

    def with_values(self, knobs: Knobs) -> "Space":
        """The same space in which ``knobs`` is one of the points."""
        return Space({name: _unique((*values, knobs[name])) for name, values in self.choices.items()})

    def without(self, name: str) -> "Space":
        return Space({n: values for n, values in self.choices.items() if n != name})

    def points(self) -> Iterator[Knobs]:
        """Every point, once."""
        seen = set()
        for values in itertools.product(*self.choices.values()):
            knobs = effective(dict(zip(self.choices, values, strict=True)))
            if key(knobs) not in seen:
                seen.add(key(knobs))
                yield knobs

    def draw(self, rng: np.random.Generator) -> Knobs:
        return effective({name: values[int(rng.integers(len(values)))] for name, values in self.choices.items()})


def _unique(values: Iterable[Any]) -> tuple[Any, ...]:
    """Without repetitions; numbers in ascending order, so that the optimiser can tell near from far."""
    kept: list[Any] = []
    for value in values:
        if not any(same(value, other) for other in kept):
            kept.append(value)
    return tuple(sorted(kept)) if all(is_number(value) for value in kept) else tuple(kept)


def same(a: Any, b: Any) -> bool:
    """Equal, where True is not 1."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def effective(knobs: Knobs) -> Knobs:
    """Without the knobs that do nothing beside the others."""
    return {
        name: value for name, value in knobs.items()
        if name not in _ONLY_WITH or knobs.get(_ONLY_WITH[name][0], _ONLY_WITH[name][1]) == _ONLY_WITH[name][1]
    }  # fmt: skip


def key(knobs: Knobs) -> str:
    """Equal for points that are the same configuration."""
    return repr(sorted(effective(knobs).items()))


def default_space(config: EngineConfig, load: Load) -> Space:
    """Batch sizes up to the number of requests, token budgets, block sizes, pool shares, chunking, and the batching policies there are."""
    most = load.num_requests if load.num_requests is not None else 64
    sizes = tuple(n for n in (1, 2, 4, 8, 16, 32, 64) if n < 2 * most)
    choices: dict[str, tuple[Any, ...]] = {
        "max_num_seqs": sizes,
        "max_num_batched_tokens": (64, 128, 256, 512, 1024, 2048),
        "block_size": (8, 16, 32, 64),
        POOL_SHARE: (0.25, 0.5, 0.75, 1.0),
        "enable_chunked_prefill": (True, False),
        "batching": tuple(name for name in ("continuous", "static", "dynamic") if not _refusal(config, {"batching": name})),
    }
    if "dynamic" in choices["batching"] and "batching_timeout_ms" in _NAMES:
        choices["batching_timeout_ms"] = (10.0, 50.0, 200.0)
    return Space(choices).with_values(default_knobs(config, choices))


def default_knobs(config: EngineConfig, names: Iterable[str]) -> Knobs:
    """Where ``config`` itself stands."""
    return {name: 1.0 if name == POOL_SHARE else getattr(config, name) for name in names}


def _refusal(config: EngineConfig, knobs: Knobs) -> str:
    """Why ``config`` cannot take ``knobs``; "" where it can."""
    try:
        config.changed(**knobs)
    except ValueError as error:
        return str(error)
    return ""


def configured(config: EngineConfig, knobs: Knobs, pool_tokens: int | None, longest: int) -> EngineConfig:
    """``config`` with ``knobs``. A pool share is taken of ``pool_tokens``, rounded to whole blocks, but never so few that a request of
    ``longest`` tokens would not fit. ``pool_tokens=None``: not known, the pool stays as it is."""
    changes = {name: value for name, value in knobs.items() if name != POOL_SHARE}
    block_size = changes.get("block_size", config.block_size)
    share = knobs.get(POOL_SHARE, 1.0)
    if pool_tokens is not None and (share != 1.0 or block_size != config.block_size):
        changes["num_kv_blocks"] = max(-(-longest // block_size), round(share * pool_tokens / block_size), 1)
    return config.changed(**changes)


def longest_request(load: Load) -> int:
    """Tokens of the longest conversation with all its answers, if these are as long as they may be."""
    return max(
        (sum(len(turn.token_ids) + turn.max_tokens for turn in conversation.turns) for conversation in conversations(load)),
        default=0,
    )


def as_text(config: EngineConfig) -> str:
    """Python that makes this configuration: the model and every field that is not as by default."""
    default = EngineConfig()
    parts = [
        f"    {f.name}={getattr(config, f.name)!r},"
        for f in fields(config)
        if f.name == "model" or getattr(config, f.name) != getattr(default, f.name)
    ]
    return "\n".join(["EngineConfig(", *parts, ")"])
