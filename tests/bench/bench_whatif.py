"""From a what-if slider to the picture: how long until the new bars are painted, and what of that is arithmetic.

    python -m tests.bench.bench_whatif [--moves 60] [--pause 0.25]

Budget: p95 at most 100 ms. The app is served as it ships, with the default model in the engine's own process; a request whose full
logits were kept (49,152 of them) is looked at in a headless Chromium, and its temperature and top-p are moved with the arrow keys. Timed in
the browser: from the key to the second frame after the table changed, and what of that passes until the move leaves for the server, until
the answer arrives, until the table has changed, and until it is painted. Beside it the same recomputation without page and browser.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from engine.request import SamplingParams
from explorer.sampling.choice import outcome_choice
from explorer.sampling.picture import choice_data
from explorer.sampling.whatif import Basis, orders_differ, recompute
from tests.browser import MISSING, find_chromium

VOCAB = 49_152
READY_MS = 180_000

# When the first message after a key leaves the page, and when the last one before the table changes arrives.
_WATCH_SOCKETS = """
  const send = WebSocket.prototype.send;
  WebSocket.prototype.send = function (...sent) {
    if (!this.ctHeard) {
      this.ctHeard = true;
      this.addEventListener("message", () => { window.ctReceived = performance.now(); });
    }
    if (window.ctSent === null) window.ctSent = performance.now();
    return send.apply(this, sent);
  };
"""

_TIME_A_KEY = """([name, key]) => new Promise((done, fail) => {
  // The page's parts live in shadow roots: find slider and picture through them.
  const find = (root, test) => {
    for (const element of root.querySelectorAll("*")) {
      if (test(element)) return element;
      const inner = element.shadowRoot && find(element.shadowRoot, test);
      if (inner) return inner;
    }
    return null;
  };
  const picture = find(document, (e) => e.classList.contains("ct-choice"));
  const started = performance.now();
  const late = setTimeout(() => { watch.disconnect(); fail(new Error("nothing was drawn")); }, 5000);
  const watch = new MutationObserver(() => {
    watch.disconnect();
    clearTimeout(late);
    const changed = performance.now();
    const received = window.ctReceived;
    requestAnimationFrame(() => requestAnimationFrame(() => {
      const painted = performance.now();
      done([painted - started, window.ctSent - started, received - window.ctSent, changed - received, painted - changed]);
    }));
  });
  watch.observe(picture, { childList: true, subtree: true });
  window.ctSent = null;
})"""
PARTS = ("the whole way", "until it leaves the page", "server, there and back", "until the table changed", "until it is painted")


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
            page = browser.new_page(viewport={"width": 1400, "height": 1200})
            page.add_init_script(_WATCH_SOCKETS)
            page.goto(f"{server.url}?page=sampling")
            page.get_by_role("status").first.get_by_text("Running").wait_for(timeout=READY_MS)
            page.get_by_role("button", name="Temperature 0.2, 1, 2, same darts").click()
            page.locator(".ct-strip .chips .chip").nth(31).wait_for(timeout=READY_MS)
            page.wait_for_timeout(3000)
            page.locator(".ct-strip .chips .chip").nth(12).click()
            page.wait_for_timeout(1500)
            times = [_move(page, i, pause_s) for i in range(moves)]
            browser.close()
    finally:
        server.stop()
    return times


def _move(page: Any, i: int, pause_s: float) -> list[float]:
    name, key = (
        (("Temperature", "ArrowRight"), ("Top-p", "ArrowLeft"))[i % 2]
        if i < 40
        else (("Temperature", "ArrowLeft"), ("Top-p", "ArrowRight"))[i % 2]
    )
    page.get_by_role("slider", name=name, exact=True).focus()
    timed = page.evaluate_handle(f"arguments => ({{ promise: ({_TIME_A_KEY})(arguments) }})", [name, key])
    page.keyboard.press(key)
    took: list[float] = timed.evaluate("timed => timed.promise")
    page.wait_for_timeout(1000 * pause_s)
    return took


def arithmetic(moves: int, clock: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Milliseconds of recomputing one token from all logits, alone, and with the data for the browser."""
    rng = np.random.default_rng(0)
    basis = Basis(np.arange(VOCAB), rng.normal(0, 3, VOCAB).astype(np.float32), True, ([1, 2, 3], [4, 5]))
    alone, whole = [], []
    for i in range(moves):
        params = SamplingParams(temperature=0.5 + 0.02 * i, top_p=0.95 - 0.005 * i, min_p=0.01)
        start = clock()
        out = recompute(basis, params, 0.3)
        alone.append(1e3 * (clock() - start))
        orders_differ(basis, params, out)
        choice_data(outcome_choice(out, params, 7, 0.3, VOCAB), params, str)
        whole.append(1e3 * (clock() - start))
    return alone, whole


def told(name: str, times: list[float]) -> str:
    ordered = sorted(times)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"{name:<58} p50 {statistics.median(times):6.1f} ms   p95 {p95:6.1f} ms   max {ordered[-1]:6.1f} ms   ({len(times)} moves)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.25)
    args = parser.parse_args()
    for what, clock in (("wall", time.perf_counter), ("processor", time.process_time)):
        alone, whole = arithmetic(args.moves, clock)
        print(told(f"the chain on {VOCAB:,} logits, {what} time", alone))
        print(told(f"with both orders and the browser's data, {what} time", whole))
    print("slider to painted picture, whole page (budget: p95 100 ms)")
    for name, times in zip(PARTS, zip(*on_a_page(args.moves, args.pause), strict=True), strict=True):
        print(told(f"  {name}", list(times)))
    load = subprocess.run(["uptime"], capture_output=True, text=True).stdout.strip()
    print(f"machine: {load}", file=sys.stderr)


if __name__ == "__main__":
    main()
