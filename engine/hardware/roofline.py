"""The roofline of a device: what bounds a piece of work, arithmetic or memory, and by how much.

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures" (CACM 2009):
work of so many operations for each byte moved runs at no more than min(peak, intensity x bandwidth).

The roofs of a GPU that is not here are its data sheet's; those of this machine are measured, see ``engine.hardware.roofs``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.hardware.gpus import Gpu


@dataclass(frozen=True, kw_only=True)
class Roofs:
    """Bandwidth in bytes a second, ``peak`` in operations a second by dtype (two for a multiply-add)."""

    name: str
    kind: str  # "measured" | "modelled"
    bandwidth: float  # the roof: the larger of copy and read where measured
    peak: Mapping[str, float]
    copy_bandwidth: float | None = None  # bytes read and written, together
    read_bandwidth: float | None = None
    fingerprint: str = ""

    def peak_of(self, dtype: str) -> float:
        """ValueError for a dtype whose rate is not known."""
        name = dtype if dtype in self.peak else {"bfloat16": "bf16", "float16": "fp16", "float32": "tf32"}.get(dtype, dtype)
        if name not in self.peak:
            raise ValueError(f"{self.name} has no rate for {dtype!r}; it has {', '.join(self.peak)}")
        return self.peak[name]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What bounds a piece of work. ``times``: the binding time over the other; 1 at the ridge."""

    by: str  # "memory" | "compute"
    compute_s: float
    memory_s: float
    times: float

    @property
    def seconds(self) -> float:
        """The least time that both roofs allow, when arithmetic and copies overlap wholly."""
        return max(self.compute_s, self.memory_s)


def attainable(intensity: float, peak: float, bandwidth: float) -> float:
    """Operations a second that the roofs allow at ``intensity`` operations a byte. ValueError for a negative number or a roof of 0."""
    if intensity < 0 or peak <= 0 or bandwidth <= 0:
        raise ValueError(f"intensity must be >= 0, peak and bandwidth > 0, got {intensity}, {peak} and {bandwidth}")
    return min(peak, intensity * bandwidth)


def ridge(peak: float, bandwidth: float) -> float:
    """Operations a byte where the roofs meet: below it memory binds, above it arithmetic."""
    if peak <= 0 or bandwidth <= 0:
        raise ValueError(f"peak and bandwidth must be > 0, got {peak} and {bandwidth}")
    return peak / bandwidth


def bound_by(flops: float, num_bytes: float, peak: float, bandwidth: float) -> Bound:
    """What bounds ``flops`` operations on ``num_bytes`` bytes. ValueError for work that is none, or a roof of 0."""
    if flops < 0 or num_bytes < 0 or flops + num_bytes == 0 or peak <= 0 or bandwidth <= 0:
        raise ValueError(
            f"work and roofs must be > 0, got {flops} operations, {num_bytes} bytes, {peak} and {bandwidth} a second"
        )
    compute, memory = flops / peak, num_bytes / bandwidth
    low, high = sorted((compute, memory))
    return Bound(
        by="memory" if memory > compute else "compute",
        compute_s=compute,
        memory_s=memory,
        times=high / low if low else float("inf"),
    )


def gpu_roofs(gpu: Gpu) -> Roofs:
    """The data sheet's roofs of a GPU."""
    return Roofs(name=gpu.title, kind="modelled", bandwidth=gpu.bandwidth, peak=dict(gpu.peak))
