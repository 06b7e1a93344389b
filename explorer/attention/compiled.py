"""The tab "Compiled": what the kernel becomes for the chosen GPU, in the compiler's own words."""

from dataclasses import replace
from typing import Any

import panel as pn

from explorer.attention import lab, words
from explorer.attention.descriptors import beside_html, has_tma
from explorer.attention.labels import CSS, part, set_html, table
from explorer.attention.memory import occupancy_of
from explorer.attention.shape import Shape
from explorer.i18n import _
from explorer.theme import card, grid, in_file, number, pane


class CompiledPanel(pn.viewable.Viewer):
    def __init__(self, view: Any, **params: Any) -> None:
        super().__init__(**params)
        self.view = view
        self.in_file = in_file.get()
        self.state, self.numbers = pane(css=CSS), pane(css=CSS, margin=(12, 0, 0, 0))
        self.room, self.mix, self.tried, self.tma = (pane(css=CSS) for _pane in range(4))
        self._with_tma: dict[str, Any] | None = None
        self._tma_of: Shape | None = None
        self._of: Any = None
        column: dict[str, Any] = {"sizing_mode": "stretch_width", "margin": 0}
        left = pn.Column(
            pane(part(_("Programs that a multiprocessor holds, by resource"), "derived"), css=CSS), self.room, **column
        )
        right = pn.Column(pane(part(_("Instructions in the machine code (SASS)"), "measured"), css=CSS), self.mix, **column)
        # In a column: a grid's own display would win over being hidden.
        self.parts = pn.Column(grid(left, right, min_width=300, gap=26), **{**column, "margin": (16, 0, 0, 0)}, visible=False)
        first = card(
            _("What it becomes"), self.state, self.numbers, self.parts, kinds=("measured", "derived"),
            hint=_("The kernel is really compiled for that GPU’s generation. Instructions are counted as they stand, not as often as they run."),
        )  # fmt: skip
        second = card(
            _("Compiled so far"), self.tried, kinds=("measured", "derived"), margin=0,
            hint=_("Each combination that was tried since the app began, by anybody."),
        )  # fmt: skip
        beside = card(
            _("Copied by the tensor memory accelerator"), self.tma, kinds=("measured",), margin=0,
            hint=_("The same tiles and the same arithmetic; only who copies K and V differs. K and V lie in one piece for this."),
        )  # fmt: skip
        self._layout = pn.Column(first, beside, second, sizing_mode="stretch_width", margin=0)

    def __panel__(self) -> pn.Column:
        return self._layout

    def update(self) -> None:
        shape, report = self.view.shape, self.view.report
        set_html(self.state, words.compile_state(shape, report, lab.COMPILER.seconds(shape.compiled), self.in_file))
        good = self.view.good_report
        self._compare(shape, good)
        known = lab.COMPILER.known()
        key = (shape.compiled, good is not None, len(known))
        if key == self._of:
            return
        self._of = key
        there = good is not None and good["registers"] is not None
        if self.parts.visible != there:
            self.parts.visible = there
        if there and good is not None:
            room = occupancy_of(shape, good)
            set_html(self.numbers, words.compiled_html(shape, good, room))
            set_html(self.room, words.room_html(room) if room is not None else "")
            set_html(self.mix, words.mix_html(good["instructions"]))
        else:
            set_html(self.numbers, "")
        set_html(self.tried, tried_html(known, shape.compiled))

    def _compare(self, shape: Shape, plain: dict[str, Any] | None) -> None:
        """The variant with descriptors beside the plain kernel, compiled once that is there."""
        wanted = replace(shape.compiled, descriptors=True)
        if wanted != self._tma_of:
            self._tma_of, self._with_tma = wanted, None
        if self._with_tma is None and plain is not None and has_tma(shape) and not self.in_file:
            self._with_tma = lab.COMPILER.ask(self.view.who, wanted)
        set_html(self.tma, beside_html(shape, plain, self._with_tma))


def tried_html(known: list[tuple[Shape, dict[str, Any]]], here: Shape) -> str:
    head = (_("tiles, stages, warps"), _("GPU"), _("shared"), _("registers"), _("spills"), _("tensor cores"), _("occupancy"), "")
    rows = []
    for shape, report in reversed(known):
        if "error" in report:
            continue
        room = occupancy_of(shape, report)
        tensor = sum(n for name, n in report["instructions"].items() if words.kind_of(name) == "tensor")
        occupied = "–" if room is None else f"{100 * room.occupancy:.0f} %"
        cells = [
            shape.label, shape.chip.title, number(report["shared_bytes"], "B"), number(report["registers"]), number(report["spills"]),
            f"{tensor:,}", occupied, _("refused") if report["refused"] else "",
        ]  # fmt: skip
        rows.append((shape == here, cells))
    return table(head, rows) if rows else f'<p class="ct-muted ct-small">{_("Nothing has been compiled yet.")}</p>'
