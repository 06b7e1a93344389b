"""What events cost: one emit, appending, replaying, seeking in a long log, and its file.

    python -m tests.bench.bench_events [--events 1000000] [--seeks 200]

The events are those of the real pool and scheduler with tokens watched (5 candidates each) and 8 requests a step. Times are
CPU time of this process, which has one thread: what a machine that others use takes from it does not count.
"""

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from engine.events.log import EventLog
from engine.events.recorder import Recorder
from engine.events.types import BlockAllocated
from explorer.store import EventStore
from tests.engine.events.simulate import Simulation


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def fill(log: EventLog, count: int) -> float:
    """Simulate until the log has ``count`` events; seconds spent in appending them."""
    simulation = Simulation(1, num_blocks=2048, block_size=16, top=5, num_running=12)
    batch: list = []
    spent = 0.0
    simulation.start(batch.append)
    while len(log) < count:
        for _ in range(100):
            simulation.step()
        spent += seconds(lambda: log.extend(batch))
        batch.clear()
    return spent


def emit_cost(sinks: int) -> float:
    """Microseconds that one guarded emit takes with that many sinks."""
    recorder = Recorder()
    for _ in range(sinks):
        recorder.attach(lambda event: None)
    blocks = [1, 2]

    def emit_many() -> None:
        for _ in range(100_000):
            if recorder.on:
                recorder.emit(BlockAllocated, request_id="r", first_index=0, block_ids=blocks)

    return min(seconds(emit_many) for _ in range(5)) / 100_000 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--seeks", type=int, default=200)
    args = parser.parse_args()
    process = psutil.Process()
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs (above 1 a CPU the figures are too high)")
    print(f"emit: nobody {emit_cost(0):.3f} us, one sink {emit_cost(1):.2f} us")

    before = process.memory_info().rss
    log = EventLog(args.events * 2)
    spent = fill(log, args.events)
    count = len(log)
    gc.collect()
    grown = (process.memory_info().rss - before) / 2**20
    print(f"append: {spent / count * 1e6:.1f} us an event ({count / spent:,.0f}/s); {count:,} events in {log.last_step:,} steps")
    print(f"memory: {log.nbytes / 2**20:.0f} MiB by its own count, the process grew by {grown:.0f} MiB")

    events = log.since(count // 2, 50_000).events
    state = log.at(events[0].step)
    rest = [e for e in events if e.step > state.step]
    replay = seconds(lambda: state.apply_all(rest))
    print(f"replay: {replay / len(rest) * 1e6:.2f} us an event ({len(rest) / replay:,.0f}/s)")

    store = EventStore(log=log)
    rng = random.Random(0)
    for name, steps in (
        ("seek anywhere", [rng.randint(log.first_step, log.last_step) for _ in range(args.seeks)]),
        ("step forward", list(range(log.last_step // 2, log.last_step // 2 + args.seeks))),
        ("step back", list(range(log.last_step // 2, log.last_step // 2 - args.seeks, -1))),
    ):
        times = sorted(seconds(lambda step=step: store.at(step)) * 1e3 for step in steps)
        print(
            f"{name}: median {statistics.median(times):.1f} ms, p95 {times[int(len(times) * 0.95)]:.1f} ms, max {times[-1]:.1f} ms"
        )

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.cutaway"
        saved = seconds(lambda: log.save(path))
        print(f"save: {saved:.2f} s, {path.stat().st_size / 2**20:.0f} MiB ({path.stat().st_size / count:.0f} bytes an event)")
        wall = time.perf_counter()
        opened = seconds(lambda: EventLog.load(path))
        print(f"open: {opened:.2f} s (wall {time.perf_counter() - wall:.2f} s)")


if __name__ == "__main__":
    main()
