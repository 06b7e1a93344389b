"""The frame around every page: navigation, the shared engine's state and knobs, time, address, messages, who is here."""

import html
import logging
import threading
import time
from typing import Any

import panel as pn
import panel_material_ui as pmui
from panel.util import edit_readonly

from explorer.banner import Banner
from explorer.base import Clock, ExplorerView
from explorer.canvas.transport import Transport
from explorer.delivery import connected, deliver
from explorer.export.takeout import TakeOut
from explorer.i18n import _
from explorer.knobs import KnobPanel
from explorer.pace import CROWDING
from explorer.pages import HOME, PAGES
from explorer.replay import Replay, ReplayBar
from explorer.runs import DEFAULT_RUN
from explorer.shell_style import BAR_STYLE, PAGE_SX, STATUS_CSS
from explorer.status import here, status_line
from explorer.theme import MUI_THEME, badge, pane
from explorer.url import Url, format_query, integer, parse_query, read_param, write_param

_log = logging.getLogger(__name__)

TICK_MS = 100
STATUS_S = 0.5  # how often the status line may change
LONGEST_S, PATIENCE_S = 0.5, 6.0  # what one tick plays at most; how long playing waits for a page that is not drawn yet
PHONE_PX = 600


class Shell:
    """One browser's frame. ``page`` is what the app serves; ``tick`` is called up to every TICK_MS on the document."""

    def __init__(self, session: Any, search: str = "", phone: bool = False) -> None:
        self.session = session
        self.replay: Replay | None = None  # what is looked at instead of the engine
        self.owner = session.join()
        self.clock = Clock(owner=self.owner)
        self.slug = ""
        self.view: ExplorerView | None = None
        self._views: dict[str, ExplorerView] = {}
        self._seen: dict[str, Any] = {}  # what the slow parts were last drawn for
        self._ticked = self._status_drawn = time.monotonic()
        self._waited = 0.0  # seconds for a page that is not drawn yet
        self._following_url = False
        self._theme: str | None = None  # "dark" or "default" when it was chosen, rather than taken from the system
        self.document: Any = None  # the Bokeh document, once it is served
        self._lock = threading.RLock()  # a server with several threads runs the callbacks of one browser side by side
        self._build(phone)
        self.go(search or self._meanwhile())
        self._write_url()
        self.page.param.watch(self._theme_toggled, "dark_theme")
        self._watch_clock()
        self.tick()

    def _watch_clock(self) -> None:
        self.clock.param.watch(self._clock_moved, ["step", "live", "playing", "request_id", "block_id", "token_index"])

    # -- parts -----------------------------------------------------------------------------------------------------------

    def _build(self, phone: bool) -> None:
        self.url = Url(self._arrived)
        self._place: dict[str, Any] = {}  # what the browser said when it had opened the page
        self._loaded = False  # whether it has drawn everything
        self.transport = Transport(self.clock)
        self.status = pane("", css=STATUS_CSS, margin=(0, 8))
        self.heading = pane("", margin=(0, 0, 16, 0))
        self.slot = pn.Column(sizing_mode="stretch_width", margin=0, styles={"flex": "1 0 auto"})
        self.banner = Banner(self.session)
        self._build_sidebar()
        self.bottom = pn.Column(
            self.transport,
            sizing_mode="stretch_width",
            margin=(16, 0, 0, 0),
            styles=BAR_STYLE,
            css_classes=["ct-not-in-pictures"],
        )
        self.replay_bar = ReplayBar(lambda: self.look_at(None))
        body = pn.Column(
            self.url, self.banner.root, self.replay_bar.root, self.heading, self.slot, self.bottom, sizing_mode="stretch_width", margin=0, css_classes=["ct-page"],
            stylesheets=[":host { padding: 20px 24px 8px; box-sizing: border-box; min-height: calc(100vh - 64px); max-height: none !important; flex: 0 0 auto !important } @media (max-width: 600px) { :host { padding: 14px 10px 8px } }"],
        )  # fmt: skip
        self.page = pmui.Page(
            title="Cutaway", header=[self.status], sidebar=[self.sidebar], main=[body], sidebar_open=not phone, sidebar_width=268,
            sidebar_resizable=False, busy_indicator=None, main_width=1560, app_bar_width="100%", site_url="?", theme_config=MUI_THEME, sx=PAGE_SX,
            meta_description=_("A real LLM inference engine with the casing cut away"),
        )  # fmt: skip
        with edit_readonly(self.page):
            # It would follow Panel's own "busy" otherwise, which nothing here shows: twice for each thing that a person does, and
            # each time the page is searched through from its root, which takes longer than most answers.
            self.page.busy = False

    def _build_sidebar(self) -> None:
        self.nav = pmui.MenuList(
            items=[{"label": p.title, "icon": p.icon, "tooltip": p.question} for p in PAGES.values()],
            active=0, dense=True, margin=(6, 4), sizing_mode="stretch_width",
        )  # fmt: skip
        self.nav.param.watch(self._navigate, "active")
        small = {"size": "small", "variant": "outlined", "margin": 0}
        self.pause = pmui.Button(
            label=_("Pause engine"), icon="pause_circle", description=_("Pauses the engine itself, for everybody. To stop only your view, use the bar below."), **small
        )  # fmt: skip
        self.one_step = pmui.Button(
            label=_("One step"), icon="skip_next", disabled=True, description=_("Runs exactly one engine step, for everybody. Pause the engine first."), **small
        )  # fmt: skip
        self.pause.on_click(lambda _e: self._toggle_engine())
        self.one_step.on_click(lambda _e: self.session.step(self.clock.owner))
        self.knobs = pn.Column(sizing_mode="stretch_width", margin=0)
        self.people = pane("")
        line = "border-top:1px solid var(--ct-line);padding-top:14px"
        self.engine = pn.Column(
            pane(f'<h2 style="{line}">{html.escape(_("Engine"))} {badge("live")}</h2><p class="ct-small ct-muted" style="margin-top:3px">{html.escape(_("Shared by everybody who is here."))}</p>'),
            pn.Row(self.pause, self.one_step, margin=0, styles={"gap": "8px", "flex-wrap": "wrap"}),
            self.knobs, margin=0, sizing_mode="stretch_width", styles={"gap": "14px"},
        )  # fmt: skip
        self.take_out = TakeOut(self._open_run, self._looking_at, self.banner.say)
        below = pn.Column(
            self.engine, pane(f'<h2 style="{line}">{html.escape(_("Recorded runs and files"))}</h2>'), self.take_out.root,
            pane(f'<h2 style="{line}">{html.escape(_("Who is here"))}</h2>'), self.people,
            margin=(6, 16, 16, 16), sizing_mode="stretch_width", styles={"gap": "14px"},
        )  # fmt: skip
        self.sidebar = pn.Column(self.nav, below, sizing_mode="stretch_width", margin=0)

    # -- what is looked at -------------------------------------------------------------------------------------------------

    @property
    def store(self) -> Any:
        """The engine's store, or that of the recorded run in its place."""
        return self.session.store if self.replay is None else self.replay.store

    def look_at(self, replay: Replay | None) -> None:
        """Show a recorded run in place of the engine, from its beginning; None: go live."""
        with self._lock:
            if replay is self.replay:
                return
            slug = self.slug or HOME
            self._close_views()
            before = (_("the engine's run") if self.replay is None else self.replay.title, self.store)
            self.replay, self.slug, self.view = replay, "", None
            self.replay_bar.show(replay, before)
            self.engine.visible = replay is None
            self.clock = Clock(owner=self.owner)  # the views that are gone listen to the old one
            if replay is not None:
                self.clock.param.update(live=False, step=replay.store.first_step, playing=True)
            self._watch_clock()
            self.transport = Transport(self.clock, recorded=replay is not None)
            self.bottom[:] = [self.transport]
            self._seen.clear()
            self.open(slug)
            self._write_url(push=True)
        self._soon()

    def _open_run(self, replay: Replay) -> None:
        self.look_at(replay)

    def _looking_at(self) -> tuple[Any, str, str]:
        name = "run" if self.replay is None else self.replay.name or self.replay.title
        return self.store, name, self.slug

    def _meanwhile(self) -> str:
        """The address of a recorded run, while the model is still on its way here or there is no engine; else none."""
        waiting = self.session.status in ("new", "died") or self.session.fetching
        return f"?run={DEFAULT_RUN}" if waiting and not len(self.session.store) else ""

    def _close_views(self) -> None:
        for view in self._views.values():
            view.close()
        self._views.clear()

    # -- pages and address -------------------------------------------------------------------------------------------------

    def open(self, slug: str) -> None:
        """Show a page; it is built when first opened."""
        if slug == self.slug:
            return
        try:
            self._open(slug)
        except Exception as error:
            self._give_up(error)

    def _open(self, slug: str) -> None:
        page = PAGES[slug]
        view = self._views.get(slug)
        if view is None:
            session = self.session if self.replay is None else None
            view = self._views[slug] = page.build(self.store, session, self.clock)
            if view.url_params:
                view.param.watch(lambda *_events: self._write_url_soon(), list(view.url_params))
        self.slug, self.view = slug, view
        self.nav.active = (list(PAGES).index(slug),)
        self.heading.object = (
            f'<h1>{html.escape(page.title)}</h1><p class="ct-muted" style="margin-top:2px">{html.escape(page.question)}</p>'
        )
        self.knob_panel = KnobPanel(self.session, self.clock.owner, view.live_knobs)
        self.knob_panel.sync(self.store.latest())
        self.knobs[:] = [self.knob_panel]
        view.update()
        self.slot[:] = [view]

    def go(self, search: str) -> None:
        """Be at this address: page, step, selection, what-if knobs. What it does not say goes back to its default."""
        with self._lock:
            self._following_url = True
            try:
                self._go(parse_query(search))
            finally:
                self._following_url = False

    def _go(self, query: dict[str, str]) -> None:
        self._theme = query["theme"] if query.get("theme") in ("dark", "default") else None
        self._go_to_run(query.get("run"))
        self.open(query["page"] if query.get("page") in PAGES else HOME)
        step = integer(query.get("step"))
        begin = self.replay is not None and step is None  # a recorded run plays from its beginning
        self.clock.param.update(
            live=step is None and not begin, playing=begin, step=step or (self.store.first_step if begin else 0), request_id=query.get("request") or None,
            block_id=integer(query.get("block")), token_index=integer(query.get("token")),
        )  # fmt: skip
        assert self.view is not None
        for name in self.view.url_params:
            read_param(self.view, name, query.get(name))

    def _go_to_run(self, name: str | None) -> None:
        if name is None:
            self.look_at(None)
        elif self.replay is None or self.replay.name != name:
            try:
                self.look_at(Replay.shipped(name))
            except ValueError as error:
                self.banner.say(str(error))

    def address(self) -> str:
        clock, view = self.clock, self.view
        assert view is not None
        run = self.replay.name if self.replay is not None else None
        values: dict[str, Any] = {
            "theme": self._theme, "run": run, "page": self.slug if self.slug != HOME else None,
            "step": None if clock.live or clock.playing else clock.step, "request": clock.request_id,
            "block": clock.block_id, "token": clock.token_index,
        }  # fmt: skip
        return format_query({**values, **{name: write_param(view, name) for name in view.url_params}})

    def _write_url(self, push: bool = False) -> None:
        if not self._following_url:
            self.url.write(self.address(), push)

    def _write_url_soon(self) -> None:
        """A what-if knob moved: its picture comes first."""
        if self.document is None or self._following_url:
            self._write_url()
        else:
            self.document.add_next_tick_callback(self._write_url)

    def _theme_toggled(self, event: Any) -> None:
        self._theme = "dark" if event.new else "default"
        self._write_url()

    def _arrived(self, place: dict[str, Any]) -> None:
        """The browser says where it is: just opened, or Back was pressed."""
        search = place.get("search")
        if not self._place:
            self._place = place
            if self.document is not None:
                connected(self.document)
            self._fit()
        elif isinstance(search, str) and search != self.address():
            self.go(search)
            self.url.write(search)
            self._soon()

    def _fit(self) -> None:
        """Suit the window: once it is known and everything is drawn, since what is still being drawn would miss the change."""
        if not self._place or not self._loaded:
            return
        width = self._place.get("width")
        if isinstance(width, (int, float)) and width < PHONE_PX:
            self.page.sidebar_open = False
        if self._place.get("dark") and self._theme is None:
            self.page.dark_theme = True

    def _navigate(self, event: Any) -> None:
        if event.new:
            index = event.new[0] if isinstance(event.new, tuple) else event.new
            slug = list(PAGES)[index]
            if slug != self.slug:
                self.open(slug)
                self._write_url(push=True)

    def _clock_moved(self, *_events: Any) -> None:
        self._soon()
        if not self.clock.playing:  # an address that changes many times a second would be refused by the browser
            self._write_url()

    def begin(self) -> None:
        """The browser has loaded the page: tick. (The document's own callbacks hold its lock; Panel's do not on a server with
        several threads.)"""
        self._loaded = True
        self._fit()
        document = self.document

        def start() -> None:
            document.add_periodic_callback(self._follow, TICK_MS)

        document.add_next_tick_callback(start)

    def _follow(self) -> None:
        """Every TICK_MS. Who follows a running engine is drawn for as often as the machine can afford."""
        deliver(self.document)
        if not self.clock.live or time.monotonic() - self._ticked > CROWDING.seconds() - TICK_MS / 2000:
            self.tick()

    def _soon(self) -> None:
        """Draw before the next tick, where the document may be changed."""
        if self.document is None:
            self.tick()
        else:
            self.document.add_next_tick_callback(self.tick)

    # -- time ----------------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Send what is new. With nothing new it compares a few numbers."""
        if not self._lock.acquire(blocking=False):
            return  # the last one is still at work, or another run is being opened
        try:
            self._tick()
        finally:
            self._lock.release()

    def _tick(self) -> None:
        now = time.monotonic()
        elapsed, self._ticked = min(now - self._ticked, LONGEST_S), now
        store = self.store
        if self._changed("run", store.run) and not self.clock.live and self._seen.get("ran"):
            self.clock.follow()  # the steps it stood at are gone with their engine
        self._seen["ran"] = True
        assert self.view is not None
        self._waited = 0.0 if self.document is None or self.view.drawn else self._waited + elapsed
        if not self._waited or self._waited > PATIENCE_S:
            self.clock.advance(elapsed, store.last_step)
        self.transport.sync(store.first_step, store.last_step)
        try:
            self.view.update()
        except Exception as error:
            return self._give_up(error)
        self.replay_bar.draw(self.session.status in ("running", "paused"))
        if self._changed("events", store.log.next_index) or self.knob_panel.unsettled:
            self.knob_panel.sync(store.latest())
        self.banner.draw(self.clock.owner)
        if now - self._status_drawn >= STATUS_S or self._changed("engine", self.session.status):
            self._status_drawn = now
            self._draw_status()

    def _give_up(self, error: Exception) -> None:
        """A view failed. Of a recorded run: whatever its file holds, it is left with a message. Of the engine: an error of ours."""
        if self.replay is None:
            raise error
        if not isinstance(error, ValueError):
            _log.error("in a view of a recorded run", exc_info=error)
        self.banner.say(_("This recorded run cannot be read on: {error}").format(error=error or type(error).__name__))
        self.look_at(None)

    def _changed(self, what: str, value: Any) -> bool:
        changed = self._seen.get(what) != value
        self._seen[what] = value
        return changed

    def _draw_status(self) -> None:
        session = self.session
        if not self._changed("status", (session.status, self.store.log.next_index, [viewer.owner for viewer in session.viewers])):
            return
        for part, text in (
            (self.status, status_line(self.session, self.replay)),
            (self.people, here(self.session, self.clock.owner)),
        ):
            if part.object != text:
                part.object = text
        paused, running = self.session.status == "paused", self.session.status in ("running", "paused")
        if self._changed("controls", (paused, running)):
            self.pause.param.update(
                label=_("Resume engine") if paused else _("Pause engine"),
                icon="play_circle" if paused else "pause_circle",
                disabled=not running,
            )
            self.one_step.disabled = not paused

    def _toggle_engine(self) -> None:
        if self.session.status == "paused":
            self.session.resume(self.clock.owner)
        else:
            self.session.pause(self.clock.owner)

    def close(self) -> None:
        """The browser is gone: its requests end."""
        self.session.leave(self.clock.owner)
        self.replay_bar.close()
        self.take_out.close()
        self._close_views()
