"""How long a compile report takes: ``python -m tests.bench.bench_reports``. Cold (at most 4 s) and kept on the disk (at most 50 ms).

The kernels of page Attention as it asks for them, in a process that has Triton loaded, as the page's compiler process has. Cold: with
an empty cache, Triton's own too. CPU time is shown beside wall time, since on a busy machine only it says something.
"""

import os
import tempfile
import time
from pathlib import Path

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # before Triton is imported

import torch

from engine.kernels.flash_attention import FlashConfig, forward_spec
from engine.kernels.report import report_of

SHAPES = [  # head size, tile of queries, of keys, warps, stages, target
    (64, 64, 64, 4, 2, "sm_90"),
    (64, 64, 64, 4, 2, "sm_80"),
    (64, 64, 64, 4, 2, "sm_100"),
    (128, 128, 64, 8, 3, "sm_90"),
    (128, 64, 64, 4, 2, "sm_89"),
]


def seconds(call: object) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), os.times()
    assert callable(call)
    call()
    after = os.times()
    used = (after.user - cpu.user) + (after.system - cpu.system)
    used += (after.children_user - cpu.children_user) + (after.children_system - cpu.children_system)
    return time.perf_counter() - wall, used


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)

        def report(head: int, m: int, n: int, warps: int, stages: int, target: str) -> None:
            spec = forward_spec(head, torch.float16, group=3, block_size=16, causal=True, config=FlashConfig(m, n, warps, stages))
            report_of(spec, target, cache=cache)

        warm = (64, 32, 32, 4, 1, "sm_80")
        print(f"the first of a process, which loads the compiler: {seconds(lambda: report(*warm))[0]:.1f} s")
        for shape in SHAPES:
            cold, used = seconds(lambda shape=shape: report(*shape))
            kept = min(seconds(lambda shape=shape: report(*shape))[0] for _ in range(5))
            head, m, n, warps, stages, target = shape
            print(
                f"{target}, head {head}, tiles {m} x {n}, {warps} warps, {stages} stages: cold {cold:.2f} s ({used:.2f} s of processor; "
                f"asked: 4), kept {1e3 * kept:.1f} ms (asked: 50)"
            )


if __name__ == "__main__":
    main()
