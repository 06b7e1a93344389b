"""The Chromium that drives the pages' tests: found on this machine, or installed by ``python -m tests.browser --install``."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
MAC = ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome", "/Applications/Chromium.app/Contents/MacOS/Chromium")
MISSING = (
    "no Chromium for the tests of the pages: install one (Debian: apt-get install chromium; elsewhere: "
    ".venv/bin/python -m playwright install chromium), or name it in CUTAWAY_CHROMIUM"
)
_PLAYWRIGHTS_OWN = "from playwright.sync_api import sync_playwright as s\nwith s() as p: print(p.chromium.executable_path)"


def find_chromium() -> str | None:
    """The path of a Chromium that starts: CUTAWAY_CHROMIUM, the system's, or Playwright's own; None when there is none."""
    named = os.environ.get("CUTAWAY_CHROMIUM")
    if named:
        if not _starts(named):
            raise ValueError(f"CUTAWAY_CHROMIUM must be a Chromium that starts, got {named!r}")
        return named
    for path in (*filter(None, map(shutil.which, NAMES)), *MAC):
        if _starts(path):
            return path
    # In a process of its own: Playwright's synchronous interface cannot be opened twice in one thread.
    done = subprocess.run([sys.executable, "-c", _PLAYWRIGHTS_OWN], capture_output=True, text=True, timeout=60)
    path = done.stdout.strip()
    return path if path and _starts(path) else None


def _starts(path: str) -> bool:
    """Ubuntu's ``chromium-browser`` is a stub that asks for a snap, so the file's existence says little."""
    if not Path(path).is_file():
        return False
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def install() -> None:
    """Debian's package where we may install it; Playwright's own build elsewhere. Says what failed, if it did."""
    root = _root()
    playwright = [sys.executable, "-m", "playwright", "install"]
    if root is None:
        _run([*playwright, "chromium"])
    elif "ID=debian" not in _os_release() or not _apt(root):
        _run([*playwright, "--with-deps", "chromium"])


def _root() -> list[str] | None:
    """The prefix of a command that runs as root without asking for a password; None where we may not."""
    if not hasattr(os, "geteuid"):
        return None
    if os.geteuid() == 0:
        return []
    if shutil.which("sudo") and subprocess.run(["sudo", "-n", "true"], capture_output=True).returncode == 0:
        return ["sudo", "-n"]
    return None


def _os_release() -> list[str]:
    path = Path("/etc/os-release")
    return path.read_text().splitlines() if path.exists() else []


def _apt(root: list[str]) -> bool:
    quiet = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "-y", "-o", "Dpkg::Use-Pty=0"]
    return _run([*root, *quiet, "update"]) and _run(
        [*root, *quiet, "install", "--no-install-recommends", "chromium", "fonts-dejavu-core"]
    )


def _run(command: list[str]) -> bool:
    """Quiet when it works; the end of the command's output when it does not."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(f"{' '.join(command)} failed ({done.returncode}):\n{done.stdout[-2000:]}", file=sys.stderr)
    return done.returncode == 0


def main(arguments: list[str]) -> int:
    if find_chromium() is None and "--install" in arguments:
        print("No Chromium found for the tests of the pages: installing one", flush=True)
        install()
    path = find_chromium()
    print(f"Chromium: {path}" if path else f"The tests of the pages will be skipped: {MISSING}", flush=True)
    # In continuous integration a skipped half of the tests would look like a pass.
    return 1 if path is None and os.environ.get("CI") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
