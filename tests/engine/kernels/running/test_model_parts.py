"""Where the model uses kernels: linear layers in few bits and the fused parts of a layer, against what they stand for in float64."""

import pytest
import torch
import torch.nn.functional as F

from engine.model import fused, kernel_linear
from engine.model.linear import create_linear_backend
from engine.model.low_bit import KernelLinear, pack_quantized
from engine.model.unpacking import create_unpacking
from engine.quantization.base import QuantizedWeight
from engine.quantization.methods import quantize

METHODS = [("int8", None), ("int4", 32), ("int4", 64), ("nf4", 64), ("fp8", None)]


@pytest.mark.parametrize(("method", "group"), METHODS)
@pytest.mark.parametrize("rows", [1, 5, 260])
def test_a_linear_layer_in_few_bits(method: str, group: int | None, rows: int, device: str) -> None:
    weight = torch.randn(48, 96)
    quantized = quantize(weight, method, group)
    backend = create_linear_backend(torch.device(device), torch.float32)
    bias = torch.randn(48)
    linear = pack_quantized(quantized, bias, backend, create_unpacking(torch.device(device)))
    assert type(linear) is KernelLinear and linear.form == "dequant_kernel" and linear.nbytes == quantized.nbytes
    x = torch.randn(rows, 96)
    want = F.linear(x.double(), quantized.dequantize().double(), bias.double())
    torch.testing.assert_close(linear(x.to(device)).double().cpu(), want, atol=1e-4, rtol=1e-5)
    residual = torch.randn(rows, 48)
    added = linear.added_to(residual.clone().to(device), x.to(device))
    torch.testing.assert_close(added.double().cpu(), want + residual.double(), atol=1e-4, rtol=1e-5)


def test_input_scales_are_divided_out(device: str) -> None:
    quantized = quantize(torch.randn(32, 64), "int4", 32)
    scales = torch.rand(64) + 0.5
    fields = {name: getattr(quantized, name) for name in QuantizedWeight.__dataclass_fields__}
    scaled = QuantizedWeight(**{**fields, "input_scales": scales})
    product = kernel_linear.KernelProduct(scaled, None, create_linear_backend(torch.device(device), torch.float32))
    x = torch.randn(3, 64)
    want = x.double() @ scaled.dequantize().double().T
    torch.testing.assert_close(product(x.to(device)).double().cpu(), want, atol=1e-4, rtol=1e-5)


def test_what_the_kernel_does_not_take_is_left() -> None:
    for method, group, why in (
        ("int3", 32, "codes of 3 bits"),
        ("int4", 24, "groups of 24 columns"),
        ("int8_w8a8", None, "activations"),
    ):
        quantized = quantize(torch.randn(32, 96), method, group)
        assert why in kernel_linear.unfit(quantized)
        with pytest.raises(ValueError, match=why):
            kernel_linear.KernelProduct(quantized, None, create_linear_backend(torch.device("cpu"), torch.float32))


def test_the_fused_parts(device: str) -> None:
    residual, x, weight = torch.randn(5, 80), torch.randn(5, 80), torch.rand(80) + 0.5
    held = residual.clone().to(device)
    got = fused.add_and_norm_(held, x.to(device), weight.to(device), 1e-5)
    total = (residual + x).double()
    torch.testing.assert_close(held.cpu(), residual + x)
    want = total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(got.double().cpu(), want, atol=1e-5, rtol=0)
    gate, up = x.double().chunk(2, -1)
    torch.testing.assert_close(fused.gated(x.to(device)).double().cpu(), F.silu(gate) * up, atol=1e-6, rtol=1e-5)
