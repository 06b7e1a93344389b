"""Products with weights of 8 and 4 bits, against float64 on the weights that the codes stand for."""

import pytest
import torch

from engine.kernels.dequant_matmul import MatmulConfig, dequant_matmul, naive_dequant_matmul, naive_dequantize
from tests.engine.kernels.running.cases import NAN

# Largest error in units of |x| |W|^T: twice the unit roundoff (the weight meets x in its dtype; the result is rounded), float32: adding up.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2 * 2.0**-11, torch.bfloat16: 2 * 2.0**-8}
NF4 = torch.tensor([-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1])  # fmt: skip
# bits, columns to a scale (0: all of the row), what else a code needs
KINDS = [(8, 0, "middle"), (8, 64, "minima"), (4, 32, "minima"), (4, 16, "zeros"), (4, 128, "middle"), (4, 64, "nf4")]


def make(rows, columns, bits, group, kind, device):
    group = group or columns
    groups = -(-columns // group)
    codes = torch.randint(0, 256, (rows, -(-columns * bits // 8)), dtype=torch.uint8)
    options = {"bits": bits, "group_size": group}
    if kind == "minima":
        options["minima"] = -torch.rand(rows, groups).half()
    if kind == "zeros":
        options["zero_points"] = torch.randint(0, 16, (rows, groups), dtype=torch.uint8)
    if kind == "nf4":
        options["levels"] = NF4
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return codes.to(device), (torch.rand(rows, groups) / 2**bits).half().to(device), options


def check(x, codes, scales, options, config, bias=None):
    weight = naive_dequantize(
        codes.cpu(), scales.cpu(), x.shape[1], **{k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    )
    want = naive_dequant_matmul(x.cpu(), weight, None if bias is None else bias.cpu())
    out = torch.full(want.shape, NAN, dtype=x.dtype, device=x.device)
    assert dequant_matmul(x, codes, scales, config=config, out=out, bias=bias, **options) is out
    limit = x.cpu().double().abs() @ weight.abs().T + want.abs()
    assert ((out.cpu().double() - want).abs() <= TOLERANCE[x.dtype] * limit).all()


@pytest.mark.parametrize(("bits", "group", "kind"), KINDS)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_matrices_and_vectors(dtype, bits, group, kind, device):
    codes, scales, options = make(20, 75, bits, group, kind, device)
    x = torch.randn(5, 75, device=device).to(dtype)
    bias = torch.randn(20, device=device)
    check(x, codes, scales, options, MatmulConfig(16, 16, 32), bias)
    check(x, codes, scales, options, MatmulConfig(16, 32, 128))
    check(x[:1], codes, scales, options, MatmulConfig(1, 16, 64), bias)
    check(x[:1], codes, scales, options, MatmulConfig(16, 16, 64))


@pytest.mark.parametrize(
    ("tokens", "rows", "columns"), [(1, 1, 1), (17, 33, 31), (2, 16, 63), (1, 17, 65), (1, 16, 64), (0, 3, 4)]
)
def test_odd_sizes(tokens, rows, columns, device):
    codes, scales, options = make(rows, columns, 4, 16, "minima", device)
    check(torch.randn(tokens, columns, device=device), codes, scales, options, None)


def test_a_view_of_wider_rows(device):
    codes, scales, options = make(16, 32, 4, 32, "minima", device)
    wide = torch.randn(3, 50, device=device)
    assert torch.equal(
        dequant_matmul(wide[:, :32], codes, scales, **options),
        dequant_matmul(wide[:, :32].contiguous(), codes, scales, **options),
    )


def test_bad_input(device):
    codes, scales, options = make(16, 64, 4, 32, "minima", device)
    x = torch.randn(2, 64, device=device)
    for match, change in (
        ("codes have 4 or 8 bits here, got 3", {"bits": 3}),
        ("group_size must be a power of two in .16, 65536., got 24", {"group_size": 24}),
        (r"scales must have shape \[16, 4\], got \[16, 2\]", {"group_size": 16}),
        ("block_n must be a power of two", {"config": MatmulConfig(16, 24, 32)}),
        ("a block_m of 1 is for one row, got 2", {"config": MatmulConfig(1, 16, 32)}),
        ("zero_points go neither with minima", {"zero_points": torch.zeros(16, 2, dtype=torch.uint8, device=device)}),
        (r"levels must have shape \[16\]", {"levels": torch.zeros(8, device=device)}),
    ):
        with pytest.raises(ValueError, match=match):
            dequant_matmul(x, codes, scales, **{**options, **change})
    with pytest.raises(ValueError, match=r"codes must have shape \[\*, 30\]"):
        dequant_matmul(x[:, :60], codes, scales, **options)
