"""The pieces of HTML that the tabs of the Attention page share. Pure."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import panel as pn

from explorer.theme import badge

CSS = (Path(__file__).parent / "panels.css").read_text(encoding="utf-8")


def said(text: str, kind: str = "") -> str:
    """What the page says; markup in ``text`` is kept. ``kind``: "", "wait", "error", "look", "good"."""
    return f'<div class="at-said {kind}" role="status">{text}</div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Large values, each above its name; both are text."""
    body = "".join(f"<div><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>" for value, name in pairs)
    return f'<div class="at-now">{body}</div>'


def table(head: Sequence[str], rows: Iterable[tuple[bool, Sequence[str]]]) -> str:
    """``rows``: (whether it is the one that is looked at, its cells as text), the first cell of each a heading."""
    top = "".join(f'<th class="{"num" if i else ""}">{html.escape(name)}</th>' for i, name in enumerate(head))
    body = ""
    for here, cells in rows:
        inner = "".join(f'<td class="{"num" if i else ""}">{html.escape(cell)}</td>' for i, cell in enumerate(cells))
        body += f'<tr class="{"here" if here else ""}">{inner}</tr>'
    return f'<div class="at-scroll"><table class="at-table"><tr>{top}</tr>{body}</table></div>'


def bars(rows: Iterable[tuple[str, float, str, str]]) -> str:
    """``rows``: name, share of the whole width in [0, 1], kind of the bar, what is written behind it."""
    body = ""
    for name, share, kind, value in rows:
        width = 100 * min(1.0, max(0.0, share))
        body += (
            f'<code>{html.escape(name)}</code><i aria-hidden="true"><u class="{kind}" style="width:{width:.1f}%"></u></i>'
            f'<span class="n">{html.escape(value)}</span>'
        )
    return f'<div class="at-bars">{body}</div>'


def part(title: str, kinds: Any = ()) -> str:
    """The title of a part of a card, with its badges."""
    marks = "".join(badge(kind) for kind in ((kinds,) if isinstance(kinds, str) else kinds))
    return f'<p class="at-what"><b>{html.escape(title)}</b> {marks}</p>'


def what(text: str) -> str:
    return f'<p class="at-what ct-muted">{html.escape(text)}</p>'


def set_html(target: pn.pane.HTML, body: str) -> None:
    """Nothing is sent where nothing changed."""
    if target.object != body:
        target.object = body
