"""What one engine step costs, counted: operations and bytes, from the model's facts and who ran how many tokens.

A multiply-add is two operations. Counted are the linear layers, the head for the positions that are sampled (or verified), and
attention over the keys that a token sees (its layer's sliding window respected). Norms, rotary embedding, activation
and softmax are left out. Bytes are what the algorithm must move at least: every weight once a step (of the embedding
table only the rows looked up), the K and V a request's tokens see once per run, and the new tokens' K and V.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPES = ("int8", "fp8", "int4")  # of a KV cache, beside "auto" (the model's) and those of ``DTYPE_BYTES``
SCALE_BYTES = 2  # of a scale or a minimum in the KV cache: bfloat16
VALUE_GROUP = 32  # channels of a value that share a scale and a minimum in 4 bits, where that divides the head


def kv_bytes(kv_dtype: str, head_dim: int, block_size: int = 16) -> float:
    """Bytes of one token's K and V of one KV head in one layer, scales and minima included.

    int8 and fp8: a byte for each channel and a scale for each vector. int4: half a byte for each channel; for keys a scale and a
    minimum of each channel, shared by the ``block_size`` tokens of a block; for values those of each group of channels. The tail
    of an int4 cache (blocks that are not full, in the model's dtype) is of no token in particular and not in it.
    ValueError for an unknown ``kv_dtype``.
    """
    if kv_dtype in DTYPE_BYTES:
        return 2.0 * head_dim * DTYPE_BYTES[kv_dtype]
    if kv_dtype in ("int8", "fp8"):
        return 2.0 * (head_dim + SCALE_BYTES)
    if kv_dtype == "int4":
        groups = head_dim // VALUE_GROUP if head_dim % VALUE_GROUP == 0 else 1
        return head_dim + 2 * SCALE_BYTES * (head_dim / block_size + groups)
    raise ValueError(f"dtype of a KV cache must be one of {(*DTYPE_BYTES, *KV_DTYPES)}, got {kv_dtype!r}")


class RunLike(Protocol):
    """What ``engine.events.types.Run`` has."""

    @property
    def start(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def sampled(self) -> bool: ...
    @property
    def num_drafts(self) -> int: ...


@dataclass(frozen=True, kw_only=True)
class StepCost:
    flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_write_bytes: float


@dataclass(frozen=True, kw_only=True)
class CostFacts:
    """The model's numbers, multiplied out once."""

    layer_flops: float  # linear layers of all layers, for one token
    head_flops: float  # for one sampled position
    pair_flops: float  # one query meeting one key in one layer, all heads: scores and weighted sum
    layer_weight_bytes: float  # all layers' weights
    head_weight_bytes: float
    embedding_row_bytes: float
    kv_layer_bytes: float  # K and V of one token in one layer
    windows: tuple[tuple[int | None, int], ...]  # (sliding window, number of layers that have it)

    @classmethod
    def from_facts(cls, model: Mapping[str, Any], dtype: str, kv_dtype: str | None = None, block_size: int = 16) -> "CostFacts":
        """``model``: ``EngineStarted.model``; ``dtype``: of the weights; ``kv_dtype``: of the cache where it differs (None or
        "auto": the same), which for int4 depends on ``block_size``, too."""
        if dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {tuple(DTYPE_BYTES)}, got {dtype!r}")
        size = DTYPE_BYTES[dtype]
        hidden, layers, head_dim = model["hidden_size"], model["num_layers"], model["head_dim"]
        q_width, kv_width = model["num_attention_heads"] * head_dim, model["num_kv_heads"] * head_dim
        linear = layers * hidden * (2 * q_width + 2 * kv_width + 3 * model["intermediate_size"])
        windows = list(model["sliding_windows"])
        head = model["vocab_size"] * hidden
        stored_heads = 1 if model["tie_word_embeddings"] else 2
        others = model["num_parameters"] - stored_heads * head  # layers and norms, biases too
        return cls(
            layer_flops=2.0 * linear,
            head_flops=2.0 * head,
            pair_flops=4.0 * q_width,
            layer_weight_bytes=float(others * size),
            head_weight_bytes=float(head * size),
            embedding_row_bytes=float(hidden * size),
            kv_layer_bytes=model["num_kv_heads"]
            * kv_bytes(dtype if kv_dtype in (None, "auto") else kv_dtype, head_dim, block_size),
            windows=tuple((window, windows.count(window)) for window in dict.fromkeys(windows)),
        )

    def with_kv_layer_bytes(self, kv_layer_bytes: float) -> "CostFacts":
        """The same model on another KV cache: bytes of one token's K and V in one layer."""
        return self if kv_layer_bytes == self.kv_layer_bytes else replace(self, kv_layer_bytes=kv_layer_bytes)


def step_cost(facts: CostFacts, runs: Iterable[RunLike]) -> StepCost:
    """Operations and bytes of one forward pass over ``runs``."""
    tokens = sampled = 0
    pairs = keys = 0.0
    for run in runs:
        tokens += run.num_tokens
        sampled += bool(run.sampled) and 1 + run.num_drafts
        for window, layers in facts.windows:
            pairs += layers * query_key_pairs(run.start, run.num_tokens, window)
            keys += layers * keys_seen(run.start, run.num_tokens, window)
    if not tokens:
        return StepCost(flops=0.0, weight_bytes=0.0, kv_read_bytes=0.0, kv_write_bytes=0.0)
    num_layers = sum(layers for _, layers in facts.windows)
    return StepCost(
        flops=tokens * facts.layer_flops + sampled * facts.head_flops + pairs * facts.pair_flops,
        weight_bytes=facts.layer_weight_bytes + bool(sampled) * facts.head_weight_bytes + tokens * facts.embedding_row_bytes,
        kv_read_bytes=keys * facts.kv_layer_bytes,
        kv_write_bytes=tokens * num_layers * facts.kv_layer_bytes,
    )


def query_key_pairs(start: int, num_tokens: int, window: int | None) -> int:
    """Pairs (query, key it sees) in one layer: position p sees min(p + 1, window) keys."""
    end = start + num_tokens
    if window is None:
        return _triangle(end) - _triangle(start)
    growing = min(max(window, start), end)  # positions from `window` on see exactly `window` keys
    return _triangle(growing) - _triangle(start) + (end - growing) * window


def keys_seen(start: int, num_tokens: int, window: int | None) -> int:
    """Different keys that the run's queries see in one layer."""
    end = start + num_tokens
    return end if window is None else end - max(0, start + 1 - window)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2
