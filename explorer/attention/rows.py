"""The tiles of an attention kernel as arrays: from what a kernel recorded, or from the arithmetic that it follows. Pure.

T tiles in the order of recording, P programs in the order of their first tile, R rows of the picture: a query tile of one head of one
request, or, of a decode, all new tokens of one KV head of one request. A plane is what is drawn as one grid: a head, or all of a decode.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.kernels.flash_attention.schedule import FlashConfig, tile_schedule
from engine.kernels.tracing import PROGRAM, TILE
from explorer.attention.shape import DTYPE_BYTES, Shape

ORDER, TIME, MODELLED = "order", "time", "modelled"  # what the lanes' axis is
RECORDED, DERIVED = "recorded", "derived"


@dataclass(frozen=True)
class Schedule:
    """Columns of tiles, programs and rows (see the module). ``start``, ``end`` of a tile: places in the order; ns; tiles' times."""

    tiles: dict[str, np.ndarray]  # program, k, kv_start, kv_rows, bytes, masked, m, total, start, end
    programs: dict[str, np.ndarray]  # row, x, y, z, lane, loaded, stored
    rows: dict[str, np.ndarray]  # plane, index, first, stop, total (tiles), q_start, q_rows, head, request
    planes: list[tuple[str, int, int]]  # title, rows, columns
    lanes: list[str]
    block_n: int
    clock: str = ORDER
    source: str = RECORDED
    dropped: int = 0

    @property
    def num_tiles(self) -> int:
        return len(self.tiles["program"])

    @property
    def bytes_loaded(self) -> int:
        return int(self.tiles["bytes"].sum() + self.programs["loaded"].sum())

    @property
    def bytes_stored(self) -> int:
        return int(self.programs["stored"].sum())

    @property
    def skipped(self) -> int:
        """Tiles that were never loaded."""
        return int((self.rows["total"] - (self.rows["stop"] - self.rows["first"])).sum())


def derived(shape: Shape) -> Schedule:
    """What the kernel's own arithmetic says that it will do, program after program as a GPU numbers them: query tiles
    of a head first, from the last one. (The interpreter takes the heads of a query tile first.)"""
    config = FlashConfig(shape.block_m, shape.block_n)
    ranges = tile_schedule(shape.seq_len, shape.seq_len, config, shape.causal, shape.window or None)
    bn, d = shape.block_n, shape.head_dim
    tiles: dict[str, list[Any]] = {name: [] for name in ("program", "kv_start", "kv_rows", "bytes", "masked")}
    launch = [(x, head, found) for head in range(shape.group) for x, found in enumerate(reversed(ranges))]
    for program, (_x, _head, found) in enumerate(launch):
        for start in found.tiles(bn):
            rows = min(bn, found.stop - start)
            tiles["program"].append(program)
            tiles["kv_start"].append(start)
            tiles["kv_rows"].append(rows)
            tiles["bytes"].append(2 * rows * d * DTYPE_BYTES)
            tiles["masked"].append(int(not found.full_start <= start < found.full_stop))
    columns: dict[str, Any] = {name: np.array(values, np.int64) for name, values in tiles.items()}
    count = len(columns["program"])
    columns |= {"m": np.full(count, np.nan, np.float32), "total": np.full(count, np.nan, np.float32)}
    columns |= {"start": np.arange(count, dtype=float), "end": np.arange(1, count + 1, dtype=float)}
    programs = {
        "x": [x for x, _head, _found in launch], "y": [head for _x, head, _found in launch], "z": [0] * len(launch),
        "loaded": [found.q_rows * d * DTYPE_BYTES for *_at, found in launch],
        "stored": [found.q_rows * (d * DTYPE_BYTES + 4) for *_at, found in launch],
        "q_start": [found.q_start for *_at, found in launch], "q_rows": [found.q_rows for *_at, found in launch],
        "first": [found.start for *_at, found in launch], "stop": [found.stop for *_at, found in launch],
    }  # fmt: skip
    made = {name: np.array(values, np.int64) for name, values in programs.items()}
    return replace(
        _flash(columns, made, [(shape.seq_len, shape.seq_len)], shape.block_m, bn, lambda z, head: _head_title(head)),
        source=DERIVED,
    )


def derived_tiles(shape: Shape) -> int:
    """How many tiles that are."""
    ranges = tile_schedule(
        shape.seq_len, shape.seq_len, FlashConfig(shape.block_m, shape.block_n), shape.causal, shape.window or None
    )
    return shape.group * sum(-(-(found.stop - found.start) // shape.block_n) for found in ranges)


def recorded(columns: Mapping[str, np.ndarray], shape: Shape, dropped: int = 0) -> Schedule:
    """What the kernel recorded when it was run for ``shape``."""
    lengths = [(shape.seq_len, shape.seq_len)]
    return replace(of_records(columns, lengths, shape.block_m, shape.block_n), dropped=dropped)


def of_records(columns: Mapping[str, np.ndarray], lengths: list[tuple[int, int]], block_m: int, block_n: int) -> Schedule:
    """Of a launch of flash_attention. ``columns``: by the names of ``engine.kernels.tracing.FIELDS``; ``lengths``: (queries, keys) of
    each request."""
    tiles, programs = _split(columns)
    made = _flash(tiles, programs, lengths, block_m, block_n, lambda z, head: _plane_title(z, head, len(lengths)))
    return _timed(made, columns)


def of_decode(columns: Mapping[str, np.ndarray], lengths: list[tuple[int, int]], kv_heads: int, block_n: int) -> Schedule:
    """Of a launch of paged_decode: all requests and KV heads in one plane, a program for each part of a row."""
    tiles, programs = _split(columns)
    row = programs["z"] * kv_heads + programs["y"]
    count = len(lengths) * kv_heads
    totals = np.array([-(-kv // block_n) for _q, kv in lengths for _head in range(kv_heads)], np.int64)
    first, stop = totals.copy(), np.zeros(count, np.int64)
    np.minimum.at(first, row, programs["first"] // block_n)
    np.maximum.at(stop, row, -(-programs["stop"] // block_n))
    rows = {
        "plane": np.zeros(count, np.int64), "index": np.arange(count), "first": np.minimum(first, stop), "stop": stop, "total": totals,
        "q_start": np.zeros(count, np.int64), "q_rows": np.array([q for q, _kv in lengths for _head in range(kv_heads)], np.int64),
        "head": np.tile(np.arange(kv_heads), len(lengths)), "request": np.repeat(np.arange(len(lengths)), kv_heads),
    }  # fmt: skip
    made = _assemble(tiles, programs, row, rows, [("", count, int(totals.max(initial=1)))], block_n)
    return _timed(made, columns)


def dealt(made: Schedule, slots: int) -> Schedule:
    """The same programs dealt to ``slots`` places that work side by side, in the order of the launch, each tile one unit of time: a
    model of what a GPU with so many places does."""
    order = np.lexsort((made.programs["x"], made.programs["y"], made.programs["z"]))
    counts = np.bincount(made.tiles["program"], minlength=len(order))
    free = np.zeros(max(1, min(slots, len(order))))
    lane, begin = np.zeros(len(order), np.int64), np.zeros(len(order))
    for program in order:
        place = int(free.argmin())
        lane[program], begin[program] = place, free[place]
        free[place] += counts[program]
    tiles = dict(made.tiles)
    program = tiles["program"]
    within = np.empty(len(program), np.int64)  # a tile's place among those of its program
    together = np.argsort(program, kind="stable")
    within[together] = np.arange(len(program)) - np.searchsorted(program[together], program[together])
    start = begin[program] + within
    by_time = np.argsort(start, kind="stable")
    tiles = {name: column[by_time] for name, column in tiles.items()}
    tiles |= {"start": start[by_time], "end": start[by_time] + 1}
    lanes = [str(i) for i in range(len(free))]
    return replace(made, tiles=tiles, programs={**made.programs, "lane": lane}, lanes=lanes, clock=MODELLED)


# ------------------------------------------------------------------------------------------------------------ building


def _split(columns: Mapping[str, np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Tiles and programs of the records. A program whose own record was dropped is known by its tiles."""
    kind = columns["kind"]
    key = np.stack([columns["program_x"], columns["program_y"], columns["program_z"]], 1)
    tile, whole = kind == TILE, kind == PROGRAM
    ids, first, of_all = np.unique(key, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")  # by the first record
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    program = place[of_all.reshape(-1)]
    tiles = {name: columns[name][tile] for name in ("kv_start", "kv_rows", "masked")}
    tiles |= {"program": program[tile], "bytes": columns["bytes_loaded"][tile]}
    tiles |= {"m": columns["running_max"][tile], "total": columns["running_sum"][tile]}
    count = len(order)
    programs = {name: ids[order][:, i] for i, name in enumerate("xyz")}
    for name, field in (("q_start", "q_start"), ("q_rows", "q_rows")):
        programs[name] = np.zeros(count, np.int64)
        programs[name][program] = columns[field]
    low, high = np.full(count, np.iinfo(np.int64).max), np.zeros(count, np.int64)
    np.minimum.at(low, program, columns["kv_start"])
    np.maximum.at(high, program, columns["kv_start"] + columns["kv_rows"])
    programs |= {"first": low, "stop": high}
    for name, field in (("loaded", "bytes_loaded"), ("stored", "bytes_stored")):
        programs[name] = np.zeros(count, np.int64)
        programs[name][program[whole]] = columns[field][whole]
    sm = np.full(count, -1, np.int64)
    sm[program] = columns["sm"]
    programs["sm"] = sm
    return tiles, programs


def _timed(made: Schedule, columns: Mapping[str, np.ndarray]) -> Schedule:
    """With real time where a GPU recorded it, else with places in the order."""
    tile = columns["kind"] == TILE
    count = made.num_tiles
    if count and (columns["sm"][tile] >= 0).all():
        begin = columns["time_start"][tile].min()
        start, end = columns["time_start"][tile] - begin, columns["time_end"][tile] - begin
        sms, lane = np.unique(made.programs["sm"], return_inverse=True)
        tiles = {**made.tiles, "start": start.astype(float), "end": np.maximum(end, start + 1).astype(float)}
        lanes = [f"SM {sm}" for sm in sms]
        return replace(made, tiles=tiles, programs={**made.programs, "lane": lane.reshape(-1)}, lanes=lanes, clock=TIME)
    tiles = {**made.tiles, "start": np.arange(count, dtype=float), "end": np.arange(1, count + 1, dtype=float)}
    return replace(made, tiles=tiles)


def _flash(
    tiles: dict[str, np.ndarray],
    programs: dict[str, np.ndarray],
    lengths: list[tuple[int, int]],
    block_m: int,
    block_n: int,
    title: Any,
) -> Schedule:
    """A plane for each head of each request, a row for each query tile, a program for each row."""
    z, y = programs["z"], programs["y"]
    plane_keys = sorted({(int(a), int(b)) for a, b in zip(z, y)})
    number = {key: i for i, key in enumerate(plane_keys)}
    q_len, kv_len = np.array(lengths, np.int64).reshape(-1, 2).T
    total = -(-kv_len // block_n)
    stop = np.minimum(-(-programs["stop"] // block_n), total[z])
    rows = {
        "plane": np.array([number[int(a), int(b)] for a, b in zip(z, y)], np.int64), "index": programs["q_start"] // block_m,
        "first": np.minimum(programs["first"] // block_n, stop), "stop": stop, "total": total[z], "q_start": programs["q_start"],
        "q_rows": programs["q_rows"], "head": y, "request": z,
    }  # fmt: skip
    planes = [(title(a, b), int(-(-q_len[a] // block_m)), int(max(1, total[a]))) for a, b in plane_keys]
    return _assemble(tiles, programs, np.arange(len(z)), rows, planes, block_n)


def _assemble(
    tiles: dict[str, np.ndarray],
    programs: dict[str, np.ndarray],
    row: np.ndarray,
    rows: dict[str, np.ndarray],
    planes: list[tuple[str, int, int]],
    block_n: int,
) -> Schedule:
    kept = {name: programs[name] for name in ("x", "y", "z", "loaded", "stored")}
    kept |= {"row": row, "lane": np.arange(len(row)), "sm": programs.get("sm", np.full(len(row), -1))}
    lanes = [str(i) for i in range(len(row))]
    return Schedule({**tiles, "k": tiles["kv_start"] // block_n}, kept, rows, planes, lanes, block_n)


def _head_title(head: int) -> str:
    return str(head)


def _plane_title(request: int, head: int, requests: int) -> str:
    return str(head) if requests == 1 else f"{request} · {head}"
