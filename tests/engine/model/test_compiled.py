"""The life of what is compiled for few rows of one request: made once, checked, kept, given up where it does not work."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from engine.model import compiled as compiled_module
from engine.model.compiled import CompiledLayer, compile_to, unfit
from engine.model.few_rows import ROWS, ProductShape, RowShape, layer

SHAPE = RowShape(64, 4, 2, 16, 96, 1e-5, True, (True, False, True, True), "float16", "float32", 2)
FEW_BITS = dataclasses.replace(SHAPE, weights=("int8", "int4:32", "int4:64+scaled", "plain"))
needs_compiler = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")


def paths(shape: RowShape, directory: Path) -> list[Path]:
    return list(compiled_module._paths(shape, directory).values())


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the function for FEW_BITS in it."""
    return made_in(FEW_BITS, tmp_path_factory.mktemp("compiled"))


def made_in(shape: RowShape, directory: Path) -> Path:
    (directory / f"layer-{compiled_module._key(shape)}.work-killed").mkdir()  # of a compiler that was killed
    made = CompiledLayer(shape, directory)
    assert made.state == "compiling" and made.function(1) is None
    assert made.wait(600) and made.state == "compiled"
    return directory


@needs_compiler
@pytest.mark.slow
@pytest.mark.long
def test_compiled_it_gives_the_same(tmp_path: Path) -> None:
    check(SHAPE, made_in(SHAPE, tmp_path), [1, 2, 3, 5, 5, 8, 8, 8, None])


@needs_compiler
@pytest.mark.slow
def test_in_few_bits_it_gives_the_same(compiled: Path) -> None:
    check(FEW_BITS, compiled, [1, *[None] * 8])


def check(shape: RowShape, compiled: Path, sizes: list[int | None]) -> None:
    """``sizes``: of the functions that 1 to 9 rows go through."""
    made = CompiledLayer(shape, compiled)  # loaded, not compiled again
    assert made.state == "compiled"
    assert [found and found[0] for found in map(made.function, range(1, 10))] == sizes
    for rows in shape.row_counts:
        size, function = made.function(rows)
        assert size == rows
        for length in (2, 3, 15, 16, 17, 300):
            torch.manual_seed(length)
            inputs = shape.examples(rows, length)
            if rows > 1:
                inputs[5][0, : length // 2] = float("-inf")  # as with a sliding window
            fresh = inputs[4].clone()
            got = function(list(inputs))[0]
            want = layer(shape, rows, *inputs[:4], fresh, *inputs[5:])[0]
            torch.testing.assert_close(got, want, atol=2e-3, rtol=2e-3)
            torch.testing.assert_close(inputs[4], fresh, atol=2e-3, rtol=2e-3)
            assert fresh.any()
    assert sorted(p.suffix for p in compiled.iterdir()) == [
        ".lock",
        *[".pt2"] * len(shape.row_counts),
    ]  # the compiler's own files are gone


@needs_compiler
@pytest.mark.slow
def test_a_file_that_computes_something_else_is_not_used(compiled: Path, tmp_path: Path, caplog) -> None:
    other = dataclasses.replace(FEW_BITS, eps=0.5)
    for source, copy in zip(paths(FEW_BITS, compiled), paths(other, tmp_path), strict=True):
        copy.write_bytes(source.read_bytes())
    made = CompiledLayer(other, tmp_path)
    assert made.function(1) is None and "differ" in made.state and not paths(other, tmp_path)[0].exists()
    assert "differ" in caplog.text


def test_a_broken_file_is_not_used(tmp_path: Path, caplog) -> None:
    path = paths(SHAPE, tmp_path)[0]
    path.write_bytes(b"PK\x03\x04 not a package")
    made = CompiledLayer(SHAPE, tmp_path)
    assert made.function(1) is None and "does not work" in made.state and not path.exists()
    assert "uncompiled" in caplog.text


def test_a_compiler_that_fails_is_told(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(compiled_module.shutil, "which", lambda name: "/bin/" + name)
    monkeypatch.setattr(compiled_module.sys, "executable", shutil.which("false") or "/bin/false")
    made = CompiledLayer(SHAPE, tmp_path)
    assert not made.wait(30) and made.state == "the compiler failed"


def test_without_a_compiler_nothing_is_started(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(compiled_module.shutil, "which", lambda name: None)
    made = CompiledLayer(SHAPE, tmp_path)
    assert made.function(1) is None and "no C++ compiler" in made.state and not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(compiled_module.shutil, "which", lambda name: "/bin/" + name)
    (tmp_path / "file").write_text("")
    made = CompiledLayer(SHAPE, tmp_path / "file" / "compiled")
    assert made.function(1) is None and "could not be started" in made.state and made.state in caplog.text


def test_the_compiler_ends_with_whoever_started_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(compiled_module.shutil, "which", lambda name: "/bin/" + name)
    made = CompiledLayer(SHAPE, tmp_path)
    process = made._compiler
    assert process is not None and process.poll() is None
    del made
    assert process.poll() is not None


def test_what_was_compiled_in_between_is_taken(tmp_path: Path, monkeypatch) -> None:
    for path in paths(SHAPE, tmp_path):
        path.write_bytes(b"whatever")
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: pytest.fail("compiled again"))
    compile_to(SHAPE, tmp_path)
    assert [path.read_bytes() for path in paths(SHAPE, tmp_path)] == [b"whatever"] * len(ROWS)


def test_which_models_it_is_for(default_engine) -> None:
    config, cpu = default_engine.model_config, torch.device("cpu")
    assert unfit(config, cpu, torch.bfloat16) == "" == unfit(config, cpu, torch.float16)
    assert "16-bit" in unfit(config, cpu, torch.float32)
    assert "16-bit" in unfit(config, torch.device("cuda"), torch.bfloat16)
    assert "too small" in unfit(dataclasses.replace(config, num_layers=1), cpu, torch.bfloat16)
    assert "too small" in unfit(dataclasses.replace(config, intermediate_size=8, num_layers=2), cpu, torch.bfloat16)
    assert "memory" in unfit(dataclasses.replace(config, intermediate_size=1 << 24), cpu, torch.bfloat16)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("held", [pytest.param("int8", marks=pytest.mark.long), "int4:32+scaled"])
def test_a_head_in_few_bits_is_compiled_for_one_row(held: str, tmp_path: Path) -> None:
    shape = ProductShape(64, 96, held, 2)
    made = CompiledLayer(shape, tmp_path)
    assert made.wait(600) and made.function(2) is None
    size, function = made.function(1)
    inputs = shape.examples(1, 0)
    torch.testing.assert_close(function(list(inputs))[0], shape.run(1, *inputs)[0], atol=1e-5, rtol=1e-4)
    assert size == 1
