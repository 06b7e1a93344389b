"""The widgets: one for each page of ``explorer.pages``, and one with all of them."""

import functools
import time
from collections import deque
from typing import Any

import ipywidgets as w
import panel as pn
import traitlets as t

from explorer.base import Clock
from explorer.i18n import _
from explorer.mirror import Mirror
from explorer.notebook.controls import Knobs, WhatIf, control
from explorer.notebook.frame import Frame
from explorer.notebook.head import Head
from explorer.notebook.hub import HUB, LOCK
from explorer.notebook.transport import TransportBar
from explorer.pages import HOME, PAGES, Page
from explorer.sources.opening import open_source

SELECTION = ("request_id", "block_id", "token_index")
ROW = {"display": "flex", "flex_flow": "row wrap", "align_items": "center"}


class Shown:
    """One page in a widget: its view, the mirror of it, its frame, and its own controls."""

    def __init__(self, page: Page, desk: "Desk") -> None:
        store, session = desk.source.store, desk.source.session
        self.view = page.build(store, session, desk.clock)
        self.head = Head(store, session, desk.clock.owner)
        self.head.update()  # so that what goes out with the widget is complete
        steering = self.view.controls()
        self.controls = {name: control(widget) for name, widget in steering.items()}
        self.what_if = {name: WhatIf(self.view, name) for name in self.view.url_params}
        names = self.view.live_knobs if session is not None else ()
        self.row = w.Box([*(desk.knobs.widgets[name] for name in names), *self.controls.values()], layout=ROW)
        whole = pn.Column(self.head.layout, self.view, sizing_mode="stretch_width", margin=0)
        self.frame = Frame(Mirror(whole, hidden=steering.values()), desk.tick, layout={"width": "100%", "overflow": "visible"})
        self.box = w.VBox([self.row, self.frame] if self.row.children else [self.frame])

    def update(self) -> None:
        self.head.update()
        self.view.update()
        self.frame.flush()

    def close(self) -> None:
        self.view.close()
        self.frame.close()


class Desk(w.VBox):
    """What all widgets have in common: a source, a clock, the transport, and one or more pages.

    Traits, to read, set, observe and link (``link`` and ``jslink``): ``step`` (the step on the screen; setting it pauses the
    view there), ``live``, ``playing``, ``speed`` (steps a second) and ``selection``, a dict with ``request_id``, ``block_id``
    and ``token_index`` (None: nothing). Controls: ``step_slider``, ``live_button``, and one for each live knob, sampling
    parameter and what-if knob of the pages, by its name: ``view.temperature.value = 1.2``.
    """

    step = t.Int(0).tag(sync=True)
    live = t.Bool(True).tag(sync=True)
    playing = t.Bool(False).tag(sync=True)
    speed = t.Float(5.0).tag(sync=True)
    selection = t.Dict(dict.fromkeys(SELECTION)).tag(sync=True)

    def __init__(self, source: Any, slugs: list[str], *, paused: bool = False) -> None:
        self.source = open_source(source)
        session = self.source.session
        owner = session.join() if session is not None else "local"
        self.clock = Clock(owner=owner)
        self.shown: dict[str, Shown] = {}
        self._telling = self._from_page = False
        self._newest: deque[tuple[float, int]] = deque(maxlen=32)  # (when, the newest step then), of the last ticks
        self._ticked = time.monotonic()
        self._run = self.source.store.run
        self._seen = -1  # the log's index up to which the knobs know it
        self._transport = TransportBar(self.clock, self.source.store)
        self.step_slider, self.live_button = self._transport.slider, self._transport.live
        super().__init__()
        self.add_class("ctm-desk")  # frame.js keeps keys for it
        with LOCK:
            knobs = dict.fromkeys(name for slug in slugs for name in _live_knobs(PAGES[slug])) if session is not None else {}
            self.knobs = Knobs(list(knobs), self._move_knob)
            for slug in slugs:
                self.shown[slug] = Shown(PAGES[slug], self)
            for name, widget in self.controls.items():
                setattr(self, name, widget)
                widget.observe(self._steered, "value")
            self.children = self._build()
            self.clock.param.watch(self._clock_moved, ["step", "live", "playing", "speed", *SELECTION])
            self.observe(self._asked, ["step", "live", "playing", "speed", "selection"])
            if paused and session is not None:
                session.pause(owner)
            self.tick()
        HUB.add(self)

    def _build(self) -> list[w.Widget]:
        raise NotImplementedError

    @property
    def controls(self) -> dict[str, w.Widget]:
        """Everything with a value that steers the engine, the requests sent from here, or a what-if of a page, by the name of
        what it sets. Where two pages have the same name, what is sent comes first: ``shown[slug].what_if`` has the other."""
        pages = self.shown.values()
        what_if = {name: knob for shown in pages for name, knob in shown.what_if.items()}
        return {**what_if, **{name: c for shown in pages for name, c in shown.controls.items()}, **self.knobs.widgets}

    def _top(self) -> w.Widget:
        session = self.source.session
        if session is None:
            return w.Box([self._transport.box], layout=ROW)  # a row of its own: the box grows sideways, not downwards
        wide = {"width": "auto"}
        self.pause_button = w.Button(
            description=_("Pause engine"), tooltip=_("Pauses the engine itself, for all of its views"), layout=wide
        )
        self.one_step_button = w.Button(
            description=_("One step"), tooltip=_("Runs one engine step. Pause the engine first."), layout=wide, disabled=True
        )
        self.pause_button.on_click(lambda _b: (self.resume if session.status == "paused" else self.pause)())
        self.one_step_button.on_click(lambda _b: session.step(self.clock.owner))
        return w.Box([self._transport.box, self.pause_button, self.one_step_button], layout=ROW)

    # -- what code does -----------------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Pause the engine, for all of its views. Steps that you make yourself go on."""
        self._session().pause(self.clock.owner)

    def resume(self) -> None:
        self._session().resume(self.clock.owner)

    def _session(self) -> Any:
        if self.source.session is None:
            raise ValueError("this is a recorded run: there is no engine")
        return self.source.session

    def refresh(self) -> None:
        """Bring the views up to date now. (They follow by themselves while they are on a screen.)"""
        self.tick()

    def save(self, path: Any) -> None:
        """Write the run, as recorded so far, to a file for ``Explorer.load``."""
        self.source.store.save(path)

    # -- keeping up ---------------------------------------------------------------------------------------------------------

    @property
    def looked_at(self) -> bool:
        return any(shown.frame.looked_at for shown in self.visible)

    @property
    def visible(self) -> list[Shown]:
        """The pages that are brought up to date."""
        return list(self.shown.values())

    def forget_the_gone(self, free_since: float) -> None:
        for shown in self.shown.values():
            shown.frame.forget_the_gone(free_since)

    def rest(self) -> None:
        """Nobody looks."""
        for shown in self.visible:
            shown.frame.flush()

    def tick(self) -> None:
        with LOCK:
            try:
                self._tick()
            except Exception as error:  # of a view; shown below it, and the other widgets go on
                for shown in self.visible:
                    shown.frame.fail(error)

    def _tick(self) -> None:
        store, session, now = self.source.store, self.source.session, time.monotonic()
        elapsed, self._ticked = now - self._ticked, now
        if store.run != self._run:  # the steps it stood at are gone with their engine
            self._run = store.run
            self.clock.follow()
        self._newest.append((now, store.last_step))
        self.clock.advance(elapsed, store.last_step)
        index = store.log.next_index
        if session is not None and (index != self._seen or self.knobs.unsettled or session.status == "died"):
            self._seen = index
            self.knobs.sync(store.latest(), session.status in ("running", "paused"))
        for shown in self.visible:
            shown.update()
        self._tell()

    def _tell(self) -> None:
        """Traits and controls say what the clock says."""
        clock, store = self.clock, self.source.store
        self._telling = True
        try:
            self._transport.sync()
            values: dict[str, Any] = {
                "step": clock.shown(store.first_step, store.last_step), "live": clock.live, "playing": clock.playing, "speed": clock.speed,
                "selection": {name: getattr(clock, name) for name in SELECTION},
            }  # fmt: skip
            for name, value in values.items():
                if getattr(self, name) != value:
                    setattr(self, name, value)
            session = self.source.session
            if session is not None:
                paused, known = session.status == "paused", session.status in ("running", "paused")
                buttons: tuple[tuple[w.Button, str, Any], ...] = (
                    (self.pause_button, "description", _("Resume engine") if paused else _("Pause engine")),
                    (self.pause_button, "disabled", not known),
                    (self.one_step_button, "disabled", not paused),
                )
                for button, name, value in buttons:
                    if getattr(button, name) != value:
                        setattr(button, name, value)
        finally:
            self._telling = False

    # -- what is asked --------------------------------------------------------------------------------------------------------

    def _move_knob(self, name: str, value: Any) -> None:
        self._session().reconfigure(self.clock.owner, **{name: value})

    def _steered(self, _change: Any) -> None:
        """What follows from it shows before the next tick."""
        if not self._telling and not self.knobs.showing:
            self.tick()

    def _clock_moved(self, *_events: Any) -> None:
        if not self._telling:
            self.tick()

    @t.validate("selection")
    def _check_selection(self, proposal: Any) -> dict[str, Any]:
        value = proposal["value"]
        unknown = set(value) - set(SELECTION)
        if unknown:
            raise t.TraitError(f"selection takes {', '.join(SELECTION)}; got {', '.join(map(repr, sorted(unknown)))}")
        for name, each in value.items():
            text = name == "request_id"
            fits = isinstance(each, str) if text else isinstance(each, int) and not isinstance(each, bool) and each >= 0
            if each is not None and not fits:
                raise t.TraitError(f"{name} must be {'text' if text else 'an integer from 0 on'} or None, got {each!r}")
        return {**dict.fromkeys(SELECTION), **value}

    @t.validate("speed")
    def _check_speed(self, proposal: Any) -> float:
        low, high = self.clock.param.speed.bounds
        if not low <= proposal["value"] <= high:
            raise t.TraitError(f"speed must lie in [{low}, {high}] steps a second, got {proposal['value']!r}")
        return float(proposal["value"])

    def _asked(self, change: Any) -> None:
        if self._telling:
            return
        name, value, clock, store = change["name"], change["new"], self.clock, self.source.store
        with LOCK:
            if name == "step":
                # A live view that is linked to another hears of steps that were the newest a moment ago: it goes on following.
                if not (self._from_page and clock.live and value >= self._a_moment_ago()):
                    clock.goto(value, store.first_step, store.last_step)
            elif name == "live":
                clock.follow() if value else clock.pause(store.last_step)
            elif name == "playing":
                clock.play(store.last_step) if value else clock.pause(store.last_step)
            elif name == "speed":
                clock.speed = value
            else:
                clock.param.update(**value)
            self.tick()

    def set_state(self, sync_data: Any) -> None:
        self._from_page = True
        try:
            super().set_state(sync_data)
        finally:
            self._from_page = False

    def _a_moment_ago(self) -> int:
        """The newest step of a second ago."""
        limit = time.monotonic() - 1.0
        return next((step for when, step in self._newest if when >= limit), self.source.store.last_step)

    # -- display ----------------------------------------------------------------------------------------------------------------

    def _repr_mimebundle_(self, **options: Any) -> Any:
        for shown in self.shown.values():
            shown.frame.shown()
        return super()._repr_mimebundle_(**options)

    def close(self) -> None:
        """Take the widget away; requests that were sent from it end. The engine runs on."""
        HUB.remove(self)
        with LOCK:
            if self.source.session is not None:
                self.source.session.leave(self.clock.owner)
            for shown in self.shown.values():
                shown.close()
            super().close()

    def __del__(self) -> None:
        """A widget lives until it is closed or the kernel ends; then other threads may hold locks for good, so none is taken."""

    def __repr__(self) -> str:
        session = self.source.session
        status = session.status if session is not None else "recorded"
        if session is not None and session.pausing and status == "running":
            status = "paused"  # asked for; the engine's answer is on its way
        return f"{type(self).__name__}({status}, step {self.step})"


def _live_knobs(page: Page) -> tuple[str, ...]:
    return page.view_class().live_knobs


class View(Desk):
    """One page as a widget; ``explorer.RunView`` and the others are made from their registration in ``explorer.pages``.

    ``source``: an Engine of this kernel (from now on a thread of ours steps it, see ``explorer.sources.inkernel``), an
    EngineProcess, a Session, an EventStore, an EventLog, the path of a saved run, or another view, whose source it shares.
    ``paused``: pause the engine at once, to step it by hand. ValueError for any other source and for an engine that was closed.
    """

    page: Page

    def __init__(self, source: Any, *, paused: bool = False) -> None:
        super().__init__(source, [self.page.slug], paused=paused)

    def _build(self) -> list[w.Widget]:
        return [self._top(), *self.shown[self.page.slug].box.children]


class Explorer(Desk):
    """All pages with tabs, one transport and one selection. ``source`` and ``paused`` as for a single view.

    ``page`` is the slug of the open one: ``explorer.page = "kv-cache"``.
    """

    page = t.Unicode(HOME).tag(sync=True)

    def __init__(self, source: Any, *, paused: bool = False) -> None:
        self._tabs = w.Tab()
        super().__init__(source, list(PAGES), paused=paused)
        self._tabs.observe(self._tab_opened, "selected_index")
        self.observe(self._page_asked, "page")

    @classmethod
    def load(cls, path: Any) -> "Explorer":
        """The explorer of a saved run. ValueError for a file that is no saved run, OSError for one that is not there."""
        return cls(path)

    def _build(self) -> list[w.Widget]:
        self._tabs.children = [shown.box for shown in self.shown.values()]
        self._tabs.titles = [PAGES[slug].title for slug in self.shown]
        self._tabs.selected_index = list(self.shown).index(self.page)
        return [self._top(), self._tabs]

    @property
    def visible(self) -> list[Shown]:
        return [self.shown[self.page]]

    @t.validate("page")
    def _check_page(self, proposal: Any) -> str:
        if proposal["value"] not in PAGES:
            raise t.TraitError(f"page must be one of {', '.join(PAGES)}, got {proposal['value']!r}")
        return str(proposal["value"])

    def _tab_opened(self, change: Any) -> None:
        if change["new"] is not None:
            self.page = list(self.shown)[change["new"]]

    def _page_asked(self, change: Any) -> None:
        self._tabs.selected_index = list(self.shown).index(change["new"])
        self.tick()


@functools.cache
def view_class(page: Page) -> type[View]:
    """The widget class of a page, named like its view."""
    doc = f"{page.title}: {page.question}\n\n    {View.__doc__}"
    return type(page.view_name, (View,), {"page": page, "__doc__": doc, "__module__": "explorer"})
