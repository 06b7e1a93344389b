"""Schedules of the real engine with a tiny model, recorded whole."""

from typing import Any

from engine.events.types import Event
from engine.load.arrivals import Burst
from engine.load.generate import Load, conversations
from engine.load.lengths import Exponential, Uniform
from engine.request import SamplingParams
from explorer.store import EventStore
from tests.engine.engines import tiny_engine


def load(num_requests: int = 12, seed: int = 1) -> Load:
    return Load(
        arrivals=Burst(), num_requests=num_requests, prompt=Uniform(3, 20), output=Exponential(6, 20), seed=seed, vocab_size=250,
        first_token=5, max_model_len=64,
    )  # fmt: skip


class Recorded:
    """``config``: of the engine. ``store`` has every event."""

    def __init__(self, **config: Any) -> None:
        self.engine = tiny_engine(**{"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32, **config})
        self.events: list[Event] = [self.engine.started_event(), self.engine.snapshot()]
        self.engine.recorder.attach(self.events.append)

    def drive(self, name: str = "load", **how: Any) -> "Recorded":
        """All requests of a load at once, to its end; they are ``name``-0, ``name``-1 ..."""
        for i, conversation in enumerate(conversations(load(**how))):
            turn = conversation.turns[0]
            self.engine.add_request(list(turn.token_ids), turn.params, request_id=f"{name}-{i}")
        return self.steps()

    def ask(self, num_prompt: int, num_output: int, request_id: str, **more: Any) -> None:
        self.engine.add_request(
            list(range(5, 5 + num_prompt)),
            SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True),
            request_id=request_id,
            **more,
        )

    def steps(self, count: int | None = None) -> "Recorded":
        while self.engine.has_unfinished() and count != 0:
            self.engine.step()
            count = None if count is None else count - 1
        return self

    @property
    def store(self) -> EventStore:
        store = EventStore()
        store.append(self.events)
        return store
