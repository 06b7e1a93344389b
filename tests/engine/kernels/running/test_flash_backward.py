"""The backward pass against autograd through float64, and gradcheck."""

import pytest
import torch

from engine.kernels.flash_attention import (
    FlashConfig,
    attention_with_gradient,
    flash_attention_backward,
    flash_attention_varlen,
    naive_flash_attention,
)
from tests.engine.kernels.running.cases import INTERPRETED, varlen

SMALL = FlashConfig(16, 16, 2, 1)
LENGTHS = [(0, 3), (1, 1), (17, 33), (20, 7), (3, 0), (16, 16)]
# Largest error of a gradient, in units of its largest element: P and dS meet the other factor in its dtype.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 4 * 2.0**-11, torch.bfloat16: 4 * 2.0**-8}


def gradients(dtype, causal, window, device, dim=64, lengths=LENGTHS):
    q, k, v, cu_q, cu_k = varlen(lengths, 4, 2, dim, dtype, device)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = attention_with_gradient(*leaves, cu_q, cu_k, causal=causal, window=window, config=SMALL)
    dout = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, dout)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.autograd.grad(naive_flash_attention(*wide, cu_q, cu_k, causal=causal, window=window)[0], wide, dout.double())
    return got, want


@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, None), (True, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_autograd(dtype, causal, window, device):
    for got, want in zip(*gradients(dtype, causal, window, device), strict=True):
        assert (got.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize(("dim", "dtype"), [(80, torch.float16), (96, torch.float32), (128, torch.bfloat16)])
def test_head_sizes(dim, dtype, device):
    for got, want in zip(*gradients(dtype, True, None, device, dim, [(5, 18)]), strict=True):
        assert (got.double() - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


def test_repeats_bit_for_bit(device):
    q, k, v, cu_q, cu_k = varlen(LENGTHS, 4, 2, 64, torch.float32, device)
    out, lse = flash_attention_varlen(q, k, v, cu_q, cu_k, config=SMALL)
    first, second = (flash_attention_backward(out, q, k, v, out, lse, cu_q, cu_k, config=SMALL) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("window", [None, 2])
def test_gradcheck(window, device):
    if not INTERPRETED:
        pytest.skip("float64 is for the interpreter")
    q, k, v, cu_q, cu_k = varlen([(2, 3), (1, 2)], 2, 1, 64, torch.float64, device)
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def attend(*tensors):
        return attention_with_gradient(*tensors, cu_q, cu_k, window=window, config=SMALL)

    # fast_mode: one random direction of the Jacobian instead of each of its 700 columns
    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


def test_bad_input(device):
    q, k, v, cu_q, cu_k = varlen([(3, 3)], 2, 1, 64, torch.float32, device)
    lse = torch.zeros(2, 3, device=device)
    with pytest.raises(ValueError, match="dout must have shape"):
        flash_attention_backward(q[:2], q, k, v, q, lse, cu_q, cu_k)
    with pytest.raises(ValueError, match="block_n must be a power of two"):
        flash_attention_backward(q, q, k, v, q, lse, cu_q, cu_k, config=FlashConfig(16, 20))
