"""The tab "Traffic": bytes to and from device memory, flash attention against standard, by length and by what SRAM there is."""

import html
from typing import Any

import panel as pn

from engine.hardware.gpus import gpus
from explorer.attention import lab
from explorer.attention.figure import COUNTED, FLASH, HERE, STANDARD, SramFigure, TrafficFigure
from explorer.attention.labels import CSS, part, set_html, table, what
from explorer.attention.shape import DTYPE_BYTES, Shape
from explorer.attention.traffic_rows import (
    LENGTHS,
    LONG,
    SRAM,
    counted,
    extra_bytes,
    flash_bytes,
    rows_in,
    sram_bytes,
    standard_bytes,
)
from explorer.attention.worker import decoded
from explorer.i18n import _
from explorer.theme import card, grid, number, pane


class TrafficPanel(pn.viewable.Viewer):
    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self._of: Any = None
        self.traffic, self.sram = TrafficFigure(), SramFigure()
        self.legend, self.doubled, self.model = pane(legend_html(), css=CSS), pane(css=CSS), pane(css=CSS)
        column: dict[str, Any] = {"sizing_mode": "stretch_width", "margin": 0}
        left = card(
            _("By the number of tokens"), self.legend, pn.pane.Bokeh(self.traffic.root, sizing_mode="stretch_width", margin=0), self.doubled,
            kinds=("derived", "measured"), margin=0,
            hint=_("Q, K, V, output and log-sum-exp as programs ask for them; what a cache saves is not counted."),
        )  # fmt: skip
        right = card(
            _("By the size of fast memory"), pn.pane.Bokeh(self.sram.root, sizing_mode="stretch_width", margin=0), self.model,
            kinds="modelled", margin=0,
            hint=_("The more query rows stay on the chip, the fewer times K and V come by: Θ(N² D² / M) bytes for M of SRAM."),
        )  # fmt: skip
        self._layout = pn.Column(grid(left, right, min_width=330), **column)

    def __panel__(self) -> pn.Column:
        return self._layout

    def update(self) -> None:
        shape = self.view.shape
        known = lab.INTERPRETER.known()
        counts = counted(known, shape, total_of)
        key = (shape, tuple(counts))
        if key == self._of:
            return
        self._of = key
        flash, standard = [flash_bytes(n, shape) for n in LENGTHS], [standard_bytes(n, shape) for n in LENGTHS]
        self.traffic.show(LENGTHS, flash, standard, counts, (shape.seq_len, flash_bytes(shape.seq_len, shape)))
        set_html(self.doubled, doubled_html(shape))
        marks: dict[int, list[Any]] = {}
        for entry in gpus().values():
            marks.setdefault(entry.limits.shared_per_block, []).append(entry)
        points = [
            (names(found), float(size), sram_bytes(size, shape), any(e.key == shape.gpu for e in found))
            for size, found in sorted(marks.items())
        ]
        self.sram.show([(m, sram_bytes(m, shape)) for m in SRAM], [p for p in points if p[2] == p[2]])
        set_html(self.model, model_html(shape))


def names(found: list[Any]) -> str:
    """Of GPUs with the same shared memory, each model once: "A100", "L4, RTX 4090"."""
    return ", ".join(
        dict.fromkeys(
            e.title.removeprefix("GeForce ").partition(" SXM")[0].partition(" 40 GB")[0].partition(" 80 GB")[0] for e in found
        )
    )


def total_of(answer: Any) -> int:
    """Bytes that the records of a run add up to."""
    return int(decoded(answer["columns"]["bytes_loaded"]).sum() + decoded(answer["columns"]["bytes_stored"]).sum())


def legend_html() -> str:
    keys = (
        (FLASH, _("flash attention, by the kernel’s ranges")),
        (STANDARD, _("standard: S and P go through device memory (dashed)")),
        (COUNTED, _("counted by the kernel’s records (circles)")),
        (HERE, _("your choice (diamond)")),
    )
    body = "".join(f'<span><i style="background:{colour}"></i>{html.escape(text)}</span>' for colour, text in keys)
    return f'<div class="at-keys">{body}</div>'


def doubled_html(shape: Shape) -> str:
    n = shape.seq_len
    rows = []
    for tokens in (n, 2 * n):
        mine, other = extra_bytes(tokens, shape)
        cells = [number(x, "B") for x in (flash_bytes(tokens, shape), standard_bytes(tokens, shape), mine, other)]
        rows.append((tokens == n, [f"{tokens:,}", *cells]))
    factors = [
        flash_bytes(2 * n, shape) / flash_bytes(n, shape),
        standard_bytes(2 * n, shape) / standard_bytes(n, shape),
        2.0,
        4.0,
    ]
    rows.append((False, [_("twice as long"), *(f"× {x:.2f}" for x in factors)]))
    head = (_("tokens"), _("flash moves"), _("standard moves"), _("flash keeps"), _("standard keeps"))
    if shape.window:
        told = _("With a window each query sees the same number of keys, so flash attention’s traffic grows with N.")
    else:
        told = _(
            "Traffic stays quadratic: its share that is linear (Q and the output) is why the factor is below 4 for short texts. What became linear is the memory "
            "that is kept: log-sum-exps instead of the scores."
        )
    return part(_("Double it"), "derived") + table(head, rows) + what(told)


def model_html(shape: Shape) -> str:
    limit = shape.chip.limits.shared_per_block
    text = _(
        "{n:,} tokens. {rows:,.0f} query rows fit beside {stages} stages of K and V tiles into the {size} of {gpu}: K and V come by {times:.1f} times. Formula: "
        "M = (rows + 2 · stages · keys a tile) · {d} · {b} B; bytes = Q + O + log-sum-exp + N / rows · 2 · (keys seen) · D · {b} B. The accumulator, in registers, "
        "would bind earlier: see “Compiled”."
    )
    n = max(LONG, shape.seq_len)
    rows = min(float(n), rows_in(limit, shape))
    if rows < 1:
        return what(_("No query row fits beside the stages of K and V tiles on this GPU: choose fewer stages or smaller tiles."))
    return what(
        text.format(
            n=n,
            rows=rows, stages=shape.num_stages, size=number(limit, "B"), gpu=shape.chip.title, times=n / rows, d=shape.padded,
            b=DTYPE_BYTES,
        )
    )  # fmt: skip
