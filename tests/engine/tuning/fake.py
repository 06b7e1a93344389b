"""Trials without an engine: measures from a formula of the configuration, at once or in processes; and trials that go wrong."""

import math
import os
import time
from array import array
from concurrent.futures import Future

from engine.config import EngineConfig
from engine.load.arrivals import Burst
from engine.load.generate import Load
from engine.load.lengths import Equal
from engine.measures import Limits, Measures, RequestRecord, measure
from engine.tuning.space import POOL_SHARE, Space
from engine.tuning.trial import Report, Task, TrialFailed

LOAD = Load(arrivals=Burst(), num_requests=12, prompt=Equal(8), output=Equal(9))
LIMITS = Limits(ttft_s=1.0, tpot_s=0.05)
SPACE = Space(
    {
        "max_num_seqs": (1, 2, 4, 8, 16, 32, 64),
        "max_num_batched_tokens": (64, 128, 256, 512, 1024, 2048),
        "block_size": (8, 16, 32, 64),
        POOL_SHARE: (0.25, 0.5, 0.75, 1.0),
        "enable_chunked_prefill": (True, False),
    }
)
POOL_TOKENS = 8192


def measured(ttft_s: float, itl_s: float, tokens_per_s: float, limits: Limits, requests: int = 12, tokens: int = 9) -> Measures:
    """Of requests that come at 0 and get their first token between ttft_s / 2 and ttft_s, then one each itl_s."""
    records = []
    for i in range(requests):
        first = ttft_s * (0.5 + 0.5 * i / (requests - 1))
        times = array("d", [first + itl_s * j for j in range(tokens)])
        records.append(RequestRecord(str(i), 0.0, 8, times, times[-1], "length"))
    return measure(records, None, limits, duration_s=requests * tokens / tokens_per_s)


def formula(config: EngineConfig, limits: Limits) -> Measures:
    """More at once: more throughput and longer gaps. A small budget: a long wait for the first token; a large one: stalls."""
    batch, budget, chunked = config.max_num_seqs, config.max_num_batched_tokens, config.enable_chunked_prefill
    pool = (config.num_kv_blocks or POOL_TOKENS // config.block_size) * config.block_size
    crowded = max(0.0, batch * 300 / pool - 1.0)
    fit = 1.0 - 0.1 * abs(math.log2(config.block_size / 32))
    tokens_per_s = 400 * batch / (batch + 16) * fit / (1 + crowded)
    itl_s = 0.008 + 0.001 * batch + (0.00002 * budget if chunked else 0.03)
    ttft_s = 60 / budget + 3.0 / batch + crowded
    return measured(ttft_s, itl_s, tokens_per_s, limits)


def run(task: Task) -> Report:
    return Report(formula(task.config, task.limits), POOL_TOKENS, 0.0, 0.0)


def run_named(task: Task) -> Report:
    """Goes wrong as max_num_seqs says."""
    batch = task.config.max_num_seqs
    if batch == 1:
        os._exit(7)
    if batch == 2:
        raise TrialFailed("of 3 requests: 1 error")
    if batch == 3:
        print("words", "on the way", flush=True)
        os.kill(os.getpid(), 9)
    if batch == 4:
        time.sleep(60)
    if batch == 5:
        raise MemoryError("no room")
    return run(task)


class Inline:
    """Trials at once, in the caller's thread, by a clock that may be moved."""

    def __init__(self, fails=lambda config: None) -> None:
        self.fails = fails
        self.tasks: list[Task] = []
        self.closed = 0

    def submit(self, task: Task, seconds: float | None) -> "Future[Report]":
        self.tasks.append(task)
        future: Future[Report] = Future()
        why = self.fails(task.config)
        if why:
            future.set_exception(TrialFailed(why))
        else:
            future.set_result(task.run(task))
        return future

    def close(self) -> None:
        self.closed += 1
