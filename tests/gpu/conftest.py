"""These tests also run where there is nothing but torch, Triton, numpy and pytest (``python -m tests.gpu``): no fixture from above is used."""

import pytest
import torch

from tests.gpu.stand_ins import install

install()


@pytest.fixture(autouse=True)
def _needs_cuda(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
