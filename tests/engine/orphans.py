"""An engine that leaves a process of its own behind, which holds on to what was its standard output."""

import subprocess

from engine.config import EngineConfig
from tests.engine.fake_engine import FakeEngine


class Orphaning(FakeEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        print("orphan", subprocess.Popen(["sleep", "600"]).pid, flush=True)
