"""What the cells of the notebooks show: tables that say where their numbers come from, a prediction beside the measurement, a verdict.

Everything here shows itself: as HTML in Jupyter (in its own light or dark colours), as plain text elsewhere.
"""

import html
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from explorer.i18n import _
from explorer.theme import BADGES, BLUE, GREEN, ORANGE, VERMILLION, number

PROVENANCE = ("measured", "derived", "modelled", "replayed")
_NUMBER = re.compile(r"[+-]?\d[\d.,e+-]*( ?%| [KMGT]?i?B)?|\d+ / \d+|–")  # "3,000", "90 MiB", "97%", "9 / 3"
_SHORT = 24  # characters that stay on one line in a table
_NEAR = 1.25  # a prediction within this factor of the measurement is called close


@dataclass(frozen=True)
class Shown:
    """Two faces of one thing. ``passed``: of a verdict, whether the exercise is solved; None for what is no verdict."""

    text: str
    html: str
    passed: bool | None = None

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


# -------------------------------------------------------------------------------------------------------------- tables


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    kinds: str | Sequence[str],
    caption: str = "",
    bar: str | None = None,
) -> Shown:
    """Rows under their column names, with provenance badges. ``bar``: the column of numbers that is also drawn as bars.

    ``kinds``: one or several of "measured", "derived", "modelled", "replayed". ValueError for another one, for none, for a ``bar``
    that is no column, and for a row of another length.
    """
    kinds = [kinds] if isinstance(kinds, str) else list(kinds)
    if not kinds or not set(kinds) <= set(PROVENANCE):
        raise ValueError(f"kinds must be of {', '.join(PROVENANCE)}, got {kinds!r}")
    if bar is not None and bar not in columns:
        raise ValueError(f"bar must be one of the columns {', '.join(columns)}, got {bar!r}")
    cells = [list(row) for row in rows]
    for row in cells:
        if len(row) != len(columns):
            raise ValueError(f"each row needs {len(columns)} values ({', '.join(columns)}), got {row!r}")
    return Shown(_table_text(columns, cells, kinds, caption), _table_html(columns, cells, kinds, caption, bar))


def _written(value: Any) -> str:
    if not _is_number(value) or math.isinf(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _table_text(columns: Sequence[str], cells: list[list[Any]], kinds: list[str], caption: str) -> str:
    lines = [list(columns), *([_written(value) for value in row] for row in cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    right = [_side(cells, i) == "right" for i in range(len(columns))]
    body = ["  ".join(t.rjust(w) if r else t.ljust(w) for t, w, r in zip(line, widths, right)).rstrip() for line in lines]
    return "\n".join([f"{caption} [{', '.join(_(kind) for kind in kinds)}]".strip(), *body])


def _table_html(columns: Sequence[str], cells: list[list[Any]], kinds: list[str], caption: str, bar: str | None) -> str:
    at = columns.index(bar) if bar is not None else -1
    most = max((float(row[at]) for row in cells if _is_number(row[at]) and row[at] == row[at]), default=0.0) if at >= 0 else 0.0
    head = "".join(f'<th style="text-align:{_side(cells, i)}">{html.escape(name)}</th>' for i, name in enumerate(columns))
    body = ""
    for row in cells:
        body += "<tr>"
        for i, value in enumerate(row):
            text = html.escape(_written(value))
            if i == at and _is_number(value):
                text = _with_bar(text, float(value), most)
            wrap = "pre" if len(_written(value)) <= _SHORT else "pre-wrap;min-width:14em"
            body += f'<td style="text-align:{_side(cells, i)};max-width:46em;white-space:{wrap}">{text}</td>'
        body += "</tr>"
    marks = "".join(_mark(kind) for kind in kinds)
    return (
        f'<div style="overflow-x:auto"><table style="margin-left:0;font-variant-numeric:tabular-nums"><caption style="caption-side:top;'
        f'text-align:left;color:inherit;padding:2px 0 6px">{html.escape(caption)} {marks}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _mark(kind: str) -> str:
    """A provenance badge that needs no stylesheet."""
    sign, colour, meaning = BADGES[kind]
    style = f"font-size:11px;border:1px solid {colour};border-radius:9px;padding:0 7px;margin-left:6px;white-space:nowrap"
    return f'<span title="{html.escape(meaning)}" style="{style}">{sign} {html.escape(_(kind))}</span>'


def _side(cells: list[list[Any]], i: int) -> str:
    """Numbers, also written ones, stand to the right."""
    return "right" if cells and all(_is_number(row[i]) or _NUMBER.fullmatch(str(row[i])) for row in cells) else "left"


def _with_bar(text: str, value: float, most: float) -> str:
    """A bar of ``value`` beside its text; all bars of a column begin at the same place."""
    width = 100 * value / most if most > 0 and math.isfinite(value) and value > 0 else 0
    bar = f'<span style="display:inline-block;height:.7em;width:{width:.1f}%;background:{BLUE};border-radius:2px"></span>'
    return (
        '<div style="display:flex;gap:.7em;align-items:center;justify-content:flex-end">'
        f'<span style="width:9em;flex:none;text-align:left">{bar}</span><span style="min-width:3.5em">{text}</span></div>'
    )


# ------------------------------------------------------------------------------------------- predictions and exercises


def compare(prediction: float | None, measured: float, unit: str = "") -> Shown:
    """The reader's prediction beside what was measured. None: no prediction was made. ValueError for what is no number."""
    found = _("measured here: {value}").format(value=number(measured, unit))
    if prediction is None or prediction is ...:
        ask = _("You made no prediction. It is worth a guess: write a number in the cell above and run both again.")
        return _note("?", ORANGE, f"{ask} {found[:1].upper()}{found[1:]}.", None)
    if not _is_number(prediction) or not math.isfinite(prediction):
        raise ValueError(f"a prediction must be a number, got {prediction!r}")
    said = _("You predicted {value}").format(value=number(prediction, unit))
    low, high = sorted((float(prediction), float(measured)))
    if low == high or (low > 0 and high / low <= _NEAR):
        return _note("≈", GREEN, f"{said}, {found}. {_('That is close.')}", None)
    off = "" if low <= 0 else _("That is off by a factor of {factor}.").format(factor=number(high / low))
    return _note("≠", ORANGE, f"{said}, {found}. {off}".strip(), None)


def check(got: Any, expected: Any, *, right: str, hints: Iterable[tuple[Any, str]] = (), hint: str = "") -> Shown:
    """Whether an exercise is solved: ``got`` against ``expected``.

    An answer that is None (or a list with nothing else in it) has not been begun. ``hints``: (wrong answer, what it shows), for the
    mistakes that people make; ``hint`` for every other one. ``right`` says why the answer is right. ``passed`` of what comes back
    tells a test.
    """
    answers = got if isinstance(got, (list, tuple)) else [got]
    if not answers or all(answer is None or answer is ... for answer in answers):
        return _note("○", ORANGE, _("Not yet: fill in the exercise above, run it, then run this cell again."), False)
    if got == expected:
        return _note("✓", GREEN, _("Right.") + f" {right}", True)
    why = next((text for wrong, text in hints if got == wrong), hint)
    return _note("✗", VERMILLION, _("Not yet: got {got}.").format(got=_answer(got)) + f" {why}".rstrip(), False)


def _answer(got: Any) -> str:
    text = ", ".join(map(str, got)) if isinstance(got, (list, tuple)) else str(got)
    return text if len(text) <= 200 else text[:200] + "…"


def _note(sign: str, colour: str, text: str, passed: bool | None) -> Shown:
    body = f'<b style="margin-right:.5em">{sign}</b>{html.escape(text)}'
    frame = f"border-left:4px solid {colour};padding:.35em .8em;margin:.3em 0;max-width:60em"
    return Shown(f"{sign} {text}", f'<div style="{frame}">{body}</div>', passed)
