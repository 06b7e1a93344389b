"""What is drawn of a schedule: its steps as bytes for the canvas, and the distribution of the gaps between tokens. Pure."""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, FixedTicker
from bokeh.models.annotations import Span

from engine.measures import RequestRecord
from explorer.batching.rows import StepRow
from explorer.i18n import _
from explorer.theme import BLUE, GREY, ORANGE, VERMILLION, figure

# -- the canvas ------------------------------------------------------------------------------------------------------------

HEAD = struct.Struct("<6I")  # sequence number before, after; steps, cells, bytes of JSON, 0
TIMES = struct.Struct("<2d")  # start, end in seconds
STEP = struct.Struct("<6I")  # step, cells, waiting, running, token budget, max_num_seqs


def pack(rows: Sequence[StepRow], names: dict[int, str], marks: Iterable[tuple[int, str]], before: int, after: int) -> bytes:
    """The wire format of ``explorer.canvas.schedule``: head, times, steps, cells, then JSON {names: {number: request}, marks: [[step, text]]}.

    Little endian. The times come first so that they lie on a multiple of 8 bytes.
    """
    more = json.dumps({"names": names, "marks": [list(mark) for mark in marks]}, separators=(",", ":")).encode()
    return b"".join(
        (
            HEAD.pack(before, after, len(rows), sum(r.num_cells for r in rows), len(more), 0),
            *(TIMES.pack(r.start_s, r.end_s) for r in rows),
            *(STEP.pack(r.step, r.num_cells, r.waiting, r.running, r.budget, r.max_num_seqs) for r in rows),
            *(r.cells for r in rows),
            more,
        )
    )


def names_in(rows: Sequence[StepRow], names: Mapping[int, str]) -> dict[int, str]:
    """Of the requests in these steps: number -> id."""
    if not rows:
        return {}
    cells = np.frombuffer(b"".join(r.cells for r in rows), "<u4").reshape(-1, 4)
    return {i: names[i] for i in np.unique(cells[:, 1]).tolist() if i in names}


# -- gaps between tokens -----------------------------------------------------------------------------------------------------

EDGES_MS = np.geomspace(1, 20_000, 49)
_TICKS = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
PERCENTILES = (("p50", BLUE, "solid"), ("p90", ORANGE, "dashed"), ("p99", VERMILLION, "dotted"))


def gaps_ms(records: Iterable[RequestRecord]) -> np.ndarray:
    """Every gap between two tokens of a request, float64 [gaps]."""
    found = [np.diff(np.array(r.token_times_s)) for r in records if len(r.token_times_s) > 1]
    return 1e3 * np.concatenate(found) if found else np.empty(0)


class GapsFigure:
    """How often which gap between tokens came, on a logarithmic axis, with the percentiles as lines."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({"left": [], "right": [], "count": [], "text": []})
        self.root: Any = figure(
            150, x_axis_type="log", x_range=(1, 20_000), y_axis_label=_("gaps"), x_axis_label=_("gap between two tokens, ms"),
            tooltips=[(_("gap"), "@text"), (_("how many"), "@count")],
        )  # fmt: skip
        self.root.quad(left="left", right="right", bottom=0, top="count", source=self.source, fill_color=GREY, fill_alpha=0.55, line_width=0)  # fmt: skip
        self.root.xaxis.ticker = FixedTicker(ticks=list(_TICKS))
        self.root.xaxis.major_label_overrides = {tick: f"{tick:,}" for tick in _TICKS}
        self.root.y_range.start = 0
        self.lines = {
            name: Span(location=1, dimension="height", line_color=colour, line_width=2, line_dash=dash, visible=False)
            for name, colour, dash in PERCENTILES
        }
        for line in self.lines.values():
            self.root.add_layout(line)
        self._shown: Any = None

    def show(self, gaps: np.ndarray, percentiles: dict[str, float]) -> None:
        """``percentiles`` in ms, NaN where there are none."""
        counts = np.histogram(np.clip(gaps, EDGES_MS[0], EDGES_MS[-1]), EDGES_MS)[0]
        key = (counts.tobytes(), tuple(percentiles.values()))
        if key == self._shown:
            return
        self._shown = key
        there = np.flatnonzero(counts)
        low, high = EDGES_MS[there], EDGES_MS[there + 1]
        self.source.data = {
            "left": low.tolist(), "right": high.tolist(), "count": counts[there].tolist(),
            "text": [f"{a:.3g} – {b:.3g} ms" for a, b in zip(low, high, strict=True)],
        }  # fmt: skip
        for name, line in self.lines.items():
            value = percentiles.get(name, float("nan"))
            line.update(visible=value == value, location=value if value == value else 1.0)
