"""The tab "From the engine": a step's attention call, traced on its real queries, keys and block tables."""

import html
import time
from typing import Any

import numpy as np
import panel as pn
import panel_material_ui as pmui

from engine.events.attention import AttentionTraced, records_of
from explorer.attention.labels import CSS, facts, part, said, set_html, table, what
from explorer.attention.rows import TIME, Schedule, of_decode, of_records
from explorer.canvas.tiles import Tiles
from explorer.i18n import _, ngettext
from explorer.theme import badge, card, empty, in_file, number, pane

PATIENCE_S = 60.0
FIRST = 0.4
ASK = _(
    "Nothing has been traced yet. Choose a layer and trace the next step; something has to run (send a prompt on the Run page)."
)
NOT_RECORDED = _("No attention call was traced up to this step of the recorded run.")
SHOWN_BLOCKS = 40


class EnginePanel(pn.viewable.Viewer):
    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.live = view.session is not None and not in_file.get()
        self._asked = 0.0  # when; 0: nothing is awaited
        self._count = 0  # of traces when it was asked
        self._of: Any = None
        small: dict[str, Any] = {"size": "small", "margin": 0}
        self.layer = pmui.Select(label=_("Layer"), options=list(range(view.steps.model.num_layers)), value=0, width=120, **small)
        self.button = pmui.Button(label=_("Trace the next step"), icon="biotech", variant="outlined", **small)
        self.button.on_click(lambda _event: self._trace())
        self.which = pmui.Select(label=_("Traced"), options={_("none yet"): ""}, value="", sizing_mode="stretch_width", **small)
        self.state, self.numbers = pane(css=CSS, margin=(10, 0, 0, 0)), pane(css=CSS, margin=(12, 0, 12, 0))
        self.nothing = pane(empty(ASK if self.live else NOT_RECORDED), margin=(10, 0, 0, 0))
        self.canvas = Tiles(self._looked, empty="")
        self.tables, self.bytes = pane(css=CSS, margin=(14, 0, 0, 0)), pane(css=CSS, margin=(14, 0, 0, 0))
        self.inside = pn.Column(
            self.numbers, self.canvas, self.bytes, self.tables, sizing_mode="stretch_width", margin=0, visible=False
        )
        asking = [
            pn.Row(
                self.layer,
                self.button,
                margin=(0, 0, 10, 0),
                styles={"flex-wrap": "wrap", "gap": "10px", "align-items": "center"},
            )
        ]
        self._layout = card(
            _("An attention call of the running engine"), *(asking if self.live else []), self.which, self.state, self.nothing, self.inside,
            kinds="measured", margin=0,
            hint=_("Our kernel on a copy of the step’s own Q, K, V and block tables, recording its tiles. On a CPU it runs under the interpreter, beside the engine."),
            acts=_("Click a tile to go there."),
        )  # fmt: skip

    def __panel__(self) -> pn.Column:
        return self._layout

    def _trace(self) -> None:
        self._asked, self._count = time.monotonic(), len(self.view.steps.traces)
        self.view.session.trace_attention(self.view.clock.owner, self.layer.value, num_sms=self.view.shape.chip.num_sms)

    def _looked(self, _program: int) -> None:
        """The scores of one row came with the trace: there are no others to be sent."""

    @property
    def found(self) -> list[AttentionTraced]:
        view = self.view
        return list(view.steps.traced(view.shown_step) if not view.clock.live else view.steps.traces)

    def update(self) -> None:
        view, found = self.view, self.found
        layers = list(range(view.steps.model.num_layers))
        if self.layer.options != layers:
            self.layer.options = layers
        if self._asked and (len(view.steps.traces) != self._count or time.monotonic() - self._asked > PATIENCE_S):
            self._asked = 0.0
        options = {title(event, i): str(i) for i, event in enumerate(found)} or {_("none yet"): ""}
        if options != self.which.options:
            self.which.param.update(options=options, value=list(options.values())[-1])
        event = found[int(self.which.value)] if self.which.value and int(self.which.value) < len(found) else None
        for each, visible in ((self.inside, event is not None), (self.nothing, event is None)):
            if each.visible != visible:
                each.visible = visible
        waiting = _(
            "Asked. The next step that runs is copied and traced beside the engine; with nothing running, it waits for a prompt."
        )
        if self._asked:
            set_html(self.state, said(html.escape(waiting), "wait"))
        else:
            set_html(self.state, state_html(event) if event is not None else "")
        key = None if event is None else (event.trace_id, event.step, event.kernel, event.time_ns)
        if key != self._of:
            self._of = key
            if event is not None:
                self._draw(event)

    def _draw(self, event: AttentionTraced) -> None:
        made = schedule_of(event)
        titles = [plane_title(event, name) for name, _rows, _columns in made.planes]
        self.canvas.draw(made, titles, round(FIRST * made.num_tiles))
        program = row_program(event, made)
        self.canvas.param.update(
            memory=[], scores=event.row_scores,
            soft={"program": program, "row": event.row, "head": event.row_head, "max": event.row_max, "sum": event.row_sum, "count": len(event.row_scores) // 4},
        )  # fmt: skip
        set_html(self.numbers, numbers_html(event, made))
        set_html(self.bytes, bytes_html(event))
        set_html(self.tables, tables_html(event))


def lengths_of(event: AttentionTraced) -> list[tuple[int, int]]:
    return [(request.q_len, request.kv_len) for request in event.requests]


def schedule_of(event: AttentionTraced) -> Schedule:
    """ValueError where the records' bytes do not fit."""
    columns = records_of(event)
    if event.kernel == "paged_decode":
        return of_decode(columns, lengths_of(event), event.traced_kv_heads, event.block_n)
    return of_records(columns, lengths_of(event), event.block_m, event.block_n)


def row_program(event: AttentionTraced, made: Schedule) -> int:
    """The program that has the last tile of the chosen row; -1: none was recorded."""
    rows, group = made.rows, max(1, event.num_heads // max(1, event.num_kv_heads))
    decode = event.kernel == "paged_decode"
    head = event.row_head // group if decode else event.row_head
    there = (rows["request"] == event.row_request) & (rows["head"] == head)
    if decode:
        if event.num_splits > 1:
            return -1  # its tiles are spread over several programs, each with its own running maximum
    else:
        there &= (rows["q_start"] <= event.row) & (event.row < rows["q_start"] + rows["q_rows"])
    at = np.flatnonzero(np.isin(made.programs["row"], np.flatnonzero(there)))
    return int(at[-1]) if len(at) else -1


def plane_title(event: AttentionTraced, name: str) -> str:
    if not name:
        return _("all requests and KV heads")
    parts = name.split(" · ")
    if len(parts) == 1:
        return _("head {i}").format(i=int(parts[0]))
    return _("{request}, head {i}").format(request=event.requests[int(parts[0])].request_id, i=int(parts[1]))


def title(event: AttentionTraced, i: int) -> str:
    kernel = _("prompts’ chunks") if event.kernel == "flash_attention" else _("decodes")
    return _("{i}: step {step}, layer {layer}, {n} {kernel}").format(
        i=i + 1, step=event.step, layer=event.layer, n=len(event.requests), kernel=kernel
    )


def state_html(event: AttentionTraced) -> str:
    if event.where == "cuda":
        text = _("Recorded on {device}: times are the GPU’s own. Tracing took {traced:.3f} ms where the kernel alone takes {plain:.3f} ms.").format(
            device=event.device, traced=event.kernel_ms, plain=event.untraced_ms
        )  # fmt: skip
    else:
        text = _(
            "Recorded under Triton’s interpreter in a process beside the engine ({s:.1f} s): order, not time. The step itself ran with the backend “{backend}”."
        ).format(s=event.seconds, backend=event.backend)
    left = []
    if event.requests_left_out:
        out = event.requests_left_out
        left.append(
            ngettext("{n} request of the step was left out.", "{n} requests of the step were left out.", out).format(n=out)
        )
    if event.traced_kv_heads < event.num_kv_heads:
        left.append(_("{n} of {all} KV heads were run.").format(n=event.traced_kv_heads, all=event.num_kv_heads))
    if event.dropped:
        left.append(_("The trace was full: {n:,} records were dropped.").format(n=event.dropped))
    return said(f"{badge('measured')} {html.escape(' '.join([text, *left]))}", "good")


def numbers_html(event: AttentionTraced, made: Schedule) -> str:
    found = [
        (f"{made.num_tiles:,}", _("tiles done")),
        (f"{made.skipped:,}", _("never loaded")),
        (f"{event.block_m} × {event.block_n}" if event.kernel == "flash_attention" else str(event.block_n), _("tile, queries × keys") if event.kernel == "flash_attention" else _("keys a tile")),
        (f"{event.max_error:.1e}", _("off from float64, where the largest is {x:.2g}").format(x=event.max_output)),
        (f"{event.max_difference:.1e}", _("off from what the step’s own backend gave")),
    ]  # fmt: skip
    if event.kernel == "paged_decode":
        found.append((str(event.num_splits), _("parts, chosen for {n} multiprocessors").format(n=event.num_sms)))
    if made.clock == TIME:
        found.append((f"{event.kernel_ms:.3f} ms", _("traced; {x:.3f} ms without").format(x=event.untraced_ms)))
    return facts(found)


def bytes_html(event: AttentionTraced) -> str:
    head = ("", _("loaded"), _("stored"))
    rows = [
        (True, [_("counted by the kernel"), number(event.bytes_loaded, "B"), number(event.bytes_stored, "B")]),
        (False, [_("formula: lengths and tiles"), number(event.formula_loaded, "B"), number(event.formula_stored, "B")]),
        (False, [_("standard attention"), number(event.standard_loaded, "B"), number(event.standard_stored, "B")]),
    ]
    return part(_("To and from device memory"), ("measured", "derived")) + table(head, rows)


def tables_html(event: AttentionTraced) -> str:
    """Which physical blocks the kernel read through."""
    rows = []
    for request in event.requests:
        blocks = ", ".join(map(str, request.block_ids[:SHOWN_BLOCKS]))
        more = len(request.block_ids) - SHOWN_BLOCKS
        rows.append(
            (
                False,
                [
                    request.request_id,
                    f"{request.q_len:,}",
                    f"{request.kv_len:,}",
                    blocks + (f", … (+{more})" if more > 0 else ""),
                ],
            )
        )
    head = (_("request"), _("queries"), _("keys"), _("blocks of its table"))
    return part(_("The block tables that it read K and V through"), "measured") + table(head, rows) + what(
        _("A tile’s keys lie together for the request and not in memory: blocks of {n} tokens, anywhere in the pool of {pool:,}.").format(
            n=event.block_size, pool=event.num_blocks
        )
    )  # fmt: skip
