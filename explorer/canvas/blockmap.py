"""The map of all physical KV blocks, drawn on a canvas: 32 to 100,000 blocks, changes sent as binary deltas."""

from typing import Any

import numpy as np
import param
from panel.custom import AnyWidgetComponent

from explorer.canvas.base import parts

FREE, CACHED, HELD, SHARED = range(4)  # what a block can be; the lowest byte of its code
ESM = parts("blockmap_paint.js", "blockmap.js")  # one ES module for Panel and for notebooks


def pack_codes(kind: np.ndarray, colour: np.ndarray, ref_counts: np.ndarray, level: np.ndarray) -> np.ndarray:
    """One uint32 a block, [num_blocks]: kind | colour << 8 | references << 16 | level << 24.

    ``kind`` FREE.., ``colour`` index into the palette, ``level`` 255 x the share of its slots that hold a token, all uint8;
    ``ref_counts`` of any size (shown up to 255).
    """
    parts = np.stack([kind, colour, np.minimum(ref_counts, 255), level], axis=-1, dtype=np.uint8, casting="unsafe")
    return np.ascontiguousarray(parts).view("<u4").reshape(-1)


class BlockMap(AnyWidgetComponent):
    """Give it codes with ``draw()``; it sends the browser what changed. Watch ``selected`` and ``hovered``.

    Wire format: see the head of blockmap.js. Deltas carry sequence numbers, so a browser that missed one asks for the whole.
    """

    full = param.Bytes(default=b"")
    delta = param.Bytes(default=b"")
    palette = param.List(default=[], doc="[[light, dark], ...] as #rrggbb; the codes' colours index it.")
    marked = param.Bytes(default=b"", doc="uint32 ids of the blocks that stay bright while the others fade; empty: none fade.")
    selected = param.Integer(default=-1, doc="The block that is ringed, -1 for none; a click sets it.")
    hovered = param.Integer(default=-1, doc="The block under the pointer or the keyboard's cursor, -1 for none.")
    detail = param.Dict(default={}, doc="Answer to hovered: {'block_id': id, 'lines': [text, ...]}.")
    resync = param.Integer(default=0, doc="Raised by the browser when it missed a delta.")
    canvas_height = param.Integer(default=420, bounds=(60, 4000), doc="The canvas is at most this high, in CSS pixels.")

    _esm = ESM

    def __init__(self, **params: Any) -> None:
        params.setdefault("sizing_mode", "stretch_width")
        super().__init__(**params)
        self._codes = np.zeros(0, np.uint32)
        self._block_size = 0
        self._seq = 0
        self.param.watch(lambda _: self._send_full(), "resync")

    def draw(self, codes: np.ndarray, block_size: int) -> int:
        """Show these codes (uint32 [num_blocks], from ``pack_codes``); returns how many blocks changed."""
        codes = np.ascontiguousarray(codes, dtype=np.uint32)
        if len(codes) != len(self._codes) or block_size != self._block_size or not self.full:
            self._codes, self._block_size = codes.copy(), block_size
            self._send_full()
            return len(codes)
        changed = np.flatnonzero(codes != self._codes).astype(np.uint32)
        if not len(changed):
            return 0
        self._codes = codes.copy()
        if len(changed) * 2 > len(codes):
            self._send_full()
        else:
            head = np.array([self._seq, self._seq + 1, len(changed)], np.uint32)
            self._seq += 1
            self.delta = b"".join((head.tobytes(), changed.tobytes(), codes[changed].tobytes()))
        return len(changed)

    def mark(self, block_ids: Any) -> None:
        """Keep these blocks bright and fade the others; an empty sequence ends that."""
        marked = np.asarray(sorted(set(block_ids)), dtype=np.uint32).tobytes()
        if marked != self.marked:
            self.marked = marked

    def _send_full(self) -> None:
        self._seq += 1
        head = np.array([self._seq, self._block_size], np.uint32)
        self.full = head.tobytes() + self._codes.tobytes()
