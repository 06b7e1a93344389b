"""Run by ``panel serve --setup``: a stand-in engine behind the app, and a tuner whose trials are a formula and take a moment."""

import functools
import time
from concurrent.futures import Future

from engine.config import EngineConfig
from engine.tuning.search import Search
from engine.tuning.trial import Report, Task
from explorer.session import Session
from explorer.tuner import Tuner
from tests.engine.tuning.fake import SPACE, Inline, run
from tests.explorer.fake import FakeProcess

TRIAL_S = 0.15


class Gradual(Inline):
    def submit(self, task: Task, seconds: float | None) -> "Future[Report]":
        time.sleep(TRIAL_S)
        return super().submit(task, seconds)


Session._shared = session = Session(FakeProcess(EngineConfig(num_kv_blocks=512), auto=True, step_s=0.03))
fails = lambda config: "it took more than 9 s" if config.max_num_seqs == 1 else None
session.tuner = Tuner(functools.partial(Search, space=SPACE, executor=Gradual(fails), measure=run))
