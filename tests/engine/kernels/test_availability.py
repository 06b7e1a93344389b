"""Without Triton the naive functions work and a kernel says what is missing; CPU tensors without the interpreter get words too."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]

WITHOUT_TRITON = """
import importlib, sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
import torch
from engine.kernels.lazy import triton_version
from engine.kernels.compiling import CompileSpec, compile_spec
assert triton_version() is None
cu = torch.tensor([0, 2], dtype=torch.int32)
for op in ("flash_attention", "paged_decode", "kv_write", "rms_norm", "silu_mul", "dequant_matmul", "sample"):
    package = importlib.import_module(f"engine.kernels.{op}")
    try:
        getattr(package, op)
    except RuntimeError as error:
        assert "Triton, which is not installed" in str(error), error
    else:
        raise SystemExit(f"{op} did not complain")
    try:
        package.no_such_kernel
    except AttributeError:
        pass
from engine.kernels.flash_attention import naive_flash_attention
x = torch.randn(2, 1, 64)
assert naive_flash_attention(x, x, x, cu, cu)[0].shape == (2, 1, 64)
try:
    compile_spec(CompileSpec(None, {}, {}), 80)
except RuntimeError as error:
    assert "not installed" in str(error)
else:
    raise SystemExit("compile_spec did not complain")
print("fine")
"""


def test_without_triton() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "fine", done.stdout + done.stderr


def test_importing_kernels_does_not_import_triton() -> None:
    code = "import sys, engine.kernels.flash_attention, engine.kernels.paged_decode, engine.kernels.sample; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    # torch itself may bring it; then nothing can be told.
    plain = subprocess.run([sys.executable, "-c", "import sys, torch; print('triton' in sys.modules)"], capture_output=True, text=True, timeout=120, check=True)  # fmt: skip
    assert done.stdout == plain.stdout


def test_cpu_tensors_without_the_interpreter() -> None:
    pytest.importorskip("triton")
    from engine.kernels.interpreter import is_interpreted, patch_once
    from engine.kernels.rms_norm import rms_norm

    if is_interpreted():
        pytest.skip("the kernels of this process are interpreted ones")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        rms_norm(torch.ones(1, 4), torch.ones(4), 1e-5)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        patch_once()


def test_unknown_names() -> None:
    import engine.kernels.rms_norm as package

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing
