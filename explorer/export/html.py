"""A page or a whole run as one HTML file: opens from disk, plays and steps, asks the network for nothing.

The run is walked through the real views (``explorer.export.tracks``); the file holds what they showed, the same drawing code as the
app's, BokehJS once, and a small player. A content security policy in the file forbids every request. What needs an answer from
Python (details of a block under the pointer, selections, what-if knobs) is not in it.
"""

import base64
import gzip
import html
import json
import os
import re
from pathlib import Path
from typing import Any

from explorer.canvas.transport import RECORDED, TEXTS
from explorer.compare.comparison import facts_of
from explorer.export.tracks import MAX_FRAMES, record_pages
from explorer.i18n import _, ngettext
from explorer.mirror import bokeh_source, runtime_source
from explorer.theme import badge

HERE = Path(__file__).parent
POLICY = "default-src 'none'; script-src 'unsafe-inline' blob:; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
TRANSPORT = HERE.parent / "canvas" / "transport.js"


def run_html(store: Any, title: str, pages: list[str] | None = None, *, limit: int = MAX_FRAMES) -> bytes:
    """The run in ``store`` as an HTML file (UTF-8). ``pages``: slugs; None: all of them. ``limit``: steps that are kept of a long run.

    Takes as long as stepping through the run: about 10 to 40 ms a step and page. ValueError for a page that is none, a run without
    a step, a limit below 2.
    """
    if not isinstance(limit, int) or limit < 2:
        raise ValueError(f"limit must be an integer of at least 2, got {limit!r}")
    steps, recordings = record_pages(store, pages, limit)
    data = {
        "steps": steps,
        "last": store.last_step,
        "texts": {**TEXTS, **RECORDED},
        "pages": [
            {
                "slug": r.slug, "title": r.title, "question": r.question, "spec": r.spec, "opening": r.opening, "tracks": r.tracks,
                "values": r.values,
            }
            for r in recordings
        ],
    }  # fmt: skip
    needs_bokeh = any('"kind":"figure"' in r.spec for r in recordings)
    sources = {
        "runtime": runtime_source(),
        "transport": TRANSPORT.read_text(encoding="utf-8"),
        "bokeh": bokeh_source() if needs_bokeh else "",
    }
    template = (HERE / "page.html").read_text(encoding="utf-8")
    parts = {
        "TITLE": html.escape(title),
        "POLICY": POLICY,
        "CSS": (HERE / "page.css").read_text(encoding="utf-8"),
        "HEAD": _head(store, title, steps),
        "DATA": _packed({"data": data, "sources": sources}),
        "PLAYER": (HERE / "player.js").read_text(encoding="utf-8"),
    }
    places = r"<!--({0})-->|/\*({0})\*/".format("|".join(parts))  # found in one go: a title may read like a place
    return re.sub(places, lambda found: parts[found[1] or found[2]], template).encode("utf-8", "replace")


def write_html(
    store: Any, path: str | os.PathLike[str], title: str = "", pages: list[str] | None = None, *, limit: int = MAX_FRAMES
) -> int:
    """Write ``run_html`` to a file; returns its bytes."""
    data = run_html(store, title or Path(path).stem, pages, limit=limit)
    Path(path).write_bytes(data)
    return len(data)


def _packed(value: Any) -> str:
    """JSON, compressed, in letters that an HTML page carries as they are."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    return base64.b64encode(gzip.compress(text, 6, mtime=0)).decode("ascii")


def _head(store: Any, title: str, steps: list[int]) -> str:
    """Who made this run with what, and which steps are here."""
    count = store.last_step - max(store.first_step, 1) + 1
    kept = (
        ngettext("{n} step, all here", "{n} steps, all here", count).format(n=count)
        if len(steps) >= count
        else _("{n} of the run's {all:,} steps are here, evenly spread").format(n=len(steps), all=count)
    )
    dropped = [_("the run's beginning had been dropped")] if store.dropped else []
    facts = {} if store.started is None else facts_of(store.started)
    lines = "".join(f"<div><dt>{html.escape(k)}</dt> <dd>{html.escape(v)}</dd></div>" for k, v in facts.items())
    return (
        f"<h1>{html.escape(title)} {badge('replayed')}</h1>"
        f'<p class="muted">{html.escape("; ".join([kept, *dropped]))}. {html.escape(_("A recorded run of Cutaway: nothing here is being computed now, and nothing is fetched. Time moves with the bar below; to select, ask and change, open the saved run in the app."))}</p>'
        f"<dl>{lines}</dl>"
    )
