"""Events of weights and KV entries in few bits. See ``engine.events.types`` for what holds for all events.

A matrix is named as in the checkpoint: "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"; N is its
out_features, K its in_features. Errors are of the weights that run against the checkpoint's own. NaN: not known.
"""

from typing import Any

import msgspec

from engine.events.event import Event


class WeightsChanged(Event, frozen=True, kw_only=True):
    """Other weights run from the next step on."""

    method: str  # EngineConfig.quantization; "" for the checkpoint's own weights in the model's dtype
    group_size: int  # 0: the method has none
    options: dict[str, Any]  # EngineConfig.quantization_options
    seconds: float  # that it took
    cached: bool  # taken from the disk: the same had been computed before
    calibration_tokens: int  # 0: the method needs none
    forms: dict[str, int]  # how they run (engine.model.low_bit.FORMS; "plain") -> how many of the linear layers
    linear_bytes: int  # of the linear layers' weights as held for a product, scales and all else counted; the second form of the compiled step is not
    other_bytes: int  # embedding, head and norms
    bits_per_weight: float  # of the linear layers, scales and all else counted, as the method defines them
    recomputed: list[str]  # the running requests whose KV is computed again under these weights


class QuantizationProgress(Event, frozen=True, kw_only=True):
    """Weights are being made beside the running engine."""

    method: str
    done: int  # layers
    total: int
    doing: str  # "calibrating", "rounding", ...; "failed: ..." or "cancelled" when nothing comes of it


class LayerQuantized(Event, frozen=True, kw_only=True):
    """What rounding did to one matrix. Recorded under ``watch("weights")``."""

    layer: int
    name: str
    method: str
    rows: int  # N
    columns: int  # K
    bits: int
    group_size: int  # as in QuantizedWeight
    form: str  # how it runs
    nbytes: int  # of codes, scales and all else
    bits_per_weight: float
    sqnr_db: float  # 10 log10(sum w^2 / sum e^2); inf where nothing was lost
    max_error: float
    mean_error: float  # of |e|
    rms_weight: float
    outlier_share: float  # of weights beyond ``engine.quantization.error``'s number of standard deviations
    output_error: float  # |X e^T| / |X W^T| on calibration inputs X
    weight_low: float  # the edges of the histograms
    weight_high: float
    weight_counts: list[int]
    error_low: float
    error_high: float
    error_counts: list[int]


class MatrixObserved(Event, frozen=True, kw_only=True):
    """One matrix itself and what comes into it, so that every method can be tried on it without an engine.

    Recorded under ``observe_matrix``. All numbers little-endian.
    """

    layer: int
    name: str
    rows: int  # N
    columns: int  # K
    dtype: str  # of the weights below: "float16", or "float32" where float16 does not hold them exactly
    weight: bytes  # [N, K], the checkpoint's own
    source: str  # where the checkpoint's numbers come from, as far as it says: "GGUF Q4_1", "safetensors BF16", ...
    running_dtype: str  # "" where the checkpoint's own run; else as ``dtype``
    running: bytes  # [N, K], what runs at the moment, dequantised
    input_rows: int  # R
    inputs: bytes  # float16 [R, K]: what came into it on calibration text
    input_abs_mean: bytes  # float32 [K], over all calibration tokens
    input_abs_max: bytes  # float32 [K]
    hessian: bytes  # float32 [K, K]: 2 X^T X / rows over all calibration tokens
    calibration_tokens: int


class TokenShift(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One token at one position, under the original weights and under the changed ones."""

    token_id: int
    text: str
    before: float  # probability
    after: float


class QuantizationProbed(Event, frozen=True, kw_only=True):
    """Some weights rounded and nothing else, on one text: from the error to the token. The running weights were not touched."""

    probe_id: str
    method: str
    group_size: int
    only: list[str]  # "3", "3.down_proj": layers or matrices; empty: all
    error_between: list[float]  # [low, high]: only weights whose rounding error lies there; empty: all
    changed_weights: int  # how many numbers are different
    text: str
    num_tokens: int
    layer_errors: list[float]  # of each layer's output: |h' - h| / |h| over all positions
    kl: list[float]  # nats, at each position
    positions: list[int]  # where the picture below is taken: where the first token changes, or else where KL is largest
    token_texts: list[str]  # of the text
    nucleus_p: float
    entered: list[TokenShift]  # at positions[0]: tokens that are in the nucleus with the changed weights only
    left: list[TokenShift]
    top: list[TokenShift]  # the most probable tokens of either
    continuation: list[str]  # greedy, from the text's end, original weights
    continuation_changed: list[str]
    first_difference: int  # index of the first token of the continuations that differs; -1: none
    margin: float  # of the first token's two largest logits there, original weights; NaN where none differs


class QualityMeasured(Event, frozen=True, kw_only=True):
    """The running weights and KV dtype on real text. See ``engine.quantization.quality``."""

    method: str
    group_size: int
    options: dict[str, Any]
    kv_cache_dtype: str
    bits_per_weight: float
    linear_bytes: int
    other_bytes: int
    perplexity: dict[str, float]  # by text
    perplexity_tokens: dict[str, int]
    window: int
    stride: int
    kl_mean: float  # nats, to the checkpoint's own weights in the model's dtype
    kl_p99: float
    kl_positions: int
    top1_agreement: float
    retrieval: float  # share of items right
    retrieval_items: int
    arithmetic: float
    arithmetic_items: int
    decode_tokens_per_s: float  # one request; NaN where it was not measured
    seconds: float


class KvObserved(Event, frozen=True, kw_only=True):
    """Keys and values of one layer by channel, and what each KV dtype would lose on them.

    Recorded under ``observe_kv``. Keys are as stored, after the rotary embedding. D is head_dim, H the number of KV heads.
    """

    layer: int
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    key_abs_max: list[float]  # [H * D]
    key_abs_mean: list[float]
    value_abs_max: list[float]
    value_abs_mean: list[float]
    key_errors: dict[str, float]  # by KV dtype: |k' - k| / |k|
    value_errors: dict[str, float]
    bytes_per_token: dict[str, float]  # by KV dtype, of all layers, scales counted
    text: str
