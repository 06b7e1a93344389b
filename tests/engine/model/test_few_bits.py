"""Linear layers that hold few bits: each way of multiplying against the numbers that its codes stand for, in float64."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.hardware import ops_cpu
from engine.model import few_rows, low_bit, words
from engine.model.linear import create_linear_backend
from engine.model.llama import common
from engine.model.low_bit import UnpackedAtUse, int4_group, pack_quantized
from engine.model.unpacking import Unpacking
from engine.quantization.awq import quantize_awq
from engine.quantization.calibration import Collector
from engine.quantization.int8 import matmul_w8a8, quantize_activations, quantize_int8, quantize_int8_w8a8
from engine.quantization.intn import quantize_int
from engine.quantization.methods import quantize
from engine.weights.original import running_weight

ROWS, COLUMNS = 48, 192
BACKEND = create_linear_backend(torch.device("cpu"), torch.float32)
# Relative to the norms of input and weight. torch's packed kernels round input, scales, zeros and output to bf16, half a unit in the
# last of 8 bits each: four times 2**-9. Elsewhere all is float32.
FEW_ROWS, MANY_ROWS = 2**-7, 2e-5


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight() -> torch.Tensor:
    return seeded(ROWS, COLUMNS) * (1 + 3 * seeded(1, COLUMNS, seed=1).abs())


def calibration():
    seen = Collector(COLUMNS, keep_rows=16)
    seen.add(seeded(256, COLUMNS, seed=2) * (1 + 5 * seeded(1, COLUMNS, seed=3).abs()))
    return seen.finish()


WAYS = {
    "int8": (lambda: quantize_int8(weight()), "int8_kernel"),
    "int8 per tensor": (lambda: quantize_int8(weight(), "tensor"), "int8_kernel"),
    "int4 32": (lambda: quantize_int(weight(), 4, 32), "int4_kernel"),
    "int4 64 symmetric": (lambda: quantize_int(weight(), 4, 64, symmetric=True), "int4_kernel"),
    "int4 row": (lambda: quantize_int(weight(), 4, COLUMNS), "int4_kernel"),
    "int4 128, the last group half as long": (lambda: quantize_int(weight(), 4, 128), "int4_kernel"),
    "int3 32": (lambda: quantize_int(weight(), 3, 32), "int4_kernel"),
    "int2 64": (lambda: quantize_int(weight(), 2, 64), "int4_kernel"),
    "awq": (lambda: quantize_awq(weight(), calibration(), bits=3, group_size=32), "int4_kernel"),
    "gptq": (lambda: quantize(weight(), "gptq", 64, calibration(), act_order=True, static_groups=True), "int4_kernel"),
    "gptq in its own order": (lambda: quantize(weight(), "gptq", 64, calibration(), act_order=True), "dequantized"),
    "int4, a last group that is short": (lambda: quantize_int(weight(), 4, 80), "dequantized"),
    "int4 in 16": (lambda: quantize_int(weight(), 4, 16), "dequantized"),
    "nf4": (lambda: quantize(weight(), "nf4"), "dequantized"),
    "fp8": (lambda: quantize(weight(), "fp8"), "dequantized"),
}


def off(got: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> float:
    """The error relative to what the product could be at most."""
    expected = x.double() @ w.double().T
    if bias is not None:
        expected = expected + bias.double()
    size = x.double().norm(dim=1, keepdim=True) * w.double().norm(dim=1)
    return float(((got.double() - expected).abs() / (size + 1e-30)).max())


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_way_multiplies_what_its_codes_stand_for(name, with_bias):
    make, form = WAYS[name]
    quantized, bias = make(), seeded(ROWS, seed=5) if with_bias else None
    linear = pack_quantized(quantized, bias, BACKEND, Unpacking(4))
    assert linear.form == form
    for rows in (1, 4, 5, 70):
        x = seeded(rows, COLUMNS, seed=rows)
        tolerance = FEW_ROWS if rows <= 4 and form.endswith("kernel") else MANY_ROWS
        assert off(linear(x), x, quantized.dequantize(), bias) < tolerance
        residual = seeded(rows, ROWS, seed=9)
        assert torch.allclose(linear.added_to(residual.clone(), x), residual + linear(x), atol=1e-5)


@pytest.mark.parametrize("name", WAYS)
def test_what_runs_can_be_read_off(name):
    quantized = WAYS[name][0]()
    linear = pack_quantized(quantized, seeded(ROWS), BACKEND, Unpacking(4))
    wanted = quantized.dequantize()
    assert torch.allclose(running_weight(linear, COLUMNS, torch.float32), wanted, atol=1e-3 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["int4 32", "int8", "nf4"])
def test_on_another_device_the_codes_are_unpacked_at_each_use(name):
    quantized, x = WAYS[name][0](), seeded(7, COLUMNS)
    linear = UnpackedAtUse(quantized, None, BACKEND)
    assert off(linear(x), x, quantized.dequantize()) < MANY_ROWS and linear.nbytes == quantized.nbytes


@pytest.mark.parametrize("smooth", [None, torch.rand(COLUMNS, generator=torch.Generator().manual_seed(4)) + 0.5])
@pytest.mark.parametrize("static", [None, 0.02])
@pytest.mark.parametrize("here", [True, False])
def test_w8a8_is_the_product_of_integers(smooth, static, here, monkeypatch):
    if here and not ops_cpu.integer_product_works():
        pytest.skip("no product of integers on this CPU")
    monkeypatch.setattr(low_bit.ops_cpu, "integer_product_works", lambda: here)
    quantized = quantize_int8_w8a8(weight(), static, smooth)
    linear = pack_quantized(quantized, None, BACKEND, Unpacking(4))
    assert linear.form == ("int8_integers" if here else "dequantized")
    for rows in (1, 9):
        x = seeded(rows, COLUMNS, seed=rows)
        assert torch.allclose(linear(x), matmul_w8a8(x, quantized), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["int8", "int4 32", "int4 64 symmetric"])
@pytest.mark.parametrize("rows", [3, 9])
def test_a_row_with_nan_harms_no_other(name, rows):
    linear = pack_quantized(WAYS[name][0](), None, BACKEND, Unpacking(4))
    x = seeded(rows, COLUMNS)
    clean = linear(x)
    x[1, 5] = float("nan")
    spoilt = linear(x)
    others = [i for i in range(rows) if i != 1]
    assert torch.equal(spoilt[others], clean[others]) and bool(spoilt[1].isnan().all())


def test_integers_do_not_see_the_other_rows():
    linear = pack_quantized(quantize_int8_w8a8(weight()), None, BACKEND, Unpacking(4))
    x = torch.cat((seeded(6, COLUMNS), 1e4 * seeded(6, COLUMNS, seed=1)))
    assert torch.equal(linear(x)[:6], linear(x[:6]))


@pytest.mark.skipif(not ops_cpu.integer_product_works(), reason="no product of integers on this CPU")
def test_rounding_activations_in_fewer_operations_gives_the_same_numbers():
    integers = pack_quantized(quantize_int8_w8a8(weight()), None, BACKEND, Unpacking(4)).integers
    x = torch.cat((seeded(30, COLUMNS), 1e-30 * seeded(2, COLUMNS), torch.zeros(1, COLUMNS), torch.full((1, COLUMNS), 0.5)))
    assert torch.equal(integers.rounded(x), integers.one_digit(*quantize_activations(x)))
    assert torch.equal(integers.rounded(torch.zeros(2, COLUMNS)), torch.zeros(2, ROWS))


@pytest.mark.parametrize("scale", [None, 0.02])
def test_rounding_activations_as_floats_gives_the_same_numbers(scale):
    x = torch.cat((seeded(30, COLUMNS), 1e-30 * seeded(2, COLUMNS), torch.zeros(1, COLUMNS), torch.full((1, COLUMNS), 0.5)))
    codes, scales = quantize_activations(x, scale)
    assert torch.equal(low_bit._rounded(x, scale), codes.float() * scales)


@pytest.mark.parametrize("name", ["int4 32", "int8"])
def test_what_was_unpacked_is_kept_while_many_rows_come_and_let_go_afterwards(name):
    unpacking = Unpacking(4)
    linear = pack_quantized(WAYS[name][0](), None, BACKEND, unpacking)

    def step(rows: int) -> None:
        unpacking.step(rows)
        linear(seeded(rows, COLUMNS))

    step(300)  # a prompt
    step(1)
    assert not unpacking.keep and linear.copy_nbytes == 0
    for _ in range(Unpacking.KEEP_AFTER):
        step(8)
    assert unpacking.keep and linear.copy_nbytes == ROWS * COLUMNS * 4
    for _ in range(Unpacking.DROP_AFTER - 1):
        step(1)
    assert unpacking.keep
    step(1)
    step(9)
    assert not unpacking.keep and linear.copy_nbytes == 0


def test_which_groups_torch_can_run():
    assert [int4_group(quantize_int(weight(), 4, size)) for size in (16, 32, 64, 96, 128, COLUMNS)] == [0, 32, 64, 32, 64, 64]
    assert int4_group(quantize_int(weight()[:40], 4, 32)) == 0  # 40 output channels
    assert int4_group(quantize_int(weight() * 1e7, 4, 32)) == 0  # scales beyond float16
    assert int4_group(quantize_int8(weight())) == 0


def test_bytes_held_are_those_of_the_arithmetic():
    for bits, size, per_weight in ((4, 32, 5.0), (4, 64, 4.5), (4, 128, 4.25)):
        linear = pack_quantized(quantize_int(seeded(64, 256), bits, size), None, BACKEND, Unpacking(4))
        assert 8 * linear.nbytes / (64 * 256) == per_weight
    linear = pack_quantized(quantize_int8(seeded(64, 256)), None, BACKEND, Unpacking(4))
    assert abs(8 * linear.nbytes / (64 * 256) - 8) < 0.02 * 8


@pytest.mark.parametrize(("held", "name"), [
    ("int8", "int8"), ("int4:32", "int4 32"), ("int4:64", "int4 64 symmetric"), ("int4:32+scaled", "awq"),
])  # fmt: skip
@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_compiled_multiplies_the_same(held, name, rows):
    """``few_rows.multiply`` as the compiler gets it."""
    quantized = WAYS[name][0]()
    linear = pack_quantized(quantized, None, BACKEND, Unpacking(4))
    assert low_bit.held_as(linear) == held
    parts = low_bit.words_of(linear)
    assert len(parts) == few_rows.weight_inputs(held)
    x = seeded(rows, COLUMNS, seed=rows)
    factors = few_rows.factor(held, parts, x)
    assert off(few_rows.multiply(held, parts, factors, rows), x, quantized.dequantize()) < 5e-4


def test_one_function_serves_layers_of_which_some_are_scaled():
    def layers(*ways):
        return [SimpleNamespace(held=lambda held=held: held) for held in ways]

    assert common(layers(("int4:32", "int8"), ("int4:32+scaled", "int8"))) == ("int4:32+scaled", "int8")
    assert common(layers(("int4:32", "int8"), ("int4:64", "int8"))) == ()
    assert common(layers(("int4:32", ""), ("int4:32", ""))) == ()
    for name, held in (("int4 32", "int4:32"), ("int8", "int8")):
        linear = pack_quantized(WAYS[name][0](), None, BACKEND, Unpacking(4))
        plain, scaled = low_bit.words_of(linear), low_bit.words_of(linear, scaled=True)
        x = seeded(1, COLUMNS)
        with_ones = few_rows.multiply(f"{held}+scaled", scaled, few_rows.factor(f"{held}+scaled", scaled, x), 1)
        assert torch.equal(with_ones, few_rows.multiply(held, plain, few_rows.factor(held, plain, x), 1))


@pytest.mark.parametrize("rows", [1, 3])
def test_what_is_compiled_rounds_its_input_the_same(rows, monkeypatch):
    monkeypatch.setattr(low_bit.ops_cpu, "integer_product_works", lambda: False)
    numbers = []
    linear = pack_quantized(quantize_int8_w8a8(weight()), None, BACKEND, Unpacking(4), numbers.append)
    held = low_bit.held_as(linear)
    assert held == "plain+rounded" and few_rows.weight_inputs(held) == len(numbers) == 1
    x = torch.cat((seeded(rows, COLUMNS), torch.zeros(1, COLUMNS)))
    got = few_rows.multiply(held, numbers, few_rows.factor(held, numbers, x), rows + 1)
    assert torch.allclose(got, linear(x), rtol=1e-5, atol=1e-5) and not got[-1].any()
    for other in (quantize_int8_w8a8(weight(), 0.02), quantize_int8_w8a8(weight(), None, torch.full((COLUMNS,), 2.0))):
        assert low_bit.held_as(pack_quantized(other, None, BACKEND, Unpacking(4))) == ""


def test_every_code_comes_out_of_its_place_in_a_word():
    """Exactly: one code at a time, whose column alone is not 0."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(ROWS, 4).view(ROWS, 64)  # two groups of 32, each code in every place
    codes = torch.stack([row.roll(n) for n, row in enumerate(codes)])
    ones = torch.ones(ROWS, 2, dtype=torch.float16)
    parts = [words.pack_int4(codes, 32), words.pack_grids(ones, ones * 0)]
    assert torch.equal(words.unpack_int4(parts[0], 32).view_as(codes), codes)
    for column in range(64):
        x = torch.zeros(1, 64)
        x[0, column] = 3.0
        got = few_rows.multiply("int4:32", parts, few_rows.factor("int4:32", parts, x), 1)
        assert torch.equal(got[0], 3 * codes[:, column].float())
    signed = torch.arange(-127, 129, dtype=torch.int16).clamp_max(127).to(torch.int8).view(1, -1)
    parts = [signed.view(torch.float32), torch.ones(1)]
    for column in range(256):
        x = torch.nn.functional.one_hot(torch.tensor([column]), 256).float()
        assert few_rows.multiply("int8", parts, few_rows.factor("int8", parts, x), 1) == float(signed[0, column])


@given(st.floats(-65504, 65504, width=16))
def test_a_float16_is_read_from_its_bits(value):
    pair = torch.tensor([value, -value], dtype=torch.float16).view(torch.int32)
    assert [words.half(pair), words.half(pair >> 16)] == [value, -value]


def test_words_of_how_a_matrix_is_held():
    assert few_rows.weight_kind("int4:64+scaled") == ("int4", 64, True) and few_rows.weight_kind("plain") == ("plain", 0, False)
    assert [few_rows.weight_inputs(h) for h in ("plain", "int8", "int8+scaled", "int4:32", "int4:32+scaled")] == [1, 2, 3, 2, 3]
