"""The part of Engine that looks into the weights: measurements beside the running requests."""

import time
from typing import Any, Protocol

from engine import device_study, reporting
from engine.attention.tap import CAPACITY, Choice
from engine.events.batching import PrefixTree
from engine.weights.requantizer import Requantizer
from engine.weights.studies import Studies


class _Beside(Protocol):
    requantizer: Requantizer
    studies: Studies


class Studying:
    """Each of these makes its measurement in a thread of its own, records it as an event and returns it. ``wait`` False: it is only
    recorded, by ``poll``, once it is there."""

    @property
    def busy_beside_steps(self: _Beside) -> bool:
        """Whether something is under way that ``poll`` will bring to its end, also when there is nothing to step."""
        return self.requantizer.busy or self.studies.busy

    def poll(self: _Beside) -> None:
        """Between two steps: take what was made beside them."""
        self.requantizer.poll()
        self.studies.poll()

    def settle(self: _Beside) -> None:
        """Wait until nothing is under way beside the steps any more."""
        while self.requantizer.busy or self.studies.busy:
            time.sleep(0.02)
            self.requantizer.poll()
            self.studies.poll()

    def observe_matrix(self: _Beside, layer: int, name: str, *, wait: bool = True) -> Any:
        """One matrix of the checkpoint, what runs in its place, and what comes into it on calibration text: a MatrixObserved.

        ``name``: as in the checkpoint, "down_proj". ValueError for a matrix that is not there.
        """
        return self.studies.observe_matrix(layer, name, wait)

    def observe_kv(self: _Beside, layer: int, *, wait: bool = True) -> Any:
        """Keys and values of a layer by channel, and what each KV dtype would lose on them: a KvObserved. ValueError: no such layer."""
        return self.studies.observe_kv(layer, wait)

    def observe_prefix(self: Any, *, num_nodes: int = 400, num_tokens: int = 24, wait: bool = True) -> PrefixTree:
        """What the prefix index holds, as a tree: a PrefixTree. Taken at once, between two steps; recorded where somebody watches.

        ``num_nodes``: the most used so many; ``num_tokens``: how many of each one's tokens to tell. ValueError out of range.
        """
        return reporting.record_prefix_tree(self, num_nodes, num_tokens)

    def probe_quantization(
        self: _Beside, *, method: str, group_size: int | None = None, only: list[str] | None = None,
        error_between: list[float] | None = None, text: str = "", top_p: float = 0.9, probe_id: str = "", wait: bool = True,
    ) -> Any:  # fmt: skip
        """Round some weights beside the running ones and follow the error to the tokens: a QuantizationProbed.

        ``only``: layers ("3") or matrices ("3.down_proj"), None: all. ``error_between``: only weights whose rounding error lies there.
        ``text``: "" for one of our own. ``top_p``: of the nuclei that are compared. ValueError for a method that does not exist or
        needs calibration, a layer or matrix that is not there, or a text too long.
        """
        return self.studies.probe(method, group_size, only, error_between, text, top_p, probe_id, wait)

    def measure_quality(self: _Beside, *, wait: bool = True) -> Any:
        """The running weights and KV dtype on real text: a QualityMeasured. A minute or so; the first time the checkpoint's own
        weights are measured, too, for comparison."""
        return self.studies.measure_quality(wait)

    def measure_roofs(self: Any, *, again: bool = False, only_kept: bool = False, wait: bool = True) -> Any:
        """What this device reaches, in bytes and operations a second: a RoofsMeasured. Measured once, about two seconds, and kept.

        ``again``: anew. ``only_kept``: None where none are kept. Whoever runs waits meanwhile; so there is no ``wait`` False.
        ValueError where there is no memory for it.
        """
        return device_study.roofs(self, again=again, only_kept=only_kept)

    def measure_memory(self: Any, *, wait: bool = True) -> Any:
        """What weights, KV pool and one forward pass take of the memory: a MemoryMeasured. A second or so, in which others wait."""
        return device_study.memory(self)

    def trace_attention(
        self: _Beside, layer: int, *, request_id: str = "", row: int = -1, head: int = 0, num_splits: int | None = None,
        num_sms: int = 132, block_m: int | None = None, block_n: int | None = None, capacity: int = CAPACITY, trace_id: str = "",
        wait: bool = True,
    ) -> Any:  # fmt: skip
        """The next step's attention call of a layer as our kernel does it, tile by tile, on its real Q, K, V and block tables: an
        AttentionTraced for each launch (a step of prompts and decodes has two; the last is returned).

        ``row`` (of its tokens in the step; negative: from the end) of ``request_id`` ("": the longest) and ``head``: whose softmax is told
        as it goes; ``num_splits``, ``block_m``, ``block_n``: None: as the kernel's launch chooses, on a CPU for ``num_sms``
        multiprocessors; ``capacity``: records of the trace. ``wait``: steps the engine until there is a step to trace, and keeps what
        the steps gave. ValueError for what is not there or does not fit, without Triton, or when nothing runs.
        """
        choice = Choice(layer, request_id, row, head, num_splits, num_sms, block_m, block_n, capacity)
        return self.studies.trace_attention(trace_id, choice, wait)

    def cancel_quantization(self: _Beside) -> None:
        """Give up the weights and measurements that are under way: what runs stays."""
        self.requantizer.cancel()
        self.studies.cancel()
