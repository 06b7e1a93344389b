"""A saved run in place of the engine: what one browser looks at, and the bar that says so on top of every page."""

import html
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import panel as pn
import panel_material_ui as pmui

from engine.events.types import RequestAdded
from explorer.compare.comparison import compare, facts_of
from explorer.compare.words import report
from explorer.i18n import _, ngettext
from explorer.runs import SHIPPED
from explorer.sources.sense import check_sampling
from explorer.sources.verifying import Verifier
from explorer.store import EventStore
from explorer.theme import badge, pane

CSS = """
.rp-facts { display: flex; flex-wrap: wrap; gap: 2px 14px; }
.rp-report { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace; max-height: 22em; overflow: auto; }
.rp-bad { color: var(--panel-on-surface-color); border-left: 3px solid #d55e00; padding-left: 10px; }
"""


MAX_RAW, MAX_RAW_AN_EVENT = (
    64 << 20,
    2048,
)  # bytes, decompressed, of a file that somebody opens: events are some times that in memory


@dataclass
class Replay:
    """``name``: of a shipped run, for the address; None for a file that somebody opened."""

    title: str
    what: str
    store: EventStore
    name: str | None = None
    problem: str = ""  # what a look at all of it found

    @classmethod
    def shipped(cls, name: str) -> "Replay":
        """ValueError for a name that is none, and for a file that is not in order."""
        if name not in SHIPPED:
            raise ValueError(_("There is no recorded run named {name!r}.").format(name=name[:60]))
        run = SHIPPED[name]
        return cls(run.title, run.what, EventStore.load(run.path), name)

    @classmethod
    def of_file(cls, title: str, path: Path) -> "Replay":
        """Opens at once; all of it is decoded and replayed in the background, and ``problem`` says what was wrong. ValueError for
        what can be seen now."""
        try:
            store = EventStore.load(path)
        except ValueError as error:  # it names our temporary file, which means nothing to a reader
            raise ValueError(f"{title}: {str(error).removeprefix(f'{path}: ')}") from None
        if store.started is None or store.last_step == 0:
            raise ValueError(_("{title}: this run holds no step of an engine.").format(title=title))
        most = MAX_RAW + MAX_RAW_AN_EVENT * len(store)
        if store.log.raw_nbytes > most:
            raise ValueError(
                _("{title}: {n:,} events take {size} MiB; up to {most} MiB of so many can be shown here.").format(
                    title=title, n=len(store), size=store.log.raw_nbytes >> 20, most=most >> 20
                )
            )
        replay = cls(title, _("A file that you opened."), store)
        threading.Thread(target=replay._check, name="check of a saved run", daemon=True).start()
        return replay

    def _check(self) -> None:
        try:
            self.store.log.check()
            check_sampling((e.request_id, e.sampling) for e in self.store.log if isinstance(e, RequestAdded))
        except ValueError as error:
            self.problem = _("This file contradicts itself: {error}. What is shown may be wrong.").format(error=error)


def at_rest(store: EventStore) -> EventStore:
    """The run as it is now: an engine may go on adding to it."""
    if store.replayed:
        return store
    with tempfile.TemporaryDirectory(prefix="cutaway-save-") as folder:
        path = Path(folder) / "run.cutaway"
        store.save(path)
        return EventStore.load(path)


class Comparing:
    """Two runs compared in a thread; told as ``Verifier`` tells its."""

    def __init__(self, title: str, a: EventStore, b: EventStore) -> None:
        self._text, self._done = _("Comparing …"), False
        threading.Thread(target=self._run, args=(title, a, b), name="compare two runs", daemon=True).start()

    def _run(self, title: str, a: EventStore, b: EventStore) -> None:
        try:
            lines = report(compare(at_rest(a).log, b.log))
            self._text = "\n".join([_("First run: {title}. Second run: this one.").format(title=title), *lines])
        except (ValueError, OSError) as error:
            self._text = _("They could not be compared: {error}").format(error=error)
        self._done = True

    def said(self) -> tuple[str, bool]:
        return self._text, self._done

    def stop(self) -> None:
        """It ends by itself."""


class ReplayBar:
    """``root`` goes on top of the page; it shows while there is a replay. ``go_live`` is called by its button."""

    def __init__(self, go_live: Callable[[], None]) -> None:
        self.replay: Replay | None = None
        self._other: tuple[str, EventStore] | None = None  # what was looked at before, to compare with
        self._verifier: Verifier | Comparing | None = None
        self._drawn: Any = None
        self.text = pane("", css=CSS)
        self.report = pane("", css=CSS, visible=False, margin=(10, 0, 0, 0))
        self.live = pmui.Button(label=_("Go live"), icon="sensors", variant="contained", size="small", margin=0)
        self.live.on_click(lambda _event: go_live())
        self.verify = pmui.Button(
            label=_("Re-run and verify"), icon="published_with_changes", variant="outlined", size="small", margin=0,
            description=_("Repeats this run with a fresh engine in a process of its own and reports the first difference."),
        )  # fmt: skip
        self.verify.on_click(lambda _event: self._verify())
        self.compare = pmui.Button(label="", icon="compare", variant="outlined", size="small", margin=0, visible=False)
        self.compare.on_click(lambda _event: self._compare())
        buttons = pn.Row(self.live, self.verify, self.compare, margin=(8, 0, 0, 0), styles={"gap": "8px", "flex-wrap": "wrap"})
        self.root = pn.Column(
            self.text, buttons, self.report, visible=False, sizing_mode="stretch_width", margin=(0, 0, 16, 0),
            styles={"border": "1px solid #cc79a7", "border-left-width": "5px", "border-radius": "12px", "padding": "12px 16px",
                    "background": "var(--panel-surface-color)", "box-sizing": "border-box"},
        )  # fmt: skip

    def show(self, replay: Replay | None, before: tuple[str, EventStore] | None = None) -> None:
        """``before``: title and store of what was looked at until now."""
        self.close()
        self.replay = replay
        self._other = before if before is not None and before[1].last_step else None
        self.compare.visible = self._other is not None
        if self._other is not None:
            self.compare.label = _("Compare with {other}").format(other=_shortened(self._other[0]))
        self.report.visible = False
        self.root.visible = replay is not None

    def draw(self, engine_ready: bool) -> None:
        """Called at every tick; draws when something changed."""
        replay = self.replay
        if replay is None:
            return
        key = (replay, replay.problem, engine_ready)
        if self._drawn is None or self._drawn[0] is not replay or self._drawn[1:] != key[1:]:
            self._drawn = key
            self.text.object = _bar_html(replay, engine_ready)
        if self._verifier is not None:
            self._draw_report(self._verifier)

    def _draw_report(self, verifier: Verifier | Comparing) -> None:
        text, done = verifier.said()
        body = f'<pre class="rp-report" role="status" tabindex="0">{html.escape(text)}</pre>'
        if self.report.object != body or not self.report.visible:
            self.report.param.update(object=body, visible=True)
        for button in (self.verify, self.compare):
            if button.disabled == done:
                button.disabled = not done

    def _verify(self) -> None:
        if self.replay is not None and self._idle:
            self._verifier = Verifier(self.replay.store.log)

    def _compare(self) -> None:
        if self.replay is not None and self._other is not None and self._idle:
            self._verifier = Comparing(*self._other, self.replay.store)

    @property
    def _idle(self) -> bool:
        return self._verifier is None or self._verifier.said()[1]

    def close(self) -> None:
        if self._verifier is not None:
            self._verifier.stop()
        self._verifier = None
        self.verify.disabled = self.compare.disabled = False


def _bar_html(replay: Replay, engine_ready: bool) -> str:
    started = replay.store.started
    steps = ngettext("{n} step", "{n:,} steps", replay.store.last_step).format(n=replay.store.last_step)
    facts = {} if started is None else facts_of(started)
    parts = [f"<span>{html.escape(steps)}</span>"] + [
        f'<span title="{html.escape(value)}"><span class="ct-muted">{html.escape(name)}</span> {html.escape(_shortened(value))}</span>'
        for name, value in facts.items()
    ]
    ready = _("The engine is ready: go live to send prompts.") if engine_ready else _("Nothing below is being computed now.")
    problem = f'<p class="rp-bad" role="alert">{html.escape(replay.problem)}</p>' if replay.problem else ""
    return (
        f'<h2>{badge("replayed")} {html.escape(replay.title)}</h2><p style="margin-top:3px">{html.escape(replay.what)} '
        f'<span class="ct-muted">{html.escape(ready)}</span></p><div class="rp-facts ct-small">{"".join(parts)}</div>{problem}'
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}…"
