"""The tiles of an attention kernel, played: the score matrix, a lane for each program, what is in fast memory, one row's softmax."""

from collections.abc import Callable
from typing import Any

import numpy as np
import param

from explorer.attention.rows import Schedule
from explorer.canvas.base import Canvas, parts
from explorer.i18n import _

TILES = (("program", "k", "kv_rows", "bytes", "masked"), ("m", "total", "start", "end"))
PROGRAMS = ("row", "x", "y", "z", "lane", "loaded", "stored", "sm")
ROWS = ("plane", "index", "first", "stop", "total", "q_start", "q_rows", "head", "request")
TEXTS = {
    "start": _("To the beginning"), "back": _("One tile back"), "play": _("Play"), "pause": _("Pause"), "next": _("One tile on"),
    "end": _("To the end"), "place": _("Tile on the screen"), "speed": _("Speed"), "rate": _("{n} tiles/s"), "at": _("{i} of {n} tiles"),
    "plane": _("Head"), "grid": _("Score matrix by tiles: arrow keys step, space plays, a click goes to a tile"),
    "rows": _("queries, from above"), "columns": _("keys, from the left"),
    "order": _("order, not time"), "time": _("time, by the GPU's timer"), "modelled": _("modelled: a tile is one unit of time"),
    "lanes_order": _("A lane for each program, in the order in which tiles were finished ({n})"),
    "lanes_time": _("A lane for each multiprocessor that was used ({n})"), "lanes_modelled": _("A lane for each place on the chip ({n})"),
    "done": _("done"), "now": _("now"), "todo": _("to come"), "causal": _("never loaded: lies after every row"),
    "window": _("never loaded: lies before the window"), "masked": _("masked element by element"),
    "tile": _("Tile {i}"), "program": _("program"), "queries": _("queries"), "keys": _("keys"), "head": _("head"), "request": _("request"),
    "loaded": _("K and V loaded"), "is_masked": _("masked"), "yes": _("yes"), "no": _("no, seen by every row"), "m": _("running max m, after it"),
    "l": _("running sum l, after it"), "sm": _("multiprocessor"), "from": _("from, to"), "unknown": _("not recorded"),
    "shared": _("Shared memory of one program"), "registers": _("Registers of one program"), "tensor": _("Tensor memory of one program"),
    "of": _("{used} of {limit}"), "of_unknown": _("at most {limit}; not compiled yet"), "rest": _("addresses, indices, the rest"),
    "in_use": _("in use"), "loading": _("on its way"), "empty": _("empty"), "shares": _("Parts that are never needed at once share a place."),
    "soft": _("The softmax of one row, as it goes"), "soft_row": _("query {row}, head {head}: after {i} of {n} tiles"),
    "rescale": _("l and acc were multiplied by"), "full": _("full softmax, float64"), "so_far": _("so far"), "log_sum": _("m + ln l"),
    "equal": _("Equal to the full softmax in all digits that are shown; l is off by {off}."),
    "off": _("Off from the full softmax by {off}."), "no_soft": _("The scores of this row are not recorded; its m and l are, at each tile."),
    "not_begun": _("this row has not begun"), "scores": _("scores so far, to come; the line is the running maximum"),
}  # fmt: skip


def pack(made: Schedule) -> bytes:
    """The wire format of tiles_paint.js."""
    words, floats = TILES
    head = np.array([made.num_tiles, len(made.programs["row"]), len(made.rows["plane"])], np.uint32)
    columns = [
        head,
        *(made.tiles[name].astype(np.uint32) for name in words),
        *(made.tiles[name].astype("<f4") for name in floats),
    ]
    columns += [made.programs[name].astype(np.int64).astype(np.uint32) for name in PROGRAMS]
    columns += [made.rows[name].astype(np.uint32) for name in ROWS]
    return b"".join(np.ascontiguousarray(column).tobytes() for column in columns)


class Tiles(Canvas):
    """``draw`` a schedule; the browser plays it by itself and says which program it stands at (``look``). ``soft`` answers that."""

    _esm = parts("tiles_style.js", "tiles_paint.js", "tiles.js")
    kinds = ("look",)

    tiles = param.Bytes(default=b"")
    meta = param.Dict(default={}, doc="planes, lanes, clock, source, block_n, at (where to stand first; -1: stay).")
    memory = param.List(default=[], doc="Bars: {title, limit, used, parts: [{name, nbytes, copies, tile, other}]}.")
    soft = param.Dict(
        default={}, doc="{program, row, head, max, sum, count} of the row whose scores are in ``scores``; {}: none."
    )
    scores = param.Bytes(default=b"", doc="float32, the row's scaled logits; -inf where it does not see the key.")
    empty = param.String(default="")
    texts = param.Dict(default=TEXTS)

    def __init__(self, look: Callable[[int], None] | None = None, **params: Any) -> None:
        super().__init__(sizing_mode="stretch_width", margin=0, **params)
        self._look = look

    def draw(self, made: Schedule, titles: list[str], at: int = 0) -> None:
        """Play this from tile ``at`` on. ``titles``: of the planes."""
        planes = [[title, rows, columns] for title, (_name, rows, columns) in zip(titles, made.planes, strict=True)]
        self.param.update(
            tiles=pack(made),
            meta={
                "planes": planes, "lanes": made.lanes, "clock": made.clock, "source": made.source, "blockN": made.block_n, "at": at,
                "count": made.num_tiles,
            },
        )  # fmt: skip

    def on_look(self, action: dict[str, Any]) -> None:
        program = action.get("program")
        if self._look is not None and isinstance(program, int) and not isinstance(program, bool) and program >= 0:
            self._look(program)
