"""The block map under load: frames a second, and what server and browser spend on it.

    python -m tests.bench.bench_blockmap [--blocks 100000] [--seconds 6] [--hz 40]

Budgets: at least 30 frames/s, at most 20 % of a core on the server. A pool of that many blocks changes all the time (requests come,
grow, finish: no model, the real pool). Its changes go through events, State, rows and the component to a headless Chromium, first
as fast as it goes, then at the page's pace.
"""

import argparse
import itertools
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import psutil

from engine.events.recorder import Recorder
from engine.events.state import State
from engine.events.types import RequestAdded, RequestFinished, Run, Snapshot, StepDone
from engine.kvcache.pool import BlockPool
from explorer.kv_cache import rows
from tests.browser import MISSING, find_chromium

BLOCK_SIZE = 16
PAGE_HZ = 10.0  # how often the app sends what is new


class Churn:
    """64 requests that fill about three quarters of a pool. Each grows by a block a tick; now and then one makes room for another."""

    def __init__(self, num_blocks: int) -> None:
        self.state = State()
        self.recorder = Recorder()
        self.recorder.attach(self.state.apply)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, self.recorder)
        self.recorder.emit(
            Snapshot,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            ref_counts=[0] * num_blocks,
            cached={},
            lru=[],
            requests=[],
            knobs={},
        )
        self.size = max(1, num_blocks * 3 // 4 // 64)
        self.tables: dict[str, list[int]] = {}
        self.numbers = itertools.count()
        for _ in range(64):
            self.arrive()

    def arrive(self) -> None:
        name = f"r-{next(self.numbers)}"
        self.recorder.emit(RequestAdded, request_id=name, owner="bench", prompt_token_ids=[1], prompt_text="", sampling={})
        self.tables[name] = self.pool.allocate(name, 0, self.size)

    def tick(self) -> None:
        """One step: every request grows by a block; in every eighth one request finishes and one arrives."""
        if self.recorder.step % 8 == 0:
            name, table = next(iter(self.tables.items()))
            self.pool.free(name, table)
            del self.tables[name]
            self.recorder.emit(RequestFinished, request_id=name, reason="length", num_output_tokens=1)
            self.arrive()
        for name, table in self.tables.items():
            table += self.pool.allocate(name, len(table), 1, table[-1])
        runs = [Run(name, "decode", len(table) * BLOCK_SIZE - 5, 1, True) for name, table in self.tables.items()]
        self.recorder.step += 1
        self.recorder.emit(
            StepDone, runs=runs, num_waiting=0, num_running=64, token_budget=64, max_num_seqs=64, used_blocks=self.pool.num_used,
            cached_free_blocks=0, schedule_ms=0, forward_ms=0, sample_ms=0, commit_ms=0, step_ms=0, record_ms=0, flops=0, weight_bytes=0,
            kv_read_bytes=0, kv_write_bytes=0,
        )  # fmt: skip


def serve(port: int, num_blocks: int, hz: float) -> None:
    """A page with nothing but the map. ``/`` streams while it is open; times go to standard output, a line a second."""
    import panel as pn

    from explorer.canvas.blockmap import BlockMap
    from explorer.theme import request_colour

    def page() -> Any:
        churn, mapper = Churn(num_blocks), rows.PoolMapper()
        view = BlockMap(palette=[[request_colour(str(i % 6), i // 6)] * 2 for i in range(24)])
        spent = {"engine": 0.0, "map": 0.0, "ticks": 0.0, "blocks": 0.0, "since": time.perf_counter()}

        def tick() -> None:
            start = time.thread_time()
            churn.tick()
            middle = time.thread_time()
            codes = rows.block_codes(mapper.map(churn.state), lambda request: rows.number_of(request) % 24)
            spent["blocks"] += view.draw(codes, BLOCK_SIZE)
            end = time.thread_time()
            spent["engine"] += middle - start
            spent["map"] += end - middle
            spent["ticks"] += 1
            if time.perf_counter() - spent["since"] >= 1:
                seconds = time.perf_counter() - spent["since"]
                print(
                    f"{spent['engine'] / seconds} {spent['map'] / seconds} {spent['ticks'] / seconds} {spent['blocks'] / seconds}",
                    flush=True,
                )
                spent.update(engine=0.0, map=0.0, ticks=0.0, blocks=0.0, since=time.perf_counter())

        tick()
        # Bokeh's own: Panel's would send two more messages each time, for its busy light.
        pn.state.curdoc.add_periodic_callback(tick, round(1000 / hz))
        return view

    pn.serve(page, port=port, address="127.0.0.1", show=False, verbose=False, threaded=False)


def measure(num_blocks: int = 100_000, seconds: float = 6.0, hz: float = 40.0, port: int = 5097) -> dict[str, float]:
    """Run server and browser for some seconds; returns frames_per_s, server_share, browser_share and what they are made of."""
    from playwright.sync_api import sync_playwright

    chromium = find_chromium()
    if chromium is None:
        raise RuntimeError(MISSING)
    command = [
        sys.executable,
        "-m",
        "tests.bench.bench_blockmap",
        "--serve",
        str(port),
        "--blocks",
        str(num_blocks),
        "--hz",
        str(hz),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(server.stdout or []), daemon=True)
    reader.start()
    try:
        _wait_for(f"http://127.0.0.1:{port}/", server)
        with sync_playwright() as playwright:
            before = {p.pid for p in psutil.Process().children(recursive=True)}
            browser = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-background-networking"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"http://127.0.0.1:{port}/")
            canvas = page.locator("canvas.map")
            canvas.wait_for(timeout=30_000)
            page.wait_for_timeout(2000)
            theirs = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
            frames, cpu, ours = canvas.evaluate("c => c.cutaway.frames"), _cpu(theirs), _cpu([psutil.Process(server.pid)])
            start, first_line = time.perf_counter(), len(lines)
            page.wait_for_timeout(1000 * seconds)
            wall = time.perf_counter() - start
            frames = canvas.evaluate("c => c.cutaway.frames") - frames
            cpu, ours = _cpu(theirs) - cpu, _cpu([psutil.Process(server.pid)]) - ours
            assert canvas.evaluate("c => c.cutaway.codes.length") == num_blocks
            whole = canvas.evaluate(_DRAW_EVERYTHING)
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=10)
    made_of = [[float(x) for x in line.split()] for line in lines[first_line:] if line.count(" ") == 3]
    engine, of_map, ticks, blocks = (sum(row[i] for row in made_of) / max(1, len(made_of)) for i in range(4))
    return {
        "frames_per_s": frames / wall, "whole_frames_per_s": whole, "server_share": ours / wall - engine, "browser_share": cpu / wall, "rows_and_draw_share": of_map,
        "pool_share": engine, "deltas_per_s": ticks, "changed_blocks_per_s": blocks,
    }  # fmt: skip


_DRAW_EVERYTHING = """canvas => new Promise(done => {  // frames a second when every one draws all blocks
  const map = canvas.cutaway, start = performance.now(), first = map.frames;
  const again = () => {
    if (performance.now() - start > 2000) return done((map.frames - first) * 1000 / (performance.now() - start));
    map.redraw(); requestAnimationFrame(again);
  };
  again();
})"""


def _cpu(processes: list[psutil.Process]) -> float:
    """Seconds of processor time of these processes (those that still live)."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def _wait_for(url: str, server: "subprocess.Popen[str]") -> None:
    for _ in range(300):
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with {server.returncode}")
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    raise RuntimeError(f"nothing answers at {url}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--hz", type=float, default=40.0)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.blocks, args.hz)
        return
    for hz, name in ((args.hz, "as fast as it goes"), (PAGE_HZ, "at the page's pace")):
        got = measure(args.blocks, args.seconds, hz)
        print(
            f"{args.blocks:,} blocks, {name}: {got['deltas_per_s']:.1f} deltas/s, {got['changed_blocks_per_s']:,.0f} changed blocks/s"
        )
        print(
            f"  frames drawn          {got['frames_per_s']:.1f} /s, {got['whole_frames_per_s']:.1f} /s when each draws all blocks"
        )
        print(f"  server                {100 * got['server_share']:.0f} % of a core, without the pool that is watched")
        print(f"    events to bytes     {100 * got['rows_and_draw_share']:.0f} % (rows, codes, delta, its message)")
        print(f"  the pool itself       {100 * got['pool_share']:.0f} %")
        print(f"  browser               {100 * got['browser_share']:.0f} % of a core, all its processes")


if __name__ == "__main__":
    main()
