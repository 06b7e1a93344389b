"""Events of the Quantisation page's tabs, made up but consistent, and a view that a tab can stand in."""

from typing import Any

import numpy as np

from engine.events.quantization import (
    KvObserved,
    LayerQuantized,
    MatrixObserved,
    QualityMeasured,
    QuantizationProbed,
    QuantizationProgress,
    TokenShift,
    WeightsChanged,
)
from engine.events.types import EngineStarted
from explorer.base import Clock, ViewLock
from explorer.store import EventStore

MODEL = {"name": "made", "num_layers": 30, "num_kv_heads": 3, "head_dim": 64}
CONFIG = {"block_size": 16, "kv_cache_dtype": "auto", "num_kv_blocks": 512}
BYTES_PER_BLOCK = 30 * 16 * 2 * 3 * 64 * 2


class Desk:
    """A session that writes down what it was asked for."""

    status = "running"

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **named: self.calls.append((name, args, named))


class View:
    """What a tab needs of the page's view."""

    def __init__(self, live: bool = True, layer: int = 3, matrix: str = "down_proj") -> None:
        self.store = EventStore()
        self.store.replayed = not live
        self.session: Any = Desk() if live else None
        self.clock = Clock(owner="ann")
        self.lock = ViewLock(lambda: self.store.replayed)
        self.layer, self.matrix = layer, matrix

    def give(self, tab: Any, *events: Any) -> None:
        """What the page does: events into the store, to the tab, and one update."""
        self.store.append(events)
        with self.lock:
            tab.take(events)
            tab.update()


def started(**changes: Any) -> EngineStarted:
    return EngineStarted(
        step=0, time_ns=0, config={**CONFIG, **changes}, model=MODEL, device={"device": "cpu"}, versions={},
        kv_bytes_per_block=BYTES_PER_BLOCK, kv_pool_bytes=512 * BYTES_PER_BLOCK,
    )  # fmt: skip


def weights(method: str = "int4", group_size: int = 32, **changes: Any) -> WeightsChanged:
    fields = {
        "method": method, "group_size": group_size, "options": {}, "seconds": 1.2, "cached": False, "calibration_tokens": 0,
        "forms": {"int4_kernel": 210}, "linear_bytes": 66_000_000, "other_bytes": 56_000_000, "bits_per_weight": 5.0, "recomputed": [],
    }  # fmt: skip
    return WeightsChanged(step=1, time_ns=1, **{**fields, **changes})


def progress(doing: str = "measuring", done: int = 5, total: int = 20, method: str = "") -> QuantizationProgress:
    return QuantizationProgress(step=1, time_ns=1, method=method, done=done, total=total, doing=doing)


QUALITIES = (
    # method, group, bits, KL, 99 %, top-1, prose, retrieval, arithmetic, tokens/s
    ("", 0, 16.0, 0.0, 0.0, 1.0, 21.4, 0.66, 0.52, 41.0),
    ("int8", 0, 8.03, 0.0006, 0.004, 0.992, 21.41, 0.66, 0.52, 62.0),
    ("int4", 32, 5.0, 0.0011, 0.01, 0.988, 21.42, 0.66, 0.51, 70.0),
    ("int4", 128, 4.25, 0.061, 0.43, 0.88, 23.0, 0.54, 0.36, 72.0),
    ("nf4", 64, 4.25, 0.049, 0.35, 0.90, 22.7, 0.58, 0.40, 40.0),
    ("gptq", 64, 4.5, 0.032, 0.22, 0.92, 22.3, 0.60, 0.44, 71.0),
    ("awq", 64, 4.5, 0.036, 0.25, 0.915, 22.4, 0.60, 0.43, 70.0),
    ("int3", 32, 4.0, 0.21, 1.4, 0.78, 27.9, 0.31, 0.12, 69.0),
    ("int2", 32, 3.0, 6.2, 14.0, 0.04, 9100.0, 0.0, 0.0, 69.0),
)


def quality(method: str = "", group_size: int = 0, kv: str = "auto", **changes: Any) -> QualityMeasured:
    found = next((q for q in QUALITIES if q[:2] == (method, group_size)), QUALITIES[0])
    _m, _g, bits, kl, p99, top1, prose, retrieval, arithmetic, speed = found
    fields = {
        "method": method, "group_size": group_size, "options": {}, "kv_cache_dtype": kv, "bits_per_weight": bits,
        "linear_bytes": round(106_168_320 * bits / 8), "other_bytes": 56_700_000,
        "perplexity": {"python-help": 0.45 * prose, "prose": prose}, "perplexity_tokens": {"python-help": 4095, "prose": 1500},
        "window": 512, "stride": 256, "kl_mean": kl, "kl_p99": p99, "kl_positions": 256, "top1_agreement": top1,
        "retrieval": retrieval, "retrieval_items": 48, "arithmetic": arithmetic, "arithmetic_items": 96, "decode_tokens_per_s": speed,
        "seconds": 34.0,
    }  # fmt: skip
    return QualityMeasured(step=1, time_ns=1, **{**fields, **changes})


def layer_quantized(layer: int = 3, name: str = "down_proj", **changes: Any) -> LayerQuantized:
    counts = [round(1000 * np.exp(-(((i - 31.5) / 12) ** 2))) for i in range(64)]
    fields = {
        "method": "int4", "rows": 48, "columns": 192, "bits": 4, "group_size": 64, "form": "int4_kernel", "nbytes": 5184,
        "bits_per_weight": 4.5, "sqnr_db": 21.0, "max_error": 0.02, "mean_error": 0.004, "rms_weight": 0.06, "outlier_share": 0.01,
        "output_error": 0.08, "weight_low": -0.3, "weight_high": 0.3, "weight_counts": [1] * 64, "error_low": -0.02, "error_high": 0.02,
        "error_counts": counts,
    }  # fmt: skip
    return LayerQuantized(step=1, time_ns=1, layer=layer, name=name, **{**fields, **changes})


def matrix(layer: int = 3, name: str = "down_proj", rows: int = 48, columns: int = 192, seed: int = 0) -> MatrixObserved:
    """Random weights, and inputs that are correlated, with a few large channels: where AWQ and GPTQ have something to find."""
    rng = np.random.default_rng(seed)
    weight = (rng.standard_t(6, (rows, columns)) * 0.05).astype(np.float16)
    scale = np.exp(rng.normal(0, 0.5, columns))
    scale[:: columns // 6] *= 8
    mixing = np.eye(columns) + 0.35 * rng.normal(size=(columns, columns)) / np.sqrt(columns) * 6
    x = (rng.normal(size=(4 * columns, columns)) @ mixing * scale).astype(np.float32)
    hessian = (2 * x.T.astype(np.float64) @ x / len(x)).astype(np.float32)
    return MatrixObserved(
        step=1, time_ns=1, layer=layer, name=name, rows=rows, columns=columns, dtype="float16", weight=weight.tobytes(),
        source="GGUF Q4_1", running_dtype="", running=b"", input_rows=16, inputs=x[:16].astype(np.float16).tobytes(),
        input_abs_mean=np.abs(x).mean(0).astype(np.float32).tobytes(), input_abs_max=np.abs(x).max(0).astype(np.float32).tobytes(),
        hessian=hessian.tobytes(), calibration_tokens=len(x),
    )  # fmt: skip


def kv_observed(layer: int = 0, seed: int = 0) -> KvObserved:
    rng = np.random.default_rng(seed)
    keys = np.abs(rng.normal(1.2, 0.5, 192)) + 0.2
    keys[[20, 52, 70, 150, 182]] *= 7
    values = np.abs(rng.normal(0.2, 0.05, 192)) + 0.05
    return KvObserved(
        step=1, time_ns=1, layer=layer, num_tokens=512, num_kv_heads=3, head_dim=64, key_abs_max=(keys * 1.6).tolist(),
        key_abs_mean=keys.tolist(), value_abs_max=(values * 3.1).tolist(), value_abs_mean=values.tolist(),
        key_errors={"int8": 0.0061, "fp8": 0.026, "int4": 0.058}, value_errors={"int8": 0.0052, "fp8": 0.026, "int4": 0.071},
        bytes_per_token={"auto": 23040.0, "int8": 11880.0, "fp8": 11880.0, "int4": 7200.0}, text="The tide came in over the flats.",
    )  # fmt: skip


def probed(probe_id: str = "p1", **changes: Any) -> QuantizationProbed:
    tokens = ["The", " capital", " of", " France", " is", " Paris", ".", " The", " capital", " of", " Spain", " is"]
    errors = [0.0] * 3 + [0.004 + 0.0009 * i for i in range(27)]
    fields: dict[str, Any] = {
        "method": "int3", "group_size": 64, "only": ["3.down_proj"], "error_between": [], "changed_weights": 884_736,
        "text": "".join(tokens), "num_tokens": 12, "layer_errors": errors,
        "kl": [0.011, 0.02, 0.0004, 0.03, 0.0042, 0.09, 0.007, 0.012, 0.0009, 0.0002, 0.051, 0.33], "positions": [11], "token_texts": tokens,
        "nucleus_p": 0.9,
        "entered": [TokenShift(5, " known", 0.008, 0.021), TokenShift(6, " in", 0.009, 0.014)],
        "left": [TokenShift(7, " a", 0.031, 0.006)],
        "top": [TokenShift(1, " Madrid", 0.44, 0.29), TokenShift(2, " Barcelona", 0.12, 0.31), TokenShift(3, " the", 0.09, 0.08)],
        "continuation": [" Madrid", ".", " It", " is"], "continuation_changed": [" Barcelona", ",", " a", " city"], "first_difference": 0,
        "margin": 1.31,
    }  # fmt: skip
    return QuantizationProbed(step=1, time_ns=1, probe_id=probe_id, **{**fields, **changes})
