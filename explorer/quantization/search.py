"""How AWQ and GPTQ look for better roundings of one matrix, computed from what was observed of it. ``search`` is pure."""

import html
import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import panel as pn
import panel_material_ui as pmui

from engine.events.types import EngineStarted, Event, MatrixObserved
from explorer.i18n import _
from explorer.kv_cache.figure import legend_html
from explorer.pace import quick
from explorer.quantization.labels import CSS, line, said, set_html, share
from explorer.quantization.search_figure import AWQ_LINES, ERROR_LINES, AwqFigure, GptqFigures, binned
from explorer.theme import card, empty, grid, pane

ROWS = (
    64  # output channels that GPTQ is run on: each is rounded by itself, so it is exactly what the whole matrix would give them
)
SHOWN_ROWS, SHOWN_COLUMNS = 24, 96  # of the window of weights
BITS = (2, 3, 4)
GROUPS = (32, 64, 128)
_MATRICES = 3  # observed ones that are kept: each may be 15 MB
_PLAY_S = 12.0  # from the first column to the last, at ten updates a second


@dataclass(frozen=True, eq=False)
class Gptq:
    """GPTQ on some rows of a matrix, step by step. Errors are |X E^T| / |X W^T| in percent over all calibration rows."""

    rows: int
    columns: int
    gptq: np.ndarray  # [K] after 1, 2, ... K columns
    plain: np.ndarray  # [K]
    rounding: np.ndarray  # [K]: |w - q| of each step's column, over the rows
    errors: np.ndarray  # float32 [K, rows]: (w - q) / U_ii
    factor: np.ndarray  # float32 [K, K]: U
    norms: np.ndarray  # [K]: of ``errors`` over the rows
    weight: np.ndarray  # float32 [rows, K]: the original, dead columns 0
    damping: float

    def moved(self, step: int) -> np.ndarray:
        """By how much (over the rows) step ``step`` (1 is the first) moved each column: [K], 0 for those already rounded. Step 0: nothing."""
        moves = np.zeros(self.columns, dtype=np.float32)
        if step:
            moves[step:] = self.norms[step - 1] * np.abs(self.factor[step - 1, step:])
        return moves

    def change(self, step: int, rows: int, first: int, last: int) -> np.ndarray:
        """The weights after ``step`` columns minus the original: float32 [rows, last - first]."""
        return -(self.errors[:step, :rows].T @ self.factor[:step, first:last])


@dataclass(frozen=True, eq=False)
class Searched:
    """What was computed for one matrix. ``alpha`` and ``ratio`` (output error relative to exponent 0) are AWQ's, on all rows."""

    alpha: np.ndarray
    ratio: np.ndarray
    percent: np.ndarray  # |(W - Q) X| / |W X|, in percent
    best: int
    gptq: Gptq


def arrays(event: MatrixObserved) -> tuple[Any, Any]:
    """(weight float32 [N, K], engine.quantization.base.Calibration) of an observed matrix. ValueError for bytes that do not fit its shape."""
    import torch

    from engine.quantization.base import Calibration

    n, k = event.rows, event.columns
    if event.dtype not in ("float16", "float32"):
        raise ValueError(f"weights must be float16 or float32, got {event.dtype!r}")

    def tensor(raw: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        kind = np.dtype(dtype).newbyteorder("<")
        if len(raw) != kind.itemsize * math.prod(shape):
            raise ValueError(f"{event.layer}.{event.name}: {len(raw):,} bytes do not make {list(shape)} of {dtype}")
        return torch.from_numpy(np.frombuffer(raw, kind).reshape(shape).astype(np.float32))

    calibration = Calibration(
        event.calibration_tokens, tensor(event.inputs, "float16", (event.input_rows, k)), tensor(event.hessian, "float32", (k, k)),
        tensor(event.input_abs_mean, "float32", (k,)), tensor(event.input_abs_max, "float32", (k,)),
    )  # fmt: skip
    return tensor(event.weight, event.dtype, (n, k)), calibration


def search(event: MatrixObserved, bits: int = 4, group_size: int = 64, rows: int = ROWS) -> Searched:
    """AWQ's curve on the whole matrix and GPTQ's run on its first ``rows`` output channels. Takes seconds: not for a callback."""
    from engine.quantization.awq import awq_curve
    from engine.quantization.calibration import output_error, output_error_by_columns
    from engine.quantization.gptq import gptq_trace
    from engine.quantization.intn import what_if

    weight, calibration = arrays(event)
    curve = awq_curve(weight, calibration, bits, group_size)
    error = curve.error.numpy()
    whole = output_error(weight, calibration)
    part = weight[:rows].contiguous()
    trace = gptq_trace(part, calibration, bits, group_size)
    plain = output_error_by_columns(part - what_if(part, bits, group_size).dequantized, calibration)
    output = output_error(part, calibration)

    def percent(of: Any, by: float) -> np.ndarray:
        return 100 * np.sqrt(np.maximum(of, 0.0) / by) if by else np.zeros(len(of))

    run = Gptq(
        rows=len(part), columns=event.columns, gptq=percent(trace.output_errors(calibration).numpy(), output),
        plain=percent(plain.numpy(), output), rounding=trace.rounding_errors().numpy(), errors=trace.errors.numpy(),
        factor=trace.factor.float().numpy(), norms=trace.errors.norm(dim=1).numpy(), weight=trace.weight.numpy(), damping=trace.damping,
    )  # fmt: skip
    ratio = error / error[0] if error[0] else np.ones_like(error)
    return Searched(curve.alpha.numpy(), ratio, percent(error, whole), curve.best, run)


def step_words(run: Gptq, step: int) -> str:
    """What happened up to ``step``, as HTML."""
    if not step:
        text = _(
            "Nothing is rounded yet. Play, or move the slider: column after column is rounded, and its error is made up for by those that are still to come."
        )
        return line(html.escape(text))  # fmt: skip
    moved = run.moved(step)
    ratio = run.gptq[step - 1] / run.plain[step - 1] if run.plain[step - 1] else math.nan
    text = _(
        "Column <b>{column}</b> of {of}: rounding moved it by {lost:.4f} (over {rows} output channels), and the {left} columns to come were moved by up to {most:.4f} to make up for it. So far the output is off by <b>{gptq}</b>; plain rounding of the same columns: {plain}"
    )
    more = "" if math.isnan(ratio) else " " + _("(× {ratio:.2f})").format(ratio=ratio)
    return line(
        text.format(column=step - 1, of=run.columns, lost=run.rounding[step - 1], rows=run.rows, left=run.columns - step,
                    most=float(moved.max()), gptq=share(run.gptq[step - 1] / 100, 2), plain=share(run.plain[step - 1] / 100, 2)) + more + "."
    )  # fmt: skip


def awq_words(found: Searched) -> str:
    """What the curve says, as HTML."""
    alpha, ratio = found.alpha[found.best], found.ratio[found.best]
    if not found.best:
        text = _(
            "No exponent beats 0 on this matrix: its inputs are even, or its grid holds the weights already. AWQ then is plain rounding."
        )
        return said(html.escape(text), "mind")
    text = _(
        "Taken: α = {alpha:.2f}. The squared output error falls to {share} of plain rounding's, with the same bits: no weight is kept in high precision, but the columns that meet large inputs are scaled up before rounding, and their inputs down. Too large an α widens the groups' ranges, and the others pay."
    )
    return said(html.escape(text.format(alpha=alpha, share=share(float(ratio), 0))), "mind")


class SearchPanel(pn.viewable.Viewer):
    """The tab of the searches. ``view``: the page's view; its ``layer`` and ``matrix`` say which matrix. What takes seconds runs in a thread."""

    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.seen: dict[tuple[int, str], MatrixObserved] = {}
        self.found: Searched | None = None
        self.failed = ""
        self._key: Any = None  # of ``found``
        self._working: Any = None
        self._answers: dict[Any, Searched | str] = {}  # what the thread has left
        self._drawn: Any = None
        self._changed = True
        self._playing = False
        live = view.session is not None
        small = {"size": "small", "margin": 0}
        wide = {**small, "sizing_mode": "stretch_width"}
        self.fetch = pmui.Button(label=_("Fetch this matrix"), icon="download", color="primary", variant="contained", **small)
        self.fetch.on_click(lambda _event: self._fetch())
        self.bits = pmui.Select(label=_("Bits"), options=list(BITS), value=4, **wide)
        self.group = pmui.Select(label=_("Group size"), options=list(GROUPS), value=64, **wide)
        self.state = pane(css=CSS, margin=(8, 0, 0, 0))
        self.step: Any = pmui.IntSlider(label=_("Columns rounded"), start=0, end=1, value=0, **wide)
        quick(self.step, 30)
        self.play = pmui.Button(label=_("Play"), icon="play_arrow", variant="outlined", **small)
        self.play.on_click(lambda _event: self._toggle())
        for widget in (self.bits, self.group, self.step):
            widget.param.watch(lambda _event: self._mark(), "value")
        self.curve, self.run = AwqFigure(), GptqFigures()
        self.told, self.now = pane(css=CSS, margin=(8, 0, 0, 0)), pane(css=CSS)

        def drawn(title: str, figure: Any) -> pn.Column:
            return pn.Column(
                pane(f'<p class="qp-what">{title}</p>', css=CSS), pn.pane.Bokeh(figure, sizing_mode="stretch_width", margin=0),
                sizing_mode="stretch_width", margin=0,
            )  # fmt: skip

        self.awq_part = pn.Column(
            pane(legend_html(AWQ_LINES), css=CSS), pn.pane.Bokeh(self.curve.plot, sizing_mode="stretch_width", margin=0), self.told,
            sizing_mode="stretch_width", margin=0, visible=False,
        )  # fmt: skip
        self.gptq_part = pn.Column(
            grid(self.step, self.play, columns="minmax(0, 1fr) 110px", min_width=160, gap=14, margin=(0, 0, 6, 0)), self.now,
            pane(legend_html(ERROR_LINES), css=CSS), drawn(html.escape(_("Output error so far, in % of the output")), self.run.errors),
            drawn(html.escape(_("What this step pushed to the columns to come (norm over the output channels)")), self.run.pushed),
            drawn(
                html.escape(_("The weights around it, first {rows} output channels: change so far; red: up, blue: down, grey ground: rounded").format(rows=SHOWN_ROWS)),
                self.run.window,
            ),
            sizing_mode="stretch_width", margin=0, visible=False,
        )  # fmt: skip
        nothing = (
            _("Choose a matrix (a click on the map, or its lists) and fetch it: weights, and the second moments of what comes into it, travel once. Everything here is then computed beside the engine.")
            if live
            else _("In this recorded run no matrix was fetched.")
        )  # fmt: skip
        self.nothing = pane(empty(nothing), margin=(10, 0, 0, 0))
        top = grid(self.bits, self.group, *([self.fetch] if live else []), min_width=130, gap=14)
        first = card(
            _("One matrix, two searches"), top, self.state, self.nothing, kinds=("derived", "what-if"),
            hint=_("From the matrix and the inputs that were recorded; the engine does not notice."),
        )  # fmt: skip
        awq = card(_("AWQ: the search for the exponent"), self.awq_part, kinds="derived", hint=_("All output channels, 21 exponents, the same bits. W x = (W diag s)(x / s)."))  # fmt: skip
        gptq = card(
            _("GPTQ: column by column"), self.gptq_part, kinds="derived", margin=0,
            hint=_("On the first {rows} output channels: each is rounded by itself, so these are exactly the steps that the whole matrix would take.").format(rows=ROWS),
        )  # fmt: skip
        self._layout = pn.Column(first, awq, gptq, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what comes in -----------------------------------------------------------------------------------------------------

    def take(self, events: Iterable[Event]) -> None:
        """New events of the store, in order."""
        for event in events:
            if isinstance(event, EngineStarted):
                self.seen, self.found, self._key, self._drawn, self._playing = {}, None, None, None, False
                self._changed = True
            elif isinstance(event, MatrixObserved):
                self.seen.pop((event.layer, event.name), None)
                self.seen[event.layer, event.name] = event
                while len(self.seen) > _MATRICES:
                    del self.seen[next(iter(self.seen))]
                self._changed = True

    @property
    def chosen(self) -> tuple[int, str]:
        return self.view.layer, self.view.matrix

    def update(self) -> None:
        event = self.seen.get(self.chosen)
        wanted = None if event is None else (id(event), self.bits.value, self.group.value)
        if self._answers:
            self._collect(wanted)
        if wanted is not None and wanted != self._key and self._working is None:
            self._begin(wanted, event)
        if self._playing and self.found is not None:
            self._advance()
        looked = (self.chosen, wanted)
        if not self._changed and looked == self._drawn:
            return
        self._changed, self._drawn = False, looked
        self._draw(event, wanted)

    def _collect(self, wanted: Any) -> None:
        key, answer = self._answers.popitem()
        self._working, self._changed = None, True
        if key != wanted:
            return
        self._key, self.failed = key, answer if isinstance(answer, str) else ""
        self.found = None if isinstance(answer, str) else answer
        if self.found is not None:
            self.curve.show(self.found.alpha, self.found.ratio, self.found.percent, self.found.best)
            self.run.show_run(self.found.gptq.gptq, self.found.gptq.plain)
            self.step.param.update(end=self.found.gptq.columns, value=min(self.step.value, self.found.gptq.columns))

    def _begin(self, wanted: Any, event: MatrixObserved | None) -> None:
        self._working, self._changed = wanted, True
        threading.Thread(target=self._compute, args=(wanted, event), name="weight-search", daemon=True).start()

    def _compute(self, key: Any, event: MatrixObserved) -> None:
        try:
            answer: Searched | str = search(event, key[1], key[2])
        except (ValueError, RuntimeError) as error:
            answer = str(error)
        self._answers[key] = answer

    # -- what is drawn ------------------------------------------------------------------------------------------------------

    def _draw(self, event: MatrixObserved | None, wanted: Any) -> None:
        ready = self.found is not None and self._key == wanted and wanted is not None
        for part, there in ((self.nothing, not self.seen), (self.awq_part, ready), (self.gptq_part, ready)):
            if part.visible != there:
                part.visible = there
        set_html(self.state, self._said(event, ready))
        label = _("Pause") if self._playing else _("Play")
        if self.play.label != label:
            self.play.param.update(label=label, icon="pause" if self._playing else "play_arrow")
        if not ready or self.found is None:
            return
        set_html(self.told, awq_words(self.found))
        run, step = self.found.gptq, min(self.step.value, self.found.gptq.columns)
        first = int(min(max(0, step - SHOWN_COLUMNS // 2), max(0, run.columns - SHOWN_COLUMNS)))
        around = run.change(step, SHOWN_ROWS, first, min(run.columns, first + SHOWN_COLUMNS))
        scale = float(np.abs(run.errors).mean() * np.abs(run.factor.diagonal()).mean() * 3) or 1.0
        moved = run.moved(step)
        most = float(moved.max()) * 1.1
        self.run.show_step(step, binned(moved), most, around, first, scale)
        set_html(self.now, step_words(run, step))

    def _said(self, event: MatrixObserved | None, ready: bool) -> str:
        layer, name = self.chosen
        if event is None:
            others = ", ".join(f"{at}.{n}" for at, n in self.seen)
            text = _("Layer {layer}, {name}: not fetched yet.").format(layer=layer, name=name)
            return line(html.escape(text + (" " + _("Fetched: {others}.").format(others=others) if others else "")))
        about = _("Layer {layer}, {name}: {rows} × {columns}, {tokens:,} calibration tokens, weights from {source}.").format(
            layer=layer,
            name=name,
            rows=event.rows,
            columns=event.columns,
            tokens=event.calibration_tokens,
            source=event.source or _("the checkpoint"),
        )
        if self.failed:
            return said(html.escape(self.failed), "error")
        return said(html.escape(about + " " + _("Computing …")), "wait") if not ready else line(html.escape(about))

    # -- what a user does ----------------------------------------------------------------------------------------------------

    def _mark(self) -> None:
        self._changed = True

    def _fetch(self) -> None:
        layer, name = self.chosen
        self.view.session.observe_matrix(self.view.clock.owner, layer, name)

    def _toggle(self) -> None:
        if self.found is not None and not self._playing and self.step.value >= self.step.end:
            self.step.value = 0
        self._playing, self._changed = not self._playing, True

    def _advance(self) -> None:
        end = self.step.end
        self.step.value = min(end, self.step.value + max(1, round(end / (10 * _PLAY_S))))
        if self.step.value >= end:
            self._playing, self._changed = False, True
