"""Where the parts of a program lie in an SM: what the compiler made of them, and what a GPU has. Pure."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.hardware.occupancy import Occupancy, occupancy
from explorer.attention.shape import DTYPE_BYTES, Shape

_ALLOC = re.compile(r"%(\w+) = (ttg\.local_alloc|ttng\.tmem_alloc)\b.*-> !ttg\.memdesc<([0-9x]+)x([a-z]+)(\d+)[,>]")
_FEEDS = re.compile(r"local_alloc %(\w+)")
KNOWN = ("q", "k", "v", "s", "acc", "p")
TENSOR_MEMORY_BYTES = 512 * 128 * 4  # of an SM of compute capability 10.0: 512 columns of 128 lanes of 32 bits (PTX ISA, tcgen05)


@dataclass(frozen=True)
class Buffer:
    """A buffer of a program. ``where``: "shared" or "tensor"; ``copies``: tiles that it holds at a time; ``nbytes``: of all of them."""

    name: str
    where: str
    copies: int
    nbytes: int


def buffers(ttgir: str) -> list[Buffer]:
    """The buffers that Triton's IR allocates, each once: the loops over the tiles come one after the other and share them.

    A name is that of the variable in the kernel, so the whole is told by the compiler and not by us. ("s" beside a K in shared memory is
    K on its way to the product.)
    """
    found: dict[tuple[str, str], Buffer] = {}
    for line in ttgir.splitlines():
        match = _ALLOC.search(line)
        if match is None:
            continue
        name, op, shape, _kind, bits = match.groups()
        where = "shared" if op.startswith("ttg.") else "tensor"
        feeds = _FEEDS.search(line)
        name = _base(name)
        if feeds is not None and where == "shared":
            name = _base(feeds[1]) if _base(feeds[1]) in KNOWN else name
        sizes = [int(x) for x in shape.split("x")]
        nbytes = math.prod(sizes) * int(bits) // 8
        if name not in KNOWN or nbytes < 512:  # barriers, and what is too small to be drawn
            continue
        made = Buffer(name, where, sizes[0] if len(sizes) == 3 else 1, nbytes)
        before = found.get((name, where))
        if before is None or before.nbytes < nbytes:
            found[name, where] = made
    order = {name: i for i, name in enumerate(KNOWN)}
    return sorted(found.values(), key=lambda b: order[b.name])


def _base(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


@dataclass(frozen=True)
class Part:
    """A piece of a bar. ``tile``: "k" or "v" where it holds tiles, whose numbers change as it goes."""

    name: str
    nbytes: int
    copies: int = 1
    tile: str = ""
    other: bool = False  # the rest, of which nothing is known


@dataclass(frozen=True)
class Bar:
    """``limit``: bytes that a program can have; ``used``: bytes that it takes, by the compiler; None: unknown, the parts alone are."""

    title: str
    limit: int
    used: int | None
    parts: tuple[Part, ...]
    kind: str  # "measured", "derived" or "modelled"


def bars(shape: Shape, report: Mapping[str, Any] | None) -> list[Bar]:
    """What a program takes on the shape's GPU. Without a report (not compiled, or refused before that): the sizes alone, modelled."""
    limits = shape.chip.limits
    found = [Buffer(**b) for b in report["buffers"]] if report else []
    done = report is not None and report.get("shared_bytes") is not None
    return [
        _shared(shape, report if done else None, [b for b in found if b.where == "shared"], limits.shared_per_block),
        _registers(shape, report if done else None, bool([b for b in found if b.where == "tensor"]), 4 * limits.registers_per_sm),
        *_tensor(report if done else None, [b for b in found if b.where == "tensor"]),
    ]


def _shared(shape: Shape, report: Mapping[str, Any] | None, found: list[Buffer], limit: int) -> Bar:
    if report is None:
        tile = shape.block_n * shape.padded * DTYPE_BYTES
        parts = tuple(Part(n, shape.num_stages * tile, shape.num_stages, n.lower()) for n in ("K", "V"))
        return Bar("shared", limit, None, parts, "modelled")
    parts = tuple(Part(b.name.upper(), b.nbytes, b.copies, b.name if b.name in "kv" else "") for b in found)
    return Bar("shared", limit, int(report["shared_bytes"]), parts, "measured")


def _registers(shape: Shape, report: Mapping[str, Any] | None, tensor: bool, limit: int) -> Bar:
    """float32 all of them, save P, which goes into the second product in 16 bits."""
    rows = 4 * shape.block_m
    parts = [Part("m", rows), Part("l", rows)]
    if not tensor:
        parts = [Part("acc", rows * shape.padded), *parts, Part("S, P", rows * shape.block_n)]
    used = None
    if report is not None:
        used = 4 * int(report["registers"]) * 32 * shape.num_warps
        rest = used - sum(part.nbytes for part in parts)
        if rest > 0:
            parts.append(Part("", rest, other=True))
    return Bar("registers", limit, used, tuple(parts), "modelled" if report is None else "derived")


def _tensor(report: Mapping[str, Any] | None, found: list[Buffer]) -> list[Bar]:
    if report is None or not report.get("tensor_memory_columns"):
        return []
    names = {"acc": "acc", "s": "S", "p": "P"}
    parts = tuple(Part(names.get(b.name, b.name), b.nbytes) for b in found)
    return [Bar("tensor", TENSOR_MEMORY_BYTES, 512 * int(report["tensor_memory_columns"]), parts, "measured")]


def occupancy_of(shape: Shape, report: Mapping[str, Any]) -> Occupancy | None:
    """None where the compiler did not get so far."""
    if report.get("registers") is None or report.get("shared_bytes") is None:
        return None
    limits = shape.chip.limits
    return occupancy(limits, threads=32 * shape.num_warps, registers=int(report["registers"]), shared=int(report["shared_bytes"]))
