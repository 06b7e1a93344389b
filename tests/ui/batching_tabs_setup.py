"""Run by ``panel serve --setup``: the real engine with a tiny random model behind the app, and a short measurement of padding."""

from typing import Any

from explorer.batching import sweep
from explorer.session import Session
from explorer.sources import inkernel
from tests.engine.engines import tiny_engine

sweep.PADDED_REQUESTS = 8
_engine: Any = tiny_engine(max_model_len=256, num_kv_blocks=512, max_num_seqs=8)
Session._shared = Session(inkernel.EngineThread(_engine))
