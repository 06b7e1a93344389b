"""The tab "Roofline": measured steps and modelled points under the roofs."""

import html
from typing import Any

import panel as pn
from bokeh.events import Tap

from engine.hardware.gpus import gpu
from engine.hardware.roofline import gpu_roofs
from explorer.i18n import _
from explorer.pace import Pace
from explorer.roofline import knobs, words
from explorer.roofline.figure import RooflineFigure, legend_html, legend_lines
from explorer.roofline.rows import running_bits
from explorer.roofline.whatif import WhatIf, what_if, with_kv_heads, workload
from explorer.theme import card, empty, grid, pane


class PointsPanel(pn.viewable.Viewer):
    """``view``: the page's view, whose parameters are the what-if knobs and whose rows say what is known."""

    def __init__(self, view: Any, css: str, **params: Any) -> None:
        super().__init__(**params)
        self.view, self.css = view, css
        self.pace = Pace()
        self._drawn: Any = None
        self._build()

    def _build(self) -> None:
        view = self.view
        self.figure = RooflineFigure()
        self.figure.root.on_event(Tap, self._tapped)
        self.legend = pane(css=self.css)
        self.no_steps = pane(empty(words.NO_STEPS if view.session is not None else words.NO_STEPS_RECORDED), margin=(0, 0, 8, 0))
        self.now, self.what, self.table, self.gpu_facts = (pane(css=self.css) for _i in range(4))
        self.kv_heads = knobs.kv_heads_select(view)
        plot = pn.pane.Bokeh(self.figure.root, sizing_mode="stretch_width", margin=0)
        first = card(
            _("Every engine step under the roofs"), self.no_steps, self.legend, plot, kinds=("measured", "derived", "modelled"),
            hint=_("Filled: measured steps, operations and bytes counted, time measured. Hollow: what if, modelled; they lie on their roofs by construction. "
                   "Hover for what binds and by how much."),
            acts=_("Click a point to go to its step."),
        )  # fmt: skip
        shown = card(_("The step on the screen"), self.now, kinds=("measured", "derived"), margin=0,
                     hint=_("Time is that of the forward pass; sampling and bookkeeping are not in it."))  # fmt: skip
        asked = card(
            _("What if"),
            grid(knobs.gpu_select(view), knobs.batch_slider(view), knobs.context_slider(view), knobs.bits_select(view), self.kv_heads,
                 knobs.kv_dtype_select(view), min_width=150, gap=18, margin=(0, 0, 14, 0)),
            self.what, self.table, pane(words.formula_html(), css=self.css), self.gpu_facts, kinds=("modelled", "what-if"), margin=0,
            hint=_("The running model with other numbers, under the measured roofs of this device and the data sheet's of a GPU."),
        )  # fmt: skip
        self._layout = pn.Column(
            first,
            grid(shown, asked, min_width=320, columns="minmax(0, 5fr) minmax(0, 8fr)"),
            sizing_mode="stretch_width",
            margin=0,
        )

    def __panel__(self) -> pn.Column:
        return self._layout

    def _tapped(self, event: Any) -> None:
        step = self.figure.nearest(event.x, event.y)
        if step is not None:
            store = self.view.store
            self.view.clock.goto(step, store.first_step, store.last_step)

    # -- what is computed ----------------------------------------------------------------------------------------------------

    def what_ifs(self) -> tuple[list[WhatIf], list[str]]:
        """The modelled points under the measured roofs and under the chosen GPU's; and why there are none for one of them."""
        view, rows = self.view, self.view.rows
        found: list[WhatIf] = []
        notes: list[str] = []
        if rows.started is None:
            return found, notes
        running = running_bits(view.method, rows.dtype)
        for roofs in (rows.device_roofs, gpu_roofs(gpu(view.gpu))):
            if roofs is None:
                continue
            try:
                work = workload(
                    batch=view.batch,
                    context=view.context,
                    bits=view.weight_bits,
                    running=running,
                    dtype=rows.dtype,
                    kv_dtype=view.kv_dtype,
                )
                found.append(what_if(with_kv_heads(rows.model, view.kv_heads), work, roofs))
            except (ValueError, KeyError) as error:
                note = str(error) if isinstance(error, ValueError) else _("the model's facts lack {name}").format(name=error)
                if note not in notes:
                    notes.append(note)
        return found, notes  # fmt: skip

    # -- what is drawn ---------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Called by the view, with its lock held, in the document's own callbacks."""
        view, rows = self.view, self.view.rows
        drawn = (view.shown_step, view.what_if_values, view.method, rows.started, len(rows.roofs))
        moved = self._drawn is None or drawn[1:] != self._drawn[1:] or (drawn[0] != self._drawn[0] and not view.clock.live)
        stale = rows.changed or self.pace.late or drawn != self._drawn
        if not moved and not (stale and self.pace.due()):
            return
        self._drawn, self.pace.late = drawn, False
        self._draw()

    def _draw(self) -> None:
        view, rows = self.view, self.view.rows
        device, dtype = rows.device_roofs, rows.dtype
        if device is not None and dtype not in device.peak:
            device = None
        knobs.offer_kv_heads(self.kv_heads, view, rows.model)
        steps = rows.up_to(view.shown_step)
        whats, notes = self.what_ifs()
        chosen = gpu(view.gpu)
        gpu_dtype = whats[-1].work.dtype if whats else "bfloat16"
        shown = steps[-1] if steps else None
        self.figure.show(steps, shown.step if shown is not None else -1, dtype, device, gpu_roofs(chosen), gpu_dtype, whats)
        self._set(self.legend, legend_html(legend_lines(device.name if device is not None else "", chosen.title, bool(whats))))
        if self.no_steps.visible != (shown is None):
            self.no_steps.visible = shown is None
        nothing = words.NO_STEPS if view.session is not None else words.NO_STEPS_RECORDED
        self._set(self.now, words.step_html(shown, device, dtype) if shown is not None else empty(nothing))
        self._draw_what_if(whats, notes)
        self._set(self.gpu_facts, words.gpu_html(chosen))

    def _draw_what_if(self, whats: list[WhatIf], notes: list[str]) -> None:
        rows, told = self.view.rows, ""
        if whats:
            heads = rows.model["num_attention_heads"]
            told = words.line(html.escape(words.work_words(whats[-1], self.view.kv_heads or rows.model["num_kv_heads"], heads)))
        self._set(self.what, told)
        self._set(self.table, words.what_if_html(whats, notes))

    @staticmethod
    def _set(target: pn.pane.HTML, body: str) -> None:
        if target.object != body:
            target.object = body
