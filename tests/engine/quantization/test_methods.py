import pytest
import torch

from engine.quantization.base import METHODS, Calibration
from engine.quantization.fp8 import quantize_fp8
from engine.quantization.int8 import quantize_int8, quantize_int8_w8a8
from engine.quantization.intn import quantize_int
from engine.quantization.methods import METHOD, check, quantize
from engine.quantization.nf4 import quantize_nf4
from engine.quantization.smoothquant import quantize_smooth


def weight(rows: int = 6, columns: int = 128) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.05


def calibration(columns: int = 128) -> Calibration:
    x = torch.randn(256, columns, generator=torch.Generator().manual_seed(1))
    hessian = 2 * x.double().T @ x.double() / len(x)
    return Calibration(len(x), x[:64], hessian, x.abs().mean(0), x.abs().amax(0))


def same(a, b) -> bool:
    return (
        a.method == b.method
        and a.group_size == b.group_size
        and torch.equal(a.codes, b.codes)
        and torch.equal(a.scales, b.scales)
    )


def test_the_table_has_every_method_in_the_configurations_order():
    assert tuple(METHOD) == METHODS and all(name == m.name for name, m in METHOD.items())
    for m in METHOD.values():
        assert m.description.endswith(".") and m.title
        assert (m.group_size is None) == (not m.group_sizes) and (m.group_size is None or m.group_size in m.group_sizes)


@pytest.mark.parametrize("name", METHODS)
def test_each_method_gives_what_its_entry_says(name):
    m = METHOD[name]
    q = quantize(weight(), name, calibration=calibration() if m.needs_calibration else None)
    assert (q.method, q.bits, q.group_size, q.shape) == (name, m.bits, m.group_size or 128, (6, 128))
    lost = float((q.dequantize() - weight()).norm() / weight().norm())
    assert 0 < lost < {8: 0.04, 4: 0.2, 3: 0.25, 2: 0.5}[m.bits]


def test_dispatch_is_to_the_methods_own_function():
    w = weight()
    assert same(quantize(w, "int8"), quantize_int8(w)) and same(quantize(w, "int8", per="tensor"), quantize_int8(w, "tensor"))
    assert same(quantize(w, "fp8", per="tensor"), quantize_fp8(w, "tensor"))
    assert same(quantize(w, "int8_w8a8"), quantize_int8_w8a8(w))
    assert same(quantize(w, "nf4", 32, double=False), quantize_nf4(w, 32, double=False))
    for bits in (2, 3, 4):
        assert same(quantize(w, f"int{bits}"), quantize_int(w, bits, 32))
        assert same(quantize(w, f"int{bits}", 64, symmetric=True), quantize_int(w, bits, 64, symmetric=True))


def test_w8a8_takes_smoothing_and_a_static_scale_from_calibration():
    w, seen = weight(), calibration()
    smooth = quantize(w, "int8_w8a8", calibration=seen, smooth=0.5)
    assert same(smooth, quantize_smooth(w, seen, 0.5)) and smooth.activation_scale is None
    assert quantize(w, "int8_w8a8", calibration=seen, smooth=0.5, static=True).activation_scale == pytest.approx(
        float((seen.abs_max / smooth.input_scales).max()) / 127
    )
    static = quantize(w, "int8_w8a8", calibration=seen, static=True)
    assert static.activation_scale == pytest.approx(float(seen.abs_max.max()) / 127) and static.input_scales is None
    for options in ({"smooth": 0.5}, {"static": True}):
        with pytest.raises(ValueError, match="needs the calibration"):
            quantize(w, "int8_w8a8", **options)


def test_an_unknown_method_is_refused_with_those_that_exist():
    for call in (lambda: quantize(weight(), "int5"), lambda: check("int5")):
        with pytest.raises(ValueError, match=r"one of int8, int8_w8a8, .*, int2, got 'int5'"):
            call()


@pytest.mark.parametrize("size", [0, -1, 32.0, True, "64"])
@pytest.mark.parametrize("name", [name for name, m in METHOD.items() if m.group_size])
def test_group_sizes_that_do_not_exist_are_refused(name, size):
    with pytest.raises(ValueError, match=f"{name} takes groups of 1 column or more"):
        quantize(weight(), name, size, calibration())


@pytest.mark.parametrize("name", [name for name, m in METHOD.items() if not m.group_size])
def test_a_group_size_for_a_method_without_groups_is_refused(name):
    with pytest.raises(ValueError, match="takes no group size, got 32"):
        quantize(weight(), name, 32)


def test_check_gives_the_size_that_would_be_used():
    assert (
        check("int4") == (METHOD["int4"], 32)
        and check("nf4", 128) == (METHOD["nf4"], 128)
        and check("fp8") == (METHOD["fp8"], None)
    )


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_calibration_that_is_needed_and_missing_is_named(name):
    with pytest.raises(ValueError, match=f"{name} needs the calibration of this layer's inputs, got none"):
        quantize(weight(), name)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_inf_and_nan_are_refused_by_every_method(name, bad):
    w = weight()
    w[3, 7] = bad
    with pytest.raises(ValueError, match="inf or NaN"):
        quantize(w, name, calibration=calibration())


@pytest.mark.parametrize("name", METHODS)
def test_all_zero_rows_come_back_as_zeros_by_every_method(name):
    w = weight()
    w[2] = 0
    w[4, :64] = 0
    back = quantize(w, name, calibration=calibration()).dequantize()
    assert bool(torch.isfinite(back).all()) and bool((back[2] == 0).all())


def test_an_option_that_a_method_does_not_have_is_refused():
    for name in ("int8", "int4", "nf4", "int8_w8a8"):
        with pytest.raises(TypeError, match="damping"):
            quantize(weight(), name, damping=0.1)
