"""What the KV cache saves, really run: one more token of a short request, with its K and V at hand and without."""

import time
from typing import TYPE_CHECKING

from engine.events.types import CacheTimed
from engine.request import Request, SamplingParams
from engine.runner import Scheduled

if TYPE_CHECKING:
    from engine.engine import Engine

_ID = "cache timing"
_REPEATS = 3  # the best of so many: whatever else the machine does only ever adds time


def cache_timings(engine: "Engine", lengths: list[int]) -> tuple[list[float], list[float]]:
    """(ms with the cache, ms without) of the step that computes the last of ``lengths[i]`` tokens.

    The request is built beside the scheduler, on free blocks that are given back (nothing of it is cached), so a running
    batch waits for the measurement but is not touched by it. ValueError for a length that does not fit.
    """
    room = min(engine.max_tokens_of_a_request, engine.pool.num_free * engine.pool.block_size)
    if not lengths or any(not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= room for n in lengths):
        raise ValueError(f"lengths must be integers in [1, {room}] (what the model and the free blocks allow), got {lengths!r}")
    longest = max(lengths)
    vocab = engine.model_config.vocab_size
    request = Request(_ID, [(7 * i + 11) % vocab for i in range(longest)], SamplingParams(), 0)
    request.block_ids = engine.pool.allocate(_ID, 0, -(-longest // engine.pool.block_size))
    try:
        _run(engine, Scheduled(request, 0, longest, True))  # fills the cache; also warms up
        with_ms = [_run(engine, Scheduled(request, n - 1, 1, True)) for n in lengths]
        without_ms = [_run(engine, Scheduled(request, 0, n, True)) for n in lengths]
    finally:
        engine.pool.free(_ID, request.block_ids)
        engine.runner.forget(_ID)
    if engine.recorder.on:
        engine.recorder.emit(CacheTimed, lengths=lengths, with_ms=with_ms, without_ms=without_ms)
    return with_ms, without_ms


def _run(engine: "Engine", run: Scheduled) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        logits = engine.runner.run([run])
        float(logits[0, 0])  # on a GPU: wait until it is really done
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)
