"""Rotating, quantising and writing K and V, against float64 and against torch's own rounding."""

import pytest
import torch

from engine.kernels.kv_write import kv_write, naive_kv_write
from tests.engine.kernels.running.cases import NAN

CODES = [None, torch.int8, torch.uint8]


def case(tokens, heads, kv_heads, dim, dtype, device, codes, scales=torch.bfloat16):
    qkv = (torch.randn(tokens, heads + 2 * kv_heads, dim) * 3).to(dtype)
    angle = torch.rand(tokens, dim // 2) * 100
    slots = torch.randperm(tokens + 5)[:tokens]
    pool = (
        torch.zeros(tokens + 5, 2 * kv_heads, dim, dtype=codes)
        if codes
        else torch.full((tokens + 5, 2 * kv_heads, dim), NAN).to(dtype)
    )
    held = None if codes is None else torch.full(pool.shape[:2], NAN, dtype=scales)
    return [t if t is None else t.to(device) for t in (qkv, angle.cos(), angle.sin(), slots, pool, held)]


@pytest.mark.parametrize("codes", CODES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype"), [(9, 3, 64, torch.bfloat16), (4, 4, 80, torch.float16), (0, 2, 96, torch.float32)])  # fmt: skip
def test_against_naive(heads, kv_heads, dim, dtype, codes, device):
    got = case(5, heads, kv_heads, dim, dtype, device, codes)
    got[3][2] = -1  # fills up the batch
    want = [t if t is None else t.clone().cpu() for t in got]
    kv_write(*got)
    naive_kv_write(*want)
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(got[0].cpu(), want[0], atol=1e-6, rtol=step)  # one step: float32 against float64 near a tie
    if codes is None:
        torch.testing.assert_close(got[4].cpu(), want[4], atol=1e-6, rtol=step, equal_nan=True)
        return
    torch.testing.assert_close(got[5].cpu(), want[5], atol=0, rtol=2.0**-7, equal_nan=True)
    same = (got[4].cpu() == want[4]).float().mean().item()
    assert same > 0.999 and (got[4].cpu().int() - want[4].int()).abs().max() <= 1
    untouched = torch.isnan(want[5])
    assert untouched.any() and torch.equal(torch.isnan(got[5].cpu()), untouched)


@pytest.mark.parametrize("codes", [torch.int8, torch.uint8])
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_of_values_is_that_of_torch(codes, scales, device):
    """V is not rotated, so that codes must be equal: ties, subnormal numbers of e4m3, zero, and all of a range of sizes."""
    got = case(64, 0, 2, 64, torch.float32, device, codes, scales)
    got[0][:, 2:] *= (10.0 ** torch.linspace(-6, 2, 64, device=device))[:, None, None]
    got[0][0] = 0
    got[0][1, 2] = torch.arange(64) * 0.5  # ties, with a largest of 127 / 448 below
    got[0][1, 2, 0] = 127 if codes == torch.int8 else 448
    got[0][2, 2] = torch.arange(64) * 2.0**-10 - 2.0**-6  # with a scale of 1: all subnormal numbers of e4m3 and ties between them
    got[0][2, 2, 0] = 448
    want = [t if t is None else t.clone().cpu() for t in got]
    kv_write(*got)
    naive_kv_write(*want)
    assert torch.equal(got[4][:, 2:].cpu(), want[4][:, 2:])
    assert torch.equal(got[5][:, 2:].cpu().nan_to_num(-1), want[5][:, 2:].nan_to_num(-1))


@pytest.mark.parametrize("bad", [NAN, float("inf")])
@pytest.mark.parametrize("codes", [torch.int8, torch.uint8])
def test_what_is_not_finite_shows(bad, codes, device):
    got = case(2, 0, 2, 64, torch.float32, device, codes)
    got[0][1, 3, 17] = bad
    kv_write(*got)
    slot = int(got[3][1])
    assert torch.isnan(got[5][slot]).tolist() == [False, False, False, True]
    assert torch.isfinite(got[5][int(got[3][0])]).all()


def test_queries_may_be_left_alone(device):
    got = case(3, 4, 2, 64, torch.float32, device, None)
    before = got[0].clone()
    kv_write(*got, rotate_queries=False)
    assert torch.equal(got[0], before)


def test_bad_input(device):
    qkv, cos, sin, slots, pool, _ = case(3, 4, 2, 64, torch.float32, device, None)
    with pytest.raises(ValueError, match="slots must lie below 8, the slots of the pool, got 8"):
        kv_write(qkv, cos, sin, torch.tensor([1, 8, 2], device=device), pool, validate=True)
    with pytest.raises(ValueError, match="a slot is named twice"):
        kv_write(qkv, cos, sin, torch.tensor([1, 1, 2], device=device), pool, validate=True)
    with pytest.raises(ValueError, match=r"cos must have shape \[3, 32\]"):
        kv_write(qkv, cos[:, :16], sin, slots, pool)
    with pytest.raises(ValueError, match="int8 and uint8 pools come with kv_scales"):
        kv_write(qkv, cos, sin, slots, pool.to(torch.int8))
    with pytest.raises(ValueError, match="do not fit"):
        kv_write(qkv[:, :3].contiguous(), cos, sin, slots, pool)
