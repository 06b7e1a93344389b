"""What is asked of the engine and what it answers."""

import math
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from engine.strict import strict

FINISH_REASONS = ("stop", "length", "abort", "error")


class QueueFull(ValueError):
    """As many requests wait as may (EngineConfig.max_num_waiting): come again later."""


def _check(ok: bool, name: str, got: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name} must be {allowed}, got {got!r}")


def _number(value: Any) -> bool:
    """A finite number; an int too large for a float is none, since every one of these is computed with as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@strict
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen. Names and meanings are vLLM's.

    ``temperature=0`` is greedy. ``seed=None`` lets the engine choose one and record it. ``logprobs=k`` returns the
    chosen token's log-probability and the k likeliest alternatives (of the raw distribution). A value out of range
    raises ValueError.

    ``beam_width`` (vLLM's BeamSearchParams; ``num_beams`` in transformers) asks for a beam search, defined in
    ``engine.sampling.beam``: ``n`` is then how many of its sequences are returned (``num_return_sequences``), and
    ``length_penalty`` and ``early_stopping`` are as in transformers. It draws nothing: temperature must be 0 or 1, top_k, top_p and
    min_p off; the penalties are applied.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 (or -1, as in vLLM): off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    beam_width: int | None = None  # None: no beam search
    length_penalty: float = 1.0
    early_stopping: bool | str = False  # True | False | "never"

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name, of in (("stop", "non-empty strings"), ("stop_token_ids", "token ids >= 0")):
            try:
                object.__setattr__(self, name, tuple(getattr(self, name)))
            except TypeError:
                raise ValueError(f"{name} must be a sequence of {of}, got {getattr(self, name)!r}") from None
        c = _check
        c(_number(self.temperature) and self.temperature >= 0, "temperature", self.temperature, "a number >= 0 (0: greedy)")
        c(_integer(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer >= 0 (0 or -1: off)")
        c(_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number with 0 < top_p <= 1")
        c(_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number with 0 <= min_p <= 1")
        c(
            _number(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            self.repetition_penalty,
            "a number > 0 (1: off)",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            c(
                _number(getattr(self, name)) and -2 <= getattr(self, name) <= 2,
                name,
                getattr(self, name),
                "a number in [-2, 2] (0: off)",
            )
        c(
            self.seed is None or (_integer(self.seed) and 0 <= self.seed < 2**64),
            "seed",
            self.seed,
            "None or an integer in [0, 2**64)",
        )
        c(_integer(self.max_tokens) and self.max_tokens >= 1, "max_tokens", self.max_tokens, "an integer >= 1")
        c(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "non-empty strings")
        c(all(_integer(t) and t >= 0 for t in self.stop_token_ids), "stop_token_ids", self.stop_token_ids, "token ids >= 0")
        c(isinstance(self.ignore_eos, bool), "ignore_eos", self.ignore_eos, "a bool")
        c(_integer(self.n) and 1 <= self.n <= 64, "n", self.n, "an integer in [1, 64]")
        c(
            self.logprobs is None or (_integer(self.logprobs) and 0 <= self.logprobs <= 100),
            "logprobs",
            self.logprobs,
            "None or an integer in [0, 100]",
        )
        self._check_beams()

    def _check_beams(self) -> None:
        c, width = _check, self.beam_width
        c(width is None or (_integer(width) and 1 <= width <= 1024), "beam_width", width, "None or an integer in [1, 1024]")
        c(
            _number(self.length_penalty) and -10 <= self.length_penalty <= 10,
            "length_penalty",
            self.length_penalty,
            "a number in [-10, 10]",
        )
        c(
            isinstance(self.early_stopping, bool) or self.early_stopping == "never",
            "early_stopping",
            self.early_stopping,
            'True, False or "never"',
        )
        if width is None:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                c(getattr(self, name) == default, name, getattr(self, name), f"{default} without beam_width")
            return
        c(self.n <= width, "n", self.n, f"at most beam_width ({width}): the sequences that are returned are beams")
        c(self.temperature in (0, 1), "temperature", self.temperature, "0 or 1 in a beam search, which draws nothing")
        for name, off in (("top_k", (0, -1)), ("top_p", (1,)), ("min_p", (0,))):
            c(getattr(self, name) in off, name, getattr(self, name), f"{off[0]} in a beam search, which draws nothing")

    @property
    def penalised(self) -> bool:
        """Whether tokens that were already there are made more or less likely."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def changed(self, **changes: Any) -> "SamplingParams":
        """A copy with these fields changed; ValueError for a name that is not a parameter."""
        return replace(self, **changes)


@dataclass
class TokenLogprob:
    token_id: int
    logprob: float  # natural log, raw distribution
    top: list[tuple[int, float]] = field(default_factory=list)  # the likeliest (token id, log-probability)


@dataclass
class CompletionOutput:
    """One finished continuation."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str | None  # one of FINISH_REASONS
    message: str = ""  # why, for "error" and "stop"
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None  # of a beam search: the sum of its tokens' log-probabilities, after the penalties
    score: float | None = None  # of a beam search: that sum / length ** length_penalty


@dataclass
class RequestOutput:
    """What a request produced: ``outputs[i]`` for each of n; the first one's fields are here too.

    A beam search gives its best first, and fewer than n where fewer sequences have any probability.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache saved

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def message(self) -> str:
        return self.outputs[0].message

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        return self.outputs[0].logprobs


def request_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request that came without one (32 bits: easy to type again): the same engine seed and id give the same."""
    return int.from_bytes(blake2b(f"{engine_seed}:{request_id}".encode(), digest_size=4).digest(), "little")


class Request:
    """One sequence in the engine: a prompt, what came of it so far, and the KV blocks it holds.

    The engine sets ``token_ids`` (prompt, then output) and the results; the scheduler sets ``status``,
    ``num_computed_tokens`` and ``block_ids``. The siblings of n > 1 are Requests of their own with the same ``group_id``, and so are
    the beams of a beam search, which share one ``beams``.
    """

    __slots__ = (
        "arrival_order",
        "arrived_ns",
        "arrived_step",
        "beams",
        "block_hashes",
        "block_ids",
        "branched_at",
        "branched_from",
        "cache_root",
        "cache_salt",
        "draw_index",
        "finish_reason",
        "group_id",
        "last_token_ns",
        "logprobs",
        "message",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_swapped_tokens",
        "owner",
        "params",
        "parent_id",
        "priority",
        "prompt_text",
        "request_id",
        "sample_index",
        "seed",
        "status",
        "stream",
        "token_counts",
        "token_ids",
    )  # fmt: skip

    def __init__(
        self, request_id: str, prompt_token_ids: list[int], params: SamplingParams, seed: int, *, owner: str = "local",
        prompt_text: str = "", arrived_ns: int = 0, cache_salt: str | None = None, cache_root: int = 0, sample_index: int = 0,
        parent_id: str | None = None, group_id: str | None = None, priority: int = 0,
    ) -> None:  # fmt: skip
        self.request_id = request_id
        self.group_id = group_id or request_id
        self.parent_id = parent_id
        self.sample_index = sample_index
        self.draw_index = sample_index  # which draws it takes; a branch takes those of the sequence that it left
        self.owner = owner
        self.params = params
        self.seed = seed
        self.prompt_text = prompt_text
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.status = "waiting"  # "waiting" | "running" | "preempted" | "finished"
        self.num_computed_tokens = 0  # tokens whose KV is in the blocks
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache when it was first admitted
        self.num_swapped_tokens = 0  # of a preempted request: those whose KV lies in host memory (engine.kvcache.swap)
        self.block_ids: list[int] = []
        self.block_hashes: list[int] = []  # chained, of the full blocks of token_ids so far
        self.cache_salt = cache_salt
        self.cache_root = cache_root
        self.arrived_ns = arrived_ns
        self.last_token_ns = arrived_ns
        self.priority = priority  # vLLM's: smaller is more urgent
        self.arrived_step = self.arrival_order = 0  # see engine.waiting
        self.beams: Any = None  # BeamGroup (engine.beams)
        self.branched_from: str | None = None  # of a branch: the sequence that it left, and where
        self.branched_at = -1
        self.stream: Any = None  # TextStream
        self.token_counts: Any = None  # TokenCounts, once a penalty wants them
        self.logprobs: list[TokenLogprob] | None = None if params.logprobs is None else []
        self.finish_reason: str | None = None
        self.message = ""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status}, {self.num_computed_tokens}/{self.num_tokens} tokens, {len(self.block_ids)} blocks)"
