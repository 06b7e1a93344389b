"""Threads that compute beside the engine, and end before the interpreter does: torch cannot be torn down under a thread that uses it."""

import atexit
import threading
import weakref
from collections.abc import Callable

PATIENCE = 30.0  # seconds at the interpreter's end for what was told to stop

_running: "weakref.WeakKeyDictionary[threading.Thread, threading.Event]" = weakref.WeakKeyDictionary()


def start(name: str, run: Callable[[], None], cancelled: threading.Event) -> threading.Thread:
    """A thread that runs ``run``; at the interpreter's end ``cancelled`` is set, and the thread waited for."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = cancelled
    thread.start()
    return thread


@atexit.register
def _stop_all() -> None:
    threads = list(_running.items())
    for _thread, cancelled in threads:
        cancelled.set()
    for thread, _cancelled in threads:
        thread.join(PATIENCE)
