"""Decodes of one request through the function that is compiled for them: its arithmetic, and the life of what was compiled."""

import dataclasses
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.kvcache.layout import KVCache
from engine.model import single_row
from engine.model.checkpoint import load_checkpoint
from engine.model.llama import Model
from engine.model.single_row import RowShape, SingleRow, between_attentions, compile_to, unfit
from engine.request import Request, SamplingParams
from engine.runner import Runner, Scheduled
from tests.engine.model import tiny

SHAPE = RowShape(64, 4, 2, 16, 96, 1e-5, True, (True, False, True, True), "float16", "float32", 2)
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


class Uncompiled:
    """Stands in for SingleRow: the same function, as torch runs it."""

    state = "compiled"

    def __init__(self, shape: RowShape) -> None:
        self.calls = 0
        self._function = partial(between_attentions, shape)

    def function(self):
        self.calls += 1
        return lambda inputs: self._function(*inputs)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    made = tiny.make(family, tmp_path)
    checkpoint = load_checkpoint(tmp_path)
    model = Model(checkpoint.config, checkpoint.tensors, "cpu", torch.float32, Uncompiled)
    kv = KVCache(checkpoint.config, 8, 4, "cpu", torch.float32)
    request = Request("r", [(5 * i + 3) % 300 for i in range(14)], SamplingParams(), 0)
    request.block_ids = [6, 1, 3, 0]
    runner = Runner(model, kv)
    runner.run([Scheduled(request, 0, 9, True)])
    assert model.single_row.calls == 0
    got = torch.cat([runner.run([Scheduled(request, i, 1, True)]) for i in range(9, 14)])
    assert model.single_row.calls == 5
    torch.testing.assert_close(got, made.logits(request.token_ids)[9:], atol=1e-4, rtol=0)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the function for SHAPE in it."""
    directory = tmp_path_factory.mktemp("compiled")
    (directory / f"single-row-{single_row._key(SHAPE)}.pt2.work-killed").mkdir()  # of a compiler that was killed
    row = SingleRow(SHAPE, directory)
    assert row.state == "compiling" and row.function() is None
    assert row.wait(300) and row.state == "compiled"
    return directory


@needs_compiler
@pytest.mark.slow
def test_compiled_it_gives_the_same(compiled: Path) -> None:
    row = SingleRow(SHAPE, compiled)  # loaded, not compiled again
    assert row.state == "compiled"
    function = row.function()
    assert function is not None
    for seed in range(3):
        torch.manual_seed(seed)
        inputs = SHAPE.examples()
        inputs[10] = torch.rand(6, 16) + 0.5  # the QK-norm's weights
        for got, want in zip(function(list(inputs))[:3], between_attentions(SHAPE, *inputs)[:3], strict=True):
            torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
    assert sorted(p.suffix for p in compiled.iterdir()) == [".lock", ".pt2"]  # the compiler's own files are gone


@needs_compiler
@pytest.mark.slow
def test_a_file_that_computes_something_else_is_not_used(compiled: Path, tmp_path: Path, caplog) -> None:
    other = RowShape(**{**SHAPE.__dict__, "eps": 0.5})
    (made,) = compiled.glob("*.pt2")
    copy = tmp_path / f"single-row-{single_row._key(other)}.pt2"
    copy.write_bytes(made.read_bytes())
    row = SingleRow(other, tmp_path)
    assert row.function() is None and "differ" in row.state and not copy.exists()
    assert "differ" in caplog.text


def test_a_broken_file_is_not_used(tmp_path: Path, caplog) -> None:
    path = tmp_path / f"single-row-{single_row._key(SHAPE)}.pt2"
    path.write_bytes(b"PK\x03\x04 not a package")
    row = SingleRow(SHAPE, tmp_path)
    assert row.function() is None and "does not work" in row.state and not path.exists()
    assert "uncompiled" in caplog.text


def test_a_compiler_that_fails_is_told(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(single_row.shutil, "which", lambda name: "/bin/" + name)
    monkeypatch.setattr(single_row.sys, "executable", shutil.which("false") or "/bin/false")
    row = SingleRow(SHAPE, tmp_path)
    assert not row.wait(30) and row.state == "the compiler failed"


def test_without_a_compiler_nothing_is_started(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(single_row.shutil, "which", lambda name: None)
    row = SingleRow(SHAPE, tmp_path)
    assert row.function() is None and "no C++ compiler" in row.state and not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(single_row.shutil, "which", lambda name: "/bin/" + name)
    (tmp_path / "file").write_text("")
    row = SingleRow(SHAPE, tmp_path / "file" / "compiled")
    assert row.function() is None and "could not be started" in row.state and row.state in caplog.text


def test_the_compiler_ends_with_whoever_started_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(single_row.shutil, "which", lambda name: "/bin/" + name)
    row = SingleRow(SHAPE, tmp_path)
    process = row._compiler
    assert process is not None and process.poll() is None
    del row
    assert process.poll() is not None


def test_what_was_compiled_in_between_is_taken(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "there.pt2"
    path.write_bytes(b"whatever")
    monkeypatch.setattr(torch.export, "export", lambda *a: pytest.fail("compiled again"))
    compile_to(SHAPE, path)
    assert path.read_bytes() == b"whatever"


def test_which_models_it_is_for(default_engine) -> None:
    config, cpu = default_engine.model_config, torch.device("cpu")
    assert unfit(config, cpu, torch.bfloat16) == "" == unfit(config, cpu, torch.float16)
    assert "16-bit" in unfit(config, cpu, torch.float32)
    assert "16-bit" in unfit(config, torch.device("cuda"), torch.bfloat16)
    assert "too small" in unfit(dataclasses.replace(config, num_layers=1), cpu, torch.bfloat16)
    assert "too small" in unfit(dataclasses.replace(config, intermediate_size=8, num_layers=2), cpu, torch.bfloat16)
    assert "memory" in unfit(dataclasses.replace(config, intermediate_size=1 << 24), cpu, torch.bfloat16)
