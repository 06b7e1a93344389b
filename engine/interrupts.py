"""Ctrl-C between two steps, never inside one: a half-done step would leave blocks and queues that disagree."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Hold SIGINT back in the block, and deliver it at its end. Does nothing outside the main thread, where none arrives,
    or where SIGINT has no handler written in Python."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler: Any = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[0])
