"""The README's Python runs as it stands, and the commands and names it gives exist."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.model
def test_the_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.S)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert "Paris" in printed and " length " in printed
    assert (tmp_path / "run.cutaway").stat().st_size > 0
    assert json.loads((tmp_path / "run.json").read_text())["traceEvents"]


def test_the_make_targets_exist() -> None:
    rules = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake ([a-z]+)\b", README)) - {"sure"}
    assert named and named <= rules, named - rules


def test_linked_files_exist() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links and all((ROOT / link).exists() for link in links), links


def test_every_variable_named_is_read_and_every_one_read_is_named() -> None:
    pattern = re.compile(r"\bCUTAWAY_[A-Z_]+\b")
    sources = [path for folder in ("engine", "explorer", "apps", "tests") for path in (ROOT / folder).rglob("*.py")]
    read = {name for path in sources if path != Path(__file__) for name in pattern.findall(path.read_text(encoding="utf-8"))}
    assert set(pattern.findall(README)) == read
