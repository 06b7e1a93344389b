"""What a kernel becomes on a GPU that need not be here: shared memory, registers, spills, instructions, and the compiler's refusals.

Triton compiles for any compute capability and carries ptxas, cuobjdump and nvdisasm, so no GPU and no CUDA toolkit is asked for.
Instructions are counted in the machine code (SASS) as they stand there, not as often as they run.
"""

import hashlib
import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.kernels.compiling import CompileSpec, compile_spec
from engine.kernels.lazy import load, triton_version

FORMAT = 1  # of what is kept on the disk: a report of another one is made anew
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
TENSOR_MEMORY_COLUMNS = 512  # of an SM of compute capability 10.0 (PTX ISA, tcgen05.alloc)
# Machine instructions by what they do; the first word of a mnemonic is looked up (CUDA Binary Utilities, instruction set reference).
TENSOR_CORE = (
    "HMMA",
    "IMMA",
    "BMMA",
    "DMMA",
    "QMMA",
    "OMMA",
    "HGMMA",
    "IGMMA",
    "BGMMA",
    "QGMMA",
    "UTCHMMA",
    "UTCQMMA",
    "UTCIMMA",
    "UTCOMMA",
)
ASYNC_COPY = ("LDGSTS", "UTMALDG", "UTMASTG", "UTMAREDG", "UBLKCP", "UTCCP")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
_USAGE = re.compile(r"REG:(\d+)\s+STACK:(\d+)\s+SHARED:(\d+)\s+LOCAL:(\d+)")
_SPILLS = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(LDL|STL)\b", re.MULTILINE)
_TOOL_SECONDS = 60


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """One kernel for one target. ``refused`` is empty, or what the compiler said; the numbers it did not get to are then None.

    ``spills``: local-memory loads and stores in the code. ``shared_bytes``: static and dynamic together, a block.
    """

    name: str
    target: str
    num_warps: int
    num_stages: int
    refused: str = ""
    shared_bytes: int | None = None
    tensor_memory_columns: int | None = None  # sm_100 and later
    registers: int | None = None  # a thread
    stack_bytes: int | None = None  # a thread
    spills: int | None = None
    instructions: Mapping[str, int] = field(default_factory=dict)  # mnemonic's first word -> how often it stands in the code
    ttgir: str = ""
    ptx: str = ""
    sass: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    cached: bool = False

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    @property
    def tensor_core(self) -> dict[str, int]:
        """The tensor-core instructions among ``instructions``."""
        return {name: n for name, n in self.instructions.items() if name in TENSOR_CORE}

    @property
    def async_copy(self) -> dict[str, int]:
        """Those that copy between device and shared memory without passing through registers."""
        return {name: n for name, n in self.instructions.items() if name in ASYNC_COPY}


def compile_report(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 2,
    target: str = "sm_90",
    *,
    aligned: tuple[str, ...] = (),
    max_shared: int | None = None,
    cache: Path | None = None,
) -> CompileReport:
    """Compile ``kernel`` (a ``triton.jit`` function) for ``target`` and look into the machine code.

    ``signature``: argument -> Triton's type ("*fp16", "i32"); ``constexprs``: compile-time arguments; ``aligned``: see ``CompileSpec``.
    ``max_shared``: bytes of shared memory that a block of the target can have (``engine.hardware.gpus``); what takes more is refused in
    the words of Triton's launcher, which is the first that would notice. ``cache``: a folder that keeps reports by content.

    ValueError for arguments that the kernel does not have, a target or a number of warps that there is not; RuntimeError where
    Triton or a tool of its is missing. What the compiler refuses is no error here but ``refused``.
    """
    spec = CompileSpec(kernel, dict(signature), dict(constexprs), num_warps, num_stages, aligned)
    return report_of(spec, target, max_shared=max_shared, cache=cache)


def report_of(spec: CompileSpec, target: str, *, max_shared: int | None = None, cache: Path | None = None) -> CompileReport:
    """``compile_report`` of a kernel's own ``CompileSpec``."""
    if target not in TARGETS:
        raise ValueError(f"target must be one of {TARGETS}, got {target!r}")
    if spec.num_warps not in (1, 2, 4, 8, 16, 32):
        raise ValueError(f"num_warps must be a power of two in [1, 32], got {spec.num_warps!r}")
    if not isinstance(spec.num_stages, int) or spec.num_stages < 1:
        raise ValueError(f"num_stages must be an integer >= 1, got {spec.num_stages!r}")
    load("triton")
    file = cache / f"{_key(spec, target, max_shared)}.json" if cache is not None else None
    kept = _read(file)
    if kept is not None:
        return kept
    report = _compile(spec, target, max_shared)
    if file is not None:
        _write(file, report)
    return report


def _compile(spec: CompileSpec, target: str, max_shared: int | None) -> CompileReport:
    errors, runtime = load("triton.compiler.errors"), load("triton.runtime.errors")
    facts: dict[str, Any] = {
        "name": spec.kernel.__name__,
        "target": target,
        "num_warps": spec.num_warps,
        "num_stages": spec.num_stages,
        "versions": {"triton": triton_version() or ""},
    }
    tools = {name: _tool(name) for name in ("cuobjdump", "nvdisasm")}
    _tool("ptxas")
    try:
        compiled = compile_spec(spec, int(target.removeprefix("sm_")))
    except (errors.CompilationError, runtime.TritonError) as error:
        return CompileReport(**facts, refused=_words(error))
    meta = compiled.metadata
    columns = int(getattr(meta, "tmem_size", None) or 0)
    refused = ""
    if max_shared is not None and meta.shared > max_shared:
        refused = str(runtime.OutOfResources(meta.shared, max_shared, "shared memory"))
    elif columns > TENSOR_MEMORY_COLUMNS:
        refused = str(runtime.OutOfResources(columns, TENSOR_MEMORY_COLUMNS, "tensor memory"))
    dump = disassemble(compiled.asm["cubin"], tools)
    usage = _USAGE.search(dump)
    if usage is None:
        raise RuntimeError(f"cuobjdump told no resource usage of {spec.kernel.__name__} for {target}: {dump[:200]!r}")
    return CompileReport(
        **facts,
        refused=refused,
        shared_bytes=int(meta.shared),
        tensor_memory_columns=columns or None,
        registers=int(usage[1]),
        stack_bytes=int(usage[2]),
        spills=len(_SPILLS.findall(dump)),
        instructions=dict(Counter(_INSTRUCTION.findall(dump)).most_common()),
        ttgir=str(compiled.asm["ttgir"]),
        ptx=str(compiled.asm["ptx"]),
        sass=_plain(dump),
    )


def disassemble(cubin: bytes, tools: Mapping[str, str]) -> str:
    """Resource usage and SASS of ``cubin`` as cuobjdump prints them; ``tools``: paths of cuobjdump and nvdisasm. RuntimeError if it fails."""
    path = os.pathsep.join((str(Path(tools["nvdisasm"]).parent), os.environ.get("PATH", "")))  # cuobjdump calls nvdisasm by name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tools["cuobjdump"], "-res-usage", "-sass", file.name]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path}, timeout=_TOOL_SECONDS)
    if done.returncode:
        raise RuntimeError(f"cuobjdump failed ({done.returncode}): {(done.stderr or done.stdout).strip()[:500]}")
    return done.stdout


def _tool(name: str) -> str:
    """Path of a tool that Triton carries. RuntimeError where it is not there."""
    try:
        found = getattr(load("triton.knobs").nvidia, name).path
    except RuntimeError as error:
        found, why = None, str(error)
    else:
        why = str(found)
    if not found or not Path(found).is_file():
        raise RuntimeError(f"this Triton came without {name} ({why}): no report of what a kernel compiles to can be made here")
    return str(found)


def _words(error: BaseException) -> str:
    """The compiler's message, with that of the error it came from."""
    said = [str(error).strip()]
    cause = error.__cause__
    while cause is not None:
        if str(cause).strip() and str(cause).strip() not in said[-1]:
            said.append(str(cause).strip())
        cause = cause.__cause__
    return "\n".join(said) or type(error).__name__


def _plain(dump: str) -> str:
    """The SASS without the encoded words beside and below each instruction."""
    kept = (re.sub(r"\s*/\* 0x[0-9a-f]+ \*/\s*$", "", line) for line in dump.splitlines())
    return "\n".join(line for line in kept if line.strip())


def _key(spec: CompileSpec, target: str, max_shared: int | None) -> str:
    """All that a report depends on. ``cache_key`` is Triton's hash of the source and of all that it calls."""
    source = getattr(spec.kernel, "cache_key", None)
    if source is None:
        raise RuntimeError("kernels are interpreted in this process (TRITON_INTERPRET=1): compile them in another one")
    parts = (
        FORMAT, triton_version(), source, spec.kernel.__name__, sorted(spec.types.items()), sorted(spec.constants.items(), key=lambda i: i[0]),
        spec.num_warps, spec.num_stages, sorted(spec.aligned), target, max_shared,
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read(file: Path | None) -> CompileReport | None:
    """The kept report; None where there is none or the file is damaged, which is then made anew."""
    if file is None or not file.is_file():
        return None
    try:
        return CompileReport(**{**json.loads(file.read_text(encoding="utf-8")), "cached": True})
    except (OSError, ValueError, TypeError):
        return None


def _write(file: Path, report: CompileReport) -> None:
    """Whole or not at all: several processes may keep the same report at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".part", delete=False, encoding="utf-8") as part:
        json.dump(asdict(report), part)
    os.replace(part.name, file)
