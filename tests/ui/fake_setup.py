"""Run by ``panel serve --setup`` before the app: puts the stand-in engine where the app looks for its session."""

from typing import Any

from engine.config import EngineConfig
from engine.request import SamplingParams
from explorer.session import Session
from tests.explorer.fake import FakeProcess


class Mortal(FakeProcess):
    """Dies of a prompt that says so."""

    def add_request(self, prompt: Any, params: SamplingParams, *, owner: str = "local", **more: Any) -> str:
        if prompt == "die":
            self.die("the engine's process was ended by signal 9")
        return super().add_request(prompt, params, owner=owner, **more)


Session._shared = Session(Mortal(EngineConfig(num_kv_blocks=64), auto=True, step_s=0.03))
