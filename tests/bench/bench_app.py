"""The app as a whole, in a real browser: start to first token, and what two open pages cost the engine.

    python -m tests.bench.bench_app start [--rounds 3]
    python -m tests.bench.bench_app watch [--batch 8] [--tokens 128] [--rounds 3] [--threads 2]

start: from the command ``panel serve apps/`` (model cached, a browser already running) to the first token chip on the page.
watch: tokens/s of the same requests with nobody watching (no events sent), with the Run and the KV cache page open and following,
and with the Sampling page open as well (which asks for more candidates), in turns; with the CPU seconds that engine, server and
browser took, since on two cores they share them.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from tests.browser import find_chromium

ROOT = Path(__file__).parents[2]
ARGS = ["--no-sandbox", "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(browser: Any, rounds: int) -> None:
    print("from the command to: page served / engine ready to send / first token on the page (s)")
    totals = []
    for _ in range(rounds):
        port = free_port()
        url = f"http://127.0.0.1:{port}/apps"
        begun = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "panel",
            "serve",
            "apps/",
            "--port",
            str(port),
            "--address",
            "127.0.0.1",
        ]
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{url}/static/nothing", timeout=5)
                except urllib.error.HTTPError:
                    break
                except OSError:
                    time.sleep(0.05)
            page = browser.new_page()
            page.goto(url)
            send = page.get_by_role("button", name="Send", exact=True)
            send.wait_for(timeout=60_000)
            shown = time.perf_counter()
            page.get_by_text("Running").first.wait_for(timeout=60_000)
            ready = time.perf_counter()
            send.click()
            page.locator("article .chips .chip").first.wait_for(timeout=60_000)
            first = time.perf_counter()
            totals.append(first - begun)
            print(f"  {shown - begun:6.2f} / {ready - begun:6.2f} / {first - begun:6.2f}")
            page.close()
        finally:
            server.terminate()
            server.wait(20)
    print(f"median {statistics.median(totals):.2f} s of {rounds}")


def cpu_seconds(processes: list[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
            total += times.user + times.system
        except psutil.NoSuchProcess:
            pass
    return total


def family(pid: int) -> list[psutil.Process]:
    parent = psutil.Process(pid)
    return [parent, *parent.children(recursive=True)]


class Rig:
    """The app served from this process, so that its session can be driven and read; the browser in another."""

    def __init__(self) -> None:
        import panel as pn

        from explorer.session import Session

        self.session = Session.shared()
        self.session.start()
        while self.session.status != "running":
            time.sleep(0.1)
            if self.session.status == "died":
                raise SystemExit(self.session.message)
        self.port = free_port()
        pn.serve({"apps": str(ROOT / "apps" / "main.py")}, port=self.port, show=False, threaded=True, websocket_origin="*")
        self.owner = self.session.join()

    def run(self, batch: int, tokens: int, browser_pids: list[int], pump: Any) -> dict[str, float]:
        """tokens/s and CPU seconds of one load, from the first command to the last Finished."""
        from engine.request import SamplingParams
        from tests.bench.prompts import bench_prompts

        engine = family(self.session.process.pid)
        browser = [p for pid in browser_pids for p in family(pid)]
        me = [psutil.Process()]
        before = [cpu_seconds(p) for p in (engine, me, browser)]
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        began = time.perf_counter()
        for prompt in bench_prompts(batch):
            self.session.submit(prompt, params, self.owner)
        while self.session.process.unfinished:
            pump(20)
        took = time.perf_counter() - began
        after = [cpu_seconds(p) for p in (engine, me, browser)]
        engine_s, server_s, browser_s = (b - a for a, b in zip(before, after))
        return {"tok/s": batch * tokens / took, "engine": engine_s / took, "server": server_s / took, "browser": browser_s / took, "engine ms/tok": 1e3 * engine_s / (batch * tokens)}  # fmt: skip


def watch(browser: Any, batch: int, tokens: int, rounds: int) -> None:
    from explorer.session import LOOK_S, WATCH_FEW

    rig = Rig()
    me = psutil.Process()
    rig.session.reconfigure(rig.owner, max_num_seqs=batch, enable_prefix_caching=False)
    chromium = [
        p.pid
        for p in me.children(recursive=True)
        if "chrom" in p.name().lower() and not any("chrom" in q.name().lower() for q in p.parents())
    ]
    idle = browser.new_page()
    opened: dict[str, tuple[str, ...]] = {
        "nobody": (),
        "both pages": ("run", "kv-cache"),
        "and Sampling": ("run", "kv-cache", "sampling"),
    }
    results: dict[str, list[dict[str, float]]] = {name: [] for name in opened}
    rig.run(batch, 16, chromium, idle.wait_for_timeout)
    for _ in range(rounds):
        for name, slugs in opened.items():
            rig.session.process.observe(bool(slugs))
            if slugs:  # what the session records while somebody is here; it asks for more when the Sampling page is open
                rig.session.process.watch("tokens", top=WATCH_FEW)
            else:
                rig.session.process.unwatch("tokens")
            pages = [browser.new_page(viewport={"width": 1440, "height": 900}) for _ in slugs]
            for page, slug in zip(pages, slugs):
                page.goto(f"http://127.0.0.1:{rig.port}/apps?page={slug}")
                page.get_by_text("Running").first.wait_for(timeout=60_000)
            idle.wait_for_timeout(3000 if slugs else 500)
            results[name].append(rig.run(batch, tokens, chromium, idle.wait_for_timeout))
            for page in pages:
                page.close()
            idle.wait_for_timeout(1000 + 1000 * LOOK_S)  # until nobody is taken to look at candidates any more
    print(f"batch {batch}, {tokens} tokens each, medians of {rounds} rounds; CPU in cores (1 = one core busy)")
    for name, rows in results.items():
        print(f"{name:13}" + "".join(f"  {key} {statistics.median(row[key] for row in rows):.2f}" for key in rows[0]))
    for name in list(opened)[1:]:
        for key in ("tok/s", "engine ms/tok"):
            ratios = [b[key] / a[key] for a, b in zip(results["nobody"], results[name])]
            print(f"{name} / nobody, {key}: median {statistics.median(ratios):.3f} ({min(ratios):.3f} .. {max(ratios):.3f})")
    rig.session.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("start", "watch"), nargs="?", default="start")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="torch threads of the engine")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    from playwright.sync_api import sync_playwright

    chromium = find_chromium()
    if chromium is None:
        raise SystemExit("no Chromium found")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGS)
        if args.what == "start":
            start(browser, args.rounds)
        else:
            watch(browser, args.batch, args.tokens, args.rounds)
        browser.close()
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            os._exit(0)  # the server's thread has no other end


if __name__ == "__main__":
    main()
