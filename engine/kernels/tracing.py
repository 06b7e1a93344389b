"""The tile schedule as a kernel itself recorded it: a bounded buffer that it fills, and what is read from it.

A kernel traces when its constexpr TRACE is on; off, the compiled code is that of a kernel without the tracing code. Each program takes
the next row of the buffer by an atomic add, so rows are in the order in which tiles were finished.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

TILE, PROGRAM = 0, 1  # kinds of a record: a K and V tile was done; a program ended

# What a row holds, int64 each. The kernel writes by these places: tile_record and program_record of trace_device.
FIELDS = (
    "kind",  # TILE or PROGRAM
    "program_x",
    "program_y",
    "program_z",
    "q_start",  # first query row, within its request
    "q_rows",
    "kv_start",  # TILE: first key, within its request; PROGRAM: first key of its range
    "kv_rows",  # TILE: keys in the tile; PROGRAM: keys in the range that it went over
    "running_max",  # of the chosen row, natural units, float32 bits (-inf: it has seen nothing yet)
    "running_sum",  # of the chosen row, float32 bits
    "bytes_loaded",  # TILE: K and V; PROGRAM: Q
    "bytes_stored",  # PROGRAM: output and log-sum-exp; TILE: nothing, but see TraceBuffer.standard
    "masked",  # 1: the tile was masked element by element
    "sm",  # multiprocessor (CUDA; else -1), as are the next four (else 0)
    "clock_start",  # the multiprocessor's own cycles at the tile's edges
    "clock_end",
    "time_start",  # the GPU's global timer in ns; it ticks in steps of up to a microsecond
    "time_end",
)
_FLOATS = ("running_max", "running_sum")
_DEFAULT_CAPACITY = 1 << 17


@dataclass(frozen=True)
class Trace:
    """Columns of a trace in the order of recording. ``dropped``: records that found the buffer full.

    Bytes are those of Q, K, V, output and log-sum-exp that a program asked for; the block table and the lengths (a few bytes a
    tile) are not counted, nor is what a cache saved.
    """

    columns: dict[str, np.ndarray]
    dropped: int

    def __len__(self) -> int:
        return len(self.columns["kind"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def of(self, kind: int) -> "Trace":
        """The records of one kind (nothing is known of which of them were dropped)."""
        chosen = self.columns["kind"] == kind
        return Trace({name: column[chosen] for name, column in self.columns.items()}, self.dropped)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each record as a dict of Python numbers."""
        names = list(self.columns)
        for values in zip(*(self.columns[name].tolist() for name in names), strict=True):
            yield dict(zip(names, values, strict=True))


class TraceBuffer:
    """Memory on the device for ``capacity`` records. ``row``: the chosen row of each query tile whose maximum and sum are recorded
    (the last row of a tile that is shorter).

    ``standard`` (flash_attention alone): count for attention that writes the matrix of scores, reads it for the softmax, writes the
    probabilities and reads them (Dao et al., arXiv 2205.14135, algorithm 0): the same kernel then skips no tile, and the bytes of
    each are those of K and V and of its part of S and P, twice each, in the dtype of Q. What it computes stays the same.
    """

    def __init__(
        self, device: torch.device | str, capacity: int = _DEFAULT_CAPACITY, row: int = 0, standard: bool = False
    ) -> None:
        if not isinstance(capacity, int) or capacity < 1:
            raise ValueError(f"the capacity of a trace must be an integer >= 1, got {capacity!r}")
        if not isinstance(row, int) or row < 0:
            raise ValueError(f"the traced row must be an integer >= 0, got {row!r}")
        self.capacity = capacity
        self.row = row
        self.standard = standard
        self.tensor = torch.zeros(1 + capacity, len(FIELDS), dtype=torch.int64, device=device)  # row 0 counts

    def clear(self) -> None:
        self.tensor[0] = 0

    def read(self) -> Trace:
        """What was recorded so far. Waits for the device."""
        count = int(self.tensor[0, 0])
        kept = min(count, self.capacity)
        host = self.tensor[1 : 1 + kept].cpu().numpy()
        columns: dict[str, np.ndarray] = {}
        for i, name in enumerate(FIELDS):
            column = host[:, i].copy()
            columns[name] = column.astype(np.int32).view(np.float32) if name in _FLOATS else column
        return Trace(columns, count - kept)
