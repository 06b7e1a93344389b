"""The tab "Decode": one query token a request over a long context, split so that the chip is full, and merged."""

import html
from typing import Any

import panel as pn
import panel_material_ui as pmui

from explorer.attention.decode_rows import Merge, Plan, merge, plan
from explorer.attention.figure import SplitsFigure
from explorer.attention.labels import CSS, facts, part, said, set_html, table, what
from explorer.i18n import _, ngettext
from explorer.theme import badge, card, grid, in_file, pane

BATCHES, CONTEXTS = (1, 2, 4, 8, 16, 32, 64, 128), (128, 512, 2048, 8192, 32768, 131072)
PER_SM = 2  # programs that a multiprocessor holds, as the engine's launch takes it
SHOWN = 12  # requests, parts
OWN, TRIED = "engine", "what-if"


class DecodePanel(pn.viewable.Viewer):
    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self._of: Any = None
        small: dict[str, Any] = {"size": "small", "margin": 0}
        wide = {**small, "sizing_mode": "stretch_width"}
        self.source = pmui.RadioButtonGroup(
            options={_("the engine’s own batch"): OWN, _("a batch of my choice"): TRIED},
            value=OWN,
            sx={"& .MuiToggleButton-root": {"whiteSpace": "nowrap"}},
            **small,
        )
        self.batch = pmui.Select(label=_("Requests"), options=list(BATCHES), value=1, **wide)
        self.context = pmui.Select(label=_("Context of each"), options={f"{n:,}": n for n in CONTEXTS}, value=8192, **wide)
        self.kv_heads = pmui.Select(label=_("KV heads"), options=[1, 2, 3, 4, 8, 16, 32], value=8, **wide)
        self.splits = pmui.Select(
            label=_("Parts"), options={_("as the launch chooses"): 0, **{str(s): s for s in (1, 2, 4, 8, 16, 32, 64, 128)}}, value=0, **wide
        )  # fmt: skip
        # In a column: a grid's own display would win over being hidden.
        self.own = pn.Column(
            grid(self.batch, self.context, self.kv_heads, min_width=120, gap=12),
            margin=(10, 0, 0, 0),
            sizing_mode="stretch_width",
        )
        self.state, self.numbers = pane(css=CSS, margin=(10, 0, 0, 0)), pane(css=CSS, margin=(12, 0, 0, 0))
        self.figure = SplitsFigure()
        self.chip, self.parts, self.merged = pane(css=CSS), pane(css=CSS), pane(css=CSS)
        column: dict[str, Any] = {"sizing_mode": "stretch_width", "margin": 0}
        curve = pn.Column(
            pane(part(_("Time over the number of parts"), "modelled"), css=CSS), pn.pane.Bokeh(self.figure.root, sizing_mode="stretch_width", margin=0),
            pane(what(_("waves · (tiles of a part + 1) + merging, the formula by which the kernel’s launch chooses. Dashed: not split.")), css=CSS), **column,
        )  # fmt: skip
        chip = pn.Column(pane(part(_("The multiprocessors in the last wave"), "modelled"), css=CSS), self.chip, **column)
        self.inside = pn.Column(self.numbers, grid(curve, chip, min_width=300, gap=26, margin=(16, 0, 0, 0)), **column)
        first = card(
            _("How many parts fill the chip"), *([] if in_file.get() else [self.source, self.own, pn.Column(self.splits, margin=(10, 0, 0, 0), max_width=240)]),
            self.state, self.inside, kinds=("measured", "modelled"),
            hint=_("A decode has one query a request: too few programs for a large chip, unless each context is cut into parts."),
        )  # fmt: skip
        second = card(
            _("The parts and their merge"), self.parts, self.merged, kinds="derived", margin=0,
            hint=_("Each part gives its own softmax’s output and log-sum-exp; weighted by exp(lse of the part − lse of all) they add up to the whole."),
        )  # fmt: skip
        self.second = second
        self._layout = pn.Column(first, second, **column)

    def __panel__(self) -> pn.Column:
        return self._layout

    def lengths(self) -> tuple[list[int], int]:
        """Keys of each request, and KV heads."""
        view = self.view
        if self.source.value == OWN:
            return view.steps.decoding(view.shown_step), view.steps.model.num_kv_heads
        return [self.context.value] * self.batch.value, self.kv_heads.value

    def update(self) -> None:
        shape = self.view.shape
        lengths, kv_heads = self.lengths()
        key = (tuple(lengths), kv_heads, shape.block_n, shape.gpu, self.splits.value, self.source.value)
        if key == self._of:
            return
        self._of = key
        tried = self.source.value == TRIED
        for each, visible in ((self.own, tried), (self.inside, bool(lengths)), (self.second, bool(lengths))):
            if each.visible != visible:
                each.visible = visible
        if not lengths:
            live = self.view.session is not None
            text = _(
                "No request decodes in the step on the screen. Send a prompt on the Run page, or choose a batch of your own."
            )
            recorded = _("No request decodes in the step of the recorded run that is shown. Move on in time.")
            set_html(self.state, said(html.escape(text if live else recorded)))
            return
        made = plan(lengths, kv_heads, shape.block_n, shape.chip.num_sms, PER_SM, self.splits.value)
        set_html(self.state, state_html(made, shape.chip.title, tried, self.view.shown_step))
        set_html(self.numbers, numbers_html(made))
        self.figure.show(made.curve(), made.splits)
        set_html(self.chip, chip_html(made))
        set_html(self.parts, parts_html(made))
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        shown = made.ranges(longest)
        set_html(self.merged, merge_html(merge(shown)) if made.lengths[longest] <= 200_000 else "")


def state_html(made: Plan, gpu: str, tried: bool, step: int) -> str:
    low, high = min(made.lengths), max(made.lengths)
    keys = _("{high:,} keys") if low == high else _("{low:,} to {high:,} keys")
    batch = _("{requests} with {keys}, {heads}").format(
        requests=ngettext("{n} request", "{n} requests", len(made.lengths)).format(n=len(made.lengths)),
        keys=keys.format(low=low, high=high),
        heads=ngettext("{n} KV head", "{n} KV heads", made.kv_heads).format(n=made.kv_heads),
    )
    where = _("tried") if tried else _("decoding in step {step}").format(step=step)
    text = _("{batch} ({where}), on {gpu}: {sms} multiprocessors that hold {per} programs each.").format(
        batch=batch, where=where, gpu=gpu, sms=made.num_sms, per=made.programs_per_sm
    )
    return said(f"{badge('what-if' if tried else 'measured')} {html.escape(text)}")


def numbers_html(made: Plan) -> str:
    s = made.splits
    return facts(
        [
            (str(s), _("parts of each context")),
            (f"{made.programs(1):,} → {made.programs(s):,}", _("programs, not split and split")),
            (f"{100 * made.busy(s):.0f} %", _("of the places busy; not split {x:.1f} %").format(x=100 * made.busy(1))),
            (f"{made.waves(s)}", ngettext("wave", "waves", made.waves(s))),
            (f"{made.time(1) / made.time(s):.1f} ×", _("faster than not split, as modelled")),
        ]
    )


def chip_html(made: Plan) -> str:
    """A square for each multiprocessor, as full as its places are in the last wave, the one that may not be full."""
    s = made.splits
    left = made.programs(s) - (made.waves(s) - 1) * made.slots
    cells = ""
    for sm in range(made.num_sms):  # dealt one to each before any gets a second
        mine = sum(1 for place in range(made.programs_per_sm) if place * made.num_sms + sm < left)
        cells += f'<i title="SM {sm}: {mine} / {made.programs_per_sm}"><u style="height:{100 * mine / made.programs_per_sm:.0f}%"></u></i>'
    alone = made.programs(1)
    text = _("{left:,} of {slots:,} places have a program in wave {wave}; not split, {alone:,} programs would be all.").format(
        left=left, slots=made.slots, wave=made.waves(s), alone=alone
    )
    return f'<div class="at-chip" role="img" aria-label="{html.escape(text)}">{cells}</div>' + what(text)


def parts_html(made: Plan) -> str:
    """The contexts, cut."""
    most = max(made.lengths)
    body = ""
    for i, length in enumerate(made.lengths[:SHOWN]):
        cuts = "".join(
            f'<u style="width:{100 * (end - start) / most:.3f}%" title="{start:,}–{end - 1:,}"></u>'
            for start, end in made.ranges(i) if end > start
        )  # fmt: skip
        body += f"<span>{html.escape(_('request {i}').format(i=i + 1))}</span><i>{cuts}</i><span>{length:,}</span>"
    left = len(made.lengths) - SHOWN
    more = (
        what(ngettext("{n} more request is not drawn.", "{n} more requests are not drawn.", left).format(n=left))
        if left > 0
        else ""
    )
    return part(_("Keys of each request, and its parts")) + f'<div class="at-split">{body}</div>' + more


def merge_html(made: Merge) -> str:
    head = (_("keys"), _("log-sum-exp"), _("weight in the whole"))
    rows = [
        (False, [f"{start:,}–{end - 1:,}", f"{lse:.5f}", f"{weight:.5f}"])
        for (start, end), lse, weight in list(zip(made.ranges, made.lse, made.weights, strict=True))[:SHOWN]
        if end > start
    ]
    total = sum(float(w) for w in made.weights)
    rows.append((True, [_("merged"), f"{made.whole:.5f}", f"{total:.5f}"]))
    left = len([r for r in made.ranges if r[1] > r[0]]) - SHOWN
    text = _(
        "On made-up keys, the longest request’s parts: merged in float32, the output is {off:.1e} away from the unsplit one in float64."
    )
    more = _(" {n} more parts are not listed.").format(n=left) if left > 0 else ""
    return part(_("The merge of one head")) + table(head, rows) + what(text.format(off=made.difference) + more)
