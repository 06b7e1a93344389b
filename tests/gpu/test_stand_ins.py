"""The stand-ins hold what the engine puts into them, and the script's parts that need no GPU work."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.kernels.lazy import triton_version
from tests.gpu import stand_ins
from tests.gpu.__main__ import _plain, table
from tests.gpu.stand_ins import Struct, _File

ROOT = Path(__file__).parents[2]


class Point(Struct, frozen=True, tag=True, kw_only=True):
    x: int
    name: str = "p"
    more: list = []  # noqa: RUF012


class Further(Point, frozen=True):
    z: float = 0.5


def test_a_struct() -> None:
    a, b = Further(x=1), Further(x=1, z=0.5)
    assert a == b and a.__struct_fields__ == ("x", "name", "more", "z") and repr(a) == "Further(x=1, name='p', more=[], z=0.5)"
    a.more.append(1)
    assert b.more == [] and a != b
    for bad in ({}, {"x": 1, "w": 2}):
        with pytest.raises(TypeError):
            Further(**bad)


def test_a_safetensors_file(tmp_path: Path) -> None:
    numbers = torch.arange(6, dtype=torch.int16).view(2, 3).view(torch.bfloat16)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, "__metadata__": {"a": "b"}}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + numbers.view(torch.int16).numpy().tobytes())
    file = _File(path)
    assert file.keys() == ["w"] and file.get_slice("w").get_shape() == [2, 3]
    assert torch.equal(file.get_tensor("w").view(torch.int16), numbers.view(torch.int16))


def test_a_checkpoint_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUTAWAY_CHECKPOINT", raising=False)
    assert stand_ins.checkpoint_folder() is None
    monkeypatch.setenv("CUTAWAY_CHECKPOINT", str(tmp_path))
    with pytest.raises(ValueError, match="must name a folder with config"):
        stand_ins.checkpoint_folder()


WITHOUT = """
import importlib.util, sys
real = importlib.util.find_spec
hidden = {"msgspec", "psutil", "safetensors", "tokenizers", "gguf", "huggingface_hub"}
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
importlib.util.find_spec = lambda name, *a: None if name.split(".")[0] in hidden else real(name, *a)
from tests.gpu.stand_ins import install
assert install() == ["msgspec", "psutil", "safetensors", "tokenizers"], install()
importlib.util.find_spec = real
from tests.gpu.models import engine_config, random_parts
from engine.engine import Engine
from engine.request import SamplingParams
engine = Engine(engine_config(device="cpu", dtype="float32"), parts=random_parts("tiny"))
events = []
engine.recorder.attach(events.append)
engine.add_request([3, 4, 5], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
while engine.has_unfinished():
    engine.step()
print(type(events[-2]).__name__, len(events[-1].__struct_fields__) > 2)
"""


def test_the_engine_runs_with_nothing_but_torch_and_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stdout.split()[1] == "True", done.stdout + done.stderr


def test_the_table_says_what_was_promised() -> None:
    rows = [
        {
            "what": "decode",
            "shape": "8",
            "value": 4.0,
            "unit": "GB/s",
            "of copy": 0.9,
            "target": {"of copy": 0.85},
            "config": "c",
        },
        {"what": "matvec", "shape": "9", "value": math.nan, "unit": "GB/s", "of copy": 0.5, "target": {"of copy": 0.85}},
        {"what": "engine", "shape": "", "value": math.nan, "unit": "", "error": "RuntimeError: no"},
    ]
    report = {
        "machine": {"gpu": "G"},
        "dry": False,
        "tests": {"processes": [{"code": 0, "last": ["3 passed"]}]},
        "benchmarks": rows,
    }
    head, tests, decode, matvec, engine = table(report).splitlines()
    assert head == "gpu=G" and tests == "tests: 0 3 passed"
    assert "of copy: kept (>= 0.85)" in decode and "of copy: MISSED (>= 0.85)" in matvec and engine.endswith("RuntimeError: no")
    assert _plain(report)["benchmarks"][1]["value"] is None
    report["dry"] = True
    assert "MISSED" not in table(report) and "A dry run" in table(report)


@pytest.mark.skipif(triton_version() is None, reason="no Triton")
def test_the_script_finds_all_tests_without_the_project_s_own_fixtures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--dry", "--tests-only", "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (process,) = json.loads((tmp_path / "gpu.json").read_text())["tests"]["processes"]
    assert process["code"] == 0 and int(process["last"][0].split()[0]) > 200


def test_without_a_gpu_nothing_is_measured() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    done = subprocess.run([sys.executable, "-m", "tests.gpu"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "No CUDA device is here" in done.stderr
