"""rms_norm and silu_mul against float64. Errors in units of a result's own rounding."""

import pytest
import torch

from engine.kernels.rms_norm import naive_rms_norm, rms_norm
from engine.kernels.silu_mul import naive_silu_mul, silu_mul
from tests.engine.kernels.running.cases import NAN

# float32 arithmetic, then one rounding: relative errors.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-11 + 2e-6, torch.bfloat16: 2.0**-8 + 2e-6}
SIZES = [(1, 1), (3, 63), (2, 64), (2, 65), (1, 576), (0, 8)]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_rms_norm(rows, size, dtype, residual, device):
    x, h = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(size, device=device).to(dtype)
    want, held = naive_rms_norm(x, weight, 1e-5, h if residual else None)
    out = torch.full_like(x, NAN)
    assert rms_norm(x, weight, 1e-5, h if residual else None, out) is out
    if residual:
        torch.testing.assert_close(h, held, atol=0, rtol=torch.finfo(dtype).eps)
        want, _ = naive_rms_norm(h, weight, 1e-5)
    torch.testing.assert_close(out.double(), want, atol=1e-7, rtol=TOLERANCE[dtype])


def test_rms_norm_of_zeros_and_of_a_view(device):
    weight = torch.ones(64, device=device)
    assert not rms_norm(torch.zeros(2, 64, device=device), weight, 1e-6).any()
    wide = torch.randn(3, 100, device=device)
    assert torch.equal(rms_norm(wide[:, :64], weight, 1e-6), rms_norm(wide[:, :64].contiguous(), weight, 1e-6))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "size"), [*SIZES, (1, 1536)])
def test_silu_mul(rows, size, dtype, device):
    x = (torch.randn(rows, 2 * size, device=device) * 4).to(dtype)
    out = torch.full((rows, size), NAN, device=device, dtype=dtype)
    assert silu_mul(x, out) is out
    torch.testing.assert_close(out.double(), naive_silu_mul(x), atol=1e-7, rtol=TOLERANCE[dtype])


def test_silu_of_large_gates(device):
    x = torch.tensor([[-200.0, 200.0, -1e4, 1.0, 2.0, 3.0]], device=device)
    assert silu_mul(x).tolist() == [[0.0, 400.0, 0.0]]


def test_bad_input(device):
    x = torch.randn(2, 6, device=device)
    with pytest.raises(ValueError, match=r"weight must have shape \[6\], got \[5\]"):
        rms_norm(x, torch.ones(5, device=device), 1e-5)
    with pytest.raises(ValueError, match="rows must have 1 to 65,536 numbers"):
        rms_norm(x[:, :0], torch.ones(0, device=device), 1e-5)
    with pytest.raises(ValueError, match=r"x must be \[T, 2 N\]"):
        silu_mul(x[:, :5])
    with pytest.raises(ValueError, match="x must be float16 or bfloat16 or float32"):
        silu_mul(x.double())
