"""The tab "Memory planner": what fits into a GPU, and the same formulas checked against the running engine."""

import html
import time
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.hardware import MemoryMeasured
from engine.events.types import EngineStarted
from engine.hardware.gpus import Gpu, gpu
from engine.hardware.memory import KvShape, pool_bytes
from engine.hardware.planner import Item, Plan
from explorer.i18n import _, ngettext
from explorer.roofline import knobs, words
from explorer.roofline.figure import bound_words
from explorer.roofline.planner import Check, Model, checks, pasted, planned
from explorer.roofline.rows import running_bits
from explorer.roofline.whatif import with_kv_heads, workload
from explorer.theme import badge, card, empty, grid, number, pane

PATIENCE_S = 60.0
CLASSES = ("rf-weights", "rf-kv", "rf-act", "rf-logits")  # of Plan.parts
PLACEHOLDER = '{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, …}'
NOT_MEASURED = _(
    "Press Look into the engine: its tensors are added up and one forward pass is watched, a second or so in which requests wait."
)
NOT_RECORDED = _("This run holds no such measurement.")


def plan_html(model: Model, found: Plan, chip: Gpu, tp: int) -> str:
    """Bars, parts with their formulas, and what is the most that fits."""
    most = max(found.total, float(chip.memory_bytes))
    bar = "".join(
        f'<i class="{css}" style="width:{100 * item.value / most:.3f}%"></i>' for css, item in zip(CLASSES, found.parts)
    )
    budget = f'<u style="left:{100 * found.budget.value / most:.2f}%"></u>'
    keys = "".join(f'<span><i class="{css}"></i>{html.escape(item.name)}</span>' for css, item in zip(CLASSES, found.parts))
    keys += f"<span><u></u>{html.escape(_('the most that is planned with'))}</span>"
    total, room = number(found.total, "B"), number(found.budget.value, "B")
    each = _(" on each of {n} GPUs").format(n=tp) if tp > 1 else ""
    if found.fits:
        text, kind = (
            _("{model} fits: {total}{each}, of {room} that are planned with.").format(
                model=model.name, total=total, each=each, room=room
            ),
            "look",
        )
    else:
        text, kind = _("{model} does not fit: {total}{each}, and {room} are planned with. {what}").format(
            model=model.name, total=total, each=each, room=room, what=_too_much(found)
        ), "error"  # fmt: skip
    items = [*found.parts, found.budget, found.largest_batch, found.largest_context]
    return (
        words.said(html.escape(text), kind)
        + f'<div class="rf-bar" role="img" aria-label="{html.escape(text)}">{bar}{budget}</div><div class="rf-keys">{keys}</div>'
        + f'<div class="rf-parts">{"".join(_item(item) for item in items)}</div>'
        + _longer(model, found)
    )


def _longer(model: Model, found: Plan) -> str:
    """A context may fit and still be one that the model was never made for."""
    made_for = model.facts.get("max_position_embeddings")
    if not isinstance(made_for, int) or found.largest_context.value <= made_for:
        return ""
    text = _("The model itself was made for {n} tokens.").format(n=f"{made_for:,}")
    return words.line(f'<span class="ct-muted">{html.escape(text)}</span>')


def _too_much(found: Plan) -> str:
    if found.weights.value > found.budget.value:
        return _("The weights alone are too large: fewer bits, more GPUs, or a larger one.")
    if found.largest_batch.value:
        most = int(found.largest_batch.value)
        return ngettext("At this context {n:,} request would fit.", "At this context {n:,} requests would fit.", most).format(
            n=most
        )
    return _("Not even one request of this context fits; {n} tokens would, at this batch.").format(
        n=f"{found.largest_context.value:,.0f}"
    )


def _value(item: Item) -> str:
    if item.unit == "s":
        return words.seconds(item.value)
    return number(item.value, "B") if item.unit == "B" else f"{item.value:,.0f} {item.unit}"


def _item(item: Item) -> str:
    return f"<b>{html.escape(item.name)}</b><span>{html.escape(_value(item))}</span><small>{html.escape(item.formula)}</small>"


def times_html(found: Plan, batch: int) -> str:
    """TTFT and time per token as modelled, with what binds."""
    rows = ""
    for item, bound in ((found.ttft, found.prefill), (found.per_token, found.decode)):
        rows += _item(item) + f"<b></b><span></span><small>{html.escape(bound_words(bound.by, bound.times))}</small>"
    each = 1 / found.per_token.value
    rate = ngettext(
        "That is {each} tokens/s at the most: sampling, scheduling and talking between GPUs are left out.",
        "That is {each} tokens/s for each request and {all} for all {b}, at the most: sampling, scheduling and talking between GPUs are left out.",
        batch,
    ).format(each=f"{each:,.0f}", all=f"{each * batch:,.0f}", b=batch)
    return f'<div class="rf-parts">{rows}</div>' + words.line(f'<span class="ct-muted">{html.escape(rate)}</span>')


def checks_html(found: list[Check], held: MemoryMeasured) -> str:
    """Planned beside held, one row each."""
    rows = []
    for c in found:
        ratio = f"{c.ratio:.3f}" if c.ratio is not None else "–"
        formula = f'<div class="rf-formula">{html.escape(c.formula)}</div>'
        rows.append([
            html.escape(c.name) + formula, html.escape(number(c.planned, "B")), html.escape(number(c.held, "B")), ratio, html.escape(c.why),
        ])  # fmt: skip
    head = [_("what"), _("planned"), _("held"), _("planned / held"), _("where they differ")]
    all_of_it = _(
        "All storages of the model together take {model}, forms for other batch sizes and tables included; the engine's process takes {process}."
    ).format(model=number(held.model_bytes, "B"), process=number(held.process_bytes, "B"))
    if held.device_bytes:
        all_of_it += " " + _("On the GPU torch holds {n}.").format(n=number(held.device_bytes, "B"))
    return words.table(head, rows, wrap=True) + words.line(html.escape(all_of_it))


def pool_html(started: EngineStarted, block_size: int, num_blocks: int) -> str:
    """The KV pool alone, which every run tells when it starts. ValueError for facts that are missing."""
    shape = KvShape.from_facts(
        started.model, str(started.device.get("dtype")), str(started.config.get("kv_cache_dtype") or "auto"), block_size
    )
    wanted = pool_bytes(shape, num_blocks, block_size)
    text = _("KV pool of this run: {n} blocks × {b} B = {planned} planned, {held} allocated.").format(
        n=num_blocks,
        b=f"{shape.bytes_per_block(block_size):,}",
        planned=number(wanted, "B"),
        held=number(started.kv_pool_bytes, "B"),
    )
    return words.line(f"{badge('measured')} {html.escape(text)}")


class PlannerPanel(pn.viewable.Viewer):
    """``view``: the page's view, whose parameters are the what-if knobs and whose rows say what is known."""

    def __init__(self, view: Any, css: str, **params: Any) -> None:
        super().__init__(**params)
        self.view, self.css = view, css
        self.pasted: Model | None = None
        self.problem = ""  # of what was pasted
        self._pressed = 0.0
        self._drawn: Any = None
        self._build()

    def _build(self) -> None:
        view, live = self.view, self.view.session is not None
        self.config = pmui.TextAreaInput(
            label=_("A config.json instead of the running model"), placeholder=PLACEHOLDER, rows=3, max_length=200_000,
            sizing_mode="stretch_width", size="small", margin=(0, 0, 6, 0),
        )  # fmt: skip
        self.config.param.watch(self._config_changed, "value")
        self.back = pmui.Button(
            label=_("Back to the running model"), icon="undo", variant="text", size="small", margin=0, visible=False
        )
        self.back.on_click(lambda _event: setattr(self.config, "value", ""))
        self.said, self.plan, self.times, self.check = (pane(css=self.css) for _i in range(4))
        self.kv_heads = knobs.kv_heads_select(view)
        asked = grid(
            knobs.gpu_select(view), knobs.batch_slider(view), knobs.context_slider(view), knobs.bits_select(view),
            knobs.kv_dtype_select(view), self.kv_heads, knobs.tp_select(view), min_width=150, gap=18, margin=(0, 0, 14, 0),
        )  # fmt: skip
        first = card(
            _("What fits"), asked, self.config, self.back, self.said, self.plan, kinds=("modelled", "what-if"),
            hint=_("Weights, KV cache, activations and logits of one GPU, each with its formula."),
        )  # fmt: skip
        when = card(_("How long it would take"), self.times, kinds="modelled", margin=0,
                    hint=_("The least time that the GPU's roofs allow; no program beats it and few reach it."))  # fmt: skip
        self.look = pmui.Button(label=_("Look into the engine"), icon="memory", variant="outlined", margin=(0, 0, 8, 0))
        self.look.on_click(lambda _event: self._measure())
        checked = card(
            _("The same formulas against the running engine"), *([self.look] if live else []), self.check, kinds=("measured", "modelled"), margin=0,
            hint=_("What the engine's process holds now, added up from its tensors, beside what the planner says of that model."),
        )  # fmt: skip
        self._layout = pn.Column(
            first,
            grid(when, checked, min_width=340, columns="minmax(0, 5fr) minmax(0, 7fr)"),
            sizing_mode="stretch_width",
            margin=0,
        )

    def __panel__(self) -> pn.Column:
        return self._layout

    # -- what a user does ----------------------------------------------------------------------------------------------------

    def _config_changed(self, event: Any) -> None:
        text = str(event.new or "").strip()
        self.pasted, self.problem = None, ""
        if text:
            try:
                self.pasted = pasted(text)
            except ValueError as error:
                self.problem = str(error)
        self._drawn = None
        self.view._draw_fresh()

    def _measure(self) -> None:
        self._pressed, self._drawn = time.monotonic(), None
        self.view.session.measure_memory(self.view.clock.owner)

    # -- what is drawn ---------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Model | None:
        """What is planned with: the pasted one, or the running one."""
        rows, view = self.view.rows, self.view
        if self.pasted is not None:
            return self.pasted
        if rows.started is None:
            return None
        return Model(rows.title, rows.model, rows.dtype, running_bits(view.method, rows.dtype))

    def update(self) -> None:
        """Called by the view, with its lock held, in the document's own callbacks."""
        view, rows = self.view, self.view.rows
        if rows.memory and rows.memory[-1].time_ns != self._seen:
            self._seen, self._pressed = rows.memory[-1].time_ns, 0.0
        waiting = bool(self._pressed) and time.monotonic() - self._pressed < PATIENCE_S
        drawn = (view.what_if_values, view.method, rows.started, self.config.value, self._seen, waiting, view.running)
        if drawn == self._drawn:
            return
        self._drawn = drawn
        self._draw_plan()
        self._draw_check(waiting)

    _seen = -1  # time of the newest measurement that was read

    def _draw_plan(self) -> None:
        view, model = self.view, self.model
        if self.back.visible != bool(self.config.value):
            self.back.visible = bool(self.config.value)
        told = words.said(html.escape(self.problem), "error") if self.problem else ""
        plan, times = "", ""
        if model is None:
            plan = empty(words.NO_ENGINE)
        elif not self.problem:
            knobs.offer_kv_heads(self.kv_heads, view, model.facts)
            try:
                facts = with_kv_heads(model.facts, view.kv_heads)
                work = workload(
                    batch=view.batch, context=view.context, bits=view.weight_bits, running=model.bits, dtype=model.dtype,
                    kv_dtype=view.kv_dtype, tensor_parallel=view.tp,
                )  # fmt: skip
                found = planned(Model(model.name, facts, model.dtype, model.bits), gpu(view.gpu), work)
                plan, times = plan_html(model, found, gpu(view.gpu), view.tp), times_html(found, view.batch)
            except (ValueError, KeyError) as error:
                why = str(error) if isinstance(error, ValueError) else _("the model's facts lack {name}").format(name=error)
                told = words.said(html.escape(why[:1].upper() + why[1:]), "error")
        self._set(self.said, told)
        self._set(self.plan, plan)
        self._set(self.times, times or empty(_("There is no plan to time.")))

    def _draw_check(self, waiting: bool) -> None:
        view, rows = self.view, self.view.rows
        live = view.session is not None
        body = ""
        if waiting:
            body += words.said(html.escape(_("Looking: requests wait for a second or so.")), "wait")
        try:
            if rows.memory:
                body += checks_html(checks(rows.model, rows.memory[-1]), rows.memory[-1])
            elif rows.started is not None:
                body += "" if waiting else empty(NOT_MEASURED if live else NOT_RECORDED)
                config = rows.started.config
                body += pool_html(rows.started, int(config["block_size"]), int(config["num_kv_blocks"]))
            else:
                body += empty(words.NO_ENGINE)
        except (ValueError, KeyError, TypeError) as error:
            text = str(error) if isinstance(error, ValueError) else _("This run says too little of its model.")
            body += words.said(html.escape(text), "mind")
        self._set(self.check, body)
        disabled = waiting or not view.running
        if self.look.disabled != disabled:
            self.look.disabled = disabled

    @staticmethod
    def _set(target: pn.pane.HTML, body: str) -> None:
        if target.object != body:
            target.object = body
