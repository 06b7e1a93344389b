"""Run by ``panel serve --setup``: the real engine with a tiny random model, whose roofs are measured in a moment and kept nowhere for long."""

import os
import tempfile
from dataclasses import replace

from engine import device_study
from engine.hardware import roofs

os.environ["CUTAWAY_CACHE"] = tempfile.mkdtemp(prefix="cutaway-roofs-")
roofs.COPY_BYTES = {"cpu": 1 << 22}
roofs.MATRIX = {"cpu": 256}
device_study.measured_roofs = lambda *a, **k: roofs.measured_roofs(*a, seconds=0.02, **k)

from explorer.roofline.scenes import SCENES  # noqa: E402
from explorer.session import Session  # noqa: E402
from explorer.sources import inkernel  # noqa: E402
from tests.engine.engines import tiny_engine  # noqa: E402

# The model has a token for each byte, and room for 256.
SCENES["prefill"] = replace(SCENES["prefill"], asks=tuple((prompt[-150:], params) for prompt, params in SCENES["prefill"].asks))
Session._shared = Session(inkernel.EngineThread(tiny_engine(max_model_len=256, num_kv_blocks=512, max_num_seqs=8)))
