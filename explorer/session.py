"""One engine and one store a server: commands go in here, events come out into the store, and who is here is known.

Besides ``sources`` and ``claims`` this is the only part of the explorer that touches a live engine.
"""

import atexit
import functools
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from engine.config import EngineConfig
from engine.messages import Died, Events, Finished, Loading, LoopState, Ready, Rejected
from engine.process import EngineProcess
from engine.request import SamplingParams
from explorer import theme
from explorer.asking import Asking
from explorer.i18n import _
from explorer.sources.loads import Loads
from explorer.store import EventStore
from explorer.tuner import Tuner

_log = logging.getLogger(__name__)

POLL_S = 0.05  # how long one wait for the engine's messages lasts
NOTICES_KEPT = 20  # of one viewer, not yet shown
WATCH_TOP = 20  # candidates recorded with every token while somebody looks at candidates,
WATCH_FEW = 8  # and while somebody is here: enough for a first look at a token of before
LOOK_S = 2.0  # how long a look lasts that is not renewed

ENVIRONMENT = {  # environment variable -> field of EngineConfig and how to read it
    "CUTAWAY_MODEL": ("model", str),
    "CUTAWAY_DEVICE": ("device", str),
    "CUTAWAY_DTYPE": ("dtype", str),
    "CUTAWAY_MAX_NUM_SEQS": ("max_num_seqs", int),
    "CUTAWAY_MAX_NUM_BATCHED_TOKENS": ("max_num_batched_tokens", int),
    "CUTAWAY_MAX_MODEL_LEN": ("max_model_len", int),
    "CUTAWAY_BLOCK_SIZE": ("block_size", int),
    "CUTAWAY_NUM_KV_BLOCKS": ("num_kv_blocks", int),
}


def config_from_environment() -> EngineConfig:
    """The engine's configuration as the CUTAWAY_* variables say it. ValueError names the variable that is wrong."""
    fields: dict[str, Any] = {}
    for variable, (name, read) in ENVIRONMENT.items():
        text = os.environ.get(variable)
        if text:
            try:
                fields[name] = read(text)
            except ValueError:
                raise ValueError(f"{variable} must be a whole number, got {text!r}") from None
    return EngineConfig(**fields)


@dataclass
class Viewer:
    """One open browser page."""

    owner: str
    since: float = field(default_factory=time.time)
    notices: deque[str] = field(default_factory=lambda: deque(maxlen=NOTICES_KEPT))
    looks_until: float = 0.0  # at candidates, on the monotonic clock


class Session(Asking):
    """``status`` is "new", "starting", "running", "paused" or "died"; ``message`` says what there is to say about it.

    Every method may be called from any thread. Commands do not wait for the engine: what it refuses arrives as a notice of
    the viewer who asked.
    """

    _shared: ClassVar["Session | None"] = None
    _shared_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, process: Any, store: EventStore | None = None) -> None:
        self.process = process
        self.store = store if store is not None else EventStore()
        self.loads = Loads()
        self.status = "new"
        self.message = ""
        self.pausing = False  # a pause was asked for, and the engine has not answered yet
        self.fetching = False  # whether the model is on its way to this machine
        self._lock = threading.RLock()
        self._viewers: dict[str, Viewer] = {}
        self._left: set[str] = set()  # whom nothing is sent for any more; names never come twice
        self._numbers = itertools.count(1)
        self._asked: dict[str, str] = {}  # unfinished request -> the viewer who sent it
        self._last_asker = ""  # who sent the last command that is not about a request of their own
        self._watched: int | None = None  # candidates that the engine was told to record; None: no tokens
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.tuner = Tuner()  # searches in processes of its own

    @classmethod
    def shared(cls) -> "Session":
        """The server's one session, made on the first call with the configuration of the environment."""
        with cls._shared_lock:
            if cls._shared is None:
                cls._shared = cls(EngineProcess(config_from_environment()))
                atexit.register(cls._shared.stop)
            return cls._shared

    # -- life ------------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine's process, once. Returns at once; requests may be sent while it loads. One that runs already is
        taken as it is; the record begins with a snapshot of it."""
        with self._lock:
            if self.status != "new":
                return
            self.status, self.message = "starting", _("The engine is starting.")
            if not self.process.alive:
                self._launch(self.process.start)
            elif self.process.started is not None:
                self.status, self.message = "paused" if self.process.paused else "running", ""
                self._if_it_runs(lambda: self.process.observe(False))
                self._if_it_runs(lambda: self.process.observe(True))
            self._thread = threading.Thread(target=self._poll, name="engine-messages", daemon=True)
            self._thread.start()

    def _launch(self, start: Callable[[], None]) -> None:
        try:
            start()
        except (OSError, RuntimeError, ValueError) as error:  # no process could be made
            self.status, self.message = "died", str(error)

    def restart(self) -> None:
        """A new engine in place of the one that died."""
        with self._lock:
            if self.status != "died":
                return
            self.status, self.message = "starting", _("The engine is starting again.")
            self._asked.clear()
        self._launch(self.process.restart)

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self.tuner.stop()
        self.process.stop()

    def _poll(self) -> None:
        while not self._stopping.is_set():
            for message in self.process.poll(min(POLL_S, self.loads.pump())):
                self._take(message)
            self._watch()  # looks that were not renewed

    def _take(self, message: Any) -> None:
        handler = self._handlers.get(type(message))
        if not self.loads.take(message) and handler is not None:
            handler(self, message)

    def _events(self, message: Events) -> None:
        try:
            self.store.append(message.events)
        except ValueError as error:
            # The record contradicts itself. Say so, and begin a new one from the engine's own snapshot.
            _log.exception("the record of events could not go on")
            self.store.clear()
            self._if_it_runs(lambda: self.process.observe(False))
            self._if_it_runs(lambda: self.process.observe(True))
            for viewer in self.viewers:
                self.notify(
                    viewer.owner, _("The record of this run broke off ({error}). It starts again here.").format(error=error)
                )

    def _loading(self, message: Loading) -> None:
        share = "" if message.done is None else f" {100 * message.done:.0f} %"
        self.message = message.text + share
        self.fetching = message.done is not None and message.done < 1

    def _ready_now(self, message: Ready) -> None:
        with self._lock:
            self.status, self.message, self._watched = "running", "", None
        self._watch()

    def _rejected(self, message: Rejected) -> None:
        with self._lock:
            if message.command in ("UpdateSampling", "Watch") and message.request_id not in self._asked:
                return  # the request ended while the knob was on its way
            # A knob that was refused concerns whoever asked for something last.
            owner = self._asked.get(message.request_id, self._last_asker)
            if message.command in ("AddRequest", "Branch"):
                self._asked.pop(message.request_id, None)
        self.notify(owner, message.error)

    def _finished(self, message: Finished) -> None:
        if message.last:
            with self._lock:
                self._asked.pop(message.request_id, None)

    def _loop_state(self, message: LoopState) -> None:
        self.pausing = False
        if self.status in ("running", "paused"):
            self.status = "paused" if message.paused else "running"

    def _died(self, message: Died) -> None:
        last = message.stderr.strip().splitlines()[-1:] if message.stderr else []
        with self._lock:
            self.status, self.pausing = "died", False
            why = message.error.rstrip(".")
            if message.returncode is None:  # an engine of this process
                self.message = _("{why}. What it recorded is still here.").format(why=why[:1].upper() + why[1:])
            else:
                self.message = " ".join([_("The engine's process has ended: {why}.").format(why=why), *last])
            self._asked.clear()

    _handlers: ClassVar[dict[type, Any]] = {
        Events: _events, Loading: _loading, Ready: _ready_now, Rejected: _rejected, Finished: _finished, LoopState: _loop_state,
        Died: _died,
    }  # fmt: skip

    def _if_it_runs(self, send: Callable[[], Any]) -> None:
        """Send what nobody asked for; an engine that is gone (its death may not have been read yet) does not need it."""
        try:
            send()
        except RuntimeError as error:
            _log.warning("not sent: %s", error)

    # -- viewers -----------------------------------------------------------------------------------------------------------

    def join(self) -> str:
        """A viewer came; returns the name under which its requests run."""
        with self._lock:
            owner = f"guest-{next(self._numbers)}"
            self._viewers[owner] = Viewer(owner)
            theme.arrived(owner)
        self._watch()
        return owner

    def leave(self, owner: str) -> None:
        """A viewer is gone: its requests end, their blocks come back."""
        with self._lock:
            if self._viewers.pop(owner, None) is None:
                return
            self._left.add(owner)
            theme.left(owner)
            self._asked = {request_id: who for request_id, who in self._asked.items() if who != owner}
        self.loads.leave(owner)
        self.tuner.cancel(owner)
        # Also while the engine loads: it obeys in order, so what was sent before is taken back before it runs.
        self._if_it_runs(lambda: self.process.abort_owner(owner))
        self._watch()

    def look_at_candidates(self, owner: str) -> None:
        """The viewer sees the candidates of tokens now: more of them are recorded. Said again and again while it is so."""
        with self._lock:
            viewer = self._viewers.get(owner)
            if viewer is not None:
                viewer.looks_until = time.monotonic() + LOOK_S
        self._watch()

    def _watch(self) -> None:
        """Have recorded what those who are here look at."""
        with self._lock:
            if self.status not in ("running", "paused"):
                return
            now = time.monotonic()
            looks = any(viewer.looks_until > now for viewer in self._viewers.values())
            wanted = None if not self._viewers else WATCH_TOP if looks else WATCH_FEW
            if wanted == self._watched:
                return
            self._watched = wanted
            send = functools.partial(self.process.watch, top=wanted) if wanted is not None else self.process.unwatch
            self._if_it_runs(lambda: send("tokens"))

    @property
    def viewers(self) -> list[Viewer]:
        """Who is here, in the order in which they came."""
        with self._lock:
            return list(self._viewers.values())

    def notify(self, owner: str, text: str) -> None:
        """A message for one viewer, shown once."""
        with self._lock:
            if owner in self._viewers:
                self._viewers[owner].notices.append(text)

    def take_notices(self, owner: str) -> list[str]:
        with self._lock:
            viewer = self._viewers.get(owner)
            notices = list(viewer.notices) if viewer is not None else []
            if viewer is not None:
                viewer.notices.clear()
            return notices

    # -- commands ------------------------------------------------------------------------------------------------------------

    def submit(self, prompt: str | Sequence[int], params: SamplingParams, owner: str, **more: Any) -> str | None:
        """Send one request. Returns its id; None (and a notice for ``owner``) when it cannot be sent. ``more``: as add_request has it."""
        return self._asking(owner, lambda: self.process.add_request(prompt, params, owner=owner, **more))

    def chat(self, messages: Sequence[dict[str, str]], params: SamplingParams, owner: str) -> str | None:
        """Send one conversation, through the model's own chat template. Returns as ``submit``."""
        return self._asking(owner, lambda: self.process.add_chat(messages, params, owner=owner))

    def branch(
        self, source_id: str, position: int, token_id: int, owner: str, params: SamplingParams | None = None
    ) -> str | None:
        """A new request from the tokens of another (anybody's), with ``token_id`` forced at ``position``. Returns as ``submit``."""
        return self._asking(owner, lambda: self.process.branch(source_id, position, token_id, params, owner=owner))

    def watch_logits(self, request_id: str, owner: str, positions: int) -> None:
        """Record the full logits of one of the viewer's own requests, for its next ``positions`` tokens."""
        if self._asked.get(request_id) == owner:
            self._telling(owner, lambda: self.process.watch("logits", request_id, positions=positions))

    def owns(self, request_id: str, owner: str) -> bool:
        """Whether an unfinished request is the viewer's own: only then may it be changed."""
        return self._asked.get(request_id) == owner

    def abort(self, request_id: str, owner: str) -> None:
        """End one of the viewer's own requests; those of others are left alone."""
        if self._asked.get(request_id) == owner:
            self._telling(owner, lambda: self.process.abort(request_id))

    def reconfigure(self, owner: str, **knobs: Any) -> None:
        """Move knobs of the shared engine; the KnobChanged event tells everybody."""
        self._telling(owner, lambda: self.process.reconfigure(by=owner, **knobs))

    def update_sampling(self, request_id: str, owner: str, **changes: Any) -> None:
        """Change one of the viewer's own running requests from its next token on."""
        if self._asked.get(request_id) == owner:
            self._telling(owner, lambda: self.process.update_sampling(request_id, by=owner, **changes))

    def pause(self, owner: str) -> None:
        """Pause the engine's own loop, for everybody."""
        self.pausing = True  # before it is sent: the answer may be read at once
        self._telling(owner, self.process.pause)

    def resume(self, owner: str) -> None:
        self.pausing = False
        self._telling(owner, self.process.resume)

    def step(self, owner: str, count: int = 1) -> None:
        """Run ``count`` engine steps and pause, for everybody."""
        self._telling(owner, lambda: self.process.step(count))

    def start_load(self, owner: str, load: Any, **how: Any) -> str | None:
        """Send a load (``engine.load.generate.Load``) over time, see ``Loads.start``. Returns its name; None, and a notice, where that cannot be."""
        started: list[str] = []
        self._telling(owner, lambda: started.append(self.loads.start(self.process, owner, load, **how)))
        return started[0] if started else None

    def _asking(self, owner: str, send: Callable[[], str]) -> str | None:
        sent: list[str] = []
        with self._lock:  # so that no answer is read before it is known who asked
            if owner in self._left:
                return None  # it left while this was on its way: nobody would end the request
            self._telling(owner, lambda: sent.append(send()))
            for request_id in sent:
                self._asked[request_id] = owner
        return sent[0] if sent else None

    def _telling(self, owner: str, send: Callable[[], Any]) -> None:
        """Send a command in the name of ``owner``, who is told when it cannot be sent."""
        if not self._ready(owner):
            return
        self._last_asker = owner
        try:
            send()
        except (ValueError, RuntimeError) as error:  # what cannot be sent; an engine that is gone or does not take commands
            self.notify(owner, str(error))

    def _ready(self, owner: str) -> bool:
        if self.status in ("new", "died"):
            self.notify(
                owner, _("The engine has stopped. Restart it first.") if self.status == "died" else _("No engine was started.")
            )
        return self.status not in ("new", "died")
