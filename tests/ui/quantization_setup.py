"""Run by ``panel serve --setup``: a stand-in engine behind the app whose weights are random and whose rounding is real.

It answers what the Quantisation page asks with events computed from small matrices that stand on a 4-bit file's grid. "gptq" takes its
time and can be cancelled.
"""

import threading
import time
from functools import cache
from typing import Any

import torch

from engine.config import EngineConfig
from engine.events.types import KnobChanged, LayerQuantized, MatrixObserved, QuantizationProgress, WeightsChanged
from engine.quantization.error import output_error, weight_error
from engine.quantization.methods import METHOD, quantize
from explorer.quantization.rows import MATRICES
from explorer.session import Session
from tests.explorer import fake
from tests.explorer.fake import FakeProcess

LAYERS, OUT, IN = 30, 48, 192
FORMS = {"int8": "int8_kernel", "nf4": "dequantized", "fp8": "dequantized"}
SLOW_S = 0.4  # a layer of GPTQ

fake.FACTS["num_layers"] = LAYERS


@cache
def weight(layer: int, name: str) -> torch.Tensor:
    """[OUT, IN] on the grid of int4 in groups of 32; outliers are more in early layers."""
    made = torch.Generator().manual_seed(1000 * layer + MATRICES.index(name))
    w = 0.05 * torch.randn(OUT, IN, generator=made)
    w[torch.rand(OUT, IN, generator=made) < 0.03 / (1 + layer)] *= 6
    return quantize(w, "int4", 32).dequantize().half()


@cache
def inputs(layer: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(layer)
    scale = torch.exp(torch.randn(IN, generator=made))
    return (torch.randn(32, IN, generator=made) * scale).half()


class QuantizingProcess(FakeProcess):
    method: str | None = None
    group_size = 0
    watched = False

    def start(self) -> None:
        super().start()
        with self._lock:  # the snapshot tells no knobs of the weights
            for name, value in (("quantization", None), ("quantization_group_size", None), ("kv_cache_dtype", "auto")):
                self._emit(KnobChanged, name=name, old=None, new=value, by="")

    restart = start

    def reconfigure(self, *, by: str = "", **knobs: Any) -> None:
        self.calls.append(("reconfigure", (by, knobs)))
        with self._lock:
            if "quantization_group_size" in knobs and "quantization" not in knobs:
                knobs["quantization"] = self.method
            if "quantization" in knobs:
                method = knobs.pop("quantization")
                group = knobs.pop("quantization_group_size", None) or (METHOD[method].group_size if method else None)
                knobs.pop("quantization_options", None)
                if method == "gptq":
                    self.cancelled = threading.Event()
                    threading.Thread(target=self._slowly, args=(by, group), daemon=True).start()
                else:
                    self._change(by, method, group)
            for name, value in knobs.items():
                self._emit(KnobChanged, name=name, old=None, new=value, by=by)

    def _slowly(self, by: str, group: int) -> None:
        for done in range(LAYERS):
            if self.cancelled.is_set():
                with self._lock:
                    self._emit(QuantizationProgress, method="gptq", done=done, total=LAYERS, doing="cancelled")
                return
            with self._lock:
                self._emit(QuantizationProgress, method="gptq", done=done, total=LAYERS, doing="rounding")
            time.sleep(SLOW_S)
        with self._lock:
            self._change(by, "gptq", group)

    def cancel_quantization(self) -> None:
        self.cancelled.set()

    def _change(self, by: str, method: str | None, group: int | None) -> None:
        old = (self.method, self.group_size or None)
        self.method, self.group_size = method, group or 0
        for name, before, now in (("quantization", old[0], method), ("quantization_group_size", old[1], group)):
            self._emit(KnobChanged, name=name, old=before, new=now, by=by)
        self._tell(recomputed=[request.request_id for request in self.running])

    def _rounded(self, layer: int, name: str) -> Any:
        method = "int4" if self.method == "gptq" else self.method
        return quantize(weight(layer, name), method, self.group_size or None) if method else None

    def _tell(self, recomputed: list[str]) -> None:
        rounded = {(layer, name): self._rounded(layer, name) for layer in range(LAYERS) for name in MATRICES}
        nbytes = sum(2 * OUT * IN if q is None else q.nbytes for q in rounded.values())
        form = FORMS.get(self.method or "", "int4_kernel") if self.method else "plain"
        self._emit(
            WeightsChanged, method=self.method or "", group_size=self.group_size, options={}, seconds=0.4, cached=False, calibration_tokens=0,
            forms={form: 4 * LAYERS}, linear_bytes=nbytes, other_bytes=600_000, bits_per_weight=8 * nbytes / (len(rounded) * OUT * IN),
            recomputed=recomputed,
        )  # fmt: skip
        for (layer, name), q in rounded.items() if self.watched else ():
            self._emit(LayerQuantized, **self._layer(layer, name, q, form))

    def _layer(self, layer: int, name: str, q: Any, form: str) -> dict[str, Any]:
        w = weight(layer, name).float()
        made = w if q is None else q.dequantize()
        e = weight_error(w, made)
        return {
            "layer": layer, "name": name, "method": self.method or "", "rows": OUT, "columns": IN, "bits": 16 if q is None else q.bits,
            "group_size": self.group_size, "form": form, "nbytes": 2 * OUT * IN if q is None else q.nbytes,
            "bits_per_weight": 16.0 if q is None else q.bits_per_weight, "sqnr_db": e.sqnr_db, "max_error": e.max_error,
            "mean_error": e.mean_error, "rms_weight": float(w.square().mean().sqrt()), "outlier_share": e.outlier_share,
            "output_error": output_error(inputs(layer).float(), w, made), "weight_low": e.weights.low, "weight_high": e.weights.high,
            "weight_counts": e.weights.counts.tolist(), "error_low": e.errors.low, "error_high": e.errors.high,
            "error_counts": e.errors.counts.tolist(),
        }  # fmt: skip

    def watch_weights(self) -> None:
        self.calls.append(("watch_weights", ()))
        with self._lock:
            self.watched = True
            self._tell([])

    def observe_matrix(self, layer: int, name: str) -> None:
        self.calls.append(("observe_matrix", (layer, name)))
        with self._lock:
            w, x, q = weight(layer, name), inputs(layer), self._rounded(layer, name)
            f = x.float()
            self._emit(
                MatrixObserved, layer=layer, name=name, rows=OUT, columns=IN, dtype="float16", weight=w.numpy().tobytes(),
                source="GGUF Q4_1", running_dtype="" if q is None else "float32",
                running=b"" if q is None else q.dequantize().contiguous().numpy().tobytes(), input_rows=len(x), inputs=x.numpy().tobytes(),
                input_abs_mean=f.abs().mean(0).numpy().tobytes(), input_abs_max=f.abs().amax(0).numpy().tobytes(),
                hessian=(2 * f.T @ f / len(f)).numpy().tobytes(), calibration_tokens=len(x),
            )  # fmt: skip


class QuantizingSession(Session):
    """Of a stand-in engine: what an engine of its own process answers, this one answers here."""

    def watch_weights(self, owner: str) -> None:
        self._telling(owner, self.process.watch_weights)

    def observe_matrix(self, owner: str, layer: int, name: str) -> None:
        self._telling(owner, lambda: self.process.observe_matrix(layer, name))

    def cancel_quantization(self, owner: str) -> None:
        self._telling(owner, self.process.cancel_quantization)


Session._shared = QuantizingSession(QuantizingProcess(EngineConfig(num_kv_blocks=128), auto=True))
