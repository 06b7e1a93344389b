"""The roofline's arithmetic, and that what is measured is kept."""

from pathlib import Path

import pytest
import torch

from engine.hardware import device
from engine.hardware import roofs as measuring
from engine.hardware.gpus import gpu
from engine.hardware.ops_cpu import half_packing_works
from engine.hardware.roofline import attainable, bound_by, gpu_roofs, ridge
from engine.hardware.roofs import kept_roofs, measured_roofs
from engine.model.linear import create_linear_backend


@pytest.mark.parametrize(("key", "point"), [("a100-80gb", 153), ("h100-sxm", 295), ("h200", 206)])
def test_ridge_of_known_gpus(key: str, point: int) -> None:
    roofs = gpu_roofs(gpu(key))
    assert round(ridge(roofs.peak_of("bfloat16"), roofs.bandwidth)) == point


def test_attainable_and_bound_meet_at_the_ridge() -> None:
    assert attainable(2, 100, 10) == 20 and attainable(50, 100, 10) == 100 and attainable(10, 100, 10) == 100
    memory, compute, even = bound_by(20, 10, 100, 10), bound_by(500, 10, 100, 10), bound_by(100, 10, 100, 10)
    assert (memory.by, memory.times, memory.seconds) == ("memory", 5, 1)
    assert (compute.by, compute.times, compute.seconds) == ("compute", 5, 5)
    assert even.times == 1
    for bound, flops in ((memory, 20), (compute, 500)):
        assert flops / bound.seconds == attainable(flops / 10, 100, 10)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="roofs must be"):
        bound_by(0, 0, 1, 1)
    with pytest.raises(ValueError, match="intensity must be"):
        attainable(-1, 1, 1)
    with pytest.raises(ValueError, match="must be > 0"):
        ridge(0, 1)
    with pytest.raises(ValueError, match="device must be"):
        measured_roofs("meta")


def test_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "COPY_BYTES", {"cpu": 1 << 22})
    first = measured_roofs(cache=tmp_path, seconds=0.01)
    assert first.kind == "measured" and set(first.peak) == {"float32", "bfloat16", "float16"}
    assert first.bandwidth == max(first.copy_bandwidth or 0, first.read_bandwidth or 0) > 1e8 and first.peak["float32"] > 1e8
    monkeypatch.setattr(measuring, "matrix_rate", lambda *_a: pytest.fail("measured again"))
    assert measured_roofs(cache=tmp_path) == kept_roofs("cpu", tmp_path) == first
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        measured_roofs(cache=tmp_path, seconds=0.01, again=True)
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    assert kept_roofs("cpu", tmp_path) is None
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        measured_roofs(cache=tmp_path, seconds=0.01)


def test_another_number_of_threads_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    mark = measuring.fingerprint(cpu)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert measuring.fingerprint(cpu) != mark


@pytest.mark.parametrize(("native", "widened"), [(False, {"bfloat16", "float16"}), (True, {"float16"})])
def test_a_rate_is_that_of_the_engines_own_products(monkeypatch: pytest.MonkeyPatch, native: bool, widened: set[str]) -> None:
    """A CPU without 16-bit arithmetic widens 16-bit weights; torch's product in 16 bits would be a roof that steps pass."""
    asked = []
    monkeypatch.setattr(device, "has_native_bf16", lambda _device: native)
    monkeypatch.setattr(device, "half_packing_works", lambda: True)
    monkeypatch.setattr(measuring, "_widening", lambda a: asked.append(a.dtype) or (lambda: None))
    for dtype in measuring.TORCH_DTYPES.values():
        measuring.matrix_rate(torch.device("cpu"), dtype, 0.001)
    assert {str(dtype).removeprefix("torch.") for dtype in asked} == widened
    assert all(create_linear_backend(torch.device("cpu"), dtype).compute_dtype == torch.float32 for dtype in asked)


def test_the_widening_product_is_one() -> None:
    if not half_packing_works():
        pytest.skip("torch has no such product here")
    a = torch.randn(64, 64).bfloat16()
    torch.testing.assert_close(measuring._widening(a)(), a.float() @ a.float().t(), atol=1e-2, rtol=1e-3)
