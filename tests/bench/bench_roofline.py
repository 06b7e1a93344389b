"""From a what-if slider of the Roofline page to the new points on the screen, and what of that is arithmetic.

    python -m tests.bench.bench_roofline [--moves 40] [--pause 0.25]

Budget: p95 at most 100 ms. The app is served as it ships, with the default model in the engine's own process, the device's roofs measured
and a run of some hundred steps on the screen; the batch and the context are moved with the arrow keys in a headless Chromium. Timed in the
browser as ``bench_whatif`` does: from the key to the second frame after the table beside the figure changed (both come in one message).
Beside it the same recomputation without page and browser.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.hardware.gpus import gpu
from engine.hardware.roofline import Roofs, gpu_roofs
from explorer.roofline.figure import RooflineFigure
from explorer.roofline.rows import Step
from explorer.roofline.whatif import BATCHES, what_if, workload
from tests.bench.bench_whatif import _TIME_A_KEY, _WATCH_SOCKETS, PARTS, READY_MS, told
from tests.browser import MISSING, find_chromium
from tests.engine.hardware.facts import SMOL

# The table's pane has a shadow root of its own, in which the table is made anew.
_TIME = _TIME_A_KEY.replace(
    'find(document, (e) => e.classList.contains("ct-choice"))',
    'find(document, (e) => e.classList.contains("rf-table")).getRootNode()',
)


def on_a_page(moves: int, pause_s: float) -> list[list[float]]:
    """Milliseconds of each move: the whole, and its ``PARTS``."""
    from playwright.sync_api import sync_playwright

    from tests.ui.conftest import serve

    chromium = find_chromium()
    if chromium is None:
        raise RuntimeError(MISSING)
    server = serve(Path(tempfile.mkdtemp(prefix="cutaway-bench-")) / "log")
    try:
        server.wait()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-background-networking"]
            )
            page = browser.new_page(viewport={"width": 1400, "height": 1600})
            page.add_init_script(_WATCH_SOCKETS)
            page.goto(f"{server.url}?page=roofline")
            page.get_by_role("status").first.get_by_text("Running").wait_for(timeout=READY_MS)
            page.get_by_role("button", name="Measure ").click()
            page.get_by_role("button", name="Measure again").wait_for(timeout=READY_MS)
            for name in ("One long prompt", "Decode, batch 8", "Decode, batch 1"):
                page.get_by_role("button", name=name, exact=True).click()
            page.wait_for_timeout(20_000)  # until nothing runs any more
            times = [_move(page, i, pause_s) for i in range(moves)]
            browser.close()
    finally:
        server.stop()
    return times


def _move(page: Any, i: int, pause_s: float) -> list[float]:
    key = "ArrowRight" if i // 2 % 16 < 8 else "ArrowLeft"  # eight up, eight down: each changes something
    name = ("Batch (what if)", "Context, tokens")[i % 2] if i // 2 % 16 not in (7, 15) or i % 2 == 0 else "Batch (what if)"
    page.get_by_role("slider", name=name, exact=True).first.focus()
    timed = page.evaluate_handle(f"arguments => ({{ promise: ({_TIME})(arguments) }})", [name, key])
    page.keyboard.press(key)
    took: list[float] = timed.evaluate("timed => timed.promise")
    page.wait_for_timeout(1000 * pause_s)
    return took


def arithmetic(moves: int) -> tuple[list[float], list[float]]:
    """Milliseconds of the modelled points under two devices' roofs, alone, and with 400 steps and all columns for the browser."""
    here = Roofs(name="here", kind="measured", bandwidth=1e10, peak={"float32": 1e11})
    steps = [Step(n, "decode", 8, 8, 40 + n, 2e9, 5e8, 1e7 * n, 1e6, 0.1) for n in range(1, 401)]
    figure = RooflineFigure()
    alone, whole = [], []
    for i in range(moves):
        start = time.perf_counter()
        work = workload(batch=BATCHES[i % len(BATCHES)], context=1024, bits=0, running=32, dtype="float32")
        found = [what_if(SMOL, work, roofs) for roofs in (here, gpu_roofs(gpu("h100-sxm")))]
        alone.append(1e3 * (time.perf_counter() - start))
        figure.show(steps, 400, "float32", here, found[1].roofs, "float32", found)
        whole.append(1e3 * (time.perf_counter() - start))
    return alone, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=40)
    parser.add_argument("--pause", type=float, default=0.25)
    args = parser.parse_args()
    alone, whole = arithmetic(args.moves)
    print(told("the modelled points under two roofs", alone))
    print(told("with 400 steps and the browser's columns", whole))
    print("slider to painted picture, whole page (budget: p95 100 ms)")
    for name, times in zip(PARTS, zip(*on_a_page(args.moves, args.pause), strict=True), strict=True):
        print(told(f"  {name}", list(times)))
    load = subprocess.run(["uptime"], capture_output=True, text=True).stdout.strip()
    print(f"machine: {load}", file=sys.stderr)


if __name__ == "__main__":
    main()
