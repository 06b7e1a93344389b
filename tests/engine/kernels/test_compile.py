"""Every kernel compiles for GPUs that are not here; what tracing costs where it is off: nothing."""

import ast
import importlib.util
import inspect
import re

import pytest
import torch

pytest.importorskip("triton")
from engine.kernels.interpreter import is_interpreted

if is_interpreted():
    pytest.skip("the kernels of this process are interpreted ones", allow_module_level=True)

from engine.attention.launches import decode_rows
from engine.kernels.compiling import CompileSpec, compile_spec
from engine.kernels.dequant_matmul import MatmulConfig, matmul_spec
from engine.kernels.flash_attention import FlashConfig, backward_specs, forward_spec, tma_spec
from engine.kernels.flash_attention import triton as flash
from engine.kernels.kv_write import kv_write_specs
from engine.kernels.paged_decode import DecodeConfig, decode_specs
from engine.kernels.report import report_of
from engine.kernels.rms_norm import rms_norm_spec
from engine.kernels.sample import sample_spec
from engine.kernels.silu_mul import silu_mul_spec
from engine.kernels.tracing import TraceBuffer

pytestmark = pytest.mark.slow
ARCHS = [80, 90, 100]
# Small tiles compile in a fraction of the time. Tensor cores of sm_90 and sm_100 want 64 rows or more.
TILES = FlashConfig(64, 32, 4, 2)


def specs() -> dict[str, CompileSpec]:
    found = {
        "flash-64-bf16": forward_spec(config=TILES),
        "flash-80-fp16-window": forward_spec(80, torch.float16, window=100, group=3, config=TILES),
        "flash-96-fp32": forward_spec(96, torch.float32, config=FlashConfig(16, 16, 4, 1)),
        "flash-128-bf16-contiguous": forward_spec(128, block_size=0, causal=False, config=TILES),
        "flash-traced": forward_spec(config=TILES, trace=TraceBuffer("cpu", 16)),
        "rms_norm": rms_norm_spec(),
        "rms_norm-alone": rms_norm_spec(residual=False),
        "silu_mul": silu_mul_spec(),
        "sample": sample_spec(),
    }
    for spec in backward_specs(config=FlashConfig(32, 32, 4, 2)):
        found[f"flash-backward-{spec.kernel.__name__}"] = spec
    for codes in (None, torch.int8, torch.uint8):
        tree = codes is None
        found[f"decode-{codes}"], merge = decode_specs(
            kv_dtype=codes, tree=tree, window=None if tree else 50, config=DecodeConfig(32)
        )
        found["decode-merge"] = merge
        (found[f"kv_write-{codes}"],) = kv_write_specs(kv_dtype=codes)
    found["decode-traced"] = decode_specs(trace=TraceBuffer("cpu", 16), config=DecodeConfig(32))[0]
    for kind in ("int8", "int4", "nf4"):
        found[f"matvec-{kind}"] = matmul_spec(kind)
        found[f"matmul-{kind}"] = matmul_spec(kind, config=MatmulConfig(64, 32, 64, 4, 2))
    return found


SPECS = specs()


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.long), 90, pytest.param(100, marks=pytest.mark.long)])
def test_every_kernel_compiles(arch: int) -> None:
    for name, spec in SPECS.items():
        made = compile_spec(spec, arch)
        assert made.asm["cubin"][:4] == b"\x7fELF", name
        assert f".target sm_{arch}" in made.asm["ptx"], name
        assert made.metadata.shared < 99 * 1024, name  # an L4 has no more


@pytest.mark.parametrize(("arch", "instruction"), [(80, "mma.sync"), (90, "wgmma.mma_async"), (100, "tcgen05.mma")])
def test_tensor_cores_are_used(arch: int, instruction: str) -> None:
    for name in ("flash-128-bf16-contiguous", "matmul-int4"):
        assert instruction in compile_spec(SPECS[name], arch).asm["ptx"], name


def test_tensor_descriptors_are_copied_by_the_accelerator() -> None:
    """sm_90: the same products, but one instruction for a tile of K or V instead of many of 16 bytes a thread."""
    config = FlashConfig(64, 64, 4, 2)
    plain, tma = (report_of(spec, "sm_90") for spec in (forward_spec(block_size=0, config=config), tma_spec(config=config)))
    assert plain.tensor_core["HGMMA"] == tma.tensor_core["HGMMA"] > 0
    assert set(plain.async_copy) == {"LDGSTS"} and set(tma.async_copy) == {"UTMALDG"}
    assert tma.async_copy["UTMALDG"] < plain.async_copy["LDGSTS"]
    assert tma.registers is not None and plain.registers is not None and tma.registers < plain.registers  # no addresses are kept


class WithoutTracing(ast.NodeTransformer):
    """A module as it would be had nobody thought of tracing: no ``if TRACE``, no arguments or variables of it."""

    def __init__(self) -> None:
        self.dropped: dict[str, set[int]] = {}

    @staticmethod
    def of_tracing(name: str) -> bool:
        return name == "TRACE" or name.lower().startswith("trace_")

    def visit_If(self, node: ast.If) -> ast.AST | None:
        if isinstance(node.test, ast.Name) and node.test.id == "TRACE":
            return None
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        target = node.targets[0]
        if isinstance(target, ast.Name) and self.of_tracing(target.id):
            return None
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        places = {i for i, a in enumerate(node.args.args) if self.of_tracing(a.arg)}
        if any(getattr(d, "attr", getattr(getattr(d, "func", None), "attr", "")) == "jit" for d in node.decorator_list):
            self.dropped[node.name] = places
            node.args.args = [a for i, a in enumerate(node.args.args) if i not in places]
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in self.dropped:
            node.args = [a for i, a in enumerate(node.args) if i not in self.dropped[node.func.id]]
        return node


def bare(ptx: str) -> str:
    """PTX without names of kernels and parameters, comments, line numbers and what describes them to a debugger."""
    text = ptx.split("\t.section\t.debug")[0]
    lines = [re.sub(r"//.*", "", line).strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp", "$L__func_", ".section"))]
    return re.sub(r"\w*flash_attention_kernel\w*", "kernel", "\n".join(lines))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"window": 100, "block_size": 0}, marks=pytest.mark.long)], ids=["paged", "window"]
)
def test_tracing_that_is_off_is_not_there(arch: int, options: dict, tmp_path) -> None:
    tree = WithoutTracing().visit(ast.parse(inspect.getsource(flash)))
    text = ast.unparse(ast.fix_missing_locations(tree))
    kernel_text = text[text.index("def flash_attention_kernel") : text.index("def flash_attention(")]
    assert "trace" not in kernel_text.lower()
    path = tmp_path / "untraced.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("untraced", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    off = forward_spec(config=TILES, **options)
    constants = {k: v for k, v in off.constants.items() if not WithoutTracing.of_tracing(k)}
    without = CompileSpec(module.flash_attention_kernel, off.types, constants, off.num_warps, off.num_stages, off.aligned)
    a, b = compile_spec(off, arch).asm["ptx"], compile_spec(without, arch).asm["ptx"]
    assert "smid" not in a
    assert bare(a) == bare(b)
    on = compile_spec(forward_spec(config=TILES, trace=TraceBuffer("cpu", 16), **options), arch).asm["ptx"]
    assert all(word in on for word in ("%smid", "%clock64", "%globaltimer")) and bare(on) != bare(a)


def test_what_does_not_fit_is_refused() -> None:
    good = SPECS["silu_mul"]
    with pytest.raises(ValueError, match=r"differing: \['size'\]"):
        compile_spec(CompileSpec(good.kernel, {k: v for k, v in good.types.items() if k != "size"}, good.constants), 80)
    with pytest.raises(RuntimeError, match="interpreted"):
        compile_spec(CompileSpec(lambda: None, {}, {}), 80)
    with pytest.raises(ValueError, match="the head size must be one of"):
        forward_spec(256)
    with pytest.raises(ValueError, match="kind must be int8, int4 or nf4"):
        matmul_spec("int5")


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [pytest.param(64, torch.float32, marks=pytest.mark.long), (128, torch.float32), (128, torch.bfloat16)],
)
def test_the_rows_that_a_decode_is_given_fit_the_smallest_shared_memory(head_dim: int, dtype: torch.dtype) -> None:
    rows = decode_rows(head_dim, dtype)
    spec = decode_specs(head_dim, dtype, group=16, max_seqlen_q=rows // 16)[0]
    report = report_of(spec, "sm_89", max_shared=99 << 10)  # beyond it the report says so, and has no occupancy
    assert report.shared_bytes <= 99 << 10
