"""Every way to hold a weight against float64."""

import pytest
import torch

from engine.hardware import ops_cpu
from engine.model.linear import HalfLinear, TransposedLinear, create_linear_backend

CPU = torch.device("cpu")
# Relative to the largest output; one rounding of the output where it is 16 bits wide.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("rows", [1, 2, 7, 33, 130])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("auto", t) for t in TOLERANCE]
    + [("plain", t) for t in TOLERANCE]
    + [("float32", t) for t in TOLERANCE]
    + [("half", torch.bfloat16), ("half", torch.float16), ("packed", torch.bfloat16), ("packed", torch.float32)],
)
def test_against_float64(name, dtype, bias, rows):
    if name == "packed" and not ops_cpu.packing_works(dtype):
        pytest.skip("this torch or CPU has no such operator")
    if name == "half" and not ops_cpu.half_packing_works():
        pytest.skip("this torch or CPU has no such operator")
    torch.manual_seed(0)
    weight, offset = torch.randn(70, 50), torch.randn(70) if bias else None
    backend = create_linear_backend(CPU, dtype, name)
    linear = backend.pack(weight, offset)
    x = torch.randn(rows, 50).to(backend.compute_dtype)
    residual = torch.randn(rows, 70).to(backend.compute_dtype)
    want = x.double() @ weight.to(dtype).double().t()
    if offset is not None:
        want += offset.to(dtype).double()
    tolerance = TOLERANCE[backend.compute_dtype] * want.abs().max().item()
    with torch.inference_mode():
        got = linear(x)
        assert got.dtype == backend.compute_dtype
        torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=0)
        added = linear.added_to(residual.clone(), x)
        torch.testing.assert_close(added.double(), want + residual.double(), atol=2 * tolerance, rtol=0)


def test_inputs_that_are_part_of_a_wider_tensor():
    """The activation of a gated MLP reaches the linear layer as the left half of a tensor."""
    torch.manual_seed(0)
    weight, wide = torch.randn(8, 16), torch.randn(5, 32)
    for name in ("float32", "plain", "half"):
        backend = create_linear_backend(CPU, torch.float32 if name != "half" else torch.float16, name)
        got = backend.pack(weight, None)(wide[:, :16])
        torch.testing.assert_close(got, wide[:, :16] @ backend.tensor(weight).t(), atol=1e-4, rtol=0)


def test_a_bfloat16_weight_beyond_float16_is_held_in_float32():
    backend = create_linear_backend(CPU, torch.bfloat16, "half")
    huge = torch.full((4, 4), 1e5)
    assert isinstance(backend.pack(huge, None), TransposedLinear)
    assert isinstance(backend.pack(-huge / 10, None), HalfLinear)
    torch.testing.assert_close(backend.pack(huge, None)(torch.ones(1, 4)), torch.full((1, 4), 4 * huge.bfloat16()[0, 0].item()))


def test_private_operators_that_are_gone_are_not_used(monkeypatch):
    def gone(*_):
        raise AttributeError("no such operator")

    for name in ("pack", "pack_half"):
        monkeypatch.setattr(ops_cpu, name, gone)
    for probe in (ops_cpu.packing_works, ops_cpu.half_packing_works):
        probe.cache_clear()
    try:
        assert not ops_cpu.packing_works(torch.bfloat16)
        assert not ops_cpu.half_packing_works()
        backend = create_linear_backend(CPU, torch.float16)
        assert isinstance(backend.pack(torch.randn(4, 4), None), TransposedLinear)
        assert backend.name == "torch float32, float16 weights widened"
    finally:
        for probe in (ops_cpu.packing_works, ops_cpu.half_packing_works):
            probe.cache_clear()


def test_an_operator_that_gives_wrong_numbers_is_not_used(monkeypatch):
    monkeypatch.setattr(ops_cpu, "half_operator", lambda: lambda x, packed: torch.zeros(x.shape[0], 48))
    ops_cpu.half_packing_works.cache_clear()
    try:
        assert not ops_cpu.half_packing_works()
    finally:
        ops_cpu.half_packing_works.cache_clear()


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="must be 'auto'"):
        create_linear_backend(CPU, torch.float32, "magic")
