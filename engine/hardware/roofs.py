"""The roofs of this machine, measured once (about two seconds) and kept with its fingerprint.

A measured roof is the best of several tries of torch, in the arithmetic that the engine has for a dtype here: no program is promised
to reach it, and a matrix that fits a cache may pass the bandwidth's.
"""

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from engine.hardware.device import TORCH_DTYPES, cpu_flags, cpu_name, widens
from engine.hardware.ops_cpu import half_operator, pack_half
from engine.hardware.roofline import Roofs

FORMAT = 2
COPY_BYTES = {"cpu": 1 << 27, "cuda": 1 << 30}  # far beyond a last-level cache's share of a virtual machine, beyond any L2
SECONDS = 0.3  # for each of the five measurements
MATRIX = {"cpu": 2048, "cuda": 8192}  # rows of the largest square matrix tried


def fingerprint(device: torch.device) -> str:
    """What a measurement holds for: the processor, the threads that torch uses, torch's version."""
    if device.type == "cuda":
        facts: tuple[Any, ...] = (
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_capability(device),
            torch.version.cuda,
        )
    else:
        facts = (cpu_name(), sorted(cpu_flags()), os.cpu_count(), torch.get_num_threads())
    return hashlib.sha256(repr((FORMAT, device.type, facts, torch.__version__)).encode()).hexdigest()[:16]


def kept_roofs(device: torch.device | str, cache: Path) -> Roofs | None:
    """The roofs of this machine as they were measured before, from the folder ``cache``; None where there are none."""
    return _read(_file(cache, fingerprint(_checked(device))))


def measured_roofs(
    device: torch.device | str = "cpu", *, cache: Path | None = None, seconds: float = SECONDS, again: bool = False
) -> Roofs:
    """The roofs of this machine, from ``cache`` (a folder) where they are kept there, or measured now and kept.

    ``seconds`` are spent on each of five measurements. ``again``: measured now in any case. ValueError for a device that is neither a
    CPU nor CUDA.
    """
    device = _checked(device)
    mark = fingerprint(device)
    file = _file(cache, mark) if cache is not None else None
    kept = None if again else _read(file)
    if kept is not None:
        return kept
    copy, read = copy_bandwidth(device, seconds), read_bandwidth(device, seconds)
    roofs = Roofs(
        name=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        kind="measured",
        bandwidth=max(copy, read),
        peak={name: matrix_rate(device, dtype, seconds) for name, dtype in TORCH_DTYPES.items()},
        copy_bandwidth=copy,
        read_bandwidth=read,
        fingerprint=mark,
    )
    if file is not None:
        _write(file, roofs)
    return roofs


def copy_bandwidth(device: torch.device, seconds: float = SECONDS) -> float:
    """Bytes a second of a copy, those read and those written."""
    size = COPY_BYTES[device.type]
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return 2 * size / _best(lambda: target.copy_(source), device, seconds)


def read_bandwidth(device: torch.device, seconds: float = SECONDS) -> float:
    """Bytes a second of a sum, which reads only."""
    size = COPY_BYTES[device.type]
    source = torch.zeros(size // 4, dtype=torch.float32, device=device)
    return size / _best(lambda: source.sum(), device, seconds)


def matrix_rate(device: torch.device, dtype: torch.dtype, seconds: float = SECONDS) -> float:
    """Operations a second of square matrix products: the best over sizes that double while the time lasts."""
    product = _widening if widens(device, dtype) else _plain
    best, size, left = 0.0, 256, seconds
    while size <= MATRIX[device.type] and left > 0:
        work = product(torch.full((size, size), 0.5, dtype=dtype, device=device))
        start = time.perf_counter()
        took = _best(work, device, left / 2)
        left -= time.perf_counter() - start
        best = max(best, 2 * size**3 / took)
        if took * 8 > left:  # one of twice the size would take more than there is
            break
        size *= 2
    return best


def _plain(a: torch.Tensor) -> Callable[[], Any]:
    """a times a, in its dtype."""
    out = torch.empty_like(a)
    return lambda: torch.mm(a, a, out=out)


def _widening(a: torch.Tensor) -> Callable[[], Any]:
    """a times a transposed, which is held in 16 bits; multiplied in float32."""
    x, packed, operator = a.float(), pack_half(a.float(), None), half_operator()
    return lambda: operator(x, packed)


def _checked(device: torch.device | str) -> torch.device:
    found = torch.device(device)
    if found.type not in MATRIX:
        raise ValueError(f"device must be 'cpu' or 'cuda', got {str(found)!r}")
    return found


def _file(cache: Path, mark: str) -> Path:
    return cache / f"roofs-{mark}.json"


def _best(work: Callable[[], Any], device: torch.device, seconds: float) -> float:
    """The shortest time of ``work`` in ``seconds`` of trying, at least two tries beside the first, which warms up."""
    work()
    best, end, tries = float("inf"), time.perf_counter() + seconds, 0
    while tries < 2 or time.perf_counter() < end:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best, tries = min(best, time.perf_counter() - start), tries + 1
    return best


def _read(file: Path | None) -> Roofs | None:
    """The kept roofs; None where there are none or the file is damaged: then they are measured anew."""
    if file is None or not file.is_file():
        return None
    try:
        roofs = Roofs(**json.loads(file.read_text(encoding="utf-8")))
        numbers = (roofs.bandwidth, *roofs.peak.values())
        return roofs if all(isinstance(n, float) and n > 0 for n in numbers) else None
    except (OSError, ValueError, TypeError, AttributeError):
        return None


def _write(file: Path, roofs: Roofs) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8") as part:
        json.dump(asdict(roofs), part)
    os.replace(part.name, file)
