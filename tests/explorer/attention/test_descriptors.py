"""The variant with tensor descriptors beside the plain kernel: what is said in each state, and the real compiler's answer."""

from dataclasses import replace

import pytest

from engine.kernels.lazy import triton_version
from explorer.attention.descriptors import beside_html, has_tma
from explorer.attention.shape import Shape
from explorer.attention.worker import compiled
from tests.explorer.attention.test_memory import report

PLAIN = {**report(), "refused": "", "instructions": {"HGMMA": 32, "LDGSTS": 48, "FFMA": 10}}
TMA = {**report(), "refused": "", "instructions": {"HGMMA": 32, "UTMALDG": 12, "FFMA": 9}}
HOPPER, AMPERE = Shape(gpu="h100-sxm"), Shape(gpu="a100-80gb")


def test_each_state_says_what_it_is():
    assert has_tma(HOPPER) and has_tma(Shape(gpu="b200")) and not has_tma(AMPERE)
    assert "came with sm_90" in beside_html(AMPERE, PLAIN, None)
    assert "Compiling" in beside_html(HOPPER, PLAIN, None) and "Compiling" in beside_html(HOPPER, None, None)
    assert "no compiler &lt;here&gt;" in beside_html(HOPPER, PLAIN, {"error": "no compiler <here>"})
    assert "refuses the variant: too much" in beside_html(HOPPER, PLAIN, {**TMA, "refused": "too much"})
    assert "refuses the plain" in beside_html(HOPPER, {**PLAIN, "refused": "x"}, TMA)


def test_both_stand_side_by_side():
    body = beside_html(HOPPER, PLAIN, TMA)
    row = body[body.index("UTMALDG") :]
    assert row.index(">0<") < row.index(">12<") and body.index(">48<") < body.index("UTMALDG")
    assert ">90<" in body and ">53<" in body


@pytest.mark.skipif(triton_version() is None, reason="Triton is not installed")
def test_the_compiler_uses_the_accelerator():
    plain, other = compiled(HOPPER), compiled(replace(HOPPER, descriptors=True))
    assert other["instructions"].get("UTMALDG", 0) > 0 == plain["instructions"].get("UTMALDG", 0)
    assert plain["instructions"]["LDGSTS"] > other["instructions"].get("LDGSTS", 0)
    assert "TMA" in replace(HOPPER, descriptors=True).label and "TMA" not in HOPPER.label
