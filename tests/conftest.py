"""Fixtures that every test may use, and what a test needs before it may run: the model, a browser, a GPU.

What is missing skips the tests that need it and says so; with CI set it fails them, since a skip there would look like a pass.
"""

import os

# Before torch is first imported, here and in the processes that tests start: two test processes on two cores, one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest

from tests.browser import MISSING, find_chromium
from tests.ending import pytest_sessionfinish, pytest_unconfigure  # noqa: F401  (hooks)

CI = bool(os.environ.get("CI"))
FIRST = ("notebooks", "ui")  # folders of tests that take longest
DEFAULT_MODEL = "smollm2-135m"

# No deadline: the first call of a property pays for imports, and shared machines stall. In CI the same examples every time.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if CI else "local")


def lacking(what: str) -> NoReturn:
    """End the test: skipped here, failed in CI."""
    if CI:
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: of two processes, none is left alone with one of them at the end. And kernels are spoken to before
    a browser is: Playwright keeps an event loop running in the main thread, in which those of notebooks cannot run."""
    here = Path(__file__).parent

    def turn(item: pytest.Item) -> int:
        folder = item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else ""
        return FIRST.index(folder) if folder in FIRST else len(FIRST)

    items.sort(key=turn)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF file, fetched once into the user's cache."""
    from engine.model.store import resolve_model

    try:
        return resolve_model(DEFAULT_MODEL)
    except OSError as error:
        lacking(f"the default model cannot be fetched (make model): {error}")


@pytest.fixture(scope="session")
def default_engine(model_path: Path) -> Iterator[Any]:
    """One float32 Engine of the default model for all who only generate with it; its prefix cache is warm from others."""
    from engine import Engine, EngineConfig

    engine = Engine(EngineConfig(model=str(model_path), dtype="float32"))
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """A Chromium that starts."""
    return find_chromium() or lacking(MISSING)


@pytest.fixture(scope="session")
def browser_type_launch_args(chromium_path: str) -> dict[str, Any]:
    """pytest-playwright's launch arguments: this machine's Chromium, headless, and silent towards the network."""
    quiet = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]
    return {"executable_path": chromium_path, "headless": True, "args": quiet}


@pytest.fixture(autouse=True)
def _what_the_markers_need(request: pytest.FixtureRequest) -> None:
    """``model`` and ``gpu`` as markers are enough: a test need not take the fixture too."""
    if request.node.get_closest_marker("model"):
        request.getfixturevalue("model_path")
    if request.node.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
