"""What must hold of the files themselves: nothing of one machine, nothing huge, one version, frozen public options."""

import dataclasses
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from engine import version
from engine.config import EngineConfig
from engine.request import SamplingParams

ROOT = Path(__file__).resolve().parent.parent
THIS = Path(__file__).name  # the one file that has to spell the patterns
MB = 1024 * 1024
IMAGES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg")

MACHINE_PATH = re.compile(r"(?<![\w.$~}/-])/(?:work|root|tmp|home/[a-z]\w*|Users/\w+|mnt|scratch)(?:/|\b(?![\w-]))")
# Where packages and browsers are fetched from is the business of their clients and of the machine's settings.
REGISTRY = re.compile(
    r"pypi\.org|pythonhosted\.org|deb\.debian\.org|archive\.ubuntu\.com|registry\.npmjs\.org|download\.pytorch\.org"
    r"|storage\.googleapis\.com|playwright\.azureedge\.net|cdn\.playwright\.dev|unpkg\.com|jsdelivr\.net|esm\.sh|fonts\.googleapis\.com"
)


def files() -> list[Path]:
    """All that is, or would be, committed; without git, all but hidden and built folders."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0:
        found = [ROOT / name for name in done.stdout.split("\0") if name]
    else:
        found = [path for path in ROOT.rglob("*") if not re.search(r"/\.[a-z]|__pycache__|egg-info", str(path.relative_to(ROOT)))]
    return [path for path in found if path.is_file()]


def text(path: Path) -> str | None:
    data = path.read_bytes()
    return None if b"\0" in data[:8192] else data.decode("utf-8", "replace")


def lines_matching(pattern: re.Pattern[str], paths: list[Path]) -> list[str]:
    found = []
    for path in paths:
        if path.name == THIS:
            continue
        for number, line in enumerate((text(path) or "").splitlines(), 1):
            if match := pattern.search(line):
                found.append(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name}:{number}: {match[0]}")
    return found


def test_there_are_files() -> None:
    assert ROOT / "engine" / "config.py" in files()


def test_no_path_of_one_machine() -> None:
    assert not (found := lines_matching(MACHINE_PATH, files())), "\n".join(found)


def test_no_host_of_a_package_or_browser_registry() -> None:
    assert not (found := lines_matching(REGISTRY, files())), "\n".join(found)


@pytest.mark.parametrize(
    ("pattern", "line", "hit"),
    [
        (MACHINE_PATH, 'open("/work/x")', True),
        (MACHINE_PATH, "in /tmp/log", True),
        (MACHINE_PATH, "cd /root", True),
        (MACHINE_PATH, "/home/ann/x", True),
        (MACHINE_PATH, "/Users/ann/x", True),
        (MACHINE_PATH, "tokens/work/s and $HOME/tmp/", False),
        (MACHINE_PATH, "../work/x, a/tmp/b, /workshop, /rootless", False),
        (MACHINE_PATH, "/usr/bin/env bash", False),
        (REGISTRY, "see https://pypi.org/x", True),
        (REGISTRY, "fetched by pip", False),
    ],
)
def test_the_patterns_hit_what_they_should(tmp_path: Path, pattern: re.Pattern[str], line: str, hit: bool) -> None:
    (tmp_path / "a.txt").write_text(line)
    assert bool(lines_matching(pattern, [tmp_path / "a.txt"])) is hit


def test_no_large_file() -> None:
    for path in files():
        size, most = path.stat().st_size, 300 * 1024 if path.suffix.lower() in IMAGES else 20 * MB
        assert size <= most, f"{path.relative_to(ROOT)} has {size:,} bytes; at most {most:,}"


def test_the_version_is_in_one_place() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", version.__version__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"] and "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "engine.version.__version__"}
    assigned = [path for path in files() if path.suffix == ".py" and re.search(r"^__version__ *(:.*)?=", text(path) or "", re.M)]
    assert assigned == [ROOT / "engine" / "version.py"]


def test_what_is_needed_is_pinned_once_and_fits() -> None:
    """Every requirement of pyproject.toml has exactly one pin in constraints.txt, and the pin satisfies it."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line]
    exact = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in pins}
    assert len(exact) == len(pins) and all(str(pin.specifier).startswith("==") for pin in pins)
    for line in [*project["dependencies"], *project["optional-dependencies"]["test"]]:
        wanted = Requirement(line)
        assert wanted.specifier.contains(exact[canonicalize_name(wanted.name)]), line


def test_the_licence_is_apaches_text() -> None:
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License\n                           Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence and len(licence.splitlines()) == 202


def options(cls: type) -> dict[str, object]:
    return {f.name: f.default for f in dataclasses.fields(cls)}


def test_the_public_options_of_the_engine_are_frozen() -> None:
    """Other people's code and saved runs hold these names and defaults: change them knowingly, here and in the README."""
    assert options(EngineConfig) == {
        "model": "smollm2-135m",
        "device": "auto",
        "dtype": "auto",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": None,
        "block_size": 16,
        "num_kv_blocks": None,
        "gpu_memory_utilization": 0.9,
        "swap_space": 0,
        "enable_prefix_caching": True,
        "prefix_index": "hash",
        "enable_chunked_prefill": True,
        "batching": "continuous",
        "batching_timeout_ms": 50.0,
        "scheduling_policy": "fcfs",
        "watermark": 0.0,
        "max_num_waiting": None,
        "preemption_mode": "recompute",
        "kv_cache_dtype": "auto",
        "quantization": None,
        "quantization_group_size": None,
        "quantization_options": None,
        "speculative": None,
        "attention_backend": "auto",
        "enforce_eager": False,
        "seed": 0,
    }


def test_the_public_options_of_sampling_are_frozen() -> None:
    assert options(SamplingParams) == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "max_tokens": 128,
        "stop": (),
        "stop_token_ids": (),
        "ignore_eos": False,
        "n": 1,
        "logprobs": None,
        "beam_width": None,
        "length_penalty": 1.0,
        "early_stopping": False,
    }
