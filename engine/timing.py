"""What the KV cache saves, really run: one more token of a short request, with its K and V at hand and without."""

import time
from typing import TYPE_CHECKING

from engine.events.types import CacheTimed
from engine.loading import make_kv_cache, make_runner
from engine.request import Request, SamplingParams
from engine.runner import Runner, Scheduled

if TYPE_CHECKING:
    from engine.engine import Engine

_ID = "cache timing"
_REPEATS = 3  # the best of so many: whatever else the machine does only ever adds time


def cache_timings(engine: "Engine", lengths: list[int]) -> tuple[list[float], list[float]]:
    """(ms with the cache, ms without) of the step that computes the last of ``lengths[i]`` tokens.

    The request has a small KV cache of its own, so the pool and whoever runs in it are not touched; they wait meanwhile.
    ValueError for a length that does not fit the model.
    """
    room = engine.config.max_model_len or 0
    if not lengths or any(not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= room for n in lengths):
        raise ValueError(f"lengths must be integers in [1, {room}] (max_model_len), got {lengths!r}")
    longest = max(lengths)
    config = engine.config.changed(num_kv_blocks=-(-longest // engine.config.block_size))
    runner = make_runner(engine.parts, make_kv_cache(engine.parts, config), config)
    request = Request(_ID, [(7 * i + 11) % engine.model_config.vocab_size for i in range(longest)], SamplingParams(), 0)
    request.block_ids = list(range(config.num_kv_blocks or 0))
    _run(runner, Scheduled(request, 0, longest, True))  # fills the cache; also warms up
    with_ms = [_run(runner, Scheduled(request, n - 1, 1, True)) for n in lengths]
    without_ms = [_run(runner, Scheduled(request, 0, n, True)) for n in lengths]
    if engine.recorder.on:
        engine.recorder.emit(CacheTimed, lengths=lengths, with_ms=with_ms, without_ms=without_ms)
    return with_ms, without_ms


def _run(runner: Runner, run: Scheduled) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        logits = runner.run([run])
        float(logits[0, 0])  # on a GPU: wait until it is really done
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)
