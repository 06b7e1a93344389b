"""What every page is made of: a view of the store, and the clock that says which step it shows."""

import threading
from collections.abc import Callable
from contextvars import Token
from typing import Any, ClassVar

import panel as pn
import param

from explorer.theme import replaying

LONG_RUN = 100_000  # events of a recorded run, beyond which a view takes in only those around the step that it shows
STEPS_BEFORE, STEPS_AFTER, STEPS_DRAWN = 240, 240, 80  # how many; and how many on either side are drawn with the shown one
NOWHERE = (0, -1)


class Clock(param.Parameterized):
    """What one browser looks at: the step on the screen and the selection. One a browser session, shared by its views.

    Pausing here stops the view, never the engine. ``live`` follows the newest step; otherwise ``step`` is what shows,
    and ``playing`` moves it forward by ``speed`` steps a second until it has caught up.
    """

    owner = param.String(default="local", doc="Who this browser is: the owner of the requests it sends.")
    step = param.Integer(default=0, bounds=(0, None), doc="The step shown when not live.")
    live = param.Boolean(default=True, doc="Follow the newest step.")
    playing = param.Boolean(default=False, doc="Move through recorded steps by itself.")
    speed = param.Number(default=5.0, bounds=(0.1, 1000), doc="Steps a second while playing.")
    # The selection: what was clicked anywhere lights up everywhere. None: nothing.
    request_id = param.String(default=None, allow_None=True)
    block_id = param.Integer(default=None, allow_None=True, bounds=(0, None), doc="Physical KV block.")
    token_index = param.Integer(default=None, allow_None=True, bounds=(0, None), doc="Position in the request, prompt included.")

    _carry = 0.0  # fraction of a step that play has not moved yet

    def pause(self, last: int) -> None:
        """Stop the view where it is (at ``last``, the newest step, if it was live)."""
        self.param.update(step=last if self.live else self.step, live=False, playing=False)

    def play(self, last: int) -> None:
        """Move on from ``step``; with nothing newer than what shows, follow live."""
        if self.live:
            return
        self._carry = 0.0
        self.param.update(playing=self.step < last, live=self.step >= last)

    def follow(self) -> None:
        self.param.update(live=True, playing=False)

    def move(self, by: int, first: int, last: int) -> None:
        """Step back (``by`` < 0) or forward, and pause there; stays within the recorded steps."""
        here = last if self.live else self.step
        self.goto(here + by, first, last)

    def goto(self, step: int, first: int, last: int) -> None:
        self.param.update(step=max(first, min(step, last), 0), live=False, playing=False)

    def advance(self, seconds: float, last: int) -> None:
        """Called by the shell: ``seconds`` passed. Does nothing unless playing."""
        if not self.playing:
            return
        self._carry += seconds * self.speed
        whole, self._carry = int(self._carry), self._carry % 1
        if self.step + whole >= last:
            self.param.update(live=True, playing=False, step=last)
        elif whole:
            self.step += whole

    def shown(self, first: int, last: int) -> int:
        """The step that views show when the steps ``first`` to ``last`` are kept."""
        return last if self.live else max(first, min(self.step, last))

    def clear_selection(self) -> None:
        self.param.update(request_id=None, block_id=None, token_index=None)


class ViewLock:
    """A re-entrant lock of one view. What is drawn while it is held bears the badges of that view's store, whichever view was made last."""

    def __init__(self, replayed: Callable[[], bool]) -> None:
        self._lock = threading.RLock()
        self._replayed = replayed
        self._before: list[Token[bool]] = []

    def acquire(self, blocking: bool = True) -> bool:
        """True when it is held now; False only where ``blocking`` is False and another thread holds it."""
        if not self._lock.acquire(blocking):
            return False
        self._before.append(replaying.set(self._replayed()))
        return True

    def release(self) -> None:
        """RuntimeError where this thread does not hold it."""
        if not self._before:
            raise RuntimeError("cannot release a view's lock that is not held")
        replaying.reset(self._before.pop())
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class ExplorerView(pn.viewable.Viewer):
    """A window on the store: build the figures once in ``__init__``, send what is new in ``update()``.

    Subclasses keep to four parts: pure ``rows`` (events or State to arrays), pure ``figure`` (arrays to a Bokeh source
    and root), parameters, and ``update()``. They read the store; ``session`` (None for a saved run) only takes a user's
    actions. The shell calls ``update()`` on the document's own callbacks, every 100 ms and soon after the clock moved: it
    must cost nothing when neither the cursor, the clock nor the parameters moved. Change Bokeh models there only: on a server
    with several threads other callbacks run without the document's lock.
    """

    live_knobs: ClassVar[tuple[str, ...]] = ()  # engine and sampling knobs that the shell offers beside this page
    url_params: ClassVar[tuple[str, ...]] = ()  # parameters (what-if knobs) that the page's address carries

    def __init__(self, store: Any, session: Any = None, clock: Clock | None = None, **params: Any) -> None:
        super().__init__(**params)
        replaying.set(bool(getattr(store, "replayed", False)))  # for the badges of what is built from here on
        self.store = store
        self.session = session
        self.clock = clock if clock is not None else Clock()
        self.cursor = 0  # the index in the log up to which this view has seen the events
        self._around = NOWHERE  # the steps of a long recorded run that this view has taken in
        self.missed = 0  # events that the ring buffer dropped before this view saw them
        # A server with several threads runs the callbacks of one browser side by side: whatever takes events in or reads what
        # they left holds this.
        self.lock = ViewLock(lambda: bool(getattr(self.store, "replayed", False)))

    def new_events(self, limit: int | None = None) -> list[Any]:
        """The events since the last call (at most ``limit``), oldest first.

        Of a long recorded run only those around the shown step, anew whenever it leaves them: they then begin with EngineStarted and
        a Snapshot, as when an engine starts.
        """
        if getattr(self.store, "replayed", False) and len(self.store) > LONG_RUN:
            return self._events_around(self.shown_step)
        events, self.cursor, missed = self.store.since(self.cursor, limit)
        self.missed += missed
        return events

    def _events_around(self, step: int) -> list[Any]:
        kept, (first, last) = self.store, self._around
        if (
            first <= step <= last
            and (first == kept.first_step or step - first >= STEPS_DRAWN)
            and (last == kept.last_step or last - step >= STEPS_DRAWN)
        ):
            return []
        first = max(self.store.first_step, step - STEPS_BEFORE)
        self._around = (first, min(self.store.last_step, step + STEPS_AFTER))
        self.cursor = self.store.log.next_index
        before = self.store.at(first).snapshot()
        return [self.store.started, before, *self.store.window(first + 1, self._around[1])]

    def forget(self) -> None:
        """Take in anew what is shown of a long recorded run."""
        self._around = NOWHERE

    @property
    def shown_step(self) -> int:
        """The step on the screen: the newest while live, else the clock's, within the steps that are kept."""
        return self.clock.shown(self.store.first_step, self.store.last_step)

    def state(self) -> Any:
        """The engine's State at the step on the screen. Read only: it may be shared with other views."""
        return self.store.at(self.shown_step)

    def update(self) -> None:
        raise NotImplementedError

    @property
    def drawn(self) -> bool:
        """Whether the browser has everything that this view waits for: a run does not play on before."""
        return True

    def controls(self) -> dict[str, Any]:
        """Widgets of this page that steer what it sends (not the live knobs), by the name of what they set. A notebook shows a
        control of its own in the place of each, which code can read, set and link."""
        return {}

    def close(self) -> None:
        """The page or the browser went away. Views hold nothing that outlives them unless they override this."""

    def __panel__(self) -> Any:
        raise NotImplementedError
