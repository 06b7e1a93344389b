"""Finding the Chromium of the tests of the pages: a stub is none, and in CI none is a failure."""

import subprocess
from pathlib import Path

import pytest

from tests import browser


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with nothing on its PATH, where Playwright has no browser and nothing can be installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "none"))
    for name in ("CUTAWAY_CHROMIUM", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(browser, "MAC", ())
    monkeypatch.setattr(browser, "install", lambda: None)
    return tmp_path


def test_a_browser_that_starts_is_taken_and_a_stub_is_not(bare: Path) -> None:
    program(bare / "chromium-browser", "echo install the snap >&2; exit 1")
    good = program(bare / "google-chrome", "echo Chromium 1")
    assert browser.find_chromium() == good


def test_a_named_one_comes_first_and_must_start(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(bare / "chromium", "exit 0")
    monkeypatch.setenv("CUTAWAY_CHROMIUM", program(bare / "mine", "exit 0"))
    assert browser.find_chromium() == str(bare / "mine")
    for wrong in (program(bare / "mine", "exit 3"), str(bare / "absent"), str(bare)):
        monkeypatch.setenv("CUTAWAY_CHROMIUM", wrong)
        with pytest.raises(ValueError, match="CUTAWAY_CHROMIUM must be a Chromium that starts, got"):
            browser.find_chromium()


@pytest.mark.slow
def test_none_is_said_and_fails_in_ci(bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert browser.find_chromium() is None
    assert browser.main(["--install"]) == 0
    assert "will be skipped: no Chromium" in capsys.readouterr().out
    monkeypatch.setenv("CI", "true")
    assert browser.main(["--install"]) == 1


@pytest.mark.parametrize(
    ("release", "root", "apt_works", "expected"),
    [
        (["ID=debian"], [], True, ["apt"]),
        (["ID=debian"], ["sudo", "-n"], False, ["apt", "playwright --with-deps"]),
        (["ID=ubuntu", "ID_LIKE=debian"], [], True, ["playwright --with-deps"]),
        (["ID=debian"], None, True, ["playwright"]),
        ([], None, True, ["playwright"]),
    ],
)
def test_how_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, release: list[str], root: list[str] | None, apt_works: bool, expected: list[str]
) -> None:
    done: list[str] = []

    def apt(prefix: list[str]) -> bool:
        done.append("apt")
        return apt_works

    def run(command: list[str]) -> bool:
        done.append("playwright --with-deps" if "--with-deps" in command else "playwright")
        return True

    monkeypatch.setattr(browser, "_root", lambda: root)
    monkeypatch.setattr(browser, "_os_release", lambda: release)
    monkeypatch.setattr(browser, "_apt", apt)
    monkeypatch.setattr(browser, "_run", run)
    browser.install()
    assert done == expected


def test_a_command_that_fails_shows_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert browser._run(["sh", "-c", "echo fine"]) and capsys.readouterr() == ("", "")
    assert not browser._run(["sh", "-c", "echo the reason >&2; exit 4"])
    assert "(4)" in (said := capsys.readouterr().err) and "the reason" in said


def test_this_machines_browser_starts(chromium_path: str) -> None:
    assert subprocess.run([chromium_path, "--version"], capture_output=True, timeout=60).returncode == 0
