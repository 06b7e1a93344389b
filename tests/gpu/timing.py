"""How long work takes on the device, with cold caches where that is asked for; on a CPU (a dry run) by the clock."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

AHEAD_CYCLES = 1_000_000  # that the device waits before it is timed: half a millisecond in which the host sends off the work
FLUSH_BYTES = 256 << 20  # more than the second-level cache of any GPU so far


@dataclass
class Bench:
    """``dry``: sizes that the interpreter can do on a CPU, to see that everything runs; the numbers mean nothing then."""

    device: str
    dry: bool
    deadline: float  # time.monotonic()
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._flush = None if self.dry else torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def add(self, what: str, shape: str, value: float, unit: str, **more: Any) -> None:
        """A line of the table. ``target``: what is promised, where something is."""
        self.rows.append({"what": what, "shape": shape, "value": value, "unit": unit, **more})

    def ms(self, work: Callable[[], Any], cold: bool = False, runs: int = 20) -> float:
        """Median milliseconds of ``work``, after it has run twice. ``cold``: the second-level cache holds none of what it reads."""
        for _ in range(1 if self.dry else 2):
            work()
        if self.dry:
            began = time.perf_counter()
            work()
            return 1e3 * (time.perf_counter() - began)
        times = []
        for _ in range(runs):
            if cold and self._flush is not None:
                self._flush.zero_()
            torch.cuda._sleep(AHEAD_CYCLES)  # else a short kernel is timed together with the host's launching it
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        return statistics.median(times)

    def best(self, makes: "list[tuple[str, Callable[[], Any]]]", cold: bool = False) -> tuple[str, float]:
        """Name and milliseconds of the fastest; one that the device refuses is left out. RuntimeError where none is left."""
        found: tuple[str, float] | None = None
        said = ""
        for name, work in makes[:1] if self.dry else makes:
            if found is not None and self.left < 60:
                break
            try:
                took = self.ms(work, cold, runs=10)
            except Exception as error:  # too much shared memory, no such instruction: another one may fit
                said = f"{name}: {type(error).__name__}: {error}"
                continue
            if found is None or took < found[1]:
                found = name, took
        if found is None:
            raise RuntimeError(f"none of the configurations ran; the last said {said[:300]}")
        return found
