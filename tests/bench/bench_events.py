"""What events cost: one emit, appending, replaying, seeking in a long log, and its file.

    python -m tests.bench.bench_events [--events 1000000] [--seeks 200]

The events are those of the real pool and scheduler with tokens watched (5 candidates each) and 8 requests a step. Times are
CPU time of this process, which has one thread: what a machine that others use takes from it does not count. Where it says so
the wall time stands beside it. The file is opened in a process of its own.
"""

import argparse
import contextlib
import gc
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import run

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


@contextlib.contextmanager
def timed(what: str) -> Iterator[list[str]]:
    """Afterwards the list holds one line: CPU time of this process, and wall time, which others on the machine lengthen."""
    said: list[str] = []
    cpu, wall = time.process_time(), time.perf_counter()
    yield said
    said.append(f"{what}: {time.process_time() - cpu:.2f} s of CPU, {time.perf_counter() - wall:.2f} s wall")


def seek_times(store: EventStore, what: str, steps: list[int]) -> None:
    cpu, wall = [], []
    for step in steps:
        start = time.perf_counter()
        cpu.append(seconds(lambda step=step: store.at(step)) * 1e3)
        wall.append((time.perf_counter() - start) * 1e3)
    parts = []
    for name, times in (("CPU", sorted(cpu)), ("wall", sorted(wall))):
        parts.append(
            f"{name} median {statistics.median(times):.1f}, p95 {times[int(len(times) * 0.95)]:.1f}, max {times[-1]:.1f}"
        )
    print(f"{what} ({len(steps)} times), ms: {'; '.join(parts)}")


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
    parser.add_argument("--open", type=Path, help="only open this saved run and seek in it")
    args = parser.parse_args()
    if args.open is not None:
        return open_and_seek(args.open, args.seeks)
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
    seek_times(store, "seek anywhere", [rng.randint(log.first_step, log.last_step) for _ in range(args.seeks)])
    seek_times(store, "step forward", list(range(log.last_step // 2, log.last_step // 2 + args.seeks)))
    seek_times(store, "step back", list(range(log.last_step // 2, log.last_step // 2 - args.seeks, -1)))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.cutaway"
        with timed("save") as said:
            log.save(path)
        size = path.stat().st_size
        print(f"{said[0]}, {size / 2**20:.0f} MiB ({size / count:.0f} bytes an event)", flush=True)
        run([sys.executable, "-m", "tests.bench.bench_events", "--open", str(path), "--seeks", str(args.seeks)], check=True)


def open_and_seek(path: Path, seeks: int) -> None:
    """What a process that opens the file pays: nothing of the log that wrote it is in its memory."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    with timed("open") as said:
        log = EventLog.load(path)
    print(f"{said[0]}; {len(log):,} events in {log.last_step:,} steps")
    store = EventStore(log=log)
    rng = random.Random(0)
    seek_times(store, "seek anywhere, just opened", [rng.randint(log.first_step, log.last_step) for _ in range(seeks)])
    (high,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    peak = int(high.split()[1]) * 1024  # not ru_maxrss: that is what the parent handed on
    grown = process.memory_info().rss - before
    print(
        f"memory: the log and {seeks} seeks grew the process by {grown / 2**20:.0f} MiB "
        f"(log by its own count {log.nbytes / 2**20:.0f}); the process at its largest {peak / 2**20:.0f} MiB"
    )
    with timed("check (decode and replay everything)") as said:
        log.check()
    print(said[0])


if __name__ == "__main__":
    main()
