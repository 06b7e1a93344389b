"""A single row's way from one layer's attention to the next one's, as one compiled function.

A decode of one request multiplies vectors: it takes as long as reading the weights, plus the fixed cost of some forty operator
calls a layer, which is more than a third of it. Compiled ahead of time (AOTInductor), all that stands between two attentions
becomes one C++ function with one parallel region, and reading the weights is nearly all that is left.

The compiler takes a quarter of a minute, so it runs once, in a process of its own (``python -m engine.model.single_row``) at
the lowest priority; what it made is kept in the cache and loads in milliseconds. Until then, without a compiler, or where the
result does not agree with plain torch, the engine goes on as it does for any number of rows.

The function reads weights as they are, while products of several rows want them packed: both are held. See ``unfit`` for when not.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.nn.functional as F

from engine.hardware.device import TORCH_DTYPES, cpu_flags
from engine.model.config import ModelConfig

_log = logging.getLogger(__name__)

Function = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

_MIN_BYTES = 16 << 20  # of weights: below, nobody waits for them
_MEMORY_SHARE = 0.25  # of the free memory, what the second form of the weights may take
_TOLERANCE = 2e-3
_OPTIONS = {"cpp.enable_floating_point_contract_flag": "fast", "compile_threads": 1}  # fused multiply-add; no worker pool


@dataclass(frozen=True)
class RowShape:
    """All that the function's code depends on. Dtypes by name."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    eps: float
    qk_norm: bool
    biases: tuple[bool, ...]  # whether o, gate_up, down, qkv have one
    dtype: str  # of the weights and of stored K and V
    compute_dtype: str  # of what attention takes and gives
    threads: int  # that share the work; compiled for one it would never use more

    def examples(self) -> list[torch.Tensor]:
        """Inputs of the right shapes and dtypes, in the order that ``between_attentions`` takes them."""
        size, q = self.hidden_size, self.num_heads * self.head_dim
        heads = self.num_heads + 2 * self.num_kv_heads
        weight, compute = TORCH_DTYPES[self.dtype], TORCH_DTYPES[self.compute_dtype]
        shapes = [(size, q), (2 * self.intermediate_size, size), (size, self.intermediate_size), (heads * self.head_dim, size)]
        weights = [torch.randn(shape).mul_(0.02).to(weight) for shape in shapes]
        biases = [torch.randn(shape[0]) if has else torch.zeros(0) for shape, has in zip(shapes, self.biases, strict=True)]
        qk = torch.ones(heads - self.num_kv_heads, self.head_dim) if self.qk_norm else torch.zeros(0)
        row = [torch.randn(1, size), torch.randn(1, q).to(compute), *(torch.randn(1, 1, self.head_dim).to(compute) for _ in "cs")]
        return [*row, *weights, torch.ones(size), torch.ones(size), qk, *biases]


def between_attentions(shape: RowShape, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One layer from its attention's output to its end, and the next one up to its attention.

    ``inputs``: x [1, hidden_size] float32, attended [1, H * D], cos and sin [1, 1, D] in compute_dtype; o, gate_up, down and
    the next layer's qkv [out, in] in dtype; the weights of the MLP's norm, of the next attention's norm, of its QK-norm
    [H + K, D] (empty: none); four biases (empty: none). All but the matrices and attended are float32.
    Gives x [1, hidden_size] float32, qkv [1, H + 2 K, D] in compute_dtype, rotated, and the same in dtype.
    """
    x, attended, cos, sin, o, gate_up, down, qkv, mlp_norm, attention_norm, qk_norm, *biases = inputs
    half, qk_heads = shape.head_dim // 2, shape.num_heads + shape.num_kv_heads

    def product(matrix: torch.Tensor, row: torch.Tensor, which: int) -> torch.Tensor:
        out = (matrix.float() * row).sum(-1)
        return out + biases[which] if shape.biases[which] else out

    def norm(row: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return row * torch.rsqrt((row * row).mean(-1, keepdim=True) + shape.eps) * weight

    x = x[0] + product(o, attended[0].float(), 0)
    mlp_in = norm(x, mlp_norm)
    gate, up = product(gate_up, mlp_in, 1).chunk(2)
    mlp_out = F.silu(gate) * up
    x = x + product(down, mlp_out, 2)
    attention_in = norm(x, attention_norm)
    heads = product(qkv, attention_in, 3).view(-1, shape.head_dim)
    qk = heads[:qk_heads]
    if shape.qk_norm:
        qk = norm(qk, qk_norm)
    swapped = torch.cat((qk[:, half:], qk[:, :half]), -1)
    heads = torch.cat((qk * cos[0].float() + swapped * sin[0].float(), heads[qk_heads:]))[None]
    out = heads.to(TORCH_DTYPES[shape.compute_dtype])
    # What is given out is computed once; what is not, the compiler computes again for every row of the matrix that reads it.
    return x[None], out, heads.to(TORCH_DTYPES[shape.dtype]), mlp_in, mlp_out, attention_in


def unfit(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Why the function is not to be used with this model here; empty when it is."""
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


class SingleRow:
    """The compiled function, as soon as there is one. ``function()`` is asked at every step of a single row."""

    def __init__(self, shape: RowShape, directory: Path) -> None:
        """Loads what an earlier run left in ``directory``, or starts the compiler."""
        self.shape = shape
        self.state = "compiling"  # "compiled"; or why there is none
        self._path = directory / f"single-row-{_key(shape)}.pt2"
        self._function: Function | None = None
        self._compiler: subprocess.Popen[bytes] | None = None
        if self._path.exists():
            self._load()
        elif not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name):
            self.state = "no C++ compiler (g++ or clang++) is here"
        else:
            try:
                self._start()
            except OSError as error:  # a cache that cannot be written, no room for another process
                self._give_up(f"the compiler could not be started: {error}")

    def function(self) -> Function | None:
        """Takes the inputs of ``between_attentions`` as a list; its first three outputs count. None: not there (yet)."""
        if self._compiler is not None and self._compiler.poll() is not None:
            self._compiler = None
            if self._path.exists():
                self._load()
            else:
                self._give_up("the compiler failed")
        return self._function

    def wait(self, timeout: float) -> bool:
        """Wait for the compiler; whether the function is there."""
        if self._compiler is not None:
            self._compiler.wait(timeout)
        return self.function() is not None

    def _start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "engine.model.single_row", json.dumps(asdict(self.shape)), str(self._path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))
        quiet = subprocess.DEVNULL
        self._compiler = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, env=environment)
        weakref.finalize(self, _end, self._compiler)  # also when the interpreter ends

    def _load(self) -> None:
        try:
            self._function = _runner(self._path)
            if not self._agrees(self._function):
                raise RuntimeError("its results differ from plain torch's")
        except Exception as error:  # whatever another torch's file does: it is only the faster way
            self._function = None
            with contextlib.suppress(OSError):  # a cache that cannot be written
                self._path.unlink()
            self._give_up(f"the compiled function does not work: {error}")
        else:
            self.state = "compiled"

    def _give_up(self, why: str) -> None:
        self.state = why
        _log.warning("decodes of a single request run uncompiled: %s", why)

    def _agrees(self, function: Function) -> bool:
        with torch.inference_mode():
            inputs = self.shape.examples()
            pairs = zip(function(list(inputs))[:3], between_attentions(self.shape, *inputs)[:3], strict=True)
            tolerance = _TOLERANCE if self.shape.dtype == "float16" else 8 * _TOLERANCE
            return all(
                a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a.float(), b.float(), atol=tolerance, rtol=tolerance)
                for a, b in pairs
            )


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _key(shape: RowShape) -> str:
    """A hash of everything that the compiled code depends on."""
    what = [
        asdict(shape),
        inspect.getsource(between_attentions),
        _OPTIONS,
        torch.__version__,
        sys.version_info[:2],
        sorted(cpu_flags()),
    ]
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]


def _runner(path: Path) -> Function:
    """The function in the file. (The loader itself: torch's wrapper around it looks through the inputs at every call.)"""
    return torch._inductor.aoti_load_package(str(path)).loader.run


def compile_to(shape: RowShape, path: Path) -> None:
    """Compile the function into ``path``; in the end it is there whole or not at all. One process at a time."""

    class Between(torch.nn.Module):
        def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return between_attentions(shape, *inputs)

    with open(path.with_name(path.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():  # another process was faster
            return
        for leftover in path.parent.glob(f"{path.name}.work-*"):  # of a compiler that was killed: we hold the lock
            shutil.rmtree(leftover)
        with (
            tempfile.TemporaryDirectory(prefix=f"{path.name}.work-", dir=path.parent) as work,
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = work
            program = torch.export.export(Between(), tuple(shape.examples()))
            made = torch._inductor.aoti_compile_and_package(
                program, package_path=str(Path(work) / "made.pt2"), inductor_configs={**_OPTIONS, "cpp.threads": shape.threads}
            )
            os.replace(made, path)


def main(arguments: list[str]) -> None:
    os.nice(19)
    fields: dict[str, Any] = json.loads(arguments[0])
    compile_to(RowShape(**{**fields, "biases": tuple(fields["biases"])}), Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
