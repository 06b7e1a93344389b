"""How the tabs of the Quantisation page name things, and the pieces of HTML that they share. Pure.

Looking at a saved run must not import torch, so the methods' titles stand here and not in ``engine.quantization.methods``.
"""

import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import panel as pn

from explorer.i18n import _
from explorer.theme import number

CSS = (Path(__file__).parent / "panels.css").read_text(encoding="utf-8")
AS_LOADED = _("as loaded")
TITLES = {
    "": AS_LOADED, "int8": "int8", "int8_w8a8": "int8, W8A8", "fp8": "FP8 e4m3", "int4": "int4", "nf4": "NF4", "gptq": "GPTQ",
    "awq": "AWQ", "int3": "int3", "int2": "int2",
}  # fmt: skip
GROUPED = ("int4", "nf4", "gptq", "awq", "int3", "int2")  # methods with a group size
CALIBRATED = ("gptq", "awq")  # methods that look at the layer's inputs first
KV_TITLES = {"auto": _("model's dtype"), "int8": "int8", "fp8": "fp8", "int4": "int4"}


def kv_label(name: str) -> str:
    return KV_TITLES.get(name, name)


def weights_label(method: str, group_size: int = 0, options: dict[str, Any] | None = None) -> str:
    """ "int4 g32", "GPTQ g64, act_order"."""
    parts = [TITLES.get(method, method) + (f" g{group_size}" if group_size and method in GROUPED else "")]
    for name, value in sorted((options or {}).items()):
        if value is not False and value is not None:
            parts.append(name if value is True else f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    return ", ".join(parts)


def share(value: float, digits: int = 1) -> str:
    """0.1234 as "12.3 %"; small ones keep two significant digits."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    percent = 100 * value
    if percent and abs(percent) < 10**-digits:
        return f"{percent:.1g} %" if abs(percent) >= 1e-4 else f"{percent:.0e} %"
    return f"{percent:.{digits}f} %"


def small(value: float, unit: str = "") -> str:
    """A number that may be very small: below a ten-thousandth in powers of ten."""
    if value and math.isfinite(value) and abs(value) < 1e-4:
        text = f"{value:.1e}"
        return f"{text} {unit}".rstrip()
    return number(value, unit)


def line(text: str) -> str:
    """One line of text, markup in it kept."""
    return f'<p class="qp-line">{text}</p>'


def said(text: str, kind: str = "look") -> str:
    """What the page says about what was found or what goes on; markup in ``text`` is kept."""
    return f'<div class="qp-said {kind}" role="status">{text}</div>'


def bar(value: float, kind: str = "") -> str:
    """A bar of ``value`` in [0, 1]; ``kind``: "", "other"."""
    width = 100 * min(1.0, max(0.0, value)) if value == value else 0.0
    return f'<span class="qp-bar {kind}" aria-hidden="true"><i style="width:{width:.1f}%"></i></span>'


def table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], css: str = "") -> str:
    """``rows``: (class of the row, its cells as HTML), the first cell of each a heading; ``head`` is text."""
    top = "".join(f'<th class="{"num" if i else ""}">{html.escape(name)}</th>' for i, name in enumerate(head))
    body = ""
    for kind, cells in rows:
        first, *rest = cells
        body += f'<tr class="{kind}"><td>{first}</td>{"".join(f"<td class=num>{cell}</td>" for cell in rest)}</tr>'
    return f'<div class="qp-scroll"><table class="qp-table {css}"><tr>{top}</tr>{body}</table></div>'


def token(text: str) -> str:
    """A token's text as HTML, with its white space shown."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    if shown[:1] == " ":
        shown = "·" + shown[1:]
    return html.escape(shown or "∅")


def set_html(target: pn.pane.HTML, body: str) -> None:
    """Nothing is sent where nothing changed."""
    if target.object != body:
        target.object = body
