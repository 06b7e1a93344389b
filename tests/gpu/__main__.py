"""All that needs a CUDA device: the kernels' tests, the engine's golden cases, the benchmarks. ``make gpu``, or

    python -m tests.gpu [--out FILE] [--seconds N] [--jobs N] [--dry]

Needs Python 3.11 or later, torch, Triton, numpy and pytest, and no network. CUTAWAY_CHECKPOINT names a folder with config.json and
safetensors; without it weights are random, of the default model's shape. Prints a table and writes a JSON. ``--dry``: on a machine
without a GPU, see that everything is found and runs, in small under Triton's interpreter.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TESTS = ("tests/engine/kernels/running", "tests/gpu")
SECONDS = 480  # for all
TEST_SHARE = 0.6  # of the seconds, that tests may take


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    began = time.monotonic()
    if options.dry and os.environ.get("TRITON_INTERPRET") != "1":
        command = [sys.executable, "-m", "tests.gpu", *arguments]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False).returncode
    import torch

    from tests.gpu.stand_ins import install

    missing = install()
    if not options.dry and not torch.cuda.is_available():
        print("No CUDA device is here: nothing was measured. `--dry` shows that the script itself is whole.", file=sys.stderr)
        return 2
    report: dict[str, Any] = {"machine": _machine(), "stand_ins": missing, "dry": options.dry}
    ended = began + options.seconds
    if not options.bench_only:
        report["tests"] = _tests(options, began + TEST_SHARE * options.seconds)
    if not options.tests_only:
        report["benchmarks"] = _benchmarks(options, ended)
    report["seconds"] = round(time.monotonic() - began, 1)
    Path(options.out).write_text(json.dumps(_plain(report), indent=1) + "\n", encoding="utf-8")
    print(table(report))
    print(f"written to {options.out}")
    failed = report.get("tests", {}).get("failed", 0) or any(row.get("error") for row in report.get("benchmarks", []))
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description="Tests and benchmarks on a CUDA device.")
    parser.add_argument("--out", default="gpu.json", help="where the JSON goes (gpu.json)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"that all may take ({SECONDS})")
    parser.add_argument(
        "--jobs", type=int, default=max(1, min(8, (os.cpu_count() or 2) // 2)), help="processes of tests side by side"
    )
    parser.add_argument("--dry", action="store_true", help="without a GPU: collect the tests, run the benchmarks in small")
    parser.add_argument("--tests-only", action="store_true")
    parser.add_argument("--bench-only", action="store_true")
    return parser


def _machine() -> dict[str, Any]:
    import torch
    import triton

    facts: dict[str, Any] = {"python": platform.python_version(), "torch": str(torch.__version__), "triton": triton.__version__}
    facts["cores"] = os.cpu_count()
    if torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        facts |= {"gpu": found.name, "sm": found.multi_processor_count, "capability": f"sm_{found.major}{found.minor}",
                  "memory_bytes": found.total_memory, "cuda": torch.version.cuda}  # fmt: skip
    return facts


def _tests(options: argparse.Namespace, deadline: float) -> dict[str, Any]:
    """Run (dry: collect) the tests in ``options.jobs`` processes."""
    base = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.gpu.sharding",
        "-p",
        "no:cacheprovider",
        "--confcutdir=tests/gpu",
        *TESTS,
    ]
    jobs = 1 if options.dry else options.jobs
    logs = [ROOT / f".gpu-tests-{i}.log" for i in range(jobs)]
    running = []
    for i, log in enumerate(logs):
        command = [*base, f"--shard={i}/{jobs}", *(["--collect-only"] if options.dry else [])]
        with open(log, "w", encoding="utf-8") as file:
            running.append(subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=_test_environment()))
    outcomes, failed = [], 0
    for process, log in zip(running, logs, strict=True):
        try:
            code: int | str = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = "out of time"
        text = log.read_text(encoding="utf-8", errors="replace")
        log.unlink()
        if code not in (0, 5):  # 5: a part without tests
            failed += 1
            print(text[-6000:])
        outcomes.append({"code": code, "last": text.strip().splitlines()[-1:] if text.strip() else []})
    return {"processes": outcomes, "failed": failed}


def _test_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {"OMP_NUM_THREADS": "1"}


def _benchmarks(options: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    import torch

    from tests.gpu import benchmarks
    from tests.gpu.timing import Bench

    bench = Bench("cpu" if options.dry else "cuda", options.dry, deadline)
    with torch.inference_mode():
        bandwidth = benchmarks.copy_bandwidth(bench)
        for subject in benchmarks.ALL:
            if bench.left < 30:
                bench.add(subject.__name__, "", math.nan, "", note="left out: no time is left")
                continue
            print(f"{subject.__name__} ...", file=sys.stderr, flush=True)
            try:
                subject(bench, bandwidth)
            except Exception as error:  # one subject that fails is told; the others still run
                bench.add(subject.__name__, "", math.nan, "", error=f"{type(error).__name__}: {error}")
    return bench.rows


def table(report: dict[str, Any]) -> str:
    """The report for people: a line for each number, with what was promised and whether it is kept."""
    lines = [" ".join(f"{name}={value}" for name, value in report["machine"].items())]
    if report["dry"]:
        lines.append("A dry run: small sizes under the interpreter. That it runs is all that the numbers say.")
    if "tests" in report:
        lines += [f"tests: {p['code']} {' '.join(p['last'])}" for p in report["tests"]["processes"]]
    for row in report.get("benchmarks", []):
        ratios = [f"{name} {row[name]:.2f}" for name in row if name.startswith("of ")]
        targets = {} if report["dry"] else row.get("target", {})
        kept = [
            f"{name}: {'kept' if row.get(name, math.nan) >= want else 'MISSED'} (>= {want})" for name, want in targets.items()
        ]
        said = [row[name] for name in ("config", "note", "error") if row.get(name)]
        lines.append(
            "  ".join(
                [f"{row['what']:<36}", f"{row['shape']:<58}", f"{row['value']:>10.2f} {row['unit']}", *ratios, *kept, *said]
            )
        )
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    """NaN is no JSON."""
    if isinstance(value, dict):
        return {name: _plain(v) for name, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
