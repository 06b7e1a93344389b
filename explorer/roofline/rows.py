"""Engine steps as points of a roofline: operations and bytes as counted, time as measured. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from engine.events.hardware import MemoryMeasured, RoofsMeasured
from engine.events.types import EngineStarted, Event, StepDone
from engine.hardware.roofline import Bound, Roofs, bound_by
from explorer.i18n import _

KEPT = 20_000  # steps that are remembered
WINDOW = 400  # steps that are drawn, up to the shown one
PHASES = {"prefill": _("prefill"), "decode": _("decode"), "mixed": _("mixed")}  # mixed: prefill of some, decode of others
BITS_OF = {"int8": 8, "int8_w8a8": 8, "fp8": 8}  # method -> bits that the planner knows; the others in few bits: 4


@dataclass(frozen=True)
class Step:
    """One engine step: operations and bytes counted, ``seconds`` of its forward pass measured."""

    step: int
    phase: str  # of PHASES
    requests: int
    tokens: int
    context: int  # the longest of its requests afterwards
    flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_write_bytes: float
    seconds: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """Operations a second, reached."""
        return self.flops / self.seconds

    @property
    def bandwidth(self) -> float:
        """Bytes a second, reached; counted bytes over measured time."""
        return self.bytes / self.seconds


def step_of(event: StepDone, on_gpu: bool = False) -> Step | None:
    """None for a step in which no model ran.

    On a GPU the forward pass is only sent off; the step waits for it while it samples, so that time is taken with it.
    """
    seconds = (event.forward_ms + (event.sample_ms if on_gpu else 0.0)) / 1e3
    moved = event.weight_bytes + event.kv_read_bytes + event.kv_write_bytes
    if not event.runs or not seconds > 0 or not moved > 0 or not event.flops > 0:
        return None
    phases = {run.phase for run in event.runs}
    return Step(
        step=event.step, phase="mixed" if len(phases) > 1 else phases.pop(), requests=len(event.runs),
        tokens=sum(run.num_tokens for run in event.runs), context=max(run.start + run.num_tokens for run in event.runs),
        flops=event.flops, weight_bytes=event.weight_bytes, kv_read_bytes=event.kv_read_bytes,
        kv_write_bytes=event.kv_write_bytes, seconds=seconds,
    )  # fmt: skip


def roofs_of(event: RoofsMeasured) -> Roofs:
    return Roofs(
        name=event.name, kind="measured", bandwidth=max(event.copy_bandwidth, event.read_bandwidth), peak=dict(event.peak),
        copy_bandwidth=event.copy_bandwidth, read_bandwidth=event.read_bandwidth, fingerprint=event.fingerprint,
    )  # fmt: skip


@dataclass(frozen=True)
class Judged:
    """A step under a roof. ``share``: of the rate that the roofs allow at its intensity; above 1 where a cache helped."""

    bound: Bound
    share: float


def judge(step: Step, roofs: Roofs, dtype: str) -> Judged:
    """What bounds a step on a device, and how near it came. ValueError for a dtype whose rate is not known."""
    bound = bound_by(step.flops, step.bytes, roofs.peak_of(dtype), roofs.bandwidth)
    return Judged(bound, bound.seconds / step.seconds)


class RooflineRows:
    """What the page knows of the run so far."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.started: EngineStarted | None = None
        self.roofs: list[RoofsMeasured] = []
        self.memory: list[MemoryMeasured] = []
        self.changed = False

    def feed(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, StepDone):
                step = step_of(event, self.on_gpu)
                if step is not None and (not self.steps or step.step > self.steps[-1].step):
                    self.steps.append(step)
                    self.changed = True
            elif isinstance(event, EngineStarted):
                self.__init__()  # type: ignore[misc]  # another run
                self.started, self.changed = event, True
            elif isinstance(event, RoofsMeasured):
                self.roofs.append(event)
                self.changed = True
            elif isinstance(event, MemoryMeasured):
                self.memory.append(event)
                self.changed = True
        if len(self.steps) > 2 * KEPT:
            del self.steps[:-KEPT]

    @property
    def on_gpu(self) -> bool:
        return self.started is not None and str(self.started.device.get("device", "")).startswith("cuda")

    @property
    def dtype(self) -> str:
        """The number format that the engine computes in."""
        return str(self.started.device.get("dtype", "float32")) if self.started is not None else "float32"

    @property
    def model(self) -> dict[str, Any]:
        return self.started.model if self.started is not None else {}

    @property
    def title(self) -> str:
        """The model's name; of a directory its last part."""
        name = str(self.model.get("name") or _("the model"))
        return (name.rstrip("/").rpartition("/")[2] or name) if name[:1] in "/.~" else name

    def up_to(self, step: int, window: int = WINDOW) -> list[Step]:
        """The last steps up to ``step``, oldest first."""
        end = len(self.steps)
        while end and self.steps[end - 1].step > step:
            end -= 1
        return self.steps[max(0, end - window) : end]

    @property
    def device_roofs(self) -> Roofs | None:
        """As they were measured last: a fact of the device, whatever step is on the screen."""
        return roofs_of(self.roofs[-1]) if self.roofs else None


def running_bits(method: str | None, dtype: str) -> int:
    """Bits of the running weights as the planner has them (32, 16, 8, 4): those of the dtype, or the method's."""
    return BITS_OF.get(method, 4) if method else 32 if dtype == "float32" else 16
