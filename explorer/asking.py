"""The part of Session that asks the engine to measure something; the answers are events."""

from collections.abc import Callable, Sequence
from typing import Any


class Asking:
    """Each of these is sent in the name of ``owner``, and waits for nothing."""

    process: Any

    def _telling(self, owner: str, send: Callable[[], Any]) -> None:
        raise NotImplementedError

    def measure_cache(self, owner: str, lengths: Sequence[int]) -> None:
        """Time steps with and without the KV cache at these context lengths; the answer is a CacheTimed event."""
        self._telling(owner, lambda: self.process.measure_cache(lengths))

    def watch_weights(self, owner: str) -> None:
        """Have told what runs and what rounding did to every matrix, now and after every change."""
        self._telling(owner, lambda: self.process.watch("weights"))

    def observe_matrix(self, owner: str, layer: int, name: str) -> None:
        """One matrix itself and what comes into it; the answer is a MatrixObserved event."""
        self._telling(owner, lambda: self.process.study("observe_matrix", layer=layer, name=name))

    def observe_kv(self, owner: str, layer: int) -> None:
        """Keys and values of a layer by channel; the answer is a KvObserved event."""
        self._telling(owner, lambda: self.process.study("observe_kv", layer=layer))

    def trace_attention(self, owner: str, layer: int, **options: Any) -> None:
        """The next step's attention call of a layer, tile by tile (see ``Engine.trace_attention``); the answers are AttentionTraced events."""
        self._telling(owner, lambda: self.process.study("trace_attention", layer=layer, **options))

    def observe_prefix(self, owner: str) -> None:
        """What the prefix index holds, as a tree; the answer is a PrefixTree event."""
        self._telling(owner, lambda: self.process.study("observe_prefix"))

    def probe_quantization(self, owner: str, **options: Any) -> None:
        """Some weights rounded beside the running ones (see ``Engine.probe_quantization``); the answer is a QuantizationProbed event."""
        self._telling(owner, lambda: self.process.study("probe_quantization", **options))

    def measure_quality(self, owner: str) -> None:
        """The running weights on real text; the answer is a QualityMeasured event."""
        self._telling(owner, lambda: self.process.study("measure_quality"))

    def measure_roofs(self, owner: str, *, again: bool = False, only_kept: bool = False) -> None:
        """What the device reaches; the answer is a RoofsMeasured event (none with ``only_kept`` where it was never measured)."""
        self._telling(owner, lambda: self.process.study("measure_roofs", again=again, only_kept=only_kept))

    def measure_memory(self, owner: str) -> None:
        """What the engine takes of the memory; the answer is a MemoryMeasured event."""
        self._telling(owner, lambda: self.process.study("measure_memory"))

    def cancel_quantization(self, owner: str) -> None:
        """Give up the weights and measurements that are under way, for everybody."""
        self._telling(owner, lambda: self.process.study("cancel_quantization"))
