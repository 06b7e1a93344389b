"""Imports go one way: apps and notebooks -> explorer -> engine. Only a few places of the explorer touch a live engine.

Read from the syntax trees, so it holds for imports inside functions and under TYPE_CHECKING, and needs nothing installed.
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("engine", "explorer", "apps", "notebooks")
# layer -> what it may never import
ABOVE = {
    "engine": ("explorer", "apps", "notebooks", "tests"),
    "explorer": ("apps", "notebooks", "tests"),
    "apps": ("notebooks", "tests"),
    "notebooks": ("apps", "tests"),
}
# The engine knows nothing of screens, and is not built on the library that its tests compare it with.
NOT_IN_ENGINE = ("panel", "bokeh", "param", "ipywidgets", "anywidget", "IPython", "transformers")
# Leaves of the engine: they import nothing else of it.
ALONE = ("engine.kernels", "engine.events", "engine.hardware")
# A live engine's state, and the few of the explorer that may hold it. The rest reads the store.
LIVE = ("engine.engine", "engine.scheduler", "engine.runner", "engine.process", "engine.kvcache")
LIVE_NAMES = ("engine.Engine", "engine.EngineProcess", "engine.Scheduler", "engine.Runner")
MAY_HOLD_A_LIVE_ENGINE = ("explorer.session", "explorer.sources", "explorer.claims")


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def module_name(path: Path, root: Path) -> str:
    parts = list(path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def trees(path: Path) -> Iterator[ast.Module]:
    """The syntax trees of a module, or of a notebook's code cells without their magics."""
    if path.suffix == ".py":
        yield ast.parse(path.read_text(encoding="utf-8"), str(path))
        return
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            lines = "".join(cell["source"]).splitlines()
            yield ast.parse("\n".join("pass" if line.lstrip()[:1] in ("%", "!") else line for line in lines), str(path))


def imported(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all that is imported; for ``from a import b`` both ``a`` and ``a.b``, since b may be a module."""
    whole = {}  # local name -> the module that ``import a`` bound, whose attributes reach what it holds
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                whole[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")
                above = above[: len(above) - node.level + is_package]
                base = ".".join([*above, base]) if base else ".".join(above)
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in whole:
            yield node.lineno, f"{whole[node.value.id]}.{node.attr}"


def forbidden(module: str, name: str) -> str | None:
    """Why ``module`` must not import ``name``; None when it may."""
    layer = module.split(".")[0]
    if within(name, ABOVE[layer]):
        return f"{layer} imports nothing above it"
    if layer == "engine":
        if within(name, NOT_IN_ENGINE):
            return "the engine knows nothing of screens, and does not run on transformers"
        for package in ALONE:
            if within(module, (package,)) and within(name, ("engine",)) and name != "engine" and not within(name, (package,)):
                return f"{package} imports nothing else of engine"
    if layer == "explorer" and not within(module, MAY_HOLD_A_LIVE_ENGINE) and (within(name, LIVE) or name in LIVE_NAMES):
        return f"only {', '.join(MAY_HOLD_A_LIVE_ENGINE)} touch a live engine"
    return None


def violations(root: Path) -> list[str]:
    found = []
    for layer in LAYERS:
        for path in sorted((root / layer).rglob("*")):
            if path.suffix not in (".py", ".ipynb") or ".ipynb_checkpoints" in path.parts:
                continue
            module = module_name(path, root)
            for tree in trees(path):
                for line, name in imported(tree, module, path.name == "__init__.py"):
                    reason = forbidden(module, name)
                    if reason:
                        found.append(f"{path.relative_to(root)}:{line} imports {name}: {reason}")
    return found


def test_imports_go_one_way() -> None:
    assert not violations(ROOT), "\n".join(violations(ROOT))


def test_there_is_something_to_check() -> None:
    assert {module_name(path, ROOT) for path in (ROOT / "engine").rglob("*.py")} >= {"engine", "engine.events.types"}


PLANTED = [
    ("engine/a.py", "import explorer.store", "explorer.store"),
    ("engine/a.py", "def f():\n    from tests import browser", "tests"),
    ("engine/a.py", "from panel import pn", "panel"),
    ("engine/a.py", "import bokeh.models as m", "bokeh.models"),
    ("engine/model/x.py", "try:\n    import transformers\nexcept ImportError:\n    pass", "transformers"),
    ("engine/a.py", "import importlib\nimportlib.import_module('ipywidgets')", "ipywidgets"),
    ("engine/events/x.py", "from engine.config import EngineConfig", "engine.config"),
    ("engine/events/x.py", "from ..request import Request", "engine.request"),
    ("engine/hardware/__init__.py", "from .. import config", "engine.config"),
    (
        "engine/kernels/matmul/naive.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import engine.runner",
        "engine.runner",
    ),
    ("explorer/a.py", "import apps.main", "apps.main"),
    ("explorer/run/view.py", "from engine import Engine", "engine.Engine"),
    ("explorer/run/view.py", "import engine\nengine.Engine()", "engine.Engine"),
    ("explorer/run/view.py", "import engine as e\ne.scheduler.Scheduler", "engine.scheduler"),
    ("explorer/run/view.py", "from engine.engine import Engine", "engine.engine"),
    ("explorer/kv_cache/rows.py", "from engine.kvcache.pool import BlockPool", "engine.kvcache.pool"),
    ("explorer/sessions.py", "from engine.process import EngineProcess", "engine.process"),
    ("apps/main.py", "import tests.browser", "tests.browser"),
]


@pytest.mark.parametrize(("path", "text", "name"), PLANTED)
def test_a_planted_violation_is_found(tmp_path: Path, path: str, text: str, name: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    found = violations(tmp_path)
    assert any(line.startswith(f"{path}:") and f" imports {name}: " in line for line in found), found


def test_a_violation_in_a_notebook_is_found(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    cells = [
        {"cell_type": "markdown", "source": ["import tests"]},
        {"cell_type": "code", "source": ["%time x\n", "import tests"]},
    ]
    (tmp_path / "notebooks" / "one.ipynb").write_text(json.dumps({"cells": cells}))
    assert [line.split(":")[1][0] for line in violations(tmp_path)] == ["2"]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("engine/engine.py", "import torch\nfrom engine.kvcache.pool import BlockPool\nfrom .scheduler import Scheduler"),
        (
            "engine/events/log.py",
            "from engine.events.types import Event\nfrom . import codec\nimport msgspec",
        ),
        ("engine/parameters.py", "import engine.parameters"),  # 'param' is no prefix of it
        ("explorer/session.py", "from engine.process import EngineProcess\nfrom engine import Engine"),
        ("explorer/sources/live.py", "from engine.engine import Engine"),
        (
            "explorer/run/rows.py",
            "from engine.events.types import StepDone\nfrom engine import EngineConfig",
        ),
        ("explorer/kv_cache/rows.py", "from engine.hardware.memory import kv_bytes"),
        ("apps/main.py", "from explorer.pages import PAGES\nimport engine\nimport panel"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, path: str, text: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    assert violations(tmp_path) == []
