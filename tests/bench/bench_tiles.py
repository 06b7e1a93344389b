"""The tiles of an attention kernel, played: frames a second, and what the browser spends on it.

    python -m tests.bench.bench_tiles [--tokens 28672] [--seconds 6]

Budget: a trace of 100,000 tiles plays at 30 frames/s or more. A schedule of that many tiles (28,672 tokens in tiles of 64 × 64, causal)
goes through ``Tiles`` to a headless Chromium and is played so fast that it would be through in the measured time.
"""

import argparse
import subprocess
import sys
import time
from typing import Any

import psutil

from tests.bench.bench_blockmap import _cpu, _wait_for
from tests.browser import MISSING, find_chromium

PORT = 5098
FIND = """() => { const walk = (node) => { for (const child of node.querySelectorAll('*')) {
  if (child.cutaway?.grid) return child; const found = child.shadowRoot && walk(child.shadowRoot); if (found) return found; } return null; };
  return walk(document)?.cutaway ?? null; }"""


def serve(port: int, tokens: int) -> None:
    """A page with nothing but the tiles."""
    import panel as pn

    from explorer.attention.rows import dealt, derived
    from explorer.attention.shape import Shape
    from explorer.canvas.tiles import Tiles

    made = dealt(derived(Shape(seq_len=tokens)), 132)
    print(made.num_tiles, flush=True)

    def page() -> Any:
        view = Tiles()
        view.draw(made, ["0"])
        return view

    pn.serve(page, port=port, address="127.0.0.1", show=False, verbose=False, threaded=False)


def measure(tokens: int = 28_672, seconds: float = 6.0, port: int = PORT) -> dict[str, float]:
    """tiles, frames_per_s while it plays, browser_share (of a core), whole_ms: painting all tiles at once."""
    from playwright.sync_api import sync_playwright

    chromium = find_chromium()
    if chromium is None:
        raise RuntimeError(MISSING)
    command = [sys.executable, "-m", "tests.bench.bench_tiles", "--serve", str(port), "--tokens", str(tokens)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, text=True)
    try:
        _wait_for(f"http://127.0.0.1:{port}/", server)
        with sync_playwright() as playwright:
            before = {p.pid for p in psutil.Process().children(recursive=True)}
            browser = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-background-networking"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 1000})
            page.goto(f"http://127.0.0.1:{port}/")
            page.wait_for_function(f"() => ({FIND})()?.data?.count > 0", timeout=60_000)
            page.wait_for_timeout(1000)
            theirs = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
            begin = f"""(rate) => {{ const p = ({FIND})(); const o = document.createElement('option'); o.value = rate; p.speed.append(o);
              p.speed.value = String(rate); p.rated = true; p.go(0); p.play(); return [p.data.count, p.frames]; }}"""
            count = page.evaluate(f"() => ({FIND})().data.count")
            cpu = _cpu(theirs)
            _count, frames = page.evaluate(begin, round(count / seconds))
            start = time.perf_counter()
            page.wait_for_timeout(1000 * 0.9 * seconds)
            frames = page.evaluate(f"() => ({FIND})().frames") - frames
            wall = time.perf_counter() - start
            cpu = _cpu(theirs) - cpu
            position = page.evaluate(f"() => ({FIND})().pos")
            whole = page.evaluate(
                f"() => {{ const p = ({FIND})(); p.pause(); p.pos = p.data.count; p.grid.painted = p.gantt.painted = -1; const t = performance.now(); "
                "p.paint(); return performance.now() - t; }"
            )
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=10)
    return {
        "tiles": count, "frames_per_s": frames / wall, "played": position / count, "browser_share": cpu / wall, "whole_ms": whole,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=28_672)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.tokens)
        return
    got = measure(args.tokens, args.seconds)
    print(f"{got['tiles']:,.0f} tiles, {100 * got['played']:.0f} % of them played")
    print(f"  frames drawn     {got['frames_per_s']:.1f} /s (budget: 30)")
    print(f"  all at once      {got['whole_ms']:.0f} ms")
    print(f"  browser          {100 * got['browser_share']:.0f} % of a core, all its processes")


if __name__ == "__main__":
    main()
