"""What a view can be made of: an engine, a session, a store, a file of a saved run, or what another view is made of."""

import atexit
import os
import weakref
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.events.log import EventLog
from engine.process import EngineProcess
from explorer.session import Session
from explorer.store import EventStore

_sessions: weakref.WeakKeyDictionary[Any, Session] = weakref.WeakKeyDictionary()  # of engines that are being watched


@dataclass(frozen=True)
class Source:
    store: EventStore
    session: Session | None  # None: nothing runs, a recorded run is looked at


def open_source(source: Any) -> Source:
    """The store and the session behind ``source``; all views of one engine share them. ValueError for anything else, for an
    engine that was closed, and for a file that is no saved run (OSError for one that is not there)."""
    if isinstance(source, Source):
        return source
    if isinstance(getattr(source, "source", None), Source):  # another widget
        return source.source  # type: ignore[no-any-return]
    if isinstance(source, Session):
        source.start()
        return Source(source.store, source)
    if isinstance(source, EventStore):
        return Source(source, None)
    if isinstance(source, EventLog):
        store = EventStore(log=source)
        store.replayed = True
        return Source(store, None)
    if isinstance(source, str | os.PathLike):
        return Source(EventStore.load(source), None)
    if isinstance(source, EngineProcess) or _is_engine(source):
        session = _session_of(source)
        return Source(session.store, session)
    raise ValueError(
        "a view is made of an Engine, an EngineProcess, a Session, an EventStore, an EventLog, the path of a saved run or another "
        f"view; got {type(source).__name__}"
    )


def launch(**config: Any) -> Source:
    """A new engine in a process of its own, loading; it ends with this process. ValueError for what EngineConfig does not take."""
    session = Session(EngineProcess(EngineConfig(**config)))
    atexit.register(session.stop)
    session.start()
    return Source(session.store, session)


def _is_engine(source: Any) -> bool:
    """By name, so that looking at a saved run does not import torch."""
    return any((cls.__module__, cls.__name__) == ("engine.engine", "Engine") for cls in type(source).__mro__)


def _session_of(engine: Any) -> Session:
    session = _sessions.get(engine)
    if session is None or (session.status == "died" and not isinstance(engine, EngineProcess)):
        process = engine
        if not isinstance(engine, EngineProcess):
            from explorer.sources.inkernel import EngineThread

            process = EngineThread(engine)  # ValueError for one that was closed
        session = _sessions[engine] = Session(process)
        session.start()
    return session
