"""Run by ``panel serve --setup``: the real engine with a tiny random model, in a thread that takes its time, behind the app."""

import time
from typing import Any

from explorer.session import Session
from explorer.sources import inkernel
from explorer.speculation import scenes
from tests.engine.engines import tiny_engine

STEP_S = 0.02  # or a request would have ended before anybody could move a knob


class SlowWorker(inkernel._Worker):
    def _step(self) -> None:
        super()._step()
        time.sleep(STEP_S)


def _slow() -> Any:
    inkernel._Worker = SlowWorker  # type: ignore[misc]
    return inkernel.EngineThread(tiny_engine(max_model_len=256, num_kv_blocks=512, max_num_seqs=8))


scenes.CODE = scenes.CODE[-150:]  # the model has a token for each byte, and room for 256
Session._shared = Session(_slow())
