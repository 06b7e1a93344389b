"""The tab "Tiles": the kernel's schedule, played."""

from typing import Any

import numpy as np
import panel as pn
import panel_material_ui as pmui

from explorer.attention import lab, words
from explorer.attention.labels import CSS, set_html
from explorer.attention.memory import Bar, bars, occupancy_of
from explorer.attention.rows import Schedule, dealt, derived, recorded
from explorer.attention.shape import Shape, row_scores
from explorer.attention.worker import decoded
from explorer.canvas.tiles import Tiles
from explorer.i18n import _
from explorer.theme import BADGES, card, in_file, pane

FIRST = 0.4  # of the tiles are done when a schedule is first shown
LANES = {_("as recorded"): "recorded", _("dealt to the chip (modelled)"): "dealt"}


class TilesPanel(pn.viewable.Viewer):
    """``view``: the page's view, which has the shape and what was found for it."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.in_file = in_file.get()
        self.made: Schedule | None = None  # as recorded or derived
        self.shown: Schedule | None = None  # what the canvas has
        self._of: Any = None
        self._stand = FIRST
        self._program: int | None = None  # that is looked at
        self._soft: Any = None
        self._memory: Any = None
        self.canvas = Tiles(self._looked, empty=_("Nothing to draw: no tile is seen by any query."))
        self.state, self.counts = pane(css=CSS), pane(css=CSS, margin=(10, 0, 12, 0))
        self.lanes = pmui.RadioButtonGroup(
            options=LANES,
            value="recorded",
            size="small",
            margin=(0, 0, 12, 0),
            sx={"& .MuiToggleButton-root": {"whiteSpace": "nowrap"}},
        )
        self._layout = card(
            _("The schedule of the kernel, tile by tile"), self.state, self.counts, *([] if self.in_file else [self.lanes]), self.canvas,
            kinds=("derived",) if self.in_file else ("measured", "derived"), margin=0,
            hint=_("Which program took which tile in which order, what lies in fast memory meanwhile, and one row’s softmax."),
            acts=_("Click a tile to go there, or play."),
        )  # fmt: skip

    def __panel__(self) -> pn.Column:
        return self._layout

    def _looked(self, program: int) -> None:
        self._program = program  # answered by the next update: in the document's own callbacks

    def update(self) -> None:
        view = self.view
        shape, answer = view.shape, view.run_answer
        of = (shape.run, answer is not None and "error" not in answer, self.lanes.value, view.slots_of_chip)
        if of != self._of:
            self._draw(shape, answer, of)
        if self.made is None:
            return
        seconds = lab.INTERPRETER.seconds(shape.run)
        shown = self.shown if self.shown is not None else self.made
        set_html(self.state, words.run_html(shape, shown, answer, seconds, view.too_many, self.in_file))
        self._draw_soft(shape)
        self._draw_memory(shape)

    def _draw(self, shape: Shape, answer: Any, of: Any) -> None:
        before, self._of = self._of, of
        new = before is None or before[0] != of[0]
        if new or before[1] != of[1]:
            there = of[1]
            self.made = (
                recorded({n: decoded(c) for n, c in answer["columns"].items()}, shape, answer["dropped"])
                if there
                else derived(shape)
            )
        assert self.made is not None
        self.shown = dealt(self.made, view_slots) if (view_slots := of[3]) and of[2] == "dealt" else self.made
        at = round(FIRST * self.shown.num_tiles) if new else -1
        heads = [_("head {i}").format(i=int(name)) for name, _rows, _columns in self.shown.planes]
        self.canvas.draw(self.shown, heads, at)
        if new:
            # The program at which it stands first, so that its row shows without a round trip (and in a file).
            programs = self.shown.tiles["program"]
            self._program = int(programs[min(at, len(programs) - 1)]) if len(programs) else None
            self._soft = None
        set_html(self.counts, words.counts_html(self.made, shape))

    def _draw_soft(self, shape: Shape) -> None:
        made, program = self.shown, self._program
        key = (shape.run, program)
        if made is None or program is None or key == self._soft or program >= len(made.programs["row"]):
            return
        self._soft = key
        row = int(made.programs["row"][program])
        head, last = int(made.rows["head"][row]), int(made.rows["q_start"][row] + made.rows["q_rows"][row] - 1)
        scores = row_scores(shape, head, last)
        most = float(scores.max())
        total = float(np.exp(scores - most).sum())
        self.canvas.param.update(
            scores=scores.astype("<f4").tobytes(),
            soft={"program": program, "row": last, "head": head, "max": most, "sum": total, "count": len(scores)},
        )

    def _draw_memory(self, shape: Shape) -> None:
        report = self.view.good_report
        key = (shape, report is not None)
        if key == self._memory:
            return
        self._memory = key
        self.canvas.memory = [told(bar) for bar in bars(shape, report)]


def told(bar: Bar) -> dict[str, Any]:
    """As the canvas takes it."""
    sign = BADGES[bar.kind][0]
    parts = [{"name": p.name, "nbytes": p.nbytes, "copies": p.copies, "tile": p.tile, "other": p.other} for p in bar.parts]
    return {"title": bar.title, "limit": bar.limit, "used": bar.used, "kind": _(bar.kind), "sign": sign, "parts": parts}


def places(shape: Shape, report: Any) -> int:
    """Programs that the chip holds at a time: by the compiler's report, else one a multiprocessor."""
    room = occupancy_of(shape, report) if report is not None else None
    return shape.chip.num_sms * max(1, room.blocks_per_sm if room is not None else 1)
