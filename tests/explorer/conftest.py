"""A session with the stand-in engine, moved by hand: ``send`` and ``run`` in tests, no thread."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.request import SamplingParams
from explorer.pace import Pace
from explorer.session import Session
from explorer.store import EventStore
from explorer.theme import replaying
from tests.explorer.fake import FakeProcess


class Desk:
    """A Session whose messages are read when a test says so."""

    def __init__(self, **config: Any) -> None:
        self.process = FakeProcess(EngineConfig(**{"num_kv_blocks": 128, **config}))
        self.session = Session(self.process, EventStore())
        self.session.status = "starting"
        self.process.start()
        self.deliver()

    @property
    def store(self) -> EventStore:
        return self.session.store

    def deliver(self) -> None:
        for message in self.process.poll(0):
            self.session._take(message)

    def send(self, owner: str = "guest-1", prompt: str = "a prompt of some words", count: int = 1, **params: Any) -> list[str]:
        ids = [self.session.submit(prompt, SamplingParams(**params), owner) for _ in range(count)]
        self.deliver()
        return [i for i in ids if i is not None]

    def run(self, steps: int = 1) -> None:
        self.process.advance(steps)
        self.deliver()


class Clock:
    """The module ``time`` for one module alone: threads of other modules (the widgets', Panel's) keep the true one."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def make_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Clock]:
    """``make_clock("explorer.shell", 100.0)``: that module's clock stands at 100 s until the test moves it."""

    def make(module: str, now: float) -> Clock:
        clock = Clock(now)
        monkeypatch.setattr(f"{module}.time", clock)
        return clock

    return make


@pytest.fixture(autouse=True)
def figures_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every update draws: tests do not wait for the next quarter of a second."""
    monkeypatch.setattr(Pace, "seconds", 0.0)


@pytest.fixture
def make_desk() -> Callable[..., Desk]:
    return Desk


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture(autouse=True)
def _no_view_was_made_before() -> None:
    """Badges outside a view's lock follow the view made last, which may be another test's."""
    replaying.set(False)
