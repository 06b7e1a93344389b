"""The Batching page's schedule under load: frames a second with 64 running requests, and what server and browser spend on it.

    python -m tests.bench.bench_schedule [--slots 64] [--seconds 6] [--hz 40]

Budget: at least 30 frames/s. Sixty-four requests decode, end and make room for others whose prompts are prefilled in chunks (no model:
the events of a scheduler). They go through rows and feed to the canvas in a headless Chromium, first as fast as it goes, then at
the page's pace.
"""

import argparse
import itertools
import random
import subprocess
import sys
import threading
import time
from typing import Any

import psutil

from engine.events.recorder import Recorder
from engine.events.types import Event, RequestAdded, RequestFinished, Run, Snapshot, StepDone
from tests.bench.bench_blockmap import PAGE_HZ, _cpu, _wait_for
from tests.browser import MISSING, find_chromium

BUDGET = 256
CHUNK = 64


class Churn:
    """``slots`` requests that run; each prefills 100 to 400 tokens in chunks within the budget, decodes 20 to 200 and makes room for another."""

    def __init__(self, slots: int) -> None:
        self.random = random.Random(0)
        self.recorder = Recorder()
        self.events: list[Event] = []
        self.recorder.attach(self.events.append)
        self.numbers = itertools.count()
        self.recorder.emit(Snapshot, num_blocks=4096, block_size=16, ref_counts=[0] * 4096, cached={}, lru=[], requests=[], knobs={"max_num_seqs": slots})  # fmt: skip
        self.slots = slots
        self.live: dict[str, list[int]] = {}  # id -> [computed, prompt, end]
        for _ in range(slots):
            self.arrive()

    def arrive(self) -> None:
        name = f"load1-{next(self.numbers)}"
        prompt = self.random.randint(100, 400)
        self.recorder.emit(
            RequestAdded, request_id=name, owner="bench", prompt_token_ids=[1] * prompt, prompt_text="", sampling={}
        )
        self.live[name] = [0, prompt, prompt + self.random.randint(20, 200)]

    def tick(self) -> list[Event]:
        """One step's events."""
        self.events.clear()
        self.recorder.step += 1
        budget, runs = BUDGET, []
        for name, at in list(self.live.items()):
            prefill = at[0] < at[1]
            count = min(CHUNK, budget, at[1] - at[0]) if prefill else min(1, budget)
            if count <= 0:
                continue
            runs.append(Run(name, "prefill" if prefill else "decode", at[0], count, at[0] + count >= at[1]))
            at[0] += count
            budget -= count
            if at[0] >= at[2]:
                self.recorder.emit(RequestFinished, request_id=name, reason="length", num_output_tokens=at[2] - at[1])
                del self.live[name]
                self.arrive()
        self.recorder.emit(
            StepDone, runs=runs, num_waiting=self.random.randint(0, 20), num_running=self.slots, token_budget=BUDGET, max_num_seqs=self.slots,
            used_blocks=2000, cached_free_blocks=0, schedule_ms=0, forward_ms=0, sample_ms=0, commit_ms=0, step_ms=20, record_ms=0, flops=0,
            weight_bytes=0, kv_read_bytes=0, kv_write_bytes=0,
        )  # fmt: skip
        return list(self.events)


def serve(port: int, slots: int, hz: float) -> None:
    """A page with nothing but the schedule. ``/`` streams while it is open; times go to standard output, a line a second."""
    import panel as pn

    from explorer.batching.feed import Feed
    from explorer.batching.rows import BatchRows
    from explorer.canvas.schedule import Schedule

    def page() -> Any:
        churn, rows = Churn(slots), BatchRows()
        rows.feed(churn.events)
        view = Schedule(lambda _n: None, lambda _n: None)
        feed = Feed(view, rows)
        spent = {"engine": 0.0, "rows": 0.0, "ticks": 0.0, "since": time.perf_counter()}

        def tick() -> None:
            start = time.thread_time()
            events = churn.tick()
            middle = time.thread_time()
            rows.feed(events)
            feed.update(churn.recorder.step, True, False)
            rows.taken()
            spent["engine"] += middle - start
            spent["rows"] += time.thread_time() - middle
            spent["ticks"] += 1
            seconds = time.perf_counter() - spent["since"]
            if seconds >= 1:
                print(f"{spent['engine'] / seconds} {spent['rows'] / seconds} {spent['ticks'] / seconds}", flush=True)
                spent.update(engine=0.0, rows=0.0, ticks=0.0, since=time.perf_counter())

        for _ in range(300):  # something to draw from the first frame on
            tick()
        pn.state.curdoc.add_periodic_callback(tick, round(1000 / hz))
        return view

    pn.serve(page, port=port, address="127.0.0.1", show=False, verbose=False, threaded=False)


def measure(slots: int = 64, seconds: float = 6.0, hz: float = 40.0, port: int = 5098) -> dict[str, float]:
    """Run server and browser for some seconds; returns frames_per_s, frame_ms (one drawing of all), server_share and browser_share."""
    from playwright.sync_api import sync_playwright

    chromium = find_chromium()
    if chromium is None:
        raise RuntimeError(MISSING)
    command = [sys.executable, "-m", "tests.bench.bench_schedule", "--serve", str(port), "--slots", str(slots), "--hz", str(hz)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    threading.Thread(target=lambda: lines.extend(server.stdout or []), daemon=True).start()
    try:
        _wait_for(f"http://127.0.0.1:{port}/", server)
        with sync_playwright() as playwright:
            before = {p.pid for p in psutil.Process().children(recursive=True)}
            browser = playwright.chromium.launch(
                executable_path=chromium, args=["--no-sandbox", "--disable-background-networking"]
            )
            page = browser.new_page(viewport={"width": 1280, "height": 900})
            page.goto(f"http://127.0.0.1:{port}/", timeout=120_000)
            canvas = page.locator("canvas.map")
            canvas.wait_for(timeout=120_000)
            page.wait_for_timeout(2000)
            theirs = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
            frames, cpu, ours = canvas.evaluate("c => c.cutaway.frames"), _cpu(theirs), _cpu([psutil.Process(server.pid)])
            start, first_line = time.perf_counter(), len(lines)
            page.wait_for_timeout(1000 * seconds)
            wall = time.perf_counter() - start
            frames = canvas.evaluate("c => c.cutaway.frames") - frames
            cpu, ours = _cpu(theirs) - cpu, _cpu([psutil.Process(server.pid)]) - ours
            frame_ms = canvas.evaluate(_FRAME_MS)
            drawn = canvas.evaluate("c => c.cutaway.l.slots")
            if drawn != slots:
                raise RuntimeError(f"{slots} slots were to be drawn, got {drawn}")
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=10)
    made_of = [[float(x) for x in line.split()] for line in lines[first_line:] if line.count(" ") == 2]
    engine, rows, ticks = (sum(row[i] for row in made_of) / max(1, len(made_of)) for i in range(3))
    return {"frames_per_s": frames / wall, "frame_ms": frame_ms, "server_share": ours / wall - engine, "browser_share": cpu / wall, "rows_share": rows, "steps_per_s": ticks}  # fmt: skip


_FRAME_MS = """canvas => {  // what the script of one whole drawing takes
  const view = canvas.cutaway, start = performance.now();
  for (let i = 0; i < 50; i += 1) view.frame();
  return (performance.now() - start) / 50;
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--hz", type=float, default=40.0)
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.slots, args.hz)
        return
    for hz, name in ((args.hz, "as fast as it goes"), (PAGE_HZ, "at the page's pace")):
        got = measure(args.slots, args.seconds, hz)
        print(f"{args.slots} running requests, {name}: {got['steps_per_s']:.1f} steps/s")
        print(f"  frames drawn          {got['frames_per_s']:.1f} /s; one takes the script {got['frame_ms']:.2f} ms")
        print(f"  server                {100 * got['server_share']:.0f} % of a core, without the steps themselves")
        print(f"    events to bytes     {100 * got['rows_share']:.0f} %")
        print(f"  browser               {100 * got['browser_share']:.0f} % of a core, all its processes")


if __name__ == "__main__":
    main()
