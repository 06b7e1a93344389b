"""Run by ``panel serve --setup``: the real engine with a tiny random model, in a thread that takes its time, behind the app."""

import time
from dataclasses import replace
from typing import Any

from explorer.batching import compare, scenes
from explorer.session import Session
from explorer.sources import inkernel
from tests.engine.engines import tiny_engine

STEP_S = 0.02  # or a load would have ended before anybody could look


class SlowWorker(inkernel._Worker):
    def _step(self) -> None:
        super()._step()
        time.sleep(STEP_S)


def _slow() -> Any:
    inkernel._Worker = SlowWorker  # type: ignore[misc]
    return inkernel.EngineThread(tiny_engine(max_model_len=256, num_kv_blocks=512, max_num_seqs=8))


compare.START = compare.START.changed(num_requests=12, output_tokens=10)
for key, scene in scenes.SCENES.items():
    scenes.SCENES[key] = replace(scene, load=scene.load.changed(num_requests=min(scene.load.num_requests, 16), output_tokens=12))
Session._shared = Session(_slow())
