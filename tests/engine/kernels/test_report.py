"""Reports of kernels compiled for GPUs that are not here."""

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
from engine.kernels.interpreter import is_interpreted

if is_interpreted():
    pytest.skip("the kernels of this process are interpreted ones", allow_module_level=True)

import triton
import triton.language as tl

from engine.kernels import report as module
from engine.kernels.report import compile_report


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n), mask=at < n)


@triton.jit
def matmul_kernel(a, b, c, K, N: tl.constexpr, STEP: tl.constexpr):
    rows, steps = tl.arange(0, N), tl.arange(0, STEP)
    acc = tl.zeros((N, N), tl.float32)
    for k in range(0, K, STEP):
        left = tl.load(a + rows[:, None] * 4096 + (k + steps)[None, :])
        right = tl.load(b + (k + steps)[:, None] * N + rows[None, :])
        acc = tl.dot(left, right, acc)
    tl.store(c + rows[:, None] * N + rows[None, :], acc)


ADD = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
MATMUL = {"a": "*fp16", "b": "*fp16", "c": "*fp32", "K": "i32"}


def matmul(target: str, n: int = 64, step: int = 32, num_stages: int = 2, **more: Any) -> module.CompileReport:
    sizes = {"N": n, "STEP": step}
    return compile_report(matmul_kernel, MATMUL, sizes, 4, num_stages, target, aligned=("a", "b", "c"), **more)


def test_vector_add_takes_no_shared_memory_and_no_tensor_cores() -> None:
    report = compile_report(add_kernel, ADD, {"BLOCK": 128}, num_warps=4, target="sm_80")
    assert (report.shared_bytes, report.spills, report.refused) == (0, 0, "")
    assert report.tensor_core == {} and report.async_copy == {}
    assert report.registers is not None and 0 < report.registers < 64
    assert report.instructions["LDG"] == 2 and report.instructions["STG"] == 1  # one number a thread: two loads, one store
    assert "FADD" in report.instructions and ".visible .entry add_kernel" in report.ptx and "ttg." in report.ttgir


@pytest.mark.parametrize(("target", "tensor", "copy"), [("sm_80", "HMMA", "LDGSTS"), ("sm_90", "HGMMA", "LDGSTS")])
def test_a_dot_becomes_the_targets_tensor_core_instruction(target: str, tensor: str, copy: str) -> None:
    report = matmul(target)
    assert list(report.tensor_core) == [tensor] and report.async_copy[copy] > 0
    assert report.sass.count(f" {tensor}.") == report.tensor_core[tensor]


def test_shared_memory_grows_with_the_stages() -> None:
    # A tile of a and one of b in fp16, for each stage: 2 x 64 x 32 x 2 bytes.
    two, three = (matmul("sm_80", num_stages=n).shared_bytes for n in (2, 3))
    assert two is not None and three is not None and three - two == 2 * 64 * 32 * 2


def test_what_does_not_fit_is_refused_in_tritons_words() -> None:
    limit = 8 * 1024
    report = matmul("sm_80", num_stages=3, max_shared=limit)
    assert report.shared_bytes is not None and report.shared_bytes > limit
    assert report.refused.startswith(f"out of resource: shared memory, Required: {report.shared_bytes}, Hardware limit: {limit}")


def test_what_the_compiler_cannot_compile_is_its_own_word() -> None:
    report = compile_report(add_kernel, ADD, {"BLOCK": 100}, target="sm_80")
    assert "power of 2" in report.refused and report.registers is None


def test_cached_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = matmul("sm_80", cache=tmp_path)
    assert not first.cached
    monkeypatch.setattr(module, "_compile", lambda *_a: pytest.fail("compiled again"))
    start = time.perf_counter()
    again = matmul("sm_80", cache=tmp_path)
    took = time.perf_counter() - start
    assert again == replace(first, cached=True) and took < 0.05
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        matmul("sm_80", num_stages=3, cache=tmp_path)


def test_a_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    compile_report(add_kernel, ADD, {"BLOCK": 128}, target="sm_80", cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:50])
    assert not compile_report(add_kernel, ADD, {"BLOCK": 128}, target="sm_80", cache=tmp_path).cached
    assert json.loads(file.read_text())["name"] == "add_kernel"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "sm_20"}, "target must be one of"),
        ({"num_warps": 3}, "num_warps must be a power of two"),
        ({"num_stages": 0}, "num_stages must be an integer >= 1"),
        ({"signature": {"x": "*fp32"}}, "differing"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"signature": ADD, "constexprs": {"BLOCK": 128}, **change}
    with pytest.raises(ValueError, match=message):
        compile_report(add_kernel, **given)


def test_without_a_tool_it_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"cuobjdump": SimpleNamespace(path=__file__), "nvdisasm": SimpleNamespace(path=__file__)}
    knobs = SimpleNamespace(nvidia=SimpleNamespace(**there, ptxas=SimpleNamespace(path="/nowhere/ptxas")))
    real = module.load
    monkeypatch.setattr(module, "load", lambda name: knobs if name == "triton.knobs" else real(name))
    with pytest.raises(RuntimeError, match=r"without ptxas .*nowhere"):
        compile_report(add_kernel, ADD, {"BLOCK": 128}, target="sm_80")


def test_without_triton_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise RuntimeError(f"{name}: the kernels need Triton")

    monkeypatch.setattr(module, "load", missing)
    with pytest.raises(RuntimeError, match="need Triton"):
        compile_report(add_kernel, ADD, {"BLOCK": 128}, target="sm_80")
