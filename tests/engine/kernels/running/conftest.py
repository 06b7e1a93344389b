"""Tests that run kernels: under Triton's interpreter where the process was started with TRITON_INTERPRET=1, else on CUDA, else not at all.

The interpreter is chosen when a kernel is decorated, so ``test_interpreter.py`` one folder up starts these files in processes of their own.
"""

import pytest
import torch

from tests.engine.kernels.running.cases import INTERPRETED
from tests.gpu.stand_ins import install

install()
collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]

if INTERPRETED:
    from engine.kernels.interpreter import patch_once

    patch_once()


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
