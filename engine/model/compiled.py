"""A layer for a few rows (``engine.model.few_rows``), compiled ahead of time (AOTInductor), and running all layers with it.

The compiler takes a minute or so, so it runs once, in a process of its own (``python -m engine.model.compiled``) at the lowest
priority; what it made is kept in the cache and loads in milliseconds. Until then, without a compiler, or where the
result does not agree with plain torch, the engine goes on as it does for any number of rows.

There is a function for a single row (a decode) and for some numbers of rows (a draft that is verified): a number between is
filled up to the next. A head in few bits has one of its own, for a single row. They read weights as they are, while products of
many rows want them packed: both are held. See ``unfit`` for when not.
"""

import contextlib
import fcntl
import hashlib
import inspect
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from engine.hardware.device import cpu_flags
from engine.model import few_rows, words
from engine.model.config import ModelConfig
from engine.model.few_rows import MIN_CONTEXT, Function, ProductShape, RowShape

Shape = RowShape | ProductShape
_log = logging.getLogger(__name__)

_MIN_BYTES = 16 << 20  # of weights: below, nobody waits for them
_MEMORY_SHARE = 0.25  # of the free memory, what the second form of the weights may take
_TOLERANCE = 2e-3
_OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add
    "cpp.vec_isa_ok": True,  # the CPU's flags are believed: trying each costs as much as compiling, and fails on a busy machine
    "compile_threads": 1,  # no worker pool
}
# Eight codes of a word are a long expression, which else would be kept for each word instead of being summed up.
_LOW_BIT_OPTIONS = {"realize_opcount_threshold": 1000, "realize_reads_threshold": 100}


def unfit(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Why the function is not to be used with this model here; empty when it is. ``dtype``: of weights that are not in few bits."""
    per_layer = config.hidden_size * (
        (2 * config.num_attention_heads + 2 * config.num_kv_heads) * config.head_dim + 3 * config.intermediate_size
    )
    size = per_layer * config.num_layers * dtype.itemsize
    if device.type != "cpu" or dtype.itemsize != 2:
        return "only for 16-bit weights on a CPU"
    if config.num_layers < 2 or size < _MIN_BYTES:
        return "the model is too small to need it"
    if size > _MEMORY_SHARE * psutil.virtual_memory().available:
        return f"a second form of the weights ({size / 2**30:.1f} GiB) would take too much of the free memory"
    return ""


class CompiledLayer:
    """The compiled functions, as soon as they are there. ``function()`` is asked at every step that they could do."""

    def __init__(self, shape: Shape, directory: Path) -> None:
        """Loads what an earlier run left in ``directory``, or starts the compiler."""
        self.shape = shape
        self.state = "compiling"  # "compiled"; or why something is missing
        self._paths = _paths(shape, directory)
        self._functions: dict[int, Function] = {}
        self._compiler: subprocess.Popen[bytes] | None = None
        self._load()
        if self.state != "compiling":
            return
        if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name):
            self.state = "no C++ compiler (g++ or clang++) is here"
        else:
            try:
                self._start(directory)
            except OSError as error:  # a cache that cannot be written, no room for another process
                self._give_up(f"the compiler could not be started: {error}")

    def function(self, rows: int) -> tuple[int, Function] | None:
        """The smallest function there is (by now) for ``rows`` rows or more, and for how many it is; None: there is none.

        It takes the inputs of ``few_rows.layer`` as a list. Only the first output counts. A single row is not filled up.
        """
        if self._compiler is not None:
            self._look(self._compiler)
        size = min((size for size in self._functions if rows == size or 1 < rows < size), default=None)
        return None if size is None else (size, self._functions[size])

    def wait(self, timeout: float) -> bool:
        """Wait for the compiler; whether all functions are there."""
        if self._compiler is not None:
            self._compiler.wait(timeout)
            self._look(self._compiler)
        return self.state == "compiled"

    def _look(self, compiler: "subprocess.Popen[bytes]") -> None:
        ended = compiler.poll() is not None
        self._load()
        if ended:
            self._compiler = None
            if self.state == "compiling":
                self._give_up("the compiler failed")

    def _start(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "engine.model.compiled", json.dumps(asdict(self.shape)), str(directory)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        quiet = subprocess.DEVNULL
        self._compiler = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, env=environment)
        weakref.finalize(self, _end, self._compiler)  # also when the interpreter ends

    def _load(self) -> None:
        """Take what has been compiled by now."""
        for rows, path in self._paths.items():
            if rows in self._functions or self.state != "compiling" or not path.exists():
                continue
            try:
                function = _runner(path)
                if not self._agrees(function, rows):
                    raise RuntimeError("its results differ from plain torch's")
            except Exception as error:  # whatever another torch's file does: it is only the faster way
                with contextlib.suppress(OSError):  # a cache that cannot be written
                    path.unlink()
                self._give_up(f"the compiled function for {rows} rows does not work: {error}")
            else:
                self._functions[rows] = function
        if len(self._functions) == len(self._paths):
            self.state = "compiled"

    def _give_up(self, why: str) -> None:
        self.state = why
        _log.warning("steps of a single request run uncompiled: %s", why)

    def _agrees(self, function: Function, rows: int) -> bool:
        with torch.inference_mode():
            inputs, own = self.shape.examples(rows, 21), self.shape.overwritten
            again = list(inputs)
            if own is not None:
                again[own] = inputs[own].clone()
            got, wanted = [function(list(inputs))[0]], [self.shape.run(rows, *again)[0]]
            if own is not None:
                got.append(inputs[own])
                wanted.append(again[own])
            pairs = zip(got, wanted, strict=True)
            tolerance = _TOLERANCE if self.shape.dtype == "float16" else 8 * _TOLERANCE
            return all(
                a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.float(), b.float(), atol=tolerance, rtol=tolerance)
                for a, b in pairs
            )


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _paths(shape: Shape, directory: Path) -> dict[int, Path]:
    """Where the function for each number of rows lies."""
    key = _key(shape)
    return {rows: directory / f"layer-{key}-{rows}.pt2" for rows in shape.row_counts}


def _key(shape: Shape) -> str:
    """A hash of everything that the compiled code depends on."""
    what = [
        asdict(shape),
        inspect.getsource(few_rows.layer),
        inspect.getsource(few_rows.factor),
        inspect.getsource(few_rows.multiply),
        inspect.getsource(few_rows._times),
        inspect.getsource(words.half),
        inspect.getsource(few_rows.attention),
        _options(shape),
        torch.__version__,
        sys.version_info[:2],
        sorted(cpu_flags()),
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]


def _options(shape: Shape) -> dict[str, Any]:
    return {**_OPTIONS, **({} if shape.is_plain else _LOW_BIT_OPTIONS), "cpp.threads": shape.threads}


def _runner(path: Path) -> Function:
    """The function in the file.

    The loader itself: torch's ``aoti_load_package`` would compile and try a library first to learn what the CPU is, which our
    file's name tells already, and would look through the inputs at every call.
    """
    return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run


def compile_to(shape: Shape, directory: Path) -> None:
    """Compile what is missing in ``directory``; each file is in the end there whole or not at all. One process at a time."""
    name = f"layer-{_key(shape)}"
    with open(directory / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in directory.glob(f"{name}.work-*"):  # of a compiler that was killed: we hold the lock
            shutil.rmtree(leftover)
        missing = {rows: path for rows, path in _paths(shape, directory).items() if not path.exists()}
        if not missing:  # another process was faster
            return
        with (
            tempfile.TemporaryDirectory(prefix=f"{name}.work-", dir=directory) as work,
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = work  # one for all: what the compiler remembers lies in it
            for rows, path in missing.items():
                os.replace(_compiled(shape, rows, Path(work) / "made.pt2"), path)


def _compiled(shape: Shape, rows: int, path: Path) -> str:
    class Layer(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return shape.run(rows, *inputs)

    inputs = shape.examples(rows, 100)
    length = torch.export.Dim("length", min=MIN_CONTEXT, max=1 << 24)
    dynamic: list[dict[int, Any] | None] = [None] * len(inputs)
    for which, dimension in shape.lengths(rows).items():
        dynamic[which] = {dimension: length}
    program = torch.export.export(Layer(), tuple(inputs), dynamic_shapes=(tuple(dynamic),))
    options = _options(shape)
    return torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=options)


def main(arguments: list[str]) -> None:
    os.nice(19)
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(arguments[0]).items()
    }
    kind: type[Shape] = ProductShape if "held" in fields else RowShape
    compile_to(kind(**fields), Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
