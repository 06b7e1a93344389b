"""One look for every page: palette, figure defaults, cards, provenance badges, how a number is written.

Colours come from Okabe and Ito's colour-blind-safe set and are never the only carrier of meaning: whatever is coloured
also has a label, a pattern or a hover. Light and dark are not handled here colour by colour: the page sets CSS variables
(``--panel-on-surface-color`` and others), stylesheets mix from them, and Bokeh figures are recoloured by the page.
"""

import html
import math
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import panel as pn
from bokeh.models import HoverTool
from bokeh.plotting import figure as bokeh_figure

from explorer.i18n import _

BLUE, ORANGE, GREEN, PURPLE, VERMILLION, SKY = "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9"
GREY = "#8a8f98"
ACCENT = {"light": BLUE, "dark": SKY}  # the one accent; sky has the contrast that blue lacks on a dark ground

# Okabe and Ito's six, then four of Paul Tol's kind for those who come after.
OWNER_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, VERMILLION, SKY, "#882255", "#999933", "#6a5acd", "#8c5a2b")
PHASE_COLOURS = {"waiting": GREY, "prefill": ORANGE, "decode": BLUE, "preempted": VERMILLION}

# Material UI's own theme: typography and radius once, the accent for each mode.
MUI_THEME: dict[str, Any] = {
    mode: {
        "palette": {
            "primary": {"main": ACCENT[mode]},
            "background": {"paper": paper, "default": ground},
        },
        "shape": {"borderRadius": 8},
        "typography": {"fontSize": 13, "button": {"textTransform": "none"}},
        # A thumb that glides to where it is moved repaints the page for 0.15 s, while the answer waits to be painted.
        "components": {"MuiSlider": {"styleOverrides": {"thumb": {"transition": "none"}, "track": {"transition": "none"}}}},
    }
    for mode, paper, ground in (("light", "#ffffff", "#f6f7f9"), ("dark", "#16191d", "#0f1114"))
}

# --------------------------------------------------------------------------------------------------- owners and requests

_OWNERS_KEPT = 4096  # a server that runs for weeks sees many browsers
_owners: dict[str, int] = {}  # owner -> place in the palette
_present: set[str] = set()
_owners_lock = threading.Lock()  # the browsers of a server with several threads come and go side by side


def owner_colour(owner: str) -> str:
    """The owner's colour as #rrggbb: whoever is seen for the first time gets the one that the fewest have, then always that one."""
    place = _owners.get(owner)
    if place is None:
        with _owners_lock:
            place = _place(owner)
    return OWNER_COLOURS[place]


def arrived(owner: str) -> None:
    """Somebody is here now: their colour is nobody else's who is here, while the palette has one left. The owners of recorded
    runs have colours too, and take none away from those who are here."""
    with _owners_lock:
        _present.add(owner)
        if _owners.get(owner) in {_owners.get(other) for other in _present - {owner}}:
            del _owners[owner]  # one of its name was in a recorded run
        _place(owner)


def left(owner: str) -> None:
    """They are gone. What they sent keeps its colour, which another may get now."""
    with _owners_lock:
        _present.discard(owner)


def _place(owner: str) -> int:
    if owner not in _owners:
        if len(_owners) >= _OWNERS_KEPT:
            for other in _owners.keys() - _present:
                del _owners[other]
        here = Counter(_owners[other] for other in _present if other in _owners)
        known = Counter(_owners.values())
        _owners[owner] = min(range(len(OWNER_COLOURS)), key=lambda place: (here[place], known[place], place))
    return _owners[owner]


def request_colour(owner: str, ordinal: int) -> str:
    """One of the owner's shades for its ``ordinal``-th request (0, 1, ...): neighbours differ, the hue stays the owner's."""
    towards, amount = (("#ffffff", 0.0), ("#ffffff", 0.35), ("#000000", 0.25), ("#ffffff", 0.55))[ordinal % 4]
    return mix(owner_colour(owner), towards, amount)


def mix(colour: str, other: str, amount: float) -> str:
    """``colour`` moved by ``amount`` (0..1) towards ``other``; both and the result are #rrggbb."""
    pairs = zip(_channels(colour), _channels(other))
    return "#" + "".join(f"{round(a + (b - a) * amount):02x}" for a, b in pairs)


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


# ------------------------------------------------------------------------------------------------------------- numbers

_UNITS_WITHOUT_PREFIX = {"ms", "%", "tokens", "blocks", "steps", "requests"}


def number(value: float | int | None, unit: str = "", digits: int = 3) -> str:
    """A number as a person reads it, with its unit: ``number(1234567, "B")`` is "1.18 MiB", of 0.1234 ms "0.123 ms".

    Integers below 10,000 stay exact; bytes go in powers of 1024, everything else in thousands. None and NaN give "–".
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if unit == "B":
        return _scaled(value, 1024, ("B", "KiB", "MiB", "GiB", "TiB"), digits)
    suffix = f" {unit}" if unit else ""
    if isinstance(value, int) and abs(value) < 10_000:
        return f"{value}{suffix}"
    if abs(value) < 1000 or (unit in _UNITS_WITHOUT_PREFIX and abs(value) < 1e6):
        return _significant(value, digits) + suffix
    scaled = _scaled(value, 1000, ("", "k", "M", "G", "T"), digits)
    # "1.2 GFLOP" but "1.2k tokens/s": the prefix belongs to a symbol, not to a word.
    return f"{scaled}{unit}" if unit[:1].isupper() else f"{scaled.replace(' ', '')}{suffix}"


def _scaled(value: float, base: int, prefixes: Sequence[str], digits: int) -> str:
    power = 0
    while abs(value) >= base and power < len(prefixes) - 1:
        value, power = value / base, power + 1
    text = f"{value:.0f}" if power == 0 and float(value).is_integer() else _significant(value, digits)
    return f"{text} {prefixes[power]}"


def _significant(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 8)}f}"


# -------------------------------------------------------------------------------------------------------------- badges

# kind -> (sign, colour, what it means). The sign and the word carry the meaning; the colour only helps.
BADGES: dict[str, tuple[str, str, str]] = {
    "measured": ("●", GREEN, _("Measured: comes from the engine that is running, as it happened.")),
    "derived": ("∑", SKY, _("Derived: arithmetic on measured numbers; hover or read the card for the formula.")),
    "modelled": ("≈", ORANGE, _("Modelled: computed from a stated formula, not observed.")),
    "replayed": ("↺", PURPLE, _("Replayed: read back from a recorded run; no engine produces it now.")),
    "live": ("⚙", VERMILLION, _("Live knob: changes the running engine for everybody, at the next step.")),
    "what-if": ("?", SKY, _("What-if knob: recomputes from recorded data; the engine does not notice.")),
}


# Set while a view is built that goes into a file, where a click is answered by nobody.
in_file: ContextVar[bool] = ContextVar("in_file", default=False)
# Set by every view when it is made: what a recorded run has measured is replayed.
replaying: ContextVar[bool] = ContextVar("replaying", default=False)


def provenance(kind: str) -> str:
    """``kind``, or "replayed" for what was "measured" in the recorded run that is being shown."""
    return "replayed" if kind == "measured" and replaying.get() else kind


def badge(kind: str) -> str:
    """HTML of a provenance badge: "measured", "derived", "modelled", "replayed"; or of a knob: "live", "what-if"."""
    if kind not in BADGES:
        raise ValueError(f"badge must be one of {', '.join(BADGES)}, got {kind!r}")
    kind = provenance(kind)
    sign, colour, meaning = BADGES[kind]
    return (
        f'<span class="ct-badge" style="--ct-badge:{colour}" title="{html.escape(meaning)}">'
        f'<span aria-hidden="true">{sign}</span> {html.escape(_(kind))}</span>'
    )


# --------------------------------------------------------------------------------------------------------------- cards

# Panes live in shadow roots, where the document's stylesheets do not reach: every pane() carries this one.
CSS = (Path(__file__).parent / "theme.css").read_text(encoding="utf-8")


class _Html(pn.pane.HTML):
    """Sends its text when that changes, and no more: Panel works out all of a pane's properties and stylesheets anew each time, which
    takes longer than most texts take to write."""

    def _update(self, ref: str, model: Any) -> None:
        model.text = self._transform_object(self.object)["object"]


def pane(body: str = "", css: str = "", **params: Any) -> pn.pane.HTML:
    """An HTML pane that wears the theme. ``body`` is markup: escape every text that a user or a model wrote."""
    params.setdefault("sizing_mode", "stretch_width")
    params.setdefault("margin", 0)
    return _Html(body, stylesheets=[CSS + css], **params)


def heading(title: str, kinds: str | Iterable[str] = (), hint: str = "") -> str:
    """HTML of a card's title with its badges and one line under it that says what one sees."""
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    below = f'<p class="ct-muted ct-small" style="margin-top:3px">{html.escape(hint)}</p>' if hint else ""
    return f"<h2>{html.escape(title)} {''.join(badge(kind) for kind in kinds)}</h2>{below}"


def card(title: str, *children: Any, kinds: str | Iterable[str] = (), hint: str = "", acts: str = "", **params: Any) -> pn.Column:
    """A titled frame around ``children``; ``kinds`` are provenance badges, ``hint`` one line of explanation, ``acts`` what a click or
    the pointer does there: it follows the hint, except in a file."""
    hint = hint if in_file.get() else f"{hint} {acts}".strip()
    params.setdefault("sizing_mode", "stretch_width")
    params.setdefault("margin", (0, 0, 16, 0))
    top = [pane(heading(title, kinds, hint), margin=(0, 0, 10, 0))] if title else []
    return pn.Column(*top, *children, css_classes=["ct-card"], stylesheets=[CSS], **params)


def grid(*children: Any, min_width: int = 340, gap: int = 16, columns: str = "", **params: Any) -> pn.Column:
    """Children side by side where each gets ``min_width`` pixels, below each other where not (a phone).

    ``columns``: a CSS ``grid-template-columns`` for screens from 1100 px on, when equal columns will not do. ``visible`` has no effect
    on it: put what is to be hidden into a column.
    """
    css = f""":host {{ display: grid !important; gap: {gap}px; grid-template-columns: repeat(auto-fit, minmax(min(100%, {min_width}px), 1fr)); }}
    ::slotted(*) {{ min-width: 0; }}"""
    if columns:
        css += f"\n@media (min-width: 1100px) {{ :host {{ grid-template-columns: {columns}; }} }}"
    params.setdefault("sizing_mode", "stretch_width")
    return pn.Column(*children, stylesheets=[css], **params)


def empty(text: str) -> str:
    """HTML of an empty state: ``text`` says what to do so that something shows."""
    return f'<div class="ct-empty">{html.escape(text)}</div>'


# ------------------------------------------------------------------------------------------------------------- figures


def figure(height: int = 220, *, tooltips: Sequence[tuple[str, str]] | None = None, **params: Any) -> Any:
    """A Bokeh figure with the defaults of this app: full width, no toolbar, horizontal pan and zoom at most.

    ``tooltips`` are (label, "@field") pairs; give every one its index, raw value and unit. Bokeh escapes the fields.
    """
    params.setdefault("tools", "")
    params.setdefault("sizing_mode", "stretch_width")
    plot = bokeh_figure(height=height, toolbar_location=None, min_border=4, **params)
    if tooltips is not None:
        plot.add_tools(HoverTool(tooltips=list(tooltips), attachment="vertical"))
    plot.xgrid.grid_line_color = None
    plot.outline_line_color = None
    for axis in (*plot.xaxis, *plot.yaxis):
        axis.major_label_text_font_size = "11px"
        axis.axis_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
        axis.minor_tick_line_color = None
    return plot
